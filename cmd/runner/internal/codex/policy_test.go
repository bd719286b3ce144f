package codex

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
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
		"absolute":                 {one(root + "/a.txt"), "", permission.RuleWorkspacePath},
		"relative":                 {one("sub/a.txt"), "", permission.RuleWorkspacePath},
		"back and forth":           {one(root + "/sub/../a"), "", permission.RuleWorkspacePath},
		"link that stays inside":   {one(root + "/in/a"), "", permission.RuleWorkspacePath},
		"grant inside":             {one(root + "/a"), root + "/sub", permission.RuleWorkspacePath},
		"above":                    {one("../a"), "", permission.RuleOutsideWorkspace},
		"sibling of a like name":   {one(root + "2/a"), "", permission.RuleOutsideWorkspace},
		"elsewhere":                {one("/etc/passwd"), "", permission.RuleOutsideWorkspace},
		"link that leads out":      {one(root + "/out/a"), "", permission.RuleOutsideWorkspace},
		"link to what is not yet":  {one(root + "/dangling"), "", permission.RuleOutsideWorkspace},
		"the name in a container":  {one("/workspace/a"), "", permission.RuleOutsideWorkspace},
		"NUL":                      {one("a\x00b"), "", permission.RuleOutsideWorkspace},
		"no path":                  {one(""), "", permission.RuleOutsideWorkspace},
		"second of two":            {append(one(root+"/a"), fileChange{Path: "/etc/passwd"}), "", permission.RuleOutsideWorkspace},
		"moved there":              {[]fileChange{{Path: root + "/a", Kind: changeKind{Type: "update", MovePath: "/etc/passwd"}}}, "", permission.RuleOutsideWorkspace},
		"grant elsewhere":          {one(root + "/a"), "/etc", permission.RuleOutsideWorkspace},
		"nothing that was told of": {nil, "", ruleUnreadableRequest},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSession(agent.Launch{Folders: agent.Folders{Workspace: root}}, nil)
			d := workspacePolicy(s.patchRequest(questionParams{GrantRoot: c.grant}, &runningItem{item: threadItem{Changes: c.changes}}))
			if allowed := d.Action == events.PermissionAllow; d.Rule != c.rule || allowed != (c.rule == permission.RuleWorkspacePath) || !allowed && d.Reason == "" {
				t.Fatalf("decided %+v", d)
			}
		})
	}
}

// workspacePolicy returns the decision on a request by the policy of an agent without permissions.
func workspacePolicy(r agent.PermissionRequest) permission.Decision {
	if r.Decided != nil {
		return *r.Decided
	}
	return (&permission.Policy{}).Decide(r.Call)
}

func TestPolicyOfCommands(t *testing.T) {
	t.Parallel()
	s := newSession(agent.Launch{Folders: agent.Folders{Workspace: "/w"}}, nil)
	for network, rule := range map[string]string{"": permission.RuleSandboxedShell, `,"networkApprovalContext":null`: permission.RuleSandboxedShell, `,"networkApprovalContext":{"host":"x"}`: permission.RuleNetwork} {
		q, err := decode[questionParams]([]byte(`{"command":"/bin/bash -lc 'rm -rf /'"`+network+`}`), "question")
		if err != nil {
			t.Fatal(err)
		}
		if d := workspacePolicy(s.commandRequest(q, nil)); d.Rule != rule || (d.Action == events.PermissionAllow) != (rule == permission.RuleSandboxedShell) {
			t.Errorf("decided %+v on %+v", d, q)
		}
	}
}

// A request that does not have the command is denied: neither the policy nor a person would know what they allow.
func TestPolicyOfCommands_DeniesAnUnknownCommand(t *testing.T) {
	t.Parallel()
	s := newSession(agent.Launch{Folders: agent.Folders{Workspace: "/w"}}, nil)
	if d := workspacePolicy(s.commandRequest(questionParams{}, nil)); d.Rule != ruleUnreadableRequest {
		t.Errorf("decided %+v", d)
	}
}

// The CLI quotes words as the Rust library shlex does.
func TestScriptOf(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]string{
		"/bin/bash -lc ls":                       "ls",
		"/bin/bash -lc 'rm -rf x; echo $y'":      "rm -rf x; echo $y",
		`/usr/bin/zsh -lc "echo it's"`:           "echo it's",
		`/bin/sh -c "echo it's "'$HOME'`:         "echo it's $HOME",
		"/bin/bash -lc 'echo a\necho b'":         "echo a\necho b",
		"/bin/bash -lc 'one\ntwo\n'":             "one\ntwo\n",
		`/bin/bash -lc "\"q\" \$x \` + "`" + `"`: "\"q\" $x `",
		"/bin/bash -lc ''":                       "",
	} {
		if got := unwrapShellScript(command); got != want {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
	for _, command := range []string{
		"", "ls", "bash -lc ls", "./bash -lc ls", "/bin/bash -lc ls more", "/bin/bash -x ls", "/bin/bash -lc $X", "/bin/bash -lc 'a", `/bin/bash -lc "a`,
		`/bin/bash -lc "$(a)"`, "/bin/bash -lc a;b", "/bin/bash -lc a\\ b", "/tmp/bash -c a", "/bin/bash -lc ls | sh",
	} {
		if got := unwrapShellScript(command); got != command {
			t.Errorf("%s: %q, want it unchanged", command, got)
		}
	}
}

// An answer accepts a call for this time only, whatever the CLI suggests.
func TestAnswers(t *testing.T) {
	t.Parallel()
	allowed, denied := agent.PermissionAnswer{Outcome: events.OutcomeApproved}, agent.PermissionAnswer{Outcome: events.OutcomeRejected, Message: "no, because"}
	skipped, ended := agent.PermissionAnswer{Outcome: events.OutcomeSkipped, Message: "go on"}, agent.PermissionAnswer{Message: "ended"}
	answered := agent.PermissionAnswer{Outcome: events.OutcomeAnswered, Content: json.RawMessage(`{"a":1}`), Answers: map[string][]string{"x": {"1", "2"}}}
	q := questionParams{Questions: []userQuestion{{ID: "x"}, {ID: "y"}}}
	user := func(a agent.PermissionAnswer) any { return userQuestionAnswer(q, a) }
	for _, c := range []struct {
		answer func(agent.PermissionAnswer) any
		to     agent.PermissionAnswer
		want   string
	}{
		{approvalAnswer, allowed, `{"decision":"accept"}`},
		{approvalAnswer, denied, `{"decision":"decline"}`},
		{approvalAnswer, skipped, `{"decision":"decline"}`},
		{approvalAnswer, answered, `{"decision":"decline"}`},
		{approvalAnswer, ended, `{"decision":"decline"}`},
		{mcpServerAnswer, allowed, `{"_meta":null,"action":"accept","content":{}}`},
		{mcpServerAnswer, answered, `{"_meta":null,"action":"accept","content":{"a":1}}`},
		{mcpServerAnswer, denied, `{"_meta":null,"action":"decline","content":null}`},
		{mcpServerAnswer, ended, `{"_meta":null,"action":"decline","content":null}`},
		{user, answered, `{"answers":{"x":{"answers":["1","2"]}}}`},
		{user, denied, `{"answers":{"x":{"answers":["no, because"]},"y":{"answers":["no, because"]}}}`},
		{user, agent.PermissionAnswer{Outcome: events.OutcomeRejected}, `{"answers":{}}`},
	} {
		got, err := json.Marshal(c.answer(c.to))
		if err != nil || string(got) != c.want {
			t.Errorf("%+v: %s, want %s, %v", c.to, got, c.want, err)
		}
	}
}
