package workspace_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/wire"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const tenant, session = "acme", "ses_1"

func open(t *testing.T, store workspace.Store, id string) *workspace.Manifest {
	t.Helper()
	m, err := workspace.Open(t.Context(), store, tenant, session, id)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// random returns content that shares no block with the content of another seed.
func random(seed uint64, size int) string {
	b := make([]byte, size)
	if _, err := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)}).Read(b); err != nil {
		panic(err)
	}
	return string(b)
}

func TestManifest_ListsAndReadsFiles(t *testing.T) {
	t.Parallel()
	store := &workspacetest.MemoryStore{}
	big := random(1, 3*wire.BlockSize+17)
	box := &workspacetest.FakeSandbox{Tree: map[string]string{
		"workspace/a": "1", "workspace/dir/b": "22", "workspace/dir/sub/c": big, "workspace/dir-2": "", "workspace/\xff": "raw", "state/secret": "transcript",
	}}
	r, err := workspace.Snapshot(t.Context(), box, store, workspace.Options{Tenant: tenant, Session: session})
	if err != nil {
		t.Fatal(err)
	}
	m := open(t, store, r.ID)
	for dir, want := range map[string][]string{
		"":        {"a", "dir", "dir/b", "dir/sub", "dir/sub/c", "dir-2", "\xff"},
		"dir":     {"dir/b", "dir/sub", "dir/sub/c"},
		"dir/sub": {"dir/sub/c"},
	} {
		list, err := m.List(dir)
		var got []string
		for _, e := range list {
			got = append(got, e.Path)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("list %q: %q %v", dir, got, err)
		}
	}
	for _, dir := range []string{"a", "none", "../state", "state", "dir/"} {
		if list, err := m.List(dir); !errors.Is(err, workspace.ErrNotFound) {
			t.Errorf("list %q: %v %v", dir, list, err)
		}
	}
	if e, err := m.Lookup("dir/sub/c"); err != nil || e.Path != "dir/sub/c" || e.Size != int64(len(big)) || e.Kind != workspace.KindFile || e.Mode != 0o644 {
		t.Errorf("lookup: %+v %v", e, err)
	}
	gets := store.GetCount()
	rd, err := m.Reader(t.Context(), store, "dir/sub/c")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(rd); err != nil || string(got) != big {
		t.Errorf("read %d bytes: %v", len(got), err)
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
	if n := store.GetCount() - gets; n != 1 {
		t.Errorf("a file in one pack took %d reads of the store", n)
	}
	if _, err := m.Reader(t.Context(), store, "dir"); !errors.Is(err, workspace.ErrNotFile) {
		t.Errorf("read a folder: %v", err)
	}
	for _, path := range []string{"", "none", "../state/secret", "secret"} {
		if _, err := m.Reader(t.Context(), store, path); !errors.Is(err, workspace.ErrNotFound) {
			t.Errorf("read %q: %v", path, err)
		}
	}
}

func TestTar_WritesFolders(t *testing.T) {
	t.Parallel()
	store := &workspacetest.MemoryStore{}
	files := map[string]string{"a": "1", "dir/b": random(2, 9<<20), "dir/\xff\n": "odd", "empty": ""}
	m := open(t, store, workspacetest.StoreSnapshot(t, store, tenant, session, files))
	for dir, want := range map[string]map[string]string{
		"":    {"a": "1", "dir/": "", "dir/b": files["dir/b"], "dir/\xff\n": "odd", "empty": ""},
		"dir": {"b": files["dir/b"], "\xff\n": "odd"},
	} {
		var out bytes.Buffer
		if err := m.Tar(t.Context(), store, dir, &out); err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for r := tar.NewReader(&out); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			content, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			got[h.Name] = string(content)
			if h.ModTime.Nanosecond() != 123_456_789 {
				t.Errorf("%q: time %v", h.Name, h.ModTime)
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("tar %q: %q", dir, slices.Sorted(maps.Keys(got)))
		}
	}
	if err := m.Tar(t.Context(), store, "none", io.Discard); !errors.Is(err, workspace.ErrNotFound) {
		t.Errorf("tar of no folder: %v", err)
	}
}

// TestSnapshot_StoresOnlyChanges tests that a moved or copied file stores no content, whatever else changed.
func TestSnapshot_StoresOnlyChanges(t *testing.T) {
	t.Parallel()
	store := &workspacetest.MemoryStore{}
	box := &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/a": random(3, 5<<20), "workspace/b": "small"}}
	o := workspace.Options{Tenant: tenant, Session: session}
	steps := []struct {
		edit func()
		want uint64
	}{
		{func() {}, 5<<20 + 5},
		{func() {}, 0},
		{func() { box.Tree["workspace/copy"] = box.Tree["workspace/a"] }, 0},
		{func() { box.Tree["workspace/a"] += "appended" }, 8},
		{func() { box.Tree["workspace/c"] = "a new one"; delete(box.Tree, "workspace/b") }, 9},
	}
	for i, s := range steps {
		s.edit()
		r, err := workspace.Snapshot(t.Context(), box, store, o)
		if err != nil || r.NewBytes != s.want {
			t.Fatalf("step %d: %+v %v", i, r, err)
		}
		o.Previous = r.ID
		other := &workspacetest.FakeSandbox{}
		if _, err := workspace.Restore(t.Context(), other, store, tenant, session, r.ID); err != nil || !maps.Equal(other.Tree, box.Tree) {
			t.Fatalf("step %d: restored %d files, %v", i, len(other.Tree), err)
		}
	}
}

// TestSnapshot_RepacksSmallPacks changes files until packs are small, many and mostly unused, and compares every
// snapshot with the files from which it was taken.
func TestSnapshot_RepacksSmallPacks(t *testing.T) {
	t.Parallel()
	store := &workspacetest.MemoryStore{}
	box := &workspacetest.FakeSandbox{Tree: map[string]string{}}
	o := workspace.Options{Tenant: tenant, Session: session}
	for i := range 4 {
		box.Tree[fmt.Sprintf("workspace/big%02d", i)] = random(uint64(100+i), 1<<20) //nolint:gosec // a small number
	}
	want := map[string]map[string]string{}
	var repacked uint64
	for turn := range 30 {
		box.Tree[fmt.Sprintf("workspace/f%02d", turn%20)] = random(uint64(1000+turn), 10_000)              //nolint:gosec // small numbers
		box.Tree[fmt.Sprintf("workspace/big%02d", turn%4)] = random(uint64(2000+turn), 1<<20-(turn%3)*100) //nolint:gosec // small numbers
		r, err := workspace.Snapshot(t.Context(), box, store, o)
		if err != nil {
			t.Fatal(err)
		}
		o.Previous, want[r.ID] = r.ID, maps.Clone(box.Tree)
		repacked += r.Repacked
		before := store.GetCount()
		to := &workspacetest.FakeSandbox{}
		if _, err := workspace.Restore(t.Context(), to, store, tenant, session, r.ID); err != nil || !maps.Equal(to.Tree, box.Tree) {
			t.Fatalf("turn %d: %v", turn, err)
		}
		// A restore reads the manifest, at most 17 small packs, and full packs that are half used: 4 MB.
		if n := store.GetCount() - before; n > 1+17+4 {
			t.Errorf("turn %d: a restore reads %d objects", turn, n)
		}
	}
	if repacked == 0 {
		t.Error("no pack was written again")
	}
	for id, files := range want { // older snapshots keep the packs that they need
		to := &workspacetest.FakeSandbox{}
		if _, err := workspace.Restore(t.Context(), to, store, tenant, session, id); err != nil || !maps.Equal(to.Tree, files) {
			t.Errorf("%s: %v", id, err)
		}
	}
}

func TestRestore_ReportsCorruptObjects(t *testing.T) {
	t.Parallel()
	fill := func(t *testing.T) (*workspacetest.MemoryStore, *workspacetest.FakeSandbox, string, string) {
		store := &workspacetest.MemoryStore{}
		box := &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/a": random(4, 1000)}}
		r, err := workspace.Snapshot(t.Context(), box, store, workspace.Options{Tenant: tenant, Session: session})
		if err != nil {
			t.Fatal(err)
		}
		names := store.ObjectNames()
		if len(names) != 2 || names[0] != workspace.ManifestName(tenant, session, r.ID) {
			t.Fatalf("objects %v", names)
		}
		return store, box, r.ID, names[1]
	}
	flip := func(b []byte) []byte {
		b = bytes.Clone(b)
		b[len(b)/2] ^= 1
		return b
	}
	for name, spoil := range map[string]func(b []byte) []byte{
		"a bit": flip, "cut": func(b []byte) []byte { return b[:len(b)/2] }, "empty": func([]byte) []byte { return []byte{} },
	} {
		t.Run("pack "+name, func(t *testing.T) {
			t.Parallel()
			store, _, id, pack := fill(t)
			store.SetObject(pack, spoil(store.GetObject(pack)))
			m := open(t, store, id)
			r, err := m.Reader(t.Context(), store, "a")
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.ReadAll(r)
			_, restored := workspace.Restore(t.Context(), &workspacetest.FakeSandbox{}, store, tenant, session, id)
			for what, err := range map[string]error{"read": err, "restore": restored, "tar": m.Tar(t.Context(), store, "", io.Discard)} {
				var bad *workspace.CorruptError
				if !errors.As(err, &bad) || bad.Object != pack {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
		t.Run("manifest "+name, func(t *testing.T) {
			t.Parallel()
			store, box, id, pack := fill(t)
			object := workspace.ManifestName(tenant, session, id)
			store.SetObject(object, spoil(store.GetObject(object)))
			_, err := workspace.Open(t.Context(), store, tenant, session, id)
			var bad *workspace.CorruptError
			if !errors.As(err, &bad) || bad.Object != object {
				t.Errorf("open: %v", err)
			}
			// The next snapshot is still stored, and complete.
			store.SetObject(pack, nil)
			box.Tree["workspace/b"] = "new"
			r, err := workspace.Snapshot(t.Context(), box, store, workspace.Options{Tenant: tenant, Session: session, Previous: id})
			if err != nil || !errors.As(r.Lost, &bad) || r.NewBytes != 1003 {
				t.Fatalf("snapshot: %+v %v", r, err)
			}
			to := &workspacetest.FakeSandbox{}
			if _, err := workspace.Restore(t.Context(), to, store, tenant, session, r.ID); err != nil || !maps.Equal(to.Tree, box.Tree) {
				t.Errorf("restore: %v", err)
			}
		})
	}
	t.Run("another's manifest", func(t *testing.T) {
		t.Parallel()
		store, _, id, _ := fill(t)
		other := workspacetest.StoreSnapshot(t, store, tenant, session, map[string]string{"x": "y"})
		store.SetObject(workspace.ManifestName(tenant, session, id), store.GetObject(workspace.ManifestName(tenant, session, other)))
		_, err := workspace.Open(t.Context(), store, tenant, session, id)
		var bad *workspace.CorruptError
		if !errors.As(err, &bad) {
			t.Errorf("open: %v", err)
		}
	})
	t.Run("a pack that is gone", func(t *testing.T) {
		t.Parallel()
		store, _, id, pack := fill(t)
		store.SetObject(pack, nil)
		if _, err := workspace.Restore(t.Context(), &workspacetest.FakeSandbox{}, store, tenant, session, id); !errors.Is(err, workspace.ErrNotFound) || !strings.Contains(err.Error(), pack) {
			t.Errorf("restore: %v", err)
		}
	})
}

// TestSnapshot_StoreFailures tests that, whichever call of the store fails, no new snapshot is named and the previous
// one stays.
func TestSnapshot_StoreFailures(t *testing.T) {
	t.Parallel()
	broken := errors.New("no answer")
	was, then := random(5, 5000), random(6, 5000)
	for _, call := range []string{"get", "put"} {
		for nth := 1; ; nth++ {
			store := &workspacetest.MemoryStore{}
			box := &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/a": was}}
			o := workspace.Options{Tenant: tenant, Session: session}
			first, err := workspace.Snapshot(t.Context(), box, store, o)
			if err != nil {
				t.Fatal(err)
			}
			o.Previous = first.ID
			box.Tree["workspace/a"] = then
			left := nth
			store.Fail = func(c, _ string) error {
				if c == call {
					left--
				}
				if c == call && left == 0 {
					return broken
				}
				return nil
			}
			named := manifests(store)
			_, err = workspace.Snapshot(t.Context(), box, store, o)
			if left > 0 { // there are fewer calls
				if err != nil {
					t.Errorf("%s: %v", call, err)
				}
				if nth == 1 {
					t.Errorf("%s: is never called", call)
				}
				break
			}
			store.Fail = nil
			if !errors.Is(err, broken) || !slices.Equal(manifests(store), named) {
				t.Errorf("%s %d: %v, named %v", call, nth, err, manifests(store))
			}
			to := &workspacetest.FakeSandbox{}
			if _, err := workspace.Restore(t.Context(), to, store, tenant, session, first.ID); err != nil || to.Tree["workspace/a"] != was {
				t.Errorf("%s %d: the previous snapshot: %v", call, nth, err)
			}
			if _, err := workspace.Snapshot(t.Context(), box, store, o); err != nil {
				t.Errorf("%s %d: again: %v", call, nth, err)
			}
		}
	}
}

// TestSnapshot_StoresAgainWhatIsNotPrevious tests that a snapshot that equals an earlier one, but not the previous
// one, is stored again with all its objects: the janitor may be removing the objects of the earlier one.
func TestSnapshot_StoresAgainWhatIsNotPrevious(t *testing.T) {
	t.Parallel()
	store := &workspacetest.MemoryStore{}
	was := random(7, 5000)
	box := &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/a": was}}
	o := workspace.Options{Tenant: tenant, Session: session}
	take := func() string {
		t.Helper()
		r, err := workspace.Snapshot(t.Context(), box, store, o)
		if err != nil {
			t.Fatal(err)
		}
		o.Previous = r.ID
		return r.ID
	}
	first := take()
	old := store.ObjectNames()
	box.Tree["workspace/a"] = random(8, 5000)
	take()
	box.Tree["workspace/a"] = was
	stored := map[string]bool{}
	store.Fail = func(call, name string) error {
		if call == "put" {
			stored[name] = true
		}
		return nil
	}
	if id := take(); id != first {
		t.Fatalf("the same files are snapshots %s and %s", first, id)
	}
	for _, name := range old {
		if !stored[name] {
			t.Errorf("%s was not stored again", name)
		}
	}
	clear(stored)
	if take(); len(stored) > 0 {
		t.Errorf("the previous snapshot, taken again, stored %v", stored)
	}
	broken := errors.New("no answer")
	store.Fail = func(call, _ string) error {
		if call == "has" {
			return broken
		}
		return nil
	}
	if _, err := workspace.Snapshot(t.Context(), box, store, o); !errors.Is(err, broken) {
		t.Errorf("a store whose Has fails for the previous snapshot: %v", err)
	}
}

// TestSnapshot_StatesWhatItAdded tests that the sizes that the snapshots of a session report add up to the size of
// the store, also when the session returns to earlier files.
func TestSnapshot_StatesWhatItAdded(t *testing.T) {
	t.Parallel()
	store := &workspacetest.MemoryStore{}
	box := &workspacetest.FakeSandbox{Tree: map[string]string{}}
	o := workspace.Options{Tenant: tenant, Session: session}
	held := func() (n uint64) {
		for _, name := range store.ObjectNames() {
			content, err := store.Get(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			size, err := io.Copy(io.Discard, content)
			if err != nil {
				t.Fatal(err)
			}
			n += uint64(size)
		}
		return n
	}
	take := func(content string) uint64 {
		t.Helper()
		box.Tree["workspace/a"] = content
		r, err := workspace.Snapshot(t.Context(), box, store, o)
		if err != nil {
			t.Fatal(err)
		}
		o.Previous = r.ID
		return r.Stored
	}
	one, two := random(11, 9<<20), random(12, 9<<20)
	stated := take(one) + take(two)
	if stated != held() || stated < 18<<20 {
		t.Errorf("the store holds %d bytes, stated are %d", held(), stated)
	}
	if again := take(two); again != 0 {
		t.Errorf("the same files again state %d bytes", again)
	}
	if back := take(one); back == 0 || back > 64<<10 { // the size of the manifest
		t.Errorf("files that the store holds state %d bytes", back)
	}
	if stated != held() {
		t.Errorf("the store holds %d bytes, %d before", held(), stated)
	}
}

func manifests(store *workspacetest.MemoryStore) (out []string) {
	for _, n := range store.ObjectNames() {
		if strings.Contains(n, "/m-") {
			out = append(out, n)
		}
	}
	return out
}

// TestSnapshot_RefusesForgedOutputOfRunners tests that the host refuses output that a hostile sandbox could send in
// place of the runner.
func TestSnapshot_RefusesForgedOutputOfRunners(t *testing.T) {
	t.Parallel()
	found := func(id string) func(out *wire.Writer) error {
		return func(out *wire.Writer) error {
			return errors.Join(out.WriteJSON(wire.FrameFoundTree, wire.FoundTree{ID: id}), out.Flush())
		}
	}
	hello := func(out *wire.Writer) error {
		return out.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion})
	}
	entry := func(path string, more ...func(*wire.Entry)) func(out *wire.Writer) error {
		e := wire.Entry{Path: path, Kind: wire.KindDir, Mode: 0o755}
		for _, m := range more {
			m(&e)
		}
		return func(out *wire.Writer) error { return out.WriteEntry(&e) }
	}
	for name, c := range map[string]struct {
		say  []func(out *wire.Writer) error
		want string
	}{
		"nothing":          {nil, "cut off"},
		"another version":  {[]func(*wire.Writer) error{func(out *wire.Writer) error { return out.WriteJSON(wire.FrameHello, wire.Hello{Protocol: 7}) }}, "protocol 7"},
		"no id":            {[]func(*wire.Writer) error{hello, found("../../x")}, "snapshot:"},
		"a path outside":   {[]func(*wire.Writer) error{hello, found(""), entry("workspace/../x")}, `path element ".."`},
		"an absolute path": {[]func(*wire.Writer) error{hello, found(""), entry("/etc")}, "neither workspace/ nor state/"},
		"another tree":     {[]func(*wire.Writer) error{hello, found(""), entry("home/x")}, "neither workspace/ nor state/"},
		"no parent":        {[]func(*wire.Writer) error{hello, found(""), entry("workspace/a/b")}, "parent"},
		"twice":            {[]func(*wire.Writer) error{hello, found(""), entry("workspace/a"), entry("workspace/a")}, "does not come after"},
		"setuid":           {[]func(*wire.Writer) error{hello, found(""), entry("workspace/a", func(e *wire.Entry) { e.Mode = 0o4755 })}, "permission bits"},
		"below a link": {[]func(*wire.Writer) error{hello, found(""), entry("workspace/a", func(e *wire.Entry) { e.Kind, e.Target, e.Mode = wire.KindSymlink, "/etc", 0 }),
			entry("workspace/a/b")}, "parent"},
		"content not sent": {[]func(*wire.Writer) error{hello, found(""), entry("workspace/a", func(e *wire.Entry) {
			e.Kind, e.Size, e.Blocks = wire.KindFile, 1, []wire.Hash{wire.HashOf([]byte("x"))}
		})}, "was not sent"},
		"an end that does not agree": {[]func(*wire.Writer) error{hello, found(""), func(out *wire.Writer) error { return out.WriteJSON(wire.FrameEnd, wire.End{ID: "m-1"}) }}, "the runner reports"},
		"no end":                     {[]func(*wire.Writer) error{hello, found(""), entry("workspace/a")}, "cut off"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := &workspacetest.MemoryStore{}
			box := &workspacetest.FakeSandbox{Runner: func(_ []string, in io.Reader, stdout, _ io.Writer) int {
				drained := make(chan struct{})
				go func() {
					defer close(drained)
					_, _ = io.Copy(io.Discard, in)
				}()
				out := wire.NewWriter(stdout)
				for _, f := range c.say {
					_ = f(out) // the host may have closed the pipe
				}
				_ = out.Flush()
				_ = stdout.(io.Closer).Close()
				<-drained
				return 0
			}}
			_, err := workspace.Snapshot(t.Context(), box, store, workspace.Options{Tenant: tenant, Session: session})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if names := store.ObjectNames(); len(names) != 0 {
				t.Errorf("stored %v", names)
			}
		})
	}
}

func TestRestore_ReportsFailuresOfTheRunner(t *testing.T) {
	t.Parallel()
	runner := func(code int, words string) *workspacetest.FakeSandbox {
		return &workspacetest.FakeSandbox{Runner: func(_ []string, _ io.Reader, _, stderr io.Writer) int {
			_, _ = fmt.Fprintf(stderr, "time=now level=INFO msg=noise\nrunner: %s\n", words)
			return code
		}}
	}
	store := &workspacetest.MemoryStore{}
	id := workspacetest.StoreSnapshot(t, store, tenant, session, map[string]string{"a": random(7, 3<<20)})
	_, err := workspace.Restore(t.Context(), runner(wire.ExitDiskFull, "write: no space left"), store, tenant, session, id)
	var full *sandbox.Error
	if !errors.As(err, &full) || full.Code != sandbox.CodeDiskFull || full.Message != "runner restore: write: no space left" {
		t.Errorf("full disk: %#v", err)
	}
	if _, err := workspace.Restore(t.Context(), runner(1, "no such folder"), store, tenant, session, id); err == nil || !strings.Contains(err.Error(), "runner restore: no such folder") {
		t.Errorf("failed: %v", err)
	}
	err = workspace.UnpackTar(t.Context(), runner(wire.ExitTarRefused, `entry "../x": leads out`), "", strings.NewReader(random(8, 1<<20)))
	var refused *workspace.RefusedError
	if !errors.As(err, &refused) || refused.Message != `entry "../x": leads out` {
		t.Errorf("refused: %v", err)
	}
	broken := errors.New("no more of it")
	hang := &workspacetest.FakeSandbox{Runner: func(_ []string, in io.Reader, _, _ io.Writer) int {
		_, _ = io.Copy(io.Discard, in)
		return 0
	}}
	if err := workspace.UnpackTar(t.Context(), hang, "", io.MultiReader(strings.NewReader("x"), failingReader{broken})); !errors.Is(err, broken) {
		t.Errorf("a source that fails: %v", err)
	}
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }

// TestSnapshot_EndsAHangingRunner tests that a runner that hangs is ended when the context ends.
func TestSnapshot_EndsAHangingRunner(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	box := &workspacetest.FakeSandbox{Runner: func(_ []string, in io.Reader, _, _ io.Writer) int {
		cancel()
		_, _ = io.Copy(io.Discard, in)
		return 0
	}}
	if _, err := workspace.Snapshot(ctx, box, &workspacetest.MemoryStore{}, workspace.Options{Tenant: tenant, Session: session}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestParseName_RefusesInvalidNames(t *testing.T) {
	t.Parallel()
	id := wire.NewTreeValidator().ID()
	a, b, c, err := workspace.ParseManifestName(workspace.ManifestName(tenant, session, id))
	if err != nil || a != tenant || b != session || c != id {
		t.Errorf("parse: %q %q %q %v", a, b, c, err)
	}
	for _, bad := range []string{"", "a/b", "a/b/c", "a/b/" + strings.ToUpper(id), "a/b/c/" + id, "a//" + id, "a.b/c/" + id, "a/*/" + id, "a/b/" + id + "0"} {
		if _, _, _, err := workspace.ParseManifestName(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}
