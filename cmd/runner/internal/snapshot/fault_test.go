package snapshot_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/snapshot"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/wire"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

func random(seed uint64, size int) string {
	b := make([]byte, size)
	if _, err := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b); err != nil {
		panic(err)
	}
	return string(b)
}

// The runner, or its stream, ends at many positions of a snapshot: no snapshot is named, the previous one stays, and
// the next attempt succeeds.
func TestSnapshot_CutLeavesThePreviousOne(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	put(t, b.workspace, "a", "first")
	first := take(t, b, store, "")
	want := tree(t, b.workspace)
	path := filepath.Join(b.state, ".spool-index")
	index, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	put(t, b.workspace, "big", random(1, 10<<20))
	put(t, b.workspace, "z", "last")
	counted := &counter{}
	b.stdout = func(r io.Reader) io.Reader { counted.r = r; return counted }
	probe := &workspacetest.MemoryStore{}
	for _, name := range store.ObjectNames() {
		probe.SetObject(name, store.GetObject(name))
	}
	take(t, b, probe, first.ID)
	named := manifests(store)
	for _, kill := range []bool{false, true} {
		for _, at := range []int64{0, 3, 40, 100, 1 << 20, 9 << 20, counted.n - 200, counted.n - 1} {
			b.stdout = func(r io.Reader) io.Reader {
				if kill {
					return &killer{r: r, left: at, b: b}
				}
				return io.LimitReader(r, at)
			}
			if err := os.WriteFile(path, index, 0o600); err != nil { // so that each attempt sends edits
				t.Fatal(err)
			}
			o := options
			o.Previous = first.ID
			_, err := workspace.Snapshot(t.Context(), b, store, o)
			if !errors.Is(err, workspace.ErrStreamCut) || len(manifests(store)) != len(named) {
				t.Errorf("cut at %d: %v, named %v", at, err, manifests(store))
			}
		}
	}
	b.stdout = nil
	to := newBox(t)
	restore(t, to, store, first.ID)
	same(t, want, tree(t, to.workspace))
	r := take(t, b, store, first.ID)
	to = newBox(t)
	restore(t, to, store, r.ID)
	same(t, tree(t, b.workspace), tree(t, to.workspace))
}

func manifests(store *workspacetest.MemoryStore) (out []string) {
	for _, n := range store.ObjectNames() {
		if strings.Contains(n, "/m-") {
			out = append(out, n)
		}
	}
	return out
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// killer kills the runner after so many bytes.
type killer struct {
	r    io.Reader
	left int64
	b    *box
}

func (k *killer) Read(p []byte) (int, error) {
	if k.left == 0 {
		if err := k.b.last.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return 0, err
		}
		return 0, io.EOF
	}
	n, err := k.r.Read(p[:min(int64(len(p)), k.left)])
	k.left -= int64(n)
	return n, err
}

// An interrupted restore can be repeated over the files that it left.
func TestRestore_CanBeRepeatedAfterACut(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	for i, n := range []string{"a", "b/c", "b/d", "e"} {
		put(t, b.workspace, n, random(uint64(i), 5<<20)) //nolint:gosec // small
	}
	if err := os.Chmod(filepath.Join(b.workspace, "b"), 0o555); err != nil { //nolint:gosec // a read-only folder
		t.Fatal(err)
	}
	r := take(t, b, store, "")
	to := newBox(t)
	broken := errors.New("no answer")
	for nth := range 3 {
		left := nth
		store.Fail = func(call, name string) error {
			if call == "get" && strings.Contains(name, "/p-") {
				if left--; left < 0 {
					return broken
				}
			}
			return nil
		}
		if _, err := workspace.Restore(t.Context(), to, store, options.Tenant, options.Session, r.ID); !errors.Is(err, broken) {
			t.Errorf("pack %d fails: %v", nth, err)
		}
	}
	store.Fail = nil
	restore(t, to, store, r.ID)
	same(t, tree(t, b.workspace), tree(t, to.workspace))
}

// A file that changes while it is read is read again, and skipped if it keeps changing.
func TestSnapshot_ReadsAChangingFileAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		changes   int
		unsettled uint32
	}{"once": {1, 0}, "at each try": {1 << 30, 1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, store := newBox(t), &workspacetest.MemoryStore{}
			path := filepath.Join(b.workspace, "big")
			put(t, b.workspace, "big", random(1, 6<<20))
			old(t, b.workspace)
			n := 0
			b.stdout = func(r io.Reader) io.Reader {
				return &meddler{r: r, every: 2 << 20, meddle: func() {
					if n++; n > c.changes {
						return
					}
					f, err := os.OpenFile(path, os.O_WRONLY, 0)
					if err == nil {
						_, err = f.WriteAt([]byte(random(uint64(n)+1, 6<<20)), 0) //nolint:gosec // small
						err = errors.Join(err, f.Close())
					}
					if err != nil {
						t.Error(err)
					}
				}}
			}
			r := take(t, b, store, "")
			if n == 0 || r.Unsettled != c.unsettled {
				t.Fatalf("changed %d times: %+v", n, r)
			}
			b.stdout = nil
			if r.Unsettled == 0 {
				to := newBox(t)
				restore(t, to, store, r.ID)
				same(t, tree(t, b.workspace), tree(t, to.workspace))
				return
			}
			// After the changes have ended, the next snapshot has the complete file.
			next := take(t, b, store, r.ID)
			to := newBox(t)
			restore(t, to, store, next.ID)
			if next.Unsettled != 0 {
				t.Errorf("still unsettled: %+v", next)
			}
			same(t, tree(t, b.workspace), tree(t, to.workspace))
		})
	}
}

// meddler calls a function after each so many bytes. The runner is ahead by no more than a pipe and a buffer.
type meddler struct {
	r      io.Reader
	every  int64
	n      int64
	meddle func()
}

func (m *meddler) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	if before := m.n / m.every; (m.n+int64(n))/m.every > before {
		m.meddle()
	}
	m.n += int64(n)
	return n, err
}

// Snapshots are taken while files are created, changed and removed. Each can be restored, and no file has content that
// it never had.
func TestSnapshot_OfABusyWorkspaceCanBeRestored(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			dir := filepath.Join(b.workspace, "d"+string(rune('a'+i%5)))
			name := filepath.Join(dir, string(rune('a'+i%7)))
			_ = os.MkdirAll(dir, 0o755)
			_ = os.WriteFile(name, bytes.Repeat([]byte{byte('a' + i%20)}, 5000), 0o644)
			if i%3 == 0 {
				_ = os.RemoveAll(dir)
			}
			if i%11 == 0 {
				_ = os.Symlink("/etc", dir)
			}
		}
	}()
	previous := ""
	for range 8 {
		r := take(t, b, store, previous)
		previous = r.ID
		to := newBox(t)
		restore(t, to, store, r.ID)
		for path, n := range tree(t, to.workspace) {
			if n.mode.IsRegular() && strings.Trim(n.content, n.content[:min(1, len(n.content))]) != "" {
				t.Errorf("%s is torn", path)
			}
			if strings.Contains(n.content, "root:") {
				t.Errorf("%s is from outside", path)
			}
		}
	}
	close(stop)
	<-done
}

// Sockets, pipes and unreadable files are reported and block nothing.
func TestSnapshot_SkipsEntriesThatAreNotFiles(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	put(t, b.workspace, "fine", "1")
	put(t, b.workspace, "large", random(1, 5000))
	l, err := net.Listen("unix", filepath.Join(b.state, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // the test's own
	deep := b.workspace
	for range 260 {
		deep = filepath.Join(deep, "d")
	}
	for _, err := range []error{syscall.Mkfifo(filepath.Join(b.workspace, "pipe"), 0o644), os.MkdirAll(deep, 0o755)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	b.flags = []string{"--max-file=4999"}
	r := take(t, b, store, "")
	got := map[wire.SkipReason]string{}
	for _, s := range r.Skips {
		got[s.Reason] = s.Path
	}
	want := map[wire.SkipReason]string{wire.SkipSpecial: "workspace/pipe", wire.SkipTooLarge: "workspace/large", wire.SkipTooDeep: "workspace" + strings.Repeat("/d", 257)}
	if r.Skipped != 4 || len(r.Skips) != 4 || r.Files != 1 {
		t.Errorf("result %+v", r)
	}
	for why, path := range want {
		if got[why] != path {
			t.Errorf("%s: %s", why, got[why])
		}
	}
	b.flags = nil
	old(t, b.workspace)
	again := take(t, b, store, take(t, b, store, r.ID).ID)
	if again.Skipped != 3 || again.ReadBytes != 0 {
		t.Errorf("unchanged: %+v", again)
	}
}

// For a runner without permission to read a file, the content from before is kept, and other files are reported.
func TestSnapshot_KeepsUnreadableFilesFromBefore(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	put(t, b.workspace, "before", "known")
	put(t, b.workspace, "locked/in", "never seen")
	old(t, b.workspace)
	b.asOther(t)
	first := take(t, b, store, "")
	put(t, b.workspace, "after", "never read")
	for _, path := range []string{"before", "after", "locked"} {
		if err := os.Chmod(filepath.Join(b.workspace, path), 0); err != nil {
			t.Fatal(err)
		}
	}
	b.asOther(t)
	r := take(t, b, store, first.ID)
	if r.Files != 1 || r.Skipped != 2 || r.Skips[0] != (workspace.SkippedFile{Path: "workspace/after", Reason: wire.SkipUnreadable}) || r.Skips[1].Path != "workspace/locked" {
		t.Errorf("result %+v", r)
	}
	to := newBox(t)
	restore(t, to, store, r.ID)
	if n := tree(t, to.workspace)["before"]; n.mode != 0 || n.content != "known" && os.Getuid() == 0 {
		t.Errorf("restored %+v", n)
	}
}

// asOther makes an unprivileged user the owner of the box, if this process is privileged.
func (b *box) asOther(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		return
	}
	const nobody = 65534
	dir := filepath.Dir(b.workspace)
	if b.user == nil {
		b.binary, b.user = filepath.Join(dir, "runner"), &syscall.Credential{Uid: nobody, Gid: nobody}
		// By another process: a program that parallel tests start meanwhile would inherit the file, and it could not be run.
		if out, err := exec.CommandContext(t.Context(), "install", "-m", "755", os.Args[0], b.binary).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil { //nolint:gosec // see above
			t.Fatal(err)
		}
	}
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err == nil && path != dir {
			err = os.Lchown(path, nobody, nobody)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A restore over a tree with links that lead out stays inside the tree.
func TestRestoreStaysInside(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	put(t, b.workspace, "a/file", "mine")
	put(t, b.workspace, "b", "mine")
	put(t, b.workspace, "c", "mine")
	put(t, b.workspace, "d/e", "mine")
	r := take(t, b, store, "")
	to, outside := newBox(t), t.TempDir()
	put(t, outside, "file", "theirs")
	put(t, to.workspace, "c/in the way", "x")
	put(t, to.workspace, "d", "x")
	for _, err := range []error{
		os.Symlink(outside, filepath.Join(to.workspace, "a")),
		os.Link(filepath.Join(outside, "file"), filepath.Join(to.workspace, "b")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	restore(t, to, store, r.ID)
	same(t, tree(t, b.workspace), tree(t, to.workspace))
	if got := tree(t, outside); len(got) != 1 || got["file"].content != "theirs" {
		t.Errorf("outside: %v", got)
	}
}

// The runner refuses a restore that a host must not send.
func TestRestoreRefuses(t *testing.T) {
	t.Parallel()
	one := wire.HashOf([]byte("1"))
	file := func(path string) wire.Entry {
		return wire.Entry{Path: path, Kind: wire.KindFile, Size: 1, Blocks: []wire.Hash{one}, Mode: 0o644}
	}
	for name, c := range map[string]struct {
		entries []wire.Entry
		block   string
		want    string
	}{
		"..":             {[]wire.Entry{file("workspace/../x")}, "1", `".."`},
		"absolute":       {[]wire.Entry{file("/x")}, "1", "neither"},
		"below a link":   {[]wire.Entry{{Path: "workspace/a", Kind: wire.KindSymlink, Target: "/tmp"}, file("workspace/a/x")}, "1", "parent"},
		"no parent":      {[]wire.Entry{file("workspace/a/x")}, "1", "parent"},
		"a NUL":          {[]wire.Entry{file("workspace/a\x00b")}, "1", "NUL"},
		"another kind":   {[]wire.Entry{{Path: "workspace/a", Kind: "device"}}, "1", "kind"},
		"no content":     {[]wire.Entry{file("workspace/a")}, "", "1 files are incomplete"},
		"alien content":  {[]wire.Entry{file("workspace/a")}, "2", "belongs to no file"},
		"out of order":   {[]wire.Entry{file("workspace/b"), file("workspace/a")}, "1", "does not come after"},
		"a setuid file":  {[]wire.Entry{{Path: "workspace/a", Kind: wire.KindFile, Mode: 0o4755}}, "", "permission bits"},
		"too many bytes": {[]wire.Entry{{Path: "workspace/a", Kind: wire.KindFile, Size: 5, Blocks: []wire.Hash{one}}}, "1", "has 1 bytes, want 5"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBox(t)
			var in bytes.Buffer
			w := wire.NewWriter(&in)
			err := w.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion})
			for _, e := range c.entries {
				err = errors.Join(err, w.WriteEntry(&e))
			}
			err = errors.Join(err, w.WriteFrame(wire.FrameGo, nil))
			if c.block != "" {
				err = errors.Join(err, w.WriteFrame(wire.FrameBlock, []byte(c.block)))
			}
			if err = errors.Join(err, w.WriteJSON(wire.FrameEnd, wire.End{}), w.Flush()); err != nil {
				t.Fatal(err)
			}
			a := snapshot.Restorer{Roots: snapshot.RootPaths{Workspace: b.workspace, State: b.state}, Log: slog.New(slog.DiscardHandler)}
			if err := a.Run(t.Context(), &in, io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// A forged index only costs time.
func TestIndex_ForgedOneCostsTimeOnly(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	put(t, b.workspace, "a", "content")
	old(t, b.workspace)
	first := take(t, b, store, "")
	path := filepath.Join(b.state, ".spool-index")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, forged := range map[string][]byte{"cut": raw[:len(raw)/2], "empty": {}, "flipped": append(bytes.Clone(raw[:len(raw)-1]), raw[len(raw)-1]^1), "other": []byte("hello")} {
		if err := os.WriteFile(path, forged, 0o600); err != nil {
			t.Fatal(err)
		}
		if r := take(t, b, store, first.ID); r.ID != first.ID || r.ReadBytes != 7 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	// A link in its place is not followed.
	outside := filepath.Join(t.TempDir(), "outside")
	if err := errors.Join(os.WriteFile(outside, []byte("theirs"), 0o600), os.Remove(path), os.Symlink(outside, path)); err != nil {
		t.Fatal(err)
	}
	if r := take(t, b, store, first.ID); r.ID != first.ID {
		t.Errorf("link: %+v", r)
	}
	if got, err := os.ReadFile(outside); err != nil || string(got) != "theirs" {
		t.Errorf("outside: %q %v", got, err)
	}
	if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	if r := take(t, b, store, first.ID); r.ID != first.ID {
		t.Errorf("pipe: %+v", r)
	}
}

// A change of the same size within a tick of the clock is found.
func TestIndex_SeesAChangeWithinATick(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	previous := ""
	for i := range 20 {
		put(t, b.workspace, "a", string(rune('a'+i)))
		previous = take(t, b, store, previous).ID
		m, err := workspace.Open(t.Context(), store, options.Tenant, options.Session, previous)
		if err != nil {
			t.Fatal(err)
		}
		r, err := m.Reader(t.Context(), store, "a")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); err != nil || string(got) != string(rune('a'+i)) {
			t.Errorf("change %d: %q %v", i, got, err)
		}
	}
}

// A change of content with the same size and modification time is found by the change time.
func TestIndex_SeesAChangeBehindOldTimes(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	put(t, b.workspace, "a", "one")
	old(t, b.workspace)
	first := take(t, b, store, "")
	path := filepath.Join(b.workspace, "a")
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	put(t, b.workspace, "a", "two")
	if err := os.Chtimes(path, time.Time{}, info.ModTime()); err != nil {
		t.Fatal(err)
	}
	if r := take(t, b, store, first.ID); r.NewBytes != 3 {
		t.Errorf("result %+v", r)
	}
}

// The runner ends when its host's context ends.
func TestSnapshot_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	put(t, b.workspace, "big", random(1, 20<<20))
	ctx, cancel := context.WithCancel(t.Context())
	b.stdout = func(r io.Reader) io.Reader {
		return &meddler{r: r, every: 1 << 20, meddle: cancel}
	}
	if _, err := workspace.Snapshot(ctx, b, &workspacetest.MemoryStore{}, options); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if s := b.last.cmd.ProcessState; s == nil {
		t.Error("the runner still runs")
	}
}
