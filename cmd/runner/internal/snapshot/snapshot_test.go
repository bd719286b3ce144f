package snapshot_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

func TestSnapshotAndRestore(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	for path, content := range map[string]string{
		"README.md": "hello", "empty": "", "src/a.go": "package a", "src/b.go": "package a", "a-b": "sorts between", "a/b": "and below",
		"line\nbreak": "1", "\xff\xfe": "no UTF-8", "sp ace/<&>\u2028": "odd", "big": strings.Repeat("0123456789", 300_000),
	} {
		put(t, b.workspace, path, content)
	}
	put(t, b.state, "claude/projects/x.jsonl", "{}\n")
	for _, step := range []error{
		os.Mkdir(filepath.Join(b.workspace, "void"), 0o755),
		os.Symlink("../../etc/passwd", filepath.Join(b.workspace, "outside")),
		os.Symlink("\xff", filepath.Join(b.workspace, "dangling")),
		os.Chmod(filepath.Join(b.workspace, "README.md"), 0o4755), //nolint:gosec // that it is dropped is the test
		os.Link(filepath.Join(b.workspace, "src/a.go"), filepath.Join(b.workspace, "hard")),
		os.Chmod(filepath.Join(b.workspace, "src"), 0o555), //nolint:gosec // a folder made read-only
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	first := take(t, b, store, "")
	if first.Files != 12 || first.Skipped != 0 || first.NewBytes == 0 {
		t.Errorf("first: %+v", first)
	}
	again := take(t, b, store, first.ID)
	if again.ID != first.ID || again.NewBytes != 0 || again.Files != first.Files || again.Bytes != first.Bytes {
		t.Errorf("unchanged: %+v", again)
	}
	to := newBox(t)
	back := restore(t, to, store, first.ID)
	if back.Files != first.Files || back.Bytes != first.Bytes {
		t.Errorf("restored: %+v", back)
	}
	want := tree(t, b.workspace)
	n := want["README.md"]
	n.mode = 0o755
	want["README.md"] = n
	same(t, want, tree(t, to.workspace))
	same(t, tree(t, b.state), tree(t, to.state))
	// A restored tree is the same snapshot, without reading its files.
	if r := take(t, to, store, first.ID); r.ID != first.ID || r.NewBytes != 0 {
		t.Errorf("after restore: %+v", r)
	}
}

// Random trees are created and edited, and a restore returns the same tree.
func TestTreesComeBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		b, store := newBox(t), &workspacetest.MemoryStore{}
		previous := ""
		for range rapid.IntRange(1, 3).Draw(rt, "turns") {
			for range rapid.IntRange(0, 8).Draw(rt, "edits") {
				edit(t, rt, b)
			}
			r := take(t, b, store, previous)
			previous = r.ID
			if again := take(t, b, store, previous); again.ID != r.ID || again.NewBytes != 0 {
				rt.Fatalf("unchanged: %+v after %+v", again, r)
			}
		}
		to := newBox(t)
		if rapid.Bool().Draw(rt, "over another tree") {
			for range 4 {
				edit(t, rt, to)
			}
			for _, dir := range []string{to.workspace, to.state} {
				clearOthers(t, dir, filepath.Join(filepath.Dir(b.workspace), filepath.Base(dir)))
			}
		}
		restore(t, to, store, previous)
		same(t, tree(t, b.workspace), tree(t, to.workspace))
		same(t, tree(t, b.state), tree(t, to.state))
		if t.Failed() {
			rt.FailNow()
		}
	})
}

// names collide often, and sort in ways that paths do not.
var names = []string{"a", "a-b", "a b", "b", "B", "\xf0\x28", "ü", "new\nline", "..x", ".hidden", "node_modules"}

func edit(t *testing.T, rt *rapid.T, b *box) {
	dir := rapid.SampledFrom([]string{b.workspace, b.workspace, b.state}).Draw(rt, "tree")
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close() //nolint:errcheck // only a handle
	path := strings.Join(rapid.SliceOfN(rapid.SampledFrom(names), 1, 3).Draw(rt, "path"), "/")
	parent := filepath.Dir(path)
	_ = root.MkdirAll(parent, 0o755) // a file may be in the way: then the edit does nothing
	switch rapid.SampledFrom([]string{"write", "write", "append", "remove", "dir", "link", "chmod"}).Draw(rt, "what") {
	case "write":
		size := rapid.SampledFrom([]int{0, 1, 100, 1 << 20, 1<<20 + 1, 3 << 20}).Draw(rt, "size")
		fill := rapid.SampledFrom([]string{"x", "yz", "\x00"}).Draw(rt, "fill")
		_ = root.RemoveAll(path)
		_ = root.WriteFile(path, []byte(strings.Repeat(fill, size)[:size]), 0o644)
	case "append":
		if f, err := root.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0); err == nil {
			_, err = fmt.Fprint(f, "more")
			if err = errors.Join(err, f.Close()); err != nil {
				t.Fatal(err)
			}
		}
	case "remove":
		_ = root.RemoveAll(path)
	case "dir":
		_ = root.Mkdir(path, 0o755)
	case "link":
		_ = root.Symlink(rapid.SampledFrom([]string{"a", "../..", "/etc/passwd", "\xff"}).Draw(rt, "target"), path)
	case "chmod":
		_ = root.Chmod(path, os.FileMode(rapid.SampledFrom([]uint32{0o600, 0o755, 0o444}).Draw(rt, "mode"))) //nolint:errcheck // see above
	}
}

// clearOthers removes the entries from dir that model does not have: a restore leaves them.
func clearOthers(t *testing.T, dir, model string) {
	t.Helper()
	have := tree(t, model)
	for path := range tree(t, dir) {
		if _, ok := have[path]; !ok {
			if err := os.RemoveAll(filepath.Join(dir, path)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Files with secrets, which every launch writes anew, are not part of snapshots.
func TestSnapshot_LeavesOutLaunchFiles(t *testing.T) {
	t.Parallel()
	b, store := newBox(t), &workspacetest.MemoryStore{}
	put(t, b.state, "launch/claude-mcp.json", "secret")
	put(t, b.state, "claude/launch/kept", "x")
	put(t, b.workspace, "launch/kept", "x")
	taken := take(t, b, store, "")
	to := newBox(t)
	restore(t, to, store, taken.ID)
	if taken.Files != 2 || taken.Skipped != 0 {
		t.Errorf("taken: %+v", taken)
	}
	if _, err := os.Stat(filepath.Join(to.state, "launch")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of the launch: %v", err)
	}
	for _, kept := range []string{filepath.Join(to.state, "claude/launch/kept"), filepath.Join(to.workspace, "launch/kept")} {
		if _, err := os.Stat(kept); err != nil {
			t.Error(err)
		}
	}
}
