package opencode_test

import (
	"bytes"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// asks is a policy by which a person decides every call.
var asks = events.Permissions{Default: events.PermissionAsk}

var approve = agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionApprove})

// run returns a rule by which the model runs commands, each when the one before has ended.
func run(text string, commands ...string) string {
	var tools []agenttest.ScriptToolCall
	for _, c := range commands {
		tools = append(tools, agenttest.ScriptToolCall{Name: "bash", Input: map[string]any{"command": c, "description": "Runs it"}})
	}
	return agenttest.ScriptRule(text, tools...)
}

// newAskingBench returns a bench whose agent has a permission policy.
func newAskingBench(t *testing.T, p events.Permissions, rules ...string) *agenttest.Harness {
	t.Helper()
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, rules...))
	b.Query.Permissions = p
	return b
}

func TestRealApproval_EveryToolIsAskedAbout(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, agenttest.ScriptRule("look around",
		agenttest.ScriptToolCall{Name: "bash", Input: map[string]any{"command": "ls", "description": "Lists files"}},
		agenttest.ScriptToolCall{Name: "read", Input: map[string]any{"filePath": "a.txt"}},
		agenttest.ScriptToolCall{Name: "edit", Input: map[string]any{"filePath": "a.txt", "oldString": "before", "newString": "after"}},
		agenttest.ScriptToolCall{Name: "todowrite", Input: map[string]any{"todos": []any{map[string]any{"content": "x", "status": "pending", "priority": "low", "id": "1"}}}},
	))
	b.WriteFile("a.txt", "before\n")
	x := b.RunTurnDeciding("look around", nil, approve)
	requests := x.ApprovalRequests()
	var asked []string
	for _, r := range requests {
		asked = append(asked, r.ToolName)
		if r.ToolUseID == "" || r.Title == "" || r.Editable || len(r.Input) == 0 && r.ToolName != "todowrite" { // that one asks before its input is known
			t.Errorf("request %+v", r)
		}
	}
	if got := strings.Join(asked, " "); got != "bash read edit todowrite" || x.Ended().Outcome != runner.OutcomeCompleted {
		t.Fatalf("asked about %s, ended %+v%s", got, x.Ended(), x)
	}
	if r := requests[0]; r.Preview.Command != "ls" || r.Reason != "Lists files" {
		t.Errorf("command %+v", r)
	}
	if r := requests[2]; !strings.Contains(r.Preview.Diff, "-before\n") || !strings.Contains(r.Preview.Diff, "+after\n") || len(r.Preview.Paths) == 0 {
		t.Errorf("edit %+v", r)
	}
	if got := b.ReadFile("a.txt"); got != "after\n" {
		t.Errorf("a.txt: %q", got)
	}
}

// A comment goes with the next query, because an answer has no field for it.
func TestRealApproval_Comment(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, run("touch it", "touch one"))
	x := b.RunTurnDeciding("touch it", nil, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionReject, Comment: "Use another name."}))
	if e, r := x.Ended(), x.ApprovalResolutions(); e.Outcome != runner.OutcomeCompleted || len(r) != 1 || r[0].Outcome != events.OutcomeRejected || b.HasFile("one") {
		t.Fatalf("ended %+v%s", e, x)
	}
	b.RunTurnOK("hello", "You said: hello", nil)
	b.RunTurnOK("hello again", "You said: hello again", nil)
	for _, r := range b.ModelRequests("hello again") {
		if n := bytes.Count(r.Body, []byte("rejected by the user: Use another name.")); n != 1 {
			t.Errorf("the model reads the comment %d times", n)
		}
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
		t.Errorf("%s", x)
	}
}

// both is a rule by which the model runs two commands at once.
const both = `  - {match: {user: both}, steps: [{tools: [{name: bash, input: {command: touch one, description: x}}, {name: bash, input: {command: touch two, description: x}}]}, {text: Done.}]}` + "\n"

// The CLI asks about calls that the model makes at once one by one.
func TestRealApproval_TwoAtOnce(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, both)
	x := b.RunTurnDeciding("both", nil, approve)
	if len(x.ApprovalRequests()) != 2 || x.Ended().Outcome != runner.OutcomeCompleted || !b.HasFile("one") || !b.HasFile("two") {
		t.Errorf("%s", x)
	}
}

// With one of several calls that wait, the CLI rejects all. The requests for the others are withdrawn.
func TestRealApproval_RejectionOfOneRejectsAll(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, both)
	x := b.ReadUntilRequests(1, b.MustStartTurn("both", nil))
	b.DecideRequest(x.ApprovalRequests()[0], events.ApprovalDecided{Decision: events.DecisionReject})
	x = b.ReadToEnd(x)
	if r := x.ApprovalRetractions(); len(x.ApprovalRequests()) != 2 || len(r) != 1 || r[0].Reason != "withdrawn" {
		t.Errorf("retracted %+v%s", r, x)
	}
	if x.Ended().Outcome != runner.OutcomeCompleted || b.HasFile("one") || b.HasFile("two") {
		t.Errorf("ended %+v", x.Ended())
	}
}

func TestRealApproval_InterruptWhileItWaits(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, run("touch it", "touch one"))
	x := b.ReadUntilRequests(1, b.MustStartTurn("touch it", nil))
	b.Supervisor.Interrupt()
	x = b.ReadToEnd(x)
	if e, r := x.Ended(), x.ApprovalRetractions(); e.Outcome != runner.OutcomeInterrupted || len(r) != 1 || r[0].Reason != "turn_ended" {
		t.Fatalf("ended %+v, retracted %+v", e, r)
	}
	if y := b.RunTurnOK("hello", "You said: hello", nil); !y.Started().Warm || b.HasFile("one") {
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

// A request of a sub-agent belongs to the sub-agent's conversation, and the comment of a rejection reaches the sub-agent.
func TestRealApproval_Subagents(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, asks, run("SUBTASK", "touch one", "touch two"), call("delegate", "task", map[string]any{"description": "sub", "prompt": "SUBTASK", "subagent_type": "general"}))
	x := b.RunTurnDeciding("delegate", nil, func(r events.ApprovalRequested) events.ApprovalDecided {
		if r.Title == "touch one" && r.Preview.Command == r.Title {
			return events.ApprovalDecided{Decision: events.DecisionReject, Comment: "Use another name."}
		}
		return events.ApprovalDecided{Decision: events.DecisionApprove}
	})
	spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
	if r := x.ApprovalRequests(); len(r) != 3 || len(spawned) != 1 || x.Ended().Outcome != runner.OutcomeCompleted || b.HasFile("one") || !b.HasFile("two") {
		t.Fatalf("%s", x)
	}
	n := 0
	for _, l := range x.Lines {
		if l.Type == (events.ApprovalRequested{}).EventType() && l.ConversationID == spawned[0].Conversation {
			n++
		}
	}
	if n != 2 {
		t.Errorf("%d requests in the sub-agent's conversation, want 2%s", n, x)
	}
	b.ModelRequests("Use another name.")
}

// The CLI may end only the sub-agent at first; the scripted model then ends the turn before the CLI is asked again.
func TestRealApproval_InterruptWhileASubagentWaits(t *testing.T) {
	t.Parallel()
	p := asks
	p.Tools = map[string]string{"task": events.PermissionAllow}
	b := newAskingBench(t, p, run("SUBTASK", "touch one"), call("delegate", "task", map[string]any{"description": "sub", "prompt": "SUBTASK", "subagent_type": "general"}))
	x := b.ReadUntilRequests(1, b.MustStartTurn("delegate", nil))
	b.Supervisor.Interrupt()
	x = b.ReadToEnd(x)
	if e, r := x.Ended(), x.ApprovalRetractions(); e.Outcome == runner.OutcomeFailed || len(r) != 1 || len(x.ApprovalResolutions()) != 0 {
		t.Fatalf("ended %+v%s", e, x)
	}
	if b.RunTurnOK("hello", "You said: hello", nil); b.HasFile("one") {
		t.Error("the command ran")
	}
}

func TestRealApproval_Presets(t *testing.T) {
	t.Parallel()
	read := agenttest.ScriptToolCall{Name: "read", Input: map[string]any{"filePath": "a.txt"}}
	touch := agenttest.ScriptToolCall{Name: "bash", Input: map[string]any{"command": "touch one", "description": "Makes it"}}
	for preset, asked := range map[string]int{events.PresetAsk: 1, events.PresetReadOnly: 0} {
		b := newAskingBench(t, events.Permissions{Preset: preset}, agenttest.ScriptRule("read and touch", read, touch))
		b.WriteFile("a.txt", "content\n")
		x := b.RunTurnDeciding("read and touch", nil, approve)
		d := x.PermissionDecisions()
		if len(x.ApprovalRequests()) != asked || len(d) != 2-asked || d[0].ToolName != "read" || d[0].Decision != "allow" {
			t.Errorf("%s: %+v%s", preset, d, x)
		}
		if x.Ended().Outcome != runner.OutcomeCompleted || b.HasFile("one") == (preset == events.PresetReadOnly) {
			t.Errorf("%s: %s", preset, x)
		}
	}
}
