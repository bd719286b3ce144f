package claudecode

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// askAll is a policy by which a person decides every call.
var askAll = events.Permissions{Default: events.PermissionAsk}

// newPolicyStage returns a stage with a permission policy, whose turn has begun.
func newPolicyStage(t *testing.T, l agent.Launch) *stage {
	t.Helper()
	st := &stage{t: t}
	l.Folders = agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}
	st.session = Adapter{Now: agenttest.FixedTime}.OpenSession(l, &st.in)
	policy, err := permission.New(l.Permissions, l.ExecutionPermissions)
	if err != nil {
		t.Fatal(err)
	}
	st.turn = agent.NewTurn(t.Context(), agent.TurnConfig{
		Journal: &st.journal, ExecutionID: "exe_1", Coalesce: time.Hour, Now: agenttest.FixedTime, Policy: policy,
	})
	if err := st.session.BeginTurn(runner.Query{Content: "hello"}, st.turn); err != nil {
		t.Fatal(err)
	}
	return st
}

// controlLine returns a line with a control request.
func controlLine(id, request string) string {
	return fmt.Sprintf(`{"type":"control_request","request_id":%q,"request":%s}`, id, request)
}

// useTool returns a permission request for a call.
func useTool(id, tool, input string) string {
	return controlLine(id, fmt.Sprintf(`{"subtype":"can_use_tool","tool_name":%q,"tool_use_id":"toolu_%s","input":%s}`, tool, id, input))
}

// answers returns the answers to control requests, by the id of the request.
func (st *stage) answers() map[string]json.RawMessage {
	st.t.Helper()
	out := map[string]json.RawMessage{}
	for _, raw := range st.in.SentValues() {
		var r struct {
			Type     string
			Response struct {
				RequestID string `json:"request_id"`
				Response  json.RawMessage
				Error     string
			}
		}
		if err := json.Unmarshal(raw, &r); err != nil {
			st.t.Fatal(err)
		}
		if r.Type != "control_response" {
			continue
		}
		if _, again := out[r.Response.RequestID]; again {
			st.t.Errorf("request %s is answered twice", r.Response.RequestID)
		}
		if out[r.Response.RequestID] = r.Response.Response; r.Response.Error != "" {
			out[r.Response.RequestID] = json.RawMessage(`"error: ` + strings.ReplaceAll(r.Response.Error, `"`, `'`) + `"`)
		}
	}
	return out
}

// decide decides the n-th request of the turn.
func (st *stage) decide(n int, d events.ApprovalDecided) {
	st.t.Helper()
	requests := of[events.ApprovalRequested](st, "approval_requested")
	d.ApprovalID = runner.ApprovalID("exe_1", st.journal.Name(), requests[n].ApprovalID)
	st.turn.ApplyVerdict(runner.ApprovalDecision{ApprovalDecided: d})
}

func TestRequests_AreAnsweredWhenTheyEndWithoutADecision(t *testing.T) {
	t.Parallel()
	st := newPolicyStage(t, agent.Launch{Permissions: askAll}).prints(initLine,
		useTool("withdrawn", "Bash", `{"command":"ls"}`), useTool("ended", "Bash", `{"command":"ls"}`),
		controlLine("form", `{"subtype":"elicitation","mcp_server_name":"desk","message":"Name?","requested_schema":{"type":"object"}}`),
		`{"type":"control_cancel_request","request_id":"withdrawn"}`)
	if got := st.answers(); len(got) != 0 {
		t.Fatalf("answered %s", got)
	}
	st.prints(done)
	got := st.answers()
	if len(got) != 2 || !strings.Contains(string(got["ended"]), `"deny"`) || string(got["form"]) != `{"action":"cancel"}` {
		t.Errorf("answered %s", got)
	}
	var reasons []string
	for _, r := range of[events.ApprovalRetracted](st, "approval_retracted") {
		reasons = append(reasons, r.Reason)
	}
	if !slices.Equal(reasons, []string{"withdrawn", "turn_ended", "turn_ended"}) {
		t.Errorf("retracted for %q", reasons)
	}
	st.prints(useTool("late", "Bash", `{"command":"ls"}`), controlLine("late form", `{"subtype":"elicitation"}`))
	if got := st.answers(); !strings.Contains(string(got["late"]), outsideTurnMessage) || string(got["late form"]) != `{"action":"cancel"}` {
		t.Errorf("answered %s", got)
	}
}

func TestSuggestionsOfTheCLIAreNotAccepted(t *testing.T) {
	t.Parallel()
	st := newPolicyStage(t, agent.Launch{Permissions: askAll}).prints(initLine, controlLine("r", `{"subtype":"can_use_tool","tool_name":"Bash","tool_use_id":"t","input":{"command":"touch a"},
		"permission_suggestions":[{"type":"addRules","rules":[{"toolName":"Bash","ruleContent":"touch *"}],"behavior":"allow","destination":"localSettings"}]}`))
	st.decide(0, events.ApprovalDecided{Decision: events.DecisionApproveAll})
	if got := string(st.answers()["r"]); got != `{"behavior":"allow","updatedInput":{"command":"touch a"}}` {
		t.Errorf("answered %s", got)
	}
}

func TestHook_HasTheCLIAskAboutEveryCall(t *testing.T) {
	t.Parallel()
	hook := controlLine("h", `{"subtype":"hook_callback","callback_id":"spool-ask","input":{"hook_event_name":"PreToolUse","tool_name":"Read"}}`)
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, programName), []byte("#!"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		launch agent.Launch
		hook   bool
		denied []string
	}{
		"no permissions":     {agent.Launch{}, false, []string{askUserQuestion, enterPlanMode, exitPlanMode}},
		"an unattended run":  {agent.Launch{ExecutionPermissions: events.ExecutionPermissions{Unattended: true}}, false, []string{askUserQuestion, enterPlanMode, exitPlanMode}},
		"everything asked":   {agent.Launch{Permissions: askAll}, true, nil},
		"preset ask":         {agent.Launch{Permissions: events.Permissions{Preset: events.PresetAsk}}, true, nil},
		"a rule":             {agent.Launch{Permissions: events.Permissions{Rules: []events.PermissionRule{{Tool: "Bash", Then: "deny"}}}}, true, []string{askUserQuestion, enterPlanMode, exitPlanMode}},
		"rules of a message": {agent.Launch{ExecutionPermissions: events.ExecutionPermissions{Rules: []events.PermissionRule{{Then: "ask"}}}}, true, []string{askUserQuestion, enterPlanMode, exitPlanMode}},
		"questions alone":    {agent.Launch{Permissions: events.Permissions{Tools: map[string]string{askUserQuestion: "ask"}}}, true, []string{enterPlanMode, exitPlanMode}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.launch.Environ = []string{"PATH=" + bin}
			command, err := Adapter{}.Command(c.launch)
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.Contains(command.Args, "--settings"); got != c.hook {
				t.Errorf("arguments %q", command.Args)
			}
			want := `{}`
			if c.hook {
				want = `{"hookSpecificOutput":{"hookEventName":"PreToolUse","permissionDecision":"ask"}}`
			}
			if got := string(newPolicyStage(t, c.launch).prints(hook).answers()["h"]); got != want {
				t.Errorf("the hook answered %s", got)
			}
			out := strings.Split(command.Args[slices.Index(command.Args, "--disallowedTools")+1], ",")
			for _, name := range []string{askUserQuestion, enterPlanMode, exitPlanMode} {
				if slices.Contains(out, name) != slices.Contains(c.denied, name) {
					t.Errorf("%s: left out %q", name, out)
				}
			}
		})
	}
}

func TestCheck_DescribesACallForAPolicyWithRules(t *testing.T) {
	t.Parallel()
	root, outside, home := t.TempDir(), t.TempDir(), t.TempDir()
	for link, to := range map[string]string{"alias": "secrets", "out": outside, "dangling": filepath.Join(outside, "new")} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(root, "secrets"), 0o700); err != nil {
		t.Fatal(err)
	}
	plans := filepath.Join(t.TempDir(), "plans")
	s := policyScope{root: root, home: home, plans: plans, checked: true, deny: []string{"Grep"}}
	file := func(path string) string { return fmt.Sprintf(`{"file_path":%q}`, path) }
	inWorkspace := func(path string) []permission.Path { return []permission.Path{{Path: path}} }
	elsewhere := func(path string) []permission.Path { return []permission.Path{{Path: path, Outside: true}} }
	for name, c := range map[string]struct {
		tool, input string
		want        permission.Call
		rule        string // of a denial
		ran         string // the input of an allowed call, if it is not the given one
	}{
		"a file":                         {"Read", file("a.txt"), permission.Call{Kind: permission.KindRead, Paths: inWorkspace("a.txt")}, "", file(root + "/a.txt")},
		"a link to another folder":       {"Read", file("alias/key"), permission.Call{Kind: permission.KindRead, Paths: inWorkspace("secrets/key")}, "", file(root + "/secrets/key")},
		"a link that leads out":          {"Write", file("out/a"), permission.Call{Kind: permission.KindEdit, Paths: elsewhere(outside + "/a")}, "", file(outside + "/a")},
		"a link to what is not yet":      {"Write", file("dangling"), permission.Call{Kind: permission.KindEdit, Paths: elsewhere(outside + "/new")}, "", file(outside + "/new")},
		"elsewhere":                      {"Read", file(" /etc/../etc/none"), permission.Call{Kind: permission.KindRead, Paths: elsewhere("/etc/none")}, "", file("/etc/none")},
		"above":                          {"Write", file("../x"), permission.Call{Kind: permission.KindEdit, Paths: elsewhere(filepath.Dir(root) + "/x")}, "", file(filepath.Dir(root) + "/x")},
		"home":                           {"Read", file("~/.ssh/id"), permission.Call{Kind: permission.KindRead, Paths: elsewhere(home + "/.ssh/id")}, "", file(home + "/.ssh/id")},
		"the home of another":            {"Read", file("~root/.ssh"), permission.Call{Kind: permission.KindRead}, permission.RuleOutsideWorkspace, ""},
		"NUL":                            {"Read", `{"file_path":"/a\u0000b"}`, permission.Call{Kind: permission.KindRead}, permission.RuleOutsideWorkspace, ""},
		"below a file":                   {"Read", file("/etc/passwd/x"), permission.Call{Kind: permission.KindRead}, permission.RuleOutsideWorkspace, ""},
		"a plan":                         {"Write", file(plans + "/a-b.md"), permission.Call{Kind: permission.KindBookkeeping, Paths: elsewhere(plans + "/a-b.md")}, "", file(plans + "/a-b.md")},
		"below the plans":                {"Write", file(plans + "/x/a.md"), permission.Call{Kind: permission.KindEdit, Paths: elsewhere(plans + "/x/a.md")}, "", file(plans + "/x/a.md")},
		"a search without a path":        {"LS", `{}`, permission.Call{Kind: permission.KindRead, Paths: inWorkspace(".")}, "", `{}`},
		"a pattern that leads out":       {"Glob", `{"pattern":"../*"}`, permission.Call{Kind: permission.KindRead}, permission.RuleOutsideWorkspace, ""},
		"a tool that is left out":        {"Grep", `{"path":7}`, permission.Call{Kind: permission.KindRead, LeftOut: true}, "", `{"path":7}`},
		"a command":                      {"Bash", `{"command":"rm x","Command":"ls"}`, permission.Call{Kind: permission.KindShell, Command: "rm x"}, "", `{"command":"rm x","Command":"ls"}`},
		"a command that is no text":      {"Bash", `{"command":["rm"]}`, permission.Call{Kind: permission.KindShell}, ruleUnreadableRequest, ""},
		"a host":                         {"WebFetch", `{"url":"http://a@EVIL.example:80/x"}`, permission.Call{Kind: permission.KindNetwork, Hosts: []string{"EVIL.example"}}, "", `{"url":"http://a@EVIL.example:80/x"}`},
		"a URL that is read in two ways": {"WebFetch", `{"url":"http://evil.example\\@good.example/"}`, permission.Call{Kind: permission.KindNetwork}, ruleUnreadableRequest, ""},
		"a URL without a host":           {"WebFetch", `{"url":"file:///etc/passwd"}`, permission.Call{Kind: permission.KindNetwork}, ruleUnreadableRequest, ""},
		"a message to a sub-agent":       {"SendMessage", `{}`, permission.Call{Kind: permission.KindAgent}, "", `{}`},
		"a tool that nobody knows":       {"New", `{}`, permission.Call{Kind: permission.KindUnknown}, "", `{}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := s.checkCall(c.tool, json.RawMessage(c.input))
			if c.want.Tool = c.tool; fmt.Sprintf("%+v", got.Call) != fmt.Sprintf("%+v", c.want) {
				t.Errorf("call %+v, want %+v", got.Call, c.want)
			}
			switch {
			case got.denied != nil:
				if got.denied.Rule != c.rule || got.denied.Reason == "" {
					t.Errorf("denied %+v, want %q", got.denied, c.rule)
				}
			case c.rule != "" || string(got.input) != c.ran:
				t.Errorf("runs with %s, want %s %s", got.input, c.ran, c.rule)
			}
		})
	}
}

func TestCheck_KnowsWhichToolsOfServersDestroyData(t *testing.T) {
	t.Parallel()
	l := agent.Launch{Permissions: askAll, MCPServers: []runner.MCPServer{{Name: "desk"}}}
	st := newPolicyStage(t, l).prints(initLine, `{"type":"control_response","response":{"subtype":"success","request_id":"spool-2","response":{"mcpServers":[{"name":"desk","status":"connected",
		"tools":[{"name":"echo","annotations":{}},{"name":"wipe.all","annotations":{"destructive":true}}]}]}}}`)
	if sent := string(st.in.SentValues()[2]); !strings.Contains(sent, `"mcp_status"`) {
		t.Errorf("sent %s", sent)
	}
	s := st.session.(*session).scope
	if s.checkCall("mcp__desk__echo", json.RawMessage(`{}`)).Destructive || !s.checkCall("mcp__desk__wipe_all", json.RawMessage(`{}`)).Destructive {
		t.Errorf("destructive tools %v", s.destructive)
	}
}

func TestPreview_ShowsWhatACallWouldDo(t *testing.T) {
	t.Parallel()
	st := newPolicyStage(t, agent.Launch{Permissions: askAll})
	s := st.session.(*session)
	if err := os.WriteFile(filepath.Join(s.scope.root, "code.go"), []byte("a\nb\nb\nc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ tool, input, title, diff, text string }{
		"edit":                   {"Edit", `{"file_path":"code.go","old_string":"b","new_string":"x"}`, "Edit: code.go", "--- code.go\n+++ code.go\n@@ -1,4 +1,4 @@\n a\n-b\n+x\n b\n c\n", ""},
		"edit everywhere":        {"Edit", `{"file_path":"code.go","old_string":"b","new_string":"x","replace_all":true}`, "Edit: code.go", "--- code.go\n+++ code.go\n@@ -1,4 +1,4 @@\n a\n-b\n-b\n+x\n+x\n c\n", ""},
		"several edits":          {"MultiEdit", `{"file_path":"code.go","edits":[{"old_string":"a","new_string":"x"},{"old_string":"c","new_string":"y"}]}`, "MultiEdit: code.go", "--- code.go\n+++ code.go\n@@ -1,4 +1,4 @@\n-a\n+x\n b\n b\n-c\n+y\n", ""},
		"edit that fits nowhere": {"Edit", `{"file_path":"none.go","old_string":"b\n","new_string":"x\n"}`, "Edit: none.go", "--- none.go\n+++ none.go\n@@ -1 +1 @@\n-b\n+x\n", ""},
		"overwrite":              {"Write", `{"file_path":"code.go","content":"a\nb\nb\n"}`, "Write: code.go", "--- code.go\n+++ code.go\n@@ -1,4 +1,3 @@\n a\n b\n b\n-c\n", ""},
		"new file":               {"Write", `{"file_path":"new.go","content":"a\n"}`, "Write: new.go", "", "a\n"},
		"search":                 {"Grep", `{"pattern":"TODO"}`, "Grep: TODO in .", "", "TODO"},
		"page":                   {"WebFetch", `{"url":"https://example.com/a","prompt":"Summarize"}`, "WebFetch: https://example.com/a", "", "Summarize"},
		"query":                  {"WebSearch", `{"query":"go"}`, "WebSearch: go", "", "go"},
		"command of two lines":   {"Bash", `{"command":"\ncd x\nls"}`, "Bash: cd x …", "", ""},
		"unknown":                {"New", `{"a":[1]}`, "New", "", "{\n  \"a\": [\n    1\n  ]\n}"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := s.callPreview(s.scope.checkCall(c.tool, json.RawMessage(c.input)))
			if r.Title != c.title || r.Preview.Diff != c.diff || r.Preview.Text != c.text || !r.Editable {
				t.Errorf("title %q, diff %q, text %q", r.Title, r.Preview.Diff, r.Preview.Text)
			}
		})
	}
}

// A call whose effect depends on more than a text shows all of its arguments.
func TestPreview_ShowsAllArgumentsThatChangeTheEffect(t *testing.T) {
	t.Parallel()
	s := newPolicyStage(t, agent.Launch{Permissions: askAll}).session.(*session)
	for _, c := range []struct{ tool, input, shows string }{
		{"NotebookEdit", `{"notebook_path":"n.ipynb","cell_id":"c1","edit_mode":"delete","new_source":"x = 1"}`, `"edit_mode": "delete"`},
		{"Edit", `{"file_path":"none.go","old_string":"b","new_string":"x","replace_all":true}`, `"replace_all": true`},
	} {
		r := s.callPreview(s.scope.checkCall(c.tool, json.RawMessage(c.input)))
		if !strings.Contains(r.Preview.Text, c.shows) || len(r.Preview.Paths) != 1 {
			t.Errorf("%s: paths %q, text %q, diff %q", c.tool, r.Preview.Paths, r.Preview.Text, r.Preview.Diff)
		}
	}
}

// A request for answers without a question that a person could answer is denied.
func TestQuestions_ThatCannotBeReadAreDenied(t *testing.T) {
	t.Parallel()
	st := newPolicyStage(t, agent.Launch{Permissions: askAll}).prints(initLine,
		useTool("a", askUserQuestion, `{}`), useTool("b", askUserQuestion, `{"questions":[]}`), useTool("c", askUserQuestion, `{"questions":[{"question":"Which?","options":"none"}]}`))
	if r := of[events.ApprovalRequested](st, "approval_requested"); len(r) != 0 {
		t.Errorf("a person was asked: %+v", r)
	}
	for _, d := range of[events.PermissionDecided](st, "permission_decided") {
		if d.Rule != ruleUnreadableRequest {
			t.Errorf("decided %+v", d)
		}
	}
}

func TestPlan_IsTheFileThatTheAgentWroteLast(t *testing.T) {
	t.Parallel()
	st := newPolicyStage(t, agent.Launch{Permissions: events.Permissions{Default: "ask", Tools: map[string]string{"Write": "allow"}}})
	plans := st.session.(*session).scope.plans
	if err := os.MkdirAll(plans, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"one.md": "PLAN-ONE", "two.md": "PLAN-TWO"} {
		if err := os.WriteFile(filepath.Join(plans, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	secret := filepath.Join(t.TempDir(), "secret.md")
	if err := os.WriteFile(secret, []byte("SECRET"), 0o600); err != nil {
		t.Fatal(err)
	}
	st.prints(initLine, useTool("w", "Write", fmt.Sprintf(`{"file_path":%q,"content":"PLAN-ONE"}`, plans+"/one.md")),
		useTool("a", exitPlanMode, `{}`), useTool("b", exitPlanMode, fmt.Sprintf(`{"planFilePath":%q}`, plans+"/two.md")),
		useTool("c", exitPlanMode, fmt.Sprintf(`{"planFilePath":%q}`, secret)), useTool("d", exitPlanMode, `{"plan":"PLAN-THREE"}`))
	var got []string
	for _, r := range of[events.ApprovalRequested](st, "approval_requested") {
		got = append(got, r.Preview.Text)
	}
	if !slices.Equal(got, []string{"PLAN-ONE", "PLAN-TWO", "PLAN-ONE", "PLAN-THREE"}) {
		t.Errorf("plans %q", got)
	}
}
