package claudecode

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPolicy(t *testing.T) {
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
	path := func(p string) string {
		raw, err := json.Marshal(map[string]string{"file_path": p})
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	for name, c := range map[string]struct {
		tool, input string
		rule        string
		path        string // what the tool is run with
	}{
		"absolute":                 {"Write", path(root + "/a.txt"), ruleInside, root + "/a.txt"},
		"relative":                 {"Edit", path("sub/a.txt"), ruleInside, root + "/sub/a.txt"},
		"back and forth":           {"Read", path(root + "/sub/../a"), ruleInside, root + "/a"},
		"link that stays inside":   {"Write", path("in/a"), ruleInside, root + "/in/a"},
		"above":                    {"Write", path("../a"), ruleOutside, ""},
		"sibling of a like name":   {"Write", path(root + "2/a"), ruleOutside, ""},
		"elsewhere":                {"Read", path("/etc/passwd"), ruleOutside, ""},
		"elsewhere, after a space": {"Write", path(" /etc/passwd"), ruleOutside, ""},
		"elsewhere, after a BOM":   {"Write", path("\uFEFF/etc/passwd"), ruleOutside, ""},
		"home":                     {"Write", path("~/a"), ruleOutside, ""},
		"another name's home":      {"Write", path("~root/a"), ruleOutside, ""},
		"link that leads out":      {"Write", path("out/a"), ruleOutside, ""},
		"link to what is not yet":  {"Write", path(root + "/dangling"), ruleOutside, ""},
		"the name in a container":  {"Write", path("/workspace/a"), ruleOutside, ""},
		"NUL":                      {"Write", path("a\x00b"), ruleOutside, ""},
		"no path":                  {"Write", `{"content":"x"}`, ruleUnreadable, ""},
		"path that is no text":     {"Write", `{"file_path":["/etc/passwd"]}`, ruleUnreadable, ""},
		"notebook":                 {"NotebookEdit", `{"notebook_path":"/etc/n.ipynb"}`, ruleOutside, ""},
		"search here":              {"Grep", `{"pattern":"/x"}`, ruleInside, ""},
		"search elsewhere":         {"Grep", `{"pattern":"x","path":"/etc"}`, ruleOutside, ""},
		"pattern":                  {"Glob", `{"pattern":"**/*.go"}`, ruleInside, ""},
		"pattern elsewhere":        {"Glob", `{"pattern":"/etc/*"}`, ruleOutside, ""},
		"pattern above":            {"Glob", `{"pattern":"a/../../*"}`, ruleOutside, ""},
		"shell":                    {"Bash", `{"command":"rm -rf /"}`, ruleShell, ""},
		"sub-agent":                {"Agent", `{"prompt":"x"}`, ruleAgent, ""},
		"list":                     {"TodoWrite", `{"todos":[]}`, ruleBooks, ""},
		"network":                  {"WebFetch", `{"url":"http://x"}`, ruleNetwork, ""},
		"MCP":                      {"mcp__x__y", `{}`, ruleUnknown, ""},
		"question to people":       {"AskUserQuestion", `{}`, ruleUnknown, ""},
		"name in other letters":    {"bash", `{"command":"ls"}`, ruleUnknown, ""},
		"no name":                  {"", `{}`, ruleUnknown, ""},
		"input that is no object":  {"Bash", `"ls"`, ruleUnreadable, ""},
		"null":                     {"Bash", `null`, ruleUnreadable, ""},
		"no input":                 {"Bash", ``, ruleUnreadable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := decide(question{ToolName: c.tool, Input: json.RawMessage(c.input)}, scope{root: root})
			allowed := c.rule == ruleInside || c.rule == ruleShell || c.rule == ruleAgent || c.rule == ruleBooks
			if d.rule != c.rule || d.allow != allowed {
				t.Fatalf("decided %+v", d)
			}
			if !d.allow && d.reason == "" {
				t.Error("the agent is told no reason")
			}
			var input struct {
				FilePath string `json:"file_path"`
			}
			if d.allow && json.Unmarshal(d.input, &input) != nil {
				t.Errorf("input %s", d.input)
			}
			if input.FilePath != c.path {
				t.Errorf("runs on %q, want %q", input.FilePath, c.path)
			}
		})
	}
}

// Whatever the path, what is allowed lies inside.
func FuzzPolicyPath(f *testing.F) {
	for _, p := range []string{"a", "../a", " /etc/x", "~", "a/../..", "/workspace/../etc", "\u00a0/etc", "out/x"} {
		f.Add(p)
	}
	root, outside := f.TempDir(), f.TempDir()
	if err := os.Symlink(outside, filepath.Join(root, "out")); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, p string) {
		raw, err := json.Marshal(map[string]string{"file_path": p})
		if err != nil {
			t.Fatal(err)
		}
		d := decide(question{ToolName: "Write", Input: raw}, scope{root: root})
		if !d.allow {
			return
		}
		var input struct {
			FilePath string `json:"file_path"`
		}
		if err := json.Unmarshal(d.input, &input); err != nil {
			t.Fatal(err)
		}
		if at := input.FilePath; at != root && !strings.HasPrefix(at, root+"/") || strings.Contains(at, "/../") || strings.HasPrefix(at+"/", root+"/out/") {
			t.Errorf("%q is allowed as %q", p, at)
		}
	})
}
