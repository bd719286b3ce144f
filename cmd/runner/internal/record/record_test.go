package record_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/record"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { must(t, root.Close()) })
	return root
}

// The last line is written after the note, as by some agents; AwaitComplete then removes the note.
func TestAwait_BlocksUntilTheRecordIsWhole(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "sub", "session.jsonl")
	must(t, os.Mkdir(filepath.Dir(path), 0o700))
	must(t, os.WriteFile(path, []byte(strings.Repeat("x", 5<<20)+"\nfirst\n"), 0o600))
	must(t, record.ExpectText(dir, path, "last-line"))
	done := make(chan bool)
	go func() {
		whole, err := record.AwaitComplete(context.Background(), open(t, dir))
		if err != nil {
			t.Error(err)
		}
		done <- whole
	}()
	select {
	case <-done:
		t.Fatal("Await returned before the line was there")
	case <-time.After(100 * time.Millisecond):
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteString("last-line\n")
	must(t, err)
	must(t, f.Close())
	if whole := <-done; !whole {
		t.Error("Await did not find the line")
	}
	if _, err := os.Stat(filepath.Join(dir, record.NoteFileName)); !os.IsNotExist(err) {
		t.Errorf("the note is still there: %v", err)
	}
	if whole, err := record.AwaitComplete(t.Context(), open(t, dir)); !whole || err != nil {
		t.Errorf("without a note Await returned %v, %v", whole, err)
	}
}

// If a turn ends while a snapshot waits for the previous turn, the next snapshot waits for that turn.
func TestAwait_KeepsTheNoteOfALaterTurn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "session.jsonl")
	must(t, record.ExpectText(dir, path, "line-1"))
	root, done := open(t, dir), make(chan bool)
	go func() {
		whole, err := record.AwaitComplete(context.Background(), root)
		if err != nil {
			t.Error(err)
		}
		done <- whole
	}()
	time.Sleep(100 * time.Millisecond) // AwaitComplete has read the note by then; otherwise the test checks less
	must(t, record.ExpectText(dir, path, "line-2"))
	must(t, os.WriteFile(path, []byte("line-1\n"), 0o600))
	<-done
	if _, err := os.Stat(filepath.Join(dir, record.NoteFileName)); err != nil {
		t.Errorf("the note of the later turn: %v", err)
	}
}

// A record that never becomes complete, one that is a pipe or lies elsewhere, and a damaged note delay the snapshot for
// a limited time, and are not waited for again.
func TestAwait_EndsWithWhatAnAgentLeaves(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(t *testing.T, dir string){
		"never whole": func(t *testing.T, dir string) { must(t, record.ExpectText(dir, filepath.Join(dir, "none"), "x")) },
		"a damaged note": func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Join(dir, record.NoteFileName), []byte("{"), 0o600))
		},
		"a pipe": func(t *testing.T, dir string) {
			must(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
			must(t, record.ExpectText(dir, filepath.Join(dir, "pipe"), "x"))
		},
		"a note that is a pipe": func(t *testing.T, dir string) {
			must(t, syscall.Mkfifo(filepath.Join(dir, record.NoteFileName), 0o600))
		},
		"a record elsewhere": func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Join(dir, record.NoteFileName), []byte(`{"path":"../../etc/passwd","text":"root"}`), 0o600))
		},
		"a link to elsewhere": func(t *testing.T, dir string) {
			must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "link")))
			must(t, record.ExpectText(dir, filepath.Join(dir, "link"), "root"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			leave(t, dir)
			if whole, _ := record.AwaitComplete(t.Context(), open(t, dir)); whole {
				t.Error("Await says that the record is whole")
			}
			if whole, err := record.AwaitComplete(t.Context(), open(t, dir)); !whole || err != nil {
				t.Errorf("a second time Await returned %v, %v", whole, err)
			}
		})
	}
	if err := record.ExpectText(t.TempDir(), "/etc/passwd", "root"); err == nil {
		t.Error("Expect took a record outside of the state folder")
	}
}
