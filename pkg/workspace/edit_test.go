package workspace_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/wire"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

// editor is a runner that sends edits. Its files are a map as in workspacetest.FakeSandbox; paths that end with a slash are
// folders.
type editor struct {
	tree map[string]string
	sent map[string]wire.Entry // the entries of the snapshot base
	base string
	full bool // send the id with edits too
}

func (r *editor) box() *workspacetest.FakeSandbox {
	return &workspacetest.FakeSandbox{Runner: func(_ []string, stdin io.Reader, stdout, stderr io.Writer) int {
		if err := r.run(wire.NewReader(stdin), wire.NewWriter(stdout)); err != nil {
			_, _ = fmt.Fprintf(stderr, "runner: %v\n", err)
			return 1
		}
		return 0
	}}
}

// entriesOf returns the entries of a tree by path.
func entriesOf(tree map[string]string) map[string]wire.Entry {
	when := time.Unix(1_700_000_000, 5)
	out := map[string]wire.Entry{}
	for path, content := range tree {
		dir := strings.TrimSuffix(path, "/")
		for i := range len(dir) {
			if dir[i] == '/' && strings.Contains(dir[:i], "/") {
				out[dir[:i]] = wire.Entry{Path: dir[:i], Kind: wire.KindDir, Mode: 0o755, ModTime: when}
			}
		}
		if dir != path {
			out[dir] = wire.Entry{Path: dir, Kind: wire.KindDir, Mode: 0o755, ModTime: when}
			continue
		}
		e := wire.Entry{Path: path, Kind: wire.KindFile, Mode: 0o644, ModTime: when, Size: int64(len(content))}
		for i := range wire.BlockCount(e.Size) {
			e.Blocks = append(e.Blocks, wire.HashOf([]byte(content[i*wire.BlockSize:][:e.BlockLength(i)])))
		}
		out[path] = e
	}
	return out
}

func (r *editor) run(in *wire.Reader, out *wire.Writer) error {
	hello, err := in.ReadHello()
	if err != nil {
		return err
	}
	if !hello.Edits {
		return errors.New("the host does not send edits")
	}
	base := ""
	if hello.Base == r.base {
		base = r.base
	}
	if err := errors.Join(out.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion, Edits: true}), out.WriteJSON(wire.FrameFoundTree, wire.FoundTree{Base: base, Known: base == ""}), out.Flush()); err != nil {
		return err
	}
	known := map[wire.Hash]bool{}
	for t := wire.FrameKnownHashes; t != wire.FrameGo; {
		var content []byte
		if t, content, err = in.Next(); err != nil {
			return err
		}
		for ; len(content) > 0; content = content[len(wire.Hash{}):] {
			known[wire.Hash(content)] = true
		}
	}
	before, now := map[string]wire.Entry{}, entriesOf(r.tree)
	if base != "" {
		before = r.sent
	}
	end := wire.End{Full: base == "" || r.full}
	for path, e := range now {
		end.Files += map[wire.EntryKind]uint32{wire.KindFile: 1}[e.Kind]
		end.Bytes += uint64(e.Size) //nolint:gosec // a length is not negative
		old, ok := before[path]
		if ok && old.Kind == e.Kind && slices.Equal(old.Blocks, e.Blocks) {
			continue
		}
		for i, h := range e.Blocks {
			if known[h] || slices.Contains(old.Blocks, h) {
				continue
			}
			if err := out.WriteFrame(wire.FrameBlock, []byte(r.tree[path][i*wire.BlockSize:][:e.BlockLength(i)])); err != nil {
				return err
			}
		}
		if err := out.WriteEntry(&e); err != nil {
			return err
		}
	}
	for path := range before {
		parent, _ := wire.SplitPath(path)
		_, had := before[parent]
		_, has := now[parent]
		if _, ok := now[path]; !ok && (!had || has) { // a folder is gone with everything below it
			if err := out.WriteFrame(wire.FrameRemoved, []byte(path)); err != nil {
				return err
			}
		}
	}
	if end.Full {
		end.ID = partsID(now)
	}
	if err := errors.Join(out.WriteJSON(wire.FrameEnd, end), out.Flush()); err != nil {
		return err
	}
	var named wire.StoredSnapshot
	if err := in.Expect(wire.FrameStoredSnapshot, &named); err != nil {
		return err
	}
	r.base, r.sent = named.ID, now
	return nil
}

// partsID computes the id of a tree of version 2.
func partsID(entries map[string]wire.Entry) string {
	id, part, open := wire.NewTreeIDHash(), wire.NewPartHash(), false
	var cut wire.PartCutter
	for _, path := range slices.SortedFunc(maps.Keys(entries), wire.ComparePartOrder) {
		e := entries[path]
		line, err := e.CanonicalLine()
		if err != nil {
			panic(err)
		}
		begins, ends := cut.Next(path, len(line))
		if begins && open {
			id.Add(part.Sum())
			part = wire.NewPartHash()
		}
		part.Add(wire.HashOf(line))
		if open = !ends; ends {
			id.Add(part.Sum())
			part = wire.NewPartHash()
		}
	}
	if open {
		id.Add(part.Sum())
	}
	return id.ID()
}

// filesOf returns the files of a tree, without folders.
func filesOf(tree map[string]string) map[string]string {
	out := maps.Clone(tree)
	maps.DeleteFunc(out, func(path, _ string) bool { return strings.HasSuffix(path, "/") })
	return out
}

// TestEdits_MakeTheTreeOfAWholeSnapshot tests random edits: their snapshot has the id of a snapshot of the whole tree,
// is restored as that tree, and needs no object but those that PackNames returns.
func TestEdits_MakeTheTreeOfAWholeSnapshot(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		store, r := &workspacetest.MemoryStore{}, &editor{tree: map[string]string{}}
		o := workspace.Options{Tenant: tenant, Session: session}
		many := rapid.IntRange(0, 1500).Draw(rt, "files")
		for i := range many {
			r.tree[fmt.Sprintf("workspace/d%d/e%d/f%d", i%3, i%50, i)] = fmt.Sprint(i)
		}
		for turn := range rapid.IntRange(1, 8).Draw(rt, "turns") {
			for range rapid.IntRange(0, 6).Draw(rt, "edits") {
				editTree(rt, r.tree, turn)
			}
			r.full = rapid.Bool().Draw(rt, "full")
			got, err := workspace.Snapshot(t.Context(), r.box(), store, o)
			if err != nil {
				rt.Fatal(err)
			}
			if want := partsID(entriesOf(r.tree)); got.ID != want || got.Diverged || got.Lost != nil || int(got.Files) != len(filesOf(r.tree)) {
				rt.Fatalf("turn %d: %+v, want %s with %d files", turn, got, want, len(filesOf(r.tree)))
			}
			o.Previous = got.ID
		}
		checkAlone(t, rt, store, o.Previous, filesOf(r.tree))
	})
}

// checkAlone tests that a snapshot can be restored from the objects that it names.
func checkAlone(t *testing.T, rt *rapid.T, store *workspacetest.MemoryStore, id string, want map[string]string) {
	t.Helper()
	packs, err := workspace.PackNames(t.Context(), store, tenant, session, id)
	if err != nil {
		rt.Fatal(err)
	}
	alone := &workspacetest.MemoryStore{}
	for _, name := range append(packs, workspace.ManifestName(tenant, session, id)) {
		alone.SetObject(name, store.GetObject(name))
	}
	m, err := workspace.Open(t.Context(), alone, tenant, session, id)
	if err != nil {
		rt.Fatal(err)
	}
	if named := m.Objects(); !slices.Equal(named, packs) {
		rt.Fatalf("objects %v, packs %v", named, packs)
	}
	to := &workspacetest.FakeSandbox{}
	if _, err := workspace.Restore(t.Context(), to, alone, tenant, session, id); err != nil || !maps.Equal(to.Tree, want) {
		rt.Fatalf("restored %d files, want %d: %v", len(to.Tree), len(want), err)
	}
}

// editTree changes a tree.
func editTree(rt *rapid.T, tree map[string]string, turn int) {
	paths := slices.Sorted(maps.Keys(tree))
	some := func() string {
		if len(paths) == 0 || rapid.Bool().Draw(rt, "new") {
			return rapid.SampledFrom([]string{"workspace/", "state/"}).Draw(rt, "tree") + rapid.StringMatching(`[ab](/[ab!]){0,3}`).Draw(rt, "path")
		}
		return strings.TrimSuffix(rapid.SampledFrom(paths).Draw(rt, "existing"), "/")
	}
	path := some()
	removeBelow := func(path string) {
		maps.DeleteFunc(tree, func(p, _ string) bool { return wire.IsBelow(strings.TrimSuffix(p, "/"), path) })
	}
	clearParents := func(path string) {
		for i := range len(path) {
			if path[i] == '/' {
				delete(tree, path[:i])
			}
		}
	}
	switch rapid.SampledFrom([]string{"write", "write", "write", "remove", "remove folder", "folder", "move"}).Draw(rt, "what") {
	case "write":
		clearParents(path)
		removeBelow(path)
		size := rapid.SampledFrom([]int{0, 5, 1000, 300_000}).Draw(rt, "size")
		tree[path] = random(uint64(turn*1000+len(tree)), size) //nolint:gosec // a small number
	case "folder":
		clearParents(path)
		removeBelow(path)
		tree[path+"/"] = ""
	case "remove":
		removeBelow(path)
	case "remove folder":
		folder, _ := wire.SplitPath(path)
		if strings.Contains(folder, "/") {
			removeBelow(folder)
		}
	case "move":
		folder, _ := wire.SplitPath(path)
		to := "workspace/moved" + fmt.Sprint(turn)
		if !strings.Contains(folder, "/") {
			return
		}
		for _, p := range paths {
			if content, ok := tree[p]; ok && strings.HasPrefix(p, folder+"/") {
				delete(tree, p)
				tree[to+p[len(folder):]] = content
			}
		}
	}
}

// TestEdits_StoreLittle tests what one changed file costs in trees of different shapes.
func TestEdits_StoreLittle(t *testing.T) {
	t.Parallel()
	for name, path := range map[string]func(i int) string{
		"folders of 100 files":   func(i int) string { return fmt.Sprintf("workspace/d%d/f%d", i/100, i) },
		"one folder":             func(i int) string { return fmt.Sprintf("workspace/d/f%d", i) },
		"5,000 folders of four":  func(i int) string { return fmt.Sprintf("workspace/d%d/f%d", i/4, i) },
		"a folder in a folder …": func(i int) string { return "workspace/" + strings.Repeat("d/", i%20) + fmt.Sprint(i) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, r := &workspacetest.MemoryStore{}, &editor{tree: map[string]string{"state/log": "1"}}
			for i := range 20_000 {
				r.tree[path(i)] = fmt.Sprint(i)
			}
			o := workspace.Options{Tenant: tenant, Session: session}
			first, err := workspace.Snapshot(t.Context(), r.box(), store, o)
			if err != nil {
				t.Fatal(err)
			}
			if n := len(store.ObjectNames()); n > 4 {
				t.Errorf("the first snapshot stored %d objects", n)
			}
			o.Previous = first.ID
			for turn := range 18 { // at turn 16 packs are merged
				r.tree[path(turn*7%20_000)], r.tree["state/log"] = fmt.Sprint("changed ", turn), fmt.Sprint(turn)
				gets, names := store.GetCount(), len(store.ObjectNames())
				one, err := workspace.Snapshot(t.Context(), r.box(), store, o)
				if err != nil {
					t.Fatal(err)
				}
				if one.Stored-one.Repacked > 150<<10 || len(store.ObjectNames())-names > 3 {
					t.Errorf("turn %d: stored %d bytes, %d again, in %d objects, with %d reads", turn, one.Stored, one.Repacked, len(store.ObjectNames())-names, store.GetCount()-gets)
				}
				o.Previous = one.ID
			}
			if want := partsID(entriesOf(r.tree)); o.Previous != want {
				t.Errorf("id %s, want %s", o.Previous, want)
			}
		})
	}
}

// TestEdits_AreTakenAgainAsAWhole tests that an editor whose base is not what the host has does not make a wrong snapshot.
func TestEdits_AreTakenAgainAsAWhole(t *testing.T) {
	t.Parallel()
	fill := func(t *testing.T) (*workspacetest.MemoryStore, *editor, workspace.Options) {
		t.Helper()
		store, r := &workspacetest.MemoryStore{}, &editor{tree: map[string]string{"workspace/a": "1", "workspace/b/c": random(9, 2<<20)}}
		first, err := workspace.Snapshot(t.Context(), r.box(), store, workspace.Options{Tenant: tenant, Session: session})
		if err != nil {
			t.Fatal(err)
		}
		return store, r, workspace.Options{Tenant: tenant, Session: session, Previous: first.ID}
	}
	check := func(t *testing.T, store *workspacetest.MemoryStore, r *editor, o workspace.Options) workspace.Result {
		t.Helper()
		got, err := workspace.Snapshot(t.Context(), r.box(), store, o)
		if err != nil || got.ID != partsID(entriesOf(r.tree)) {
			t.Fatalf("%+v %v", got, err)
		}
		to := &workspacetest.FakeSandbox{}
		if _, err := workspace.Restore(t.Context(), to, store, tenant, session, got.ID); err != nil || !maps.Equal(to.Tree, filesOf(r.tree)) {
			t.Errorf("restored %d files: %v", len(to.Tree), err)
		}
		return got
	}
	t.Run("a full walk finds another tree", func(t *testing.T) {
		t.Parallel()
		store, r, o := fill(t)
		r.full, r.tree["workspace/a"] = true, "2"
		r.sent = entriesOf(r.tree) // the runner believes that the host has the change
		if got := check(t, store, r, o); !got.Diverged {
			t.Errorf("%+v", got)
		}
	})
	t.Run("a part is corrupt", func(t *testing.T) {
		t.Parallel()
		store, r, o := fill(t)
		for _, name := range store.ObjectNames() {
			if strings.Contains(name, "/p-") {
				store.SetObject(name, []byte("x"))
			}
		}
		r.tree["workspace/a"] = "2"
		if got := check(t, store, r, o); !got.Diverged || got.Lost == nil || got.NewBytes != 2<<20+1 {
			t.Errorf("%+v", got)
		}
	})
	t.Run("version 1", func(t *testing.T) {
		t.Parallel()
		store, r, o := fill(t)
		o.Previous = workspacetest.StoreSnapshot(t, store, tenant, session, map[string]string{"b/c": random(9, 2<<20)})
		if got := check(t, store, r, o); got.NewBytes != 1 {
			t.Errorf("content of a snapshot of version 1 was stored again: %+v", got)
		}
	})
	t.Run("a runner before edits", func(t *testing.T) {
		t.Parallel()
		store, _, o := fill(t)
		box := &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/b/c": random(9, 2<<20)}}
		got, err := workspace.Snapshot(t.Context(), box, store, o)
		if err != nil || got.NewBytes != 0 {
			t.Fatalf("%+v %v", got, err)
		}
		to := &workspacetest.FakeSandbox{}
		if _, err := workspace.Restore(t.Context(), to, store, tenant, session, got.ID); err != nil || !maps.Equal(to.Tree, box.Tree) {
			t.Errorf("restored %d files: %v", len(to.Tree), err)
		}
	})
}

// TestEdits_RefusesForgedOutputOfRunners is TestSnapshot_RefusesForgedOutputOfRunners for edits.
func TestEdits_RefusesForgedOutputOfRunners(t *testing.T) {
	t.Parallel()
	entry := func(path string, more ...func(*wire.Entry)) func(out *wire.Writer) error {
		e := wire.Entry{Path: path, Kind: wire.KindDir, Mode: 0o755}
		for _, m := range more {
			m(&e)
		}
		return func(out *wire.Writer) error { return out.WriteEntry(&e) }
	}
	gone := func(path string) func(out *wire.Writer) error {
		return func(out *wire.Writer) error { return out.WriteFrame(wire.FrameRemoved, []byte(path)) }
	}
	end := func(out *wire.Writer) error { return out.WriteJSON(wire.FrameEnd, wire.End{}) }
	file := func(e *wire.Entry) {
		e.Kind, e.Size, e.Blocks = wire.KindFile, 1, []wire.Hash{wire.HashOf([]byte("x"))}
	}
	for name, c := range map[string]struct {
		base string
		say  []func(out *wire.Writer) error
		want string
	}{
		"another base":          {"m-1", nil, "the base is"},
		"a path outside":        {"", []func(*wire.Writer) error{entry("workspace/../x")}, `path element ".."`},
		"another tree":          {"", []func(*wire.Writer) error{entry("home/x")}, "neither workspace/ nor state/"},
		"no parent":             {"", []func(*wire.Writer) error{entry("workspace/a/b"), end}, "parent"},
		"below a link":          {"", []func(*wire.Writer) error{entry("workspace/a", func(e *wire.Entry) { e.Kind, e.Target, e.Mode = wire.KindSymlink, "/etc", 0 }), entry("workspace/a/b"), end}, "parent"},
		"twice":                 {"", []func(*wire.Writer) error{entry("workspace/a"), entry("workspace/a"), end}, "sent twice"},
		"setuid":                {"", []func(*wire.Writer) error{entry("workspace/a", func(e *wire.Entry) { e.Mode = 0o4755 })}, "permission bits"},
		"content not sent":      {"", []func(*wire.Writer) error{entry("workspace/a", file), end}, "was not sent"},
		"content of another":    {"base", []func(*wire.Writer) error{entry("workspace/other", file), end}, "was not sent"},
		"below a removed one":   {"base", []func(*wire.Writer) error{gone("workspace/d"), entry("workspace/d/n"), end}, "parent"},
		"in place of a folder":  {"base", []func(*wire.Writer) error{entry("workspace/d", func(e *wire.Entry) { e.Kind, e.Size = wire.KindFile, 0 }), entry("workspace/d/n"), end}, "parent"},
		"removal of a tree":     {"base", []func(*wire.Writer) error{gone("workspace")}, "cannot be removed"},
		"removal outside":       {"base", []func(*wire.Writer) error{gone("home/x")}, "cannot be removed"},
		"no end":                {"base", []func(*wire.Writer) error{entry("workspace/n")}, "cut off"},
		"a whole that is other": {"", []func(*wire.Writer) error{entry("workspace/a"), func(out *wire.Writer) error { return out.WriteJSON(wire.FrameEnd, wire.End{Full: true, ID: "m-1"}) }}, "the runner reports"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, honest := &workspacetest.MemoryStore{}, &editor{tree: map[string]string{"workspace/f": "x", "workspace/d/f": "y"}}
			o := workspace.Options{Tenant: tenant, Session: session}
			if c.base == "base" {
				first, err := workspace.Snapshot(t.Context(), honest.box(), store, o)
				if err != nil {
					t.Fatal(err)
				}
				c.base, o.Previous = first.ID, first.ID
			}
			before := store.ObjectNames()
			box := &workspacetest.FakeSandbox{Runner: func(_ []string, in io.Reader, stdout, _ io.Writer) int {
				drained := make(chan struct{})
				go func() {
					defer close(drained)
					_, _ = io.Copy(io.Discard, in)
				}()
				out := wire.NewWriter(stdout)
				_ = errors.Join(out.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion, Edits: true}), out.WriteJSON(wire.FrameFoundTree, wire.FoundTree{Base: c.base}))
				for _, f := range c.say {
					_ = f(out) // the host may have closed the pipe
				}
				_ = out.Flush()
				_ = stdout.(io.Closer).Close()
				<-drained
				return 0
			}}
			_, err := workspace.Snapshot(t.Context(), box, store, o)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if !slices.Equal(store.ObjectNames(), before) {
				t.Errorf("stored %v", store.ObjectNames())
			}
		})
	}
}

func TestOpen_RefusesALaterVersion(t *testing.T) {
	t.Parallel()
	store, r := &workspacetest.MemoryStore{}, &editor{tree: map[string]string{"workspace/f": "x"}}
	first, err := workspace.Snapshot(t.Context(), r.box(), store, workspace.Options{Tenant: tenant, Session: session})
	if err != nil {
		t.Fatal(err)
	}
	name := workspace.ManifestName(tenant, session, first.ID)
	for what, object := range map[string]string{"version 3": `{"spoolWorkspace":3}` + "\n", "not a manifest": "hello\n", "unexpected EOF": wire.HeaderV2 + "\n{"} {
		store.SetObject(name, compress(t, object))
		if _, err := workspace.Open(t.Context(), store, tenant, session, first.ID); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("got %v, want %q", err, what)
		}
	}
}

func compress(t *testing.T, text string) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return z.EncodeAll([]byte(text), nil)
}
