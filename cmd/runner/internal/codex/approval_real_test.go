package codex_test

import (
	"encoding/json"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/mcptest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// asks is a policy by which a person decides every call.
var asks = events.Permissions{Default: events.PermissionAsk}

var (
	approve = agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionApprove})
	skip    = agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionSkip})
)

// run returns a rule by which the model runs commands, each when the one before has ended.
func run(text string, commands ...string) string {
	var tools []agenttest.ScriptToolCall
	for _, c := range commands {
		tools = append(tools, agenttest.ScriptToolCall{Name: "exec_command", Input: map[string]any{"cmd": c}})
	}
	return agenttest.ScriptRule(text, tools...)
}

// both is a rule by which the model runs two commands at once.
const both = `  - {match: {user: both}, steps: [{tools: [{name: exec_command, input: {cmd: touch one}}, {name: exec_command, input: {cmd: touch two}}]}, {text: 'Results: {{range results}}[{{trim .}}]{{end}}'}]}` + "\n"

// newAskingBench returns a bench whose agent has a permission policy.
func newAskingBench(t *testing.T, p events.Permissions, rules ...string) *agenttest.Harness {
	t.Helper()
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, rules...))
	b.Query.Permissions = p
	return b
}

// The CLI itself takes some commands for safe. It asks about them all the same.
func TestRealApproval_EveryCommandIsAskedAbout(t *testing.T) {
	t.Parallel()
	commands := []string{"ls", "cat a.txt", "git status", "pwd", "echo hello", "true", "find .", "grep x a.txt", "head a.txt", "wc -l a.txt", "sed -n 1p a.txt", "/bin/ls"}
	b := newAskingBench(t, asks, run("look around", commands...))
	x := b.RunTurnDeciding("look around", nil, approve)
	var asked []string
	for _, r := range x.ApprovalRequests() {
		asked = append(asked, r.Preview.Command)
		if r.ToolName != "shell" || r.ToolUseID == "" || r.Title == "" || r.Editable || r.Kind != events.ApprovalTool || !strings.Contains(string(r.Input), r.Title) {
			t.Errorf("request %+v", r)
		}
	}
	if e := x.Ended(); !slices.Equal(asked, commands) || e.Outcome != runner.OutcomeCompleted {
		t.Errorf("asked about %q, want %q; ended %+v", asked, commands, e)
	}
}

// A denial's comment reaches the model in the same turn.
func TestRealApproval_CommentReachesTheModel(t *testing.T) {
	t.Parallel()
	patch := agenttest.ScriptToolCall{Name: "apply_patch", Input: "*** Begin Patch\n*** Add File: hello.txt\n+hello, world\n*** End Patch\n"}
	b := newAskingBench(t, asks, agenttest.ScriptRule("write it", patch, agenttest.ScriptToolCall{Name: "exec_command", Input: map[string]any{"cmd": "true"}}))
	x := b.RunTurnDeciding("write it", nil, func(r events.ApprovalRequested) events.ApprovalDecided {
		if r.ToolName == "shell" {
			return events.ApprovalDecided{Decision: events.DecisionApprove}
		}
		if !strings.HasSuffix(strings.Join(r.Preview.Paths, ","), "/hello.txt") || !strings.Contains(r.Preview.Diff, "\n+hello, world\n") || !strings.HasPrefix(r.Title, "A ") {
			t.Errorf("request %+v", r)
		}
		return events.ApprovalDecided{Decision: events.DecisionReject, Comment: "Use another name."}
	})
	if r := x.ApprovalResolutions(); len(r) != 2 || r[0].Outcome != events.OutcomeRejected || r[1].Outcome != events.OutcomeApproved {
		t.Errorf("resolved %+v", r)
	}
	if body := b.ModelRequests("Use another name."); strings.Contains(string(body[0].Body), "declined by policy") {
		t.Error("the model is told that a policy declined the call")
	}
	if r := x.FinishedBlocks(events.KindToolResult); len(r) != 2 || !r[0].IsError || !strings.Contains(r[0].Output, "Use another name.") {
		t.Errorf("results %+v", r)
	}
	if b.HasFile("hello.txt") {
		t.Error("the file was written")
	}
}

func TestRealApproval_SkipAndClass(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, run("touch them", "touch one", "touch two", "touch three"))
	decide := []string{events.DecisionSkip, events.DecisionApproveAll}
	x := b.RunTurnDeciding("touch them", nil, func(events.ApprovalRequested) events.ApprovalDecided {
		d := events.ApprovalDecided{Decision: decide[0]}
		decide = decide[1:]
		return d
	})
	if d := x.PermissionDecisions(); len(d) != 1 || d[0].Rule != "approved-class" || d[0].Decision != "allow" {
		t.Errorf("decisions %+v", d)
	}
	if b.HasFile("one") || !b.HasFile("two") || !b.HasFile("three") {
		t.Errorf("files %v %v %v", b.HasFile("one"), b.HasFile("two"), b.HasFile("three"))
	}
	b.ModelRequests("The user skipped this call.")
}

func TestRealApproval_TwoAtOnceInTheOtherOrder(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, both)
	x := b.ReadUntilRequests(2, b.MustStartTurn("both", nil))
	requests := x.ApprovalRequests()
	slices.Reverse(requests)
	for _, r := range requests {
		d := events.ApprovalDecided{Decision: events.DecisionApprove}
		if r.Preview.Command == "touch one" {
			d = events.ApprovalDecided{Decision: events.DecisionReject, Comment: "no"}
		}
		b.DecideRequest(r, d)
	}
	if x = b.ReadToEnd(x); x.Ended().Outcome != runner.OutcomeCompleted || b.HasFile("one") || !b.HasFile("two") {
		t.Errorf("%s", x)
	}
}

func TestRealApproval_InterruptWhileItWaits(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, both)
	x := b.ReadUntilRequests(2, b.MustStartTurn("both", nil))
	b.Supervisor.Interrupt()
	x = b.ReadToEnd(x)
	if e := x.Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("ended %+v", e)
	}
	if r := x.ApprovalRetractions(); len(r) != 2 || r[0].Reason != "turn_ended" {
		t.Errorf("retracted %+v", r)
	}
	y := b.RunTurnOK("hello", "You said: hello", nil)
	if !y.Started().Warm || b.HasFile("one") || b.HasFile("two") {
		t.Errorf("started %+v", y.Started())
	}
}

// The next attempt of an agent that was killed asks again.
func TestRealApproval_KillWhileItWaits(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, run("touch it", "touch one"))
	x := b.ReadUntilRequests(1, b.MustStartTurn("touch it", nil))
	if err := syscall.Kill(x.Started().PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	x = b.ReadToEnd(x)
	if e, r := x.Ended(), x.ApprovalRetractions(); e.Code != "AGENT_EXITED" || len(r) != 1 || len(x.ApprovalResolutions()) != 0 {
		t.Errorf("ended %+v, retracted %+v", e, r)
	}
	y := b.RunTurnDeciding("touch it", func(q *runner.Query) { q.Attempt = 2 }, approve)
	if len(y.ApprovalRequests()) != 1 || y.Ended().Outcome != runner.OutcomeCompleted || !b.HasFile("one") {
		t.Errorf("%s", y)
	}
}

// A policy that denies everything leaves no tool that runs unasked.
func TestRealApproval_NothingRunsUnasked(t *testing.T) {
	t.Parallel()
	resource := agenttest.ScriptToolCall{Name: "read_mcp_resource", Input: map[string]any{"server": "desk", "uri": "test://page"}}
	for _, action := range []string{events.PermissionAsk, events.PermissionDeny} {
		b := newAskingBench(t, events.Permissions{Default: action},
			run("list them", "ls"), agenttest.ScriptRule("read the page", resource),
			agenttest.ScriptRule("look around", agenttest.ScriptToolCall{Name: "mcp__desk.look", Input: map[string]any{}}))
		b.Query.Model = plain
		b.Query.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "desk", nil)}
		for _, query := range []string{"list them", "look around"} {
			x := b.RunTurnDeciding(query, nil, skip)
			if n := len(x.ApprovalRequests()) + len(x.PermissionDecisions()); n != 1 {
				t.Errorf("%s: %d decisions%s", query, n, x)
			}
		}
		b.RunTurn("read the page", nil)
		for _, r := range b.Model.Requests() {
			if body := string(r.Body); strings.Contains(body, "TEXT-OF-THE-PAGE") || strings.Contains(body, `"name":"view_image"`) || strings.Contains(body, "spawn_agent") {
				t.Errorf("%s: the model reads the page, or is offered a tool about which the CLI does not ask", action)
			}
		}
		b.ModelRequests("The permission policy does not allow this call.")
	}
}

// The input of a running command is not asked about.
func TestRealApproval_NoInputForRunningCommands(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, agenttest.ScriptRule("start it", agenttest.ScriptToolCall{Name: "exec_command", Input: map[string]any{"cmd": "bash", "tty": true, "yield_time_ms": 300}}))
	b.RunTurnDeciding("start it", nil, approve)
	b.ModelRequests("TTY execution is disabled")
}

func TestRealApproval_Servers(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks,
		agenttest.ScriptRule("note it", agenttest.ScriptToolCall{Name: "mcp__desk.note", Input: map[string]any{"path": "/nowhere/x", "text": "NOTED"}}),
		agenttest.ScriptRule("ask for it", agenttest.ScriptToolCall{Name: "mcp__desk.form", Input: map[string]any{}}))
	b.Query.Model = plain
	b.Query.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "desk", nil)}
	x := b.RunTurnDeciding("note it", nil, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionReject, Comment: "Do not note it."}))
	if r := x.ApprovalRequests(); len(r) != 1 || r[0].ToolName != "mcp__desk__note" || r[0].ToolUseID == "" || !strings.Contains(r[0].Preview.Text, `"text": "NOTED"`) || len(r[0].Input) == 0 {
		t.Errorf("requests %+v", r)
	}
	b.ModelRequests("Do not note it.")
	x = b.RunTurnDeciding("ask for it", nil, func(r events.ApprovalRequested) events.ApprovalDecided {
		if r.Kind != events.ApprovalElicitation {
			return events.ApprovalDecided{Decision: events.DecisionApprove}
		}
		if r.Title != "What is your name?" || !strings.Contains(string(r.Schema), `"name"`) {
			t.Errorf("request %+v", r)
		}
		return events.ApprovalDecided{Decision: events.DecisionAnswer, Content: json.RawMessage(`{"name":"Ada"}`)}
	})
	if len(x.ApprovalRequests()) != 2 || !strings.Contains(x.Ended().Result, "accept Ada") {
		t.Errorf("%s", x)
	}
	x = b.RunTurnDeciding("ask for it", nil, func(r events.ApprovalRequested) events.ApprovalDecided {
		if r.Kind != events.ApprovalElicitation {
			return events.ApprovalDecided{Decision: events.DecisionApprove}
		}
		return events.ApprovalDecided{Decision: events.DecisionReject}
	})
	if !strings.Contains(x.Ended().Result, "decline") {
		t.Errorf("%s", x)
	}
}

func TestRealApproval_Questions(t *testing.T) {
	t.Parallel()
	ask := agenttest.ScriptToolCall{Name: "request_user_input", Input: map[string]any{"questions": []any{map[string]any{
		"id": "color", "header": "Color", "question": "Which color?",
		"options": []any{map[string]any{"label": "Blue", "description": "like the sky"}, map[string]any{"label": "Red", "description": "like a rose"}},
	}}}}
	b := newAskingBench(t, asks, agenttest.ScriptRule("ask me", ask))
	x := b.RunTurnDeciding("ask me", nil, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionAnswer, Answers: map[string][]string{"color": {"Blue"}}}))
	r := x.ApprovalRequests()
	if len(r) != 1 || r[0].Kind != events.ApprovalQuestion || r[0].Title != "Which color?" || len(r[0].Questions) != 1 || r[0].Class != "" && r[0].Editable {
		t.Fatalf("requests %+v%s", r, x)
	}
	if q := r[0].Questions[0]; q.ID != "color" || len(q.Options) != 2 || !q.Other || q.Secret {
		t.Errorf("question %+v", q)
	}
	if e := x.Ended(); !strings.Contains(e.Result, "Blue") {
		t.Errorf("ended %+v", e)
	}
	x = b.RunTurnDeciding("ask me", nil, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionReject, Comment: "Decide yourself."}))
	if e := x.Ended(); !strings.Contains(e.Result, "Decide yourself.") {
		t.Errorf("ended %+v", e)
	}
}

// A request of a sub-agent belongs to the sub-agent's conversation.
func TestRealApproval_Subagents(t *testing.T) {
	t.Parallel()
	p := asks
	p.Rules = []events.PermissionRule{{Tool: "spawn_agent", Then: events.PermissionAllow}}
	b := newAskingBench(t, p, run("SUBTASK", "touch one"), agenttest.ScriptRule("delegate",
		agenttest.ScriptToolCall{Name: "multi_agent_v1.spawn_agent", Input: map[string]any{"message": "SUBTASK"}},
		agenttest.ScriptToolCall{Name: "multi_agent_v1.wait_agent", Input: map[string]any{"targets": []string{"{{result | find `\"agent_id\":\"([^\"]+)\"`}}"}, "timeout_ms": 20_000}}))
	b.Query.Model = plain
	x := b.RunTurnDeciding("delegate", nil, approve)
	spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
	if len(spawned) != 1 || len(x.ApprovalRequests()) != 1 || !b.HasFile("one") {
		t.Fatalf("%s", x)
	}
	for _, l := range x.Lines {
		if l.Type == (events.ApprovalRequested{}).EventType() && l.ConversationID != spawned[0].Conversation {
			t.Errorf("asked in %s, want %s", l.ConversationID, spawned[0].Conversation)
		}
	}
}

func TestRealApproval_Presets(t *testing.T) {
	t.Parallel()
	for preset, asked := range map[string]int{events.PresetAsk: 1, events.PresetReadOnly: 0, events.PresetWorkspace: 0, events.PresetFull: 0} {
		b := newAskingBench(t, events.Permissions{Preset: preset}, run("touch it", "touch one"))
		x := b.RunTurnDeciding("touch it", nil, approve)
		if n := len(x.ApprovalRequests()); n != asked || len(x.PermissionDecisions()) != 1-asked {
			t.Errorf("%s: asked %d times%s", preset, n, x)
		}
		if x.Ended().Outcome != runner.OutcomeCompleted || b.HasFile("one") == (preset == events.PresetReadOnly) {
			t.Errorf("%s: %s", preset, x)
		}
	}
}
