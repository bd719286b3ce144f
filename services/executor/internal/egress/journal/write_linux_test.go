package journal_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
)

// Lines that cannot be written are kept, and written later, with their numbers.
func TestWriteFailure_KeepsLines(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	told := make(chan error, 100)
	r := run(t, dir, journal.Config{Failed: func(err error) { told <- err }})
	call(t, r, "a")
	r.until(t, 1)
	if err := <-told; err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "journal.jsonl")
	folder := filepath.Join(t.TempDir(), "folder")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	// The file and the folder change places at once: a write in between would make another file.
	exchange := func() {
		t.Helper()
		if err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, folder, unix.RENAME_EXCHANGE); err != nil {
			t.Fatal(err)
		}
	}
	exchange()
	call(t, r, "b")
	if err := <-told; err == nil {
		t.Fatal("a failed write is not told")
	}
	call(t, r, "c")
	exchange()
	r.until(t, 3)
	if got := r.lines(t, 0); len(got) != 3 || got[2].N != 3 {
		t.Errorf("%+v", got)
	}
}
