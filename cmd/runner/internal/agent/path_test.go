package agent_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/permission"
)

func TestResolvePath(t *testing.T) {
	t.Parallel()
	top, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	root, alias, outside := filepath.Join(top, "work"), filepath.Join(top, "alias"), filepath.Join(top, "other")
	for _, dir := range []string{root + "/sub", outside} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, target := range map[string]string{
		alias: root, root + "/out": outside, root + "/in": "sub", root + "/new": "sub/.env", root + "/away": "../other/new", root + "/loop": "loop",
	} {
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
	}
	in := func(path string) permission.Path { return permission.Path{Path: path} }
	out := func(path string) permission.Path { return permission.Path{Path: path, Outside: true} }
	for path, want := range map[string]permission.Path{
		"a.txt": in("a.txt"), "sub/../b": in("b"), ".": in("."), root: in("."), root + "/sub/x/y": in("sub/x/y"), alias + "/a": out(root + "/a"),
		"in/c": in("sub/c"), "new": in("sub/.env"), "out/d": out(outside + "/d"), "away": out(outside + "/new"),
		"../other/e": out(outside + "/e"), "/etc/f": out("/etc/f"), root + "x/g": out(root + "x/g"), "": out(""), "loop": out(root + "/loop"),
		"in\x00": out(root + "/in\x00"),
	} {
		// The alias is another folder for an agent that works in the root.
		if path == alias+"/a" {
			want = in("a")
			if got := agent.ResolvePath(alias, path); got != want {
				t.Errorf("%q in the workspace %s: %+v, want %+v", path, alias, got, want)
			}
			want = out(root + "/a")
		}
		if got := agent.ResolvePath(root, path); got != want {
			t.Errorf("%q: %+v, want %+v", path, got, want)
		}
	}
}
