package claudecode

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// decide returns the decision of an agent without permissions on a call, and the input that the call is run with.
func decide(s policyScope, tool, input string) (permission.Decision, json.RawMessage) {
	c := s.checkCall(tool, json.RawMessage(input))
	if c.denied != nil {
		return *c.denied, nil
	}
	return (&permission.Policy{}).Decide(c.Call), c.input
}

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
		"absolute":                 {"Write", path(root + "/a.txt"), permission.RuleWorkspacePath, root + "/a.txt"},
		"relative":                 {"Edit", path("sub/a.txt"), permission.RuleWorkspacePath, root + "/sub/a.txt"},
		"back and forth":           {"Read", path(root + "/sub/../a"), permission.RuleWorkspacePath, root + "/a"},
		"link that stays inside":   {"Write", path("in/a"), permission.RuleWorkspacePath, root + "/in/a"},
		"above":                    {"Write", path("../a"), permission.RuleOutsideWorkspace, ""},
		"sibling of a like name":   {"Write", path(root + "2/a"), permission.RuleOutsideWorkspace, ""},
		"elsewhere":                {"Read", path("/etc/passwd"), permission.RuleOutsideWorkspace, ""},
		"elsewhere, after a space": {"Write", path(" /etc/passwd"), permission.RuleOutsideWorkspace, ""},
		"elsewhere, after a BOM":   {"Write", path("\uFEFF/etc/passwd"), permission.RuleOutsideWorkspace, ""},
		"home":                     {"Write", path("~/a"), permission.RuleOutsideWorkspace, ""},
		"another name's home":      {"Write", path("~root/a"), permission.RuleOutsideWorkspace, ""},
		"link that leads out":      {"Write", path("out/a"), permission.RuleOutsideWorkspace, ""},
		"link to what is not yet":  {"Write", path(root + "/dangling"), permission.RuleOutsideWorkspace, ""},
		"the name in a container":  {"Write", path("/workspace/a"), permission.RuleOutsideWorkspace, ""},
		"NUL":                      {"Write", path("a\x00b"), permission.RuleOutsideWorkspace, ""},
		"no path":                  {"Write", `{"content":"x"}`, ruleUnreadableRequest, ""},
		"path that is no text":     {"Write", `{"file_path":["/etc/passwd"]}`, ruleUnreadableRequest, ""},
		"notebook":                 {"NotebookEdit", `{"notebook_path":"/etc/n.ipynb"}`, permission.RuleOutsideWorkspace, ""},
		"search here":              {"Grep", `{"pattern":"/x"}`, permission.RuleWorkspacePath, ""},
		"search elsewhere":         {"Grep", `{"pattern":"x","path":"/etc"}`, permission.RuleOutsideWorkspace, ""},
		"pattern":                  {"Glob", `{"pattern":"**/*.go"}`, permission.RuleWorkspacePath, ""},
		"pattern elsewhere":        {"Glob", `{"pattern":"/etc/*"}`, permission.RuleOutsideWorkspace, ""},
		"pattern above":            {"Glob", `{"pattern":"a/../../*"}`, permission.RuleOutsideWorkspace, ""},
		"shell":                    {"Bash", `{"command":"rm -rf /"}`, permission.RuleSandboxedShell, ""},
		"sub-agent":                {"Agent", `{"prompt":"x"}`, permission.RuleSubagent, ""},
		"list":                     {"TodoWrite", `{"todos":[]}`, permission.RuleBookkeeping, ""},
		"network":                  {"WebFetch", `{"url":"http://x"}`, permission.RuleNetwork, ""},
		"MCP":                      {"mcp__x__y", `{}`, permission.RuleUnknownTool, ""},
		"question to people":       {"AskUserQuestion", `{}`, permission.RuleUnknownTool, ""},
		"name in other letters":    {"bash", `{"command":"ls"}`, permission.RuleUnknownTool, ""},
		"no name":                  {"", `{}`, permission.RuleUnknownTool, ""},
		"input that is no object":  {"Bash", `"ls"`, ruleUnreadableRequest, ""},
		"null":                     {"Bash", `null`, ruleUnreadableRequest, ""},
		"no input":                 {"Bash", ``, ruleUnreadableRequest, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, ran := decide(policyScope{root: root}, c.tool, c.input)
			allowed := c.rule == permission.RuleWorkspacePath || c.rule == permission.RuleSandboxedShell || c.rule == permission.RuleSubagent || c.rule == permission.RuleBookkeeping
			if d.Rule != c.rule || (d.Action == events.PermissionAllow) != allowed {
				t.Fatalf("decided %+v", d)
			}
			if !allowed && d.Reason == "" {
				t.Error("the agent is told no reason")
			}
			var input struct {
				FilePath string `json:"file_path"`
			}
			if allowed && json.Unmarshal(ran, &input) != nil {
				t.Errorf("input %s", ran)
			}
			if allowed && input.FilePath != c.path {
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
		// With rules the policy sees the same path that the tool gets.
		if c := (policyScope{root: root, checked: true}).checkCall("Write", raw); c.denied == nil && !c.Paths[0].Outside {
			var ran struct {
				FilePath string `json:"file_path"`
			}
			if err := json.Unmarshal(c.input, &ran); err != nil {
				t.Fatal(err)
			}
			if rel := c.Paths[0].Path; !filepath.IsLocal(rel) || strings.HasPrefix(rel+"/", "out/") || ran.FilePath != filepath.Join(root, rel) {
				t.Errorf("%q is inside as %q, and the tool gets %q", p, rel, ran.FilePath)
			}
		}
		d, ran := decide(policyScope{root: root}, "Write", string(raw))
		if d.Action != events.PermissionAllow {
			return
		}
		var input struct {
			FilePath string `json:"file_path"`
		}
		if err := json.Unmarshal(ran, &input); err != nil {
			t.Fatal(err)
		}
		if at := input.FilePath; at != root && !strings.HasPrefix(at, root+"/") || strings.Contains(at, "/../") || strings.HasPrefix(at+"/", root+"/out/") {
			t.Errorf("%q is allowed as %q", p, at)
		}
	})
}
