package snapshot_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/cmd/runner/internal/watch"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

type noSink struct{}

func (noSink) JournalEvents(context.Context, ...events.Payload) string { return "" }

// watched starts a watcher of the box, as runner serve does. processes are those whose mappings count.
func (b *box) watched(t testing.TB, processes ...int) (stop func()) {
	t.Helper()
	w, err := watch.New(watch.Config{Dir: b.workspace, Sink: noSink{}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran, served := make(chan error, 1), make(chan error, 1)
	go func() { ran <- w.Run(ctx) }()
	go func() { served <- w.ServeQueries(ctx, b.state, func() []int { return processes }) }()
	stop = func() {
		cancel()
		if err := errors.Join(<-ran, <-served); err != nil {
			t.Error(err)
		}
	}
	for { // until it answers
		if q, err := watch.QueryChanges(t.Context(), b.state, ""); err == nil {
			q.Close()
			return stop
		}
		time.Sleep(time.Millisecond)
	}
}

// next takes a snapshot after the previous one.
func next(t testing.TB, b *box, store workspace.Store, previous *string, full bool) workspace.Result {
	t.Helper()
	o := options
	o.Previous, o.Full = *previous, full
	r, err := workspace.Snapshot(t.Context(), b, store, o)
	if err != nil {
		t.Fatal(err)
	}
	*previous = r.ID
	return r
}

// proved takes a snapshot of what the watcher has reported, and proves it with a full walk.
func proved(t testing.TB, b *box, store workspace.Store, previous *string) workspace.Result {
	t.Helper()
	r := next(t, b, store, previous, false)
	if full := next(t, b, store, previous, true); !full.Full || full.ID != r.ID || full.Missed != 0 || full.Diverged {
		t.Errorf("the watcher's changes make %+v\na full walk finds %+v", r, full)
	}
	return r
}

// settled makes a tree whose files the index trusts, and takes its snapshots until the dirty set is used.
func settled(t testing.TB, b *box, store workspace.Store, previous *string) {
	t.Helper()
	old(t, b.workspace)
	old(t, b.state)
	for range 2 {
		next(t, b, store, previous, false)
	}
	if r := next(t, b, store, previous, false); r.Full || r.NewBytes != 0 {
		t.Fatalf("an unchanged workspace: %+v", r)
	}
}

func TestEdits_FindEveryKindOfChange(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(t *testing.T, b *box) error{
		"nothing":  func(*testing.T, *box) error { return nil },
		"a record": func(t *testing.T, b *box) error { put(t, b.state, "log", "more"); return nil },
		"written":  func(t *testing.T, b *box) error { put(t, b.workspace, "a/f", "more"); return nil },
		"same size and time": func(t *testing.T, b *box) error {
			info, err := os.Stat(filepath.Join(b.workspace, "a/f"))
			put(t, b.workspace, "a/f", "F")
			return errors.Join(err, os.Chtimes(filepath.Join(b.workspace, "a/f"), info.ModTime(), info.ModTime()))
		},
		"replaced with the same size and time": func(t *testing.T, b *box) error {
			info, err := os.Stat(filepath.Join(b.workspace, "a/f"))
			put(t, b.workspace, "new", "F")
			return errors.Join(err, os.Chtimes(filepath.Join(b.workspace, "new"), info.ModTime(), info.ModTime()), os.Rename(filepath.Join(b.workspace, "new"), filepath.Join(b.workspace, "a/f")))
		},
		"truncated":        func(_ *testing.T, b *box) error { return os.Truncate(filepath.Join(b.workspace, "a/f"), 0) },
		"mode of a file":   func(_ *testing.T, b *box) error { return os.Chmod(filepath.Join(b.workspace, "a/f"), 0o600) },
		"mode of a folder": func(_ *testing.T, b *box) error { return os.Chmod(filepath.Join(b.workspace, "a/b"), 0o700) }, //nolint:gosec // a test
		"time of a file": func(_ *testing.T, b *box) error {
			return os.Chtimes(filepath.Join(b.workspace, "a/f"), time.Time{}, time.Unix(1, 2))
		},
		"removed":        func(_ *testing.T, b *box) error { return os.Remove(filepath.Join(b.workspace, "a/f")) },
		"folder removed": func(_ *testing.T, b *box) error { return os.RemoveAll(filepath.Join(b.workspace, "a")) },
		"folder made":    func(t *testing.T, b *box) error { put(t, b.workspace, "n/e/w/f", "1"); return nil },
		"folder moved": func(_ *testing.T, b *box) error {
			return os.Rename(filepath.Join(b.workspace, "a"), filepath.Join(b.workspace, "z"))
		},
		"folder moved in":   func(t *testing.T, b *box) error { put(t, t.TempDir(), "x", ""); return moveIn(t, b) },
		"folders exchanged": func(t *testing.T, b *box) error { return exchange(b.workspace, "a", "c") },
		"files exchanged":   func(t *testing.T, b *box) error { return exchange(b.workspace, "a/f", "c/f") },
		"file to folder": func(t *testing.T, b *box) error {
			err := os.Remove(filepath.Join(b.workspace, "a/f"))
			put(t, b.workspace, "a/f/g", "1")
			return err
		},
		"folder to file": func(t *testing.T, b *box) error {
			err := os.RemoveAll(filepath.Join(b.workspace, "a"))
			put(t, b.workspace, "a", "1")
			return err
		},
		"folder to link": func(_ *testing.T, b *box) error {
			return errors.Join(os.RemoveAll(filepath.Join(b.workspace, "a")), os.Symlink("c", filepath.Join(b.workspace, "a")))
		},
		"link": func(_ *testing.T, b *box) error {
			return errors.Join(os.Remove(filepath.Join(b.workspace, "link")), os.Symlink("f", filepath.Join(b.workspace, "link")))
		},
		"link to itself":    func(_ *testing.T, b *box) error { return os.Symlink(".", filepath.Join(b.workspace, "a/loop")) },
		"in an ignored one": func(t *testing.T, b *box) error { put(t, b.workspace, "node_modules/p/f", "more"); return nil },
		"new in an ignored": func(t *testing.T, b *box) error { put(t, b.workspace, ".git/refs/heads/x", "1"); return nil },
		"rules for ignored": func(t *testing.T, b *box) error {
			put(t, b.workspace, ".spoolignore", "c\n")
			put(t, b.workspace, "c/f", "more")
			return nil
		},
		"hard link": func(t *testing.T, b *box) error {
			err := os.Link(filepath.Join(b.workspace, "a/f"), filepath.Join(b.workspace, "c/hard"))
			put(t, b.workspace, "c/hard", "through the link")
			return err
		},
		"link of the agent": func(t *testing.T, b *box) error {
			err := os.Link(filepath.Join(b.workspace, "a/f"), filepath.Join(b.state, "hard"))
			put(t, b.state, "hard", "through the link")
			return err
		},
		"a socket": func(_ *testing.T, b *box) error { return syscall.Mkfifo(filepath.Join(b.workspace, "a/pipe"), 0o600) },
		"many, with content": func(t *testing.T, b *box) error {
			fill(t, b, 300)
			put(t, b.workspace, "big", random(3, 3<<20))
			return nil
		},
		"a name of bytes": func(t *testing.T, b *box) error { put(t, b.workspace, "a/\xff\n/\xfe", "1"); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, store, previous := newBox(t), &workspacetest.MemoryStore{}, ""
			defer b.watched(t)()
			for _, path := range []string{"a/f", "a/b/f", "a/b/c/f", "c/f", "node_modules/p/f", ".git/HEAD"} {
				put(t, b.workspace, path, "f")
			}
			put(t, b.state, "log", "log")
			if err := os.Symlink("a", filepath.Join(b.workspace, "link")); err != nil {
				t.Fatal(err)
			}
			settled(t, b, store, &previous)
			if err := change(t, b); err != nil {
				t.Fatal(err)
			}
			r := proved(t, b, store, &previous)
			if wantFull := name == "hard link" || name == "link of the agent"; r.Full != wantFull && name != "rules for ignored" {
				t.Errorf("full %t, want %t", r.Full, wantFull)
			}
			proved(t, b, store, &previous)
			checkRestored(t, b, store, previous, name == "a socket")
		})
	}
}

// checkRestored compares a restored snapshot with the files.
func checkRestored(t *testing.T, b *box, store workspace.Store, id string, pipe bool) {
	t.Helper()
	if pipe {
		if err := os.Remove(filepath.Join(b.workspace, "a/pipe")); err != nil {
			t.Fatal(err)
		}
	}
	to := newBox(t)
	restore(t, to, store, id)
	want, got := tree(t, b.workspace), tree(t, to.workspace)
	if pipe { // its removal changed the time of the folder
		delete(want, "a")
		delete(got, "a")
	}
	same(t, want, got)
	state := tree(t, b.state)
	delete(state, watch.SocketName)
	same(t, state, tree(t, to.state))
}

func moveIn(t *testing.T, b *box) error {
	dir := filepath.Join(filepath.Dir(b.workspace), "outside")
	put(t, dir, "x/y", "1")
	return os.Rename(dir, filepath.Join(b.workspace, "in"))
}

func exchange(dir, x, y string) error {
	tmp := filepath.Join(filepath.Dir(dir), "tmp")
	return errors.Join(os.Rename(filepath.Join(dir, x), tmp), os.Rename(filepath.Join(dir, y), filepath.Join(dir, x)), os.Rename(tmp, filepath.Join(dir, y)))
}

// Random operations on files: what the watcher has reported makes the snapshot that a full walk finds.
func TestEdits_EqualFullWalks(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		b, store, previous := newBox(t), &workspacetest.MemoryStore{}, ""
		stop := b.watched(t)
		defer func() { stop() }()
		for range rapid.IntRange(1, 3).Draw(rt, "turns") {
			for range rapid.IntRange(0, 8).Draw(rt, "edits") {
				if rapid.Bool().Draw(rt, "a move") {
					move(rt, b)
				} else {
					edit(t, rt, b)
				}
			}
			proved(t, b, store, &previous)
			if rapid.IntRange(0, 9).Draw(rt, "restart") == 0 {
				stop()
				stop = b.watched(t)
			}
		}
		checkRestored(t, b, store, previous, false)
		if t.Failed() {
			rt.FailNow()
		}
	})
}

// move renames or links a random file or folder.
func move(rt *rapid.T, b *box) {
	path := func(what string) string {
		return filepath.Join(b.workspace, strings.Join(rapid.SliceOfN(rapid.SampledFrom(names), 1, 3).Draw(rt, what), "/"))
	}
	from, to := path("from"), path("to")
	switch rapid.SampledFrom([]string{"rename", "rename", "exchange", "link"}).Draw(rt, "how") {
	case "rename":
		_ = os.Rename(from, to) // it may not be possible, and then does nothing
	case "exchange":
		_ = exchange(b.workspace, strings.TrimPrefix(from, b.workspace), strings.TrimPrefix(to, b.workspace)) // see above
	case "link":
		_ = os.Link(from, to) // see above
	}
}

// A snapshot that is not stored, another process that asks, or another index, never hides a change.
func TestEdits_ForgetNothingThatIsNotStored(t *testing.T) {
	t.Parallel()
	b, store, previous := newBox(t), &workspacetest.MemoryStore{}, ""
	stop := b.watched(t)
	put(t, b.workspace, "a/f", "f")
	put(t, b.workspace, "b/f", "f")
	settled(t, b, store, &previous)
	index := filepath.Join(b.state, ".spool-index")
	confirmed, err := os.ReadFile(index)
	if err != nil {
		t.Fatal(err)
	}
	put(t, b.workspace, "a/f", "changed")
	store.Fail = func(call, _ string) error {
		if call == "put" {
			return errors.New("no answer")
		}
		return nil
	}
	o := options
	o.Previous = previous
	if _, err := workspace.Snapshot(t.Context(), b, store, o); err == nil {
		t.Error("a store that fails made a snapshot")
	}
	store.Fail = nil
	// The index may be the earlier one: a runner that is ended early has not saved its own.
	if r := proved(t, b, store, &previous); r.NewBytes != 7 {
		t.Errorf("after a failure: %+v", r)
	}
	settled(t, b, store, &previous)
	put(t, b.workspace, "a/f", "changed again")
	if err := os.WriteFile(index, confirmed, 0o600); err != nil {
		t.Fatal(err)
	}
	if r := proved(t, b, store, &previous); !r.Full || r.NewBytes != 13 {
		t.Errorf("with an earlier index: %+v", r)
	}
	settled(t, b, store, &previous)
	put(t, b.workspace, "b/f", "changed too")
	q, err := watch.QueryChanges(t.Context(), b.state, "")
	if err != nil || q.Confirm() != nil {
		t.Fatal(err)
	}
	q.Close()
	if r := proved(t, b, store, &previous); !r.Full || r.NewBytes != 11 {
		t.Errorf("after another process has asked: %+v", r)
	}
	settled(t, b, store, &previous)
	stop()
	put(t, b.workspace, "b/f", "changed while nothing watched")
	defer b.watched(t)()
	if r := proved(t, b, store, &previous); !r.Full || r.NewBytes != 29 {
		t.Errorf("after a restart: %+v", r)
	}
}

// A file that a process has mapped for writing changes without a report and, within a page, without a change of its
// times.
func TestEdits_FindChangesOfMappedFiles(t *testing.T) {
	t.Parallel()
	b, store, previous := newBox(t), &workspacetest.MemoryStore{}, ""
	defer b.watched(t, os.Getpid())()
	put(t, b.workspace, "d/mapped", strings.Repeat("a", 8192))
	settled(t, b, store, &previous)
	f, err := os.OpenFile(filepath.Join(b.workspace, "d/mapped"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	memory, err := syscall.Mmap(int(f.Fd()), 0, 8192, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		memory[i] = 'b'
		if r := proved(t, b, store, &previous); r.Full || r.ReadBytes < 8192 {
			t.Errorf("change %d: %+v", i, r)
		}
		checkRestored(t, b, store, previous, false)
	}
	memory[9] = 'c'
	if err := syscall.Munmap(memory); err != nil {
		t.Fatal(err)
	}
	proved(t, b, store, &previous)
	checkRestored(t, b, store, previous, false)
}

// Files that change while a snapshot is taken are right in the next one.
func TestEdits_FollowAWriter(t *testing.T) {
	t.Parallel()
	b, store, previous := newBox(t), &workspacetest.MemoryStore{}, ""
	defer b.watched(t)()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			dir := filepath.Join(b.workspace, fmt.Sprintf("d%d", i%7))
			_ = os.MkdirAll(dir, 0o755)
			_ = os.WriteFile(filepath.Join(dir, fmt.Sprint(i%13)), []byte(fmt.Sprint(i)), 0o644)
			if i%29 == 0 {
				_ = os.RemoveAll(filepath.Join(b.workspace, fmt.Sprintf("d%d", (i+3)%7)))
			}
			if i%31 == 0 {
				_ = os.Rename(dir, filepath.Join(b.workspace, fmt.Sprintf("d%d", (i+1)%7)))
			}
			time.Sleep(100 * time.Microsecond)
		}
	}()
	for range 15 {
		if r := next(t, b, store, &previous, false); r.Diverged {
			t.Errorf("%+v", r)
		}
	}
	close(stop)
	<-done
	proved(t, b, store, &previous)
	checkRestored(t, b, store, previous, false)
}

// After a number of snapshots all files are looked at, also without a request.
func TestEdits_WalkEverythingNowAndThen(t *testing.T) {
	t.Parallel()
	b, store, previous := newBox(t), &workspacetest.MemoryStore{}, ""
	defer b.watched(t)()
	put(t, b.workspace, "f", "f")
	settled(t, b, store, &previous)
	var full []int
	for i := range 45 {
		if next(t, b, store, &previous, false).Full {
			full = append(full, i)
		}
	}
	if len(full) != 2 || full[1]-full[0] != 21 {
		t.Errorf("full walks at %v", full)
	}
}

// Versions: a host of an earlier build gets the protocol without edits, and both kinds of snapshots follow on each other.
func TestEdits_WithHostsOfEarlierBuilds(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	defer b.watched(t)()
	put(t, b.workspace, "d/f", random(1, 3<<20))
	put(t, b.state, "log", "log")
	old(t, b.workspace)
	old(t, b.state)
	previous, ids := "", map[int][]string{}
	for i, version := range []int{1, 2, 2, 1, 1, 2} {
		o := options
		o.Previous, o.Version = previous, version
		r, err := workspace.Snapshot(t.Context(), b, store, o)
		if err != nil {
			t.Fatal(err)
		}
		if want := uint64(3<<20 + 3); i == 0 && r.NewBytes != want || i > 0 && (r.NewBytes != 0 || r.ReadBytes != 0) || r.Lost != nil {
			t.Errorf("snapshot %d: %+v", i, r)
		}
		previous, ids[version] = r.ID, append(ids[version], r.ID)
		checkRestored(t, b, store, previous, false)
	}
	for version, list := range ids {
		if list = slices.Compact(list); len(list) != 1 {
			t.Errorf("the same files are snapshots %v of version %d", list, version)
		}
	}
}
