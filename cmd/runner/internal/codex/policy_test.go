package codex

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPolicyOfPatches(t *testing.T) {
	t.Parallel()
	root, outside := filepath.Join(t.TempDir(), "ws"), t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"out": outside, "in": "sub", "dangling": filepath.Join(outside, "new")} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	one := func(path string) []fileChange { return []fileChange{{Path: path}} }
	for name, c := range map[string]struct {
		changes []fileChange
		grant   string
		rule    string
	}{
		"absolute":                 {one(root + "/a.txt"), "", ruleInside},
		"relative":                 {one("sub/a.txt"), "", ruleInside},
		"back and forth":           {one(root + "/sub/../a"), "", ruleInside},
		"link that stays inside":   {one(root + "/in/a"), "", ruleInside},
		"grant inside":             {one(root + "/a"), root + "/sub", ruleInside},
		"above":                    {one("../a"), "", ruleOutside},
		"sibling of a like name":   {one(root + "2/a"), "", ruleOutside},
		"elsewhere":                {one("/etc/passwd"), "", ruleOutside},
		"link that leads out":      {one(root + "/out/a"), "", ruleOutside},
		"link to what is not yet":  {one(root + "/dangling"), "", ruleOutside},
		"the name in a container":  {one("/workspace/a"), "", ruleOutside},
		"NUL":                      {one("a\x00b"), "", ruleOutside},
		"no path":                  {one(""), "", ruleOutside},
		"second of two":            {append(one(root+"/a"), fileChange{Path: "/etc/passwd"}), "", ruleOutside},
		"moved there":              {[]fileChange{{Path: root + "/a", Kind: changeKind{Type: "update", MovePath: "/etc/passwd"}}}, "", ruleOutside},
		"grant elsewhere":          {one(root + "/a"), "/etc", ruleOutside},
		"nothing that was told of": {nil, "", ruleUnreadable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := decidePatch(question{GrantRoot: c.grant}, c.changes, root)
			if d.rule != c.rule || d.allow != (c.rule == ruleInside) || !d.allow && d.reason == "" {
				t.Fatalf("decided %+v", d)
			}
		})
	}
}

func TestPolicyOfCommands(t *testing.T) {
	t.Parallel()
	if d := decideCommand(question{Command: "rm -rf /"}); !d.allow || d.rule != ruleShell {
		t.Errorf("decided %+v", d)
	}
	if d := decideCommand(question{Network: json.RawMessage("null")}); !d.allow {
		t.Errorf("decided %+v", d)
	}
	if d := decideCommand(question{Network: json.RawMessage(`{"host":"x"}`)}); d.allow || d.rule != ruleNetwork || d.reason == "" {
		t.Errorf("decided %+v", d)
	}
}

// Whatever the path, what is allowed lies inside.
func FuzzPolicyPath(f *testing.F) {
	for _, p := range []string{"a", "../a", "/etc/x", "~", "a/../..", "/workspace/../etc", "out/x"} {
		f.Add(p)
	}
	root, outside := f.TempDir(), f.TempDir()
	if err := os.Symlink(outside, filepath.Join(root, "out")); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, p string) {
		if !inside(root, p) {
			return
		}
		at := p
		if !filepath.IsAbs(p) {
			at = filepath.Join(root, p)
		}
		at = filepath.Clean(at)
		if at != root && !strings.HasPrefix(at, root+"/") || strings.HasPrefix(at+"/", root+"/out/") {
			t.Errorf("%q is allowed", p)
		}
	})
}
