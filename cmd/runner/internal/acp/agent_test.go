package acp_test

import (
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// subject returns the scripted agent of a kind.
func subject(t *testing.T, kind string) agenttest.AgentUnderTest {
	t.Helper()
	home := t.TempDir()
	return agenttest.AgentUnderTest{
		Architecture: acp.Architecture, Adapter: acp.Adapter{}, Command: []string{os.Args[0]}, NoModel: true,
		Env: func(string) map[string]string { return map[string]string{asAgent: kind, "SPOOL_TEST_HOME": home} },
	}
}

// newBench runs the scripted agent of a kind.
func newBench(t *testing.T, kind string) *agenttest.Harness {
	t.Helper()
	return agenttest.NewHarness(t, subject(t, kind))
}

// TestConformance runs the suite with agents that resume sessions and that load them.
func TestConformance(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"resumes", "loads", "loads anything"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			agenttest.Exercise(t, subject(t, kind), agenttest.Capabilities{
				Conversation: &agenttest.Conversation{},
				Resume:       &agenttest.ResumeCheck{UnknownSession: "never-was"},
			})
		})
	}
}

// One process runs all turns of a session.
func TestOneProcess(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"plain", "resumes"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, kind)
			first := b.RunTurnOK("one", "You said: one", nil)
			second := b.RunTurnOK("recall", "before: one,", nil)
			if f, s := first.Started(), second.Started(); f.Warm || !s.Warm || f.PID != s.PID {
				t.Errorf("started %+v, then %+v", f, s)
			}
			if w := agenttest.DataOfType[events.TranscriptWritten](first, "transcript_written"); len(w) == 0 || w[0].AgentSessionID == "" {
				t.Errorf("no session was told%s", first)
			}
		})
	}
}

// The next process resumes the session, if the agent can; the repeated conversation is not journaled again.
func TestResume_DoesNotJournalTheRepeatedConversation(t *testing.T) {
	t.Parallel()
	for kind, want := range map[string]string{"resumes": "before: one,", "loads": "before: one,", "resume fails": "before: one,", "plain": "before: "} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, kind)
			first := b.RunTurnOK("one", "You said: one", nil)
			if err := syscall.Kill(first.Started().PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			second := b.RunTurn("recall", func(q *runner.Query) { q.ContinueAfterLoss = kind == "plain" })
			if e := second.Ended(); e.Result != want {
				t.Errorf("ended %+v, want %q", e, want)
			}
			if strings.Contains(second.String(), "REPEATED") || len(second.FinishedBlocks(events.KindToolUse)) > 0 {
				t.Errorf("journaled again%s", second)
			}
			lost := agenttest.DataOfType[events.Error](second, "error")
			if kind == "plain" != (len(lost) == 1 && lost[0].Code == "TRANSCRIPT_LOST") {
				t.Errorf("errors %+v", lost)
			}
		})
	}
}

// An agent that cannot continue its session does not run as if nothing had happened: also the next process refuses.
func TestResume_FailsWithoutTheConversation(t *testing.T) {
	t.Parallel()
	b := newBench(t, "plain")
	pid := b.RunTurnOK("one", "You said: one", nil).Started().PID
	for range 2 {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		x := b.RunTurn("recall", nil)
		if e := x.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != runner.CodeConversationLost || len(x.FinishedBlocks(events.KindAssistantText)) > 0 {
			t.Errorf("ended %+v%s", e, x)
		}
		pid = x.Started().PID
	}
}

func TestPlanAndThinking(t *testing.T) {
	t.Parallel()
	x := newBench(t, "plain").RunTurnOK("plan", "planned", nil)
	if b := x.FinishedBlocks(events.KindPlan); len(b) != 1 || !slices.Equal(b[0].Plan.Items, []events.PlanItem{{Content: "Think", Status: events.PlanCompleted, Priority: "high"}}) {
		t.Errorf("plans %+v", b)
	}
	if b := x.FinishedBlocks(events.KindThinking); len(b) != 1 || b[0].Content != "hm, well" {
		t.Errorf("thinking %+v", b)
	}
}

func TestTools_StreamTheirOutput(t *testing.T) {
	t.Parallel()
	x := newBench(t, "plain").RunTurnOK("work", "worked", nil)
	use, result := x.FinishedBlocks(events.KindToolUse), x.FinishedBlocks(events.KindToolResult)
	if len(use) != 3 || len(result) != 3 {
		t.Fatalf("blocks%s", x)
	}
	if string(use[0].Input) != `{"n":1}` || use[0].ToolName != "Run the tests" {
		t.Errorf("call %+v", use[0])
	}
	if r := result[0]; r.Output != "one\ntwo\nthree\n" || !r.IsError {
		t.Errorf("result %+v", r)
	}
	var flown strings.Builder
	for _, d := range agenttest.DataOfType[runner.TextDelta](x, events.TextDelta) {
		if d.BlockID == result[0].ID {
			flown.WriteString(d.Delta)
		}
	}
	if flown.String() != "one\ntwo\n" {
		t.Errorf("output in flight %q", flown.String())
	}
	if r := result[1]; r.Output != "--- a.txt\n+++ a.txt\n-old\n+new\n\n[terminal t1]" || r.IsError || use[1].Description != "a.txt" {
		t.Errorf("result %+v of %+v", r, use[1])
	}
	if r := result[2]; r.Output != "seen" {
		t.Errorf("result %+v", r)
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	b := newBench(t, "plain")
	x := b.RunTurnOK("usage", "used", nil)
	want := events.Usage{InputTokens: 7, OutputTokens: 5, CacheReadTokens: 5}
	if e := x.Ended(); e.Usage != want || e.CostUSD != 0.75 {
		t.Errorf("ended %+v", e)
	}
	if m := agenttest.DataOfType[events.MetadataUpdate](x, "metadata_update"); len(m) != 3 || m[0].CostUSD != 0.5 || m[2].Usage != want {
		t.Errorf("metadata %+v", m)
	}
	if e := b.RunTurnOK("hello", "You said", nil).Ended(); e.CostUSD != 0 || e.Usage != (events.Usage{}) {
		t.Errorf("the next turn is charged with the one before: %+v", e)
	}
}

func TestStopReasons(t *testing.T) {
	t.Parallel()
	b := newBench(t, "plain")
	for reason, code := range map[string]string{
		"max_tokens": "MODEL_ERROR", "max_turn_requests": "TURN_LIMIT", "refusal": "MODEL_ERROR",
		"cancelled": "AGENT_PROTOCOL", "bored": "AGENT_PROTOCOL", "status": "MODEL_RATE_LIMITED",
	} {
		if e := b.RunTurn(reason, nil).Ended(); e.Outcome != runner.OutcomeFailed || e.Code != code || e.Message == "" {
			t.Errorf("%s: ended %+v", reason, e)
		}
	}
	b.RunTurnOK("hello", "You said: hello", nil)
}

func TestPermissions_FollowThePolicy(t *testing.T) {
	t.Parallel()
	b := newBench(t, "plain")
	const all = " reject_always allow_always reject_once allow_once"
	for _, c := range []struct{ ask, answer, rule string }{
		{"edit a.txt" + all, "opt-allow_once", "workspace-path"},
		{"read " + b.Folders.Workspace + "/a.txt" + all, "opt-allow_once", "workspace-path"},
		{"read /etc/passwd" + all, "opt-reject_once", "outside-workspace"},
		{"edit ../a.txt" + all, "opt-reject_once", "outside-workspace"},
		{"delete ~/a.txt" + all, "opt-reject_once", "outside-workspace"},
		{"move " + b.Folders.Workspace + "-sibling/a.txt" + all, "opt-reject_once", "outside-workspace"},
		{"edit -" + all, "opt-reject_once", "unreadable-request"},
		{"search -" + all, "opt-allow_once", "workspace-path"},
		{"execute -" + all, "opt-allow_once", "sandboxed-shell"},
		{"think -" + all, "opt-allow_once", "bookkeeping"},
		{"fetch -" + all, "opt-reject_once", "network"},
		{"switch_mode -" + all, "opt-reject_once", "unknown-tool"},
		{"other a.txt" + all, "opt-reject_once", "unknown-tool"},
		{"edit a.txt allow_always reject_once", "cancelled", "no-option"},
		{"edit /etc/passwd reject_always allow_once", "opt-reject_always", "outside-workspace"},
		{"edit /etc/passwd allow_once", "cancelled", "outside-workspace"},
		{"edit a.txt", "cancelled", "no-option"},
	} {
		x := b.RunTurnOK("permission: "+c.ask, "answered "+c.answer, nil)
		want := "deny"
		if c.answer == "opt-allow_once" {
			want = "allow"
		}
		d := x.PermissionDecisions()
		if len(d) != 1 || d[0].Decision != want || d[0].Rule != c.rule || d[0].ToolName != "a tool" || d[0].ToolUseID != "c1" {
			t.Errorf("%s: decisions %+v", c.ask, d)
		} else if want == "deny" && d[0].Reason == "" {
			t.Errorf("%s: denied without a reason", c.ask)
		}
	}
}

func TestModelImagesAndInstructions(t *testing.T) {
	t.Parallel()
	b := newBench(t, "images")
	withImage := func(q *runner.Query) {
		q.Model, q.SystemPrompt = "big", "Be kind."
		q.Content, q.Parts = "", []events.Part{{Type: "image", MediaType: "image/png", Data: "aGk="}, {Type: "text", Text: "everything"}}
	}
	first := b.RunTurnOK("", `texts ["# Instructions\nBe kind." "everything"] images ["image/png"] model "big"`, withImage)
	second := b.RunTurnOK("", `texts ["everything"] images ["image/png"] model "big"`, withImage)
	if first.Started().PID != second.Started().PID {
		t.Error("the same settings need no other process")
	}
	b.Query.ContinueAfterLoss = true // the agent cannot resume
	third := b.RunTurnOK("everything", `model ""`, nil)
	if third.Started().PID == first.Started().PID {
		t.Error("another model needs another process")
	}
	if e := b.RunTurn("hello", func(q *runner.Query) { q.Model = "huge" }).Ended(); e.Code != "MODEL_NOT_FOUND" || !strings.Contains(e.Message, "small, big") {
		t.Errorf("ended %+v", e)
	}
	bad := b.RunTurn("", func(q *runner.Query) { q.Parts = []events.Part{{Type: "image", MediaType: "image/png", Data: "!"}} })
	if e := bad.Ended(); e.Outcome != runner.OutcomeFailed || !strings.Contains(e.Message, "query.parts[0].data") {
		t.Errorf("ended %+v", e)
	}
}

func TestModelThatCannotBeChosen(t *testing.T) {
	t.Parallel()
	x := newBench(t, "plain").RunTurn("hello", func(q *runner.Query) { q.Model = "big" })
	if l := agenttest.DataOfType[events.Log](x, "log"); x.Ended().Outcome != runner.OutcomeCompleted || len(l) != 1 || !strings.Contains(l[0].Message, "no choice of a model") {
		t.Errorf("%s", x)
	}
}

// A model with which the process was started is chosen over ACP if the agent offers it by that name, and is otherwise
// left to the process.
func TestModelSet(t *testing.T) {
	t.Parallel()
	set := func(model string) func(*runner.Query) {
		return func(q *runner.Query) { q.Model, q.ModelSet = model, true }
	}
	b := newBench(t, "images")
	b.RunTurnOK("everything", `model "big"`, set("big"))
	b.Query.ContinueAfterLoss = true                   // another model needs another process
	b.RunTurnOK("everything", `model ""`, set("huge")) // not offered: MODEL_NOT_FOUND without ModelSet
	x := newBench(t, "plain").RunTurn("hello", set("big"))
	if l := agenttest.DataOfType[events.Log](x, "log"); x.Ended().Outcome != runner.OutcomeCompleted || len(l) != 0 {
		t.Errorf("an agent without a choice of models: %s", x)
	}
}

func TestInterrupt(t *testing.T) {
	t.Parallel()
	b := newBench(t, "plain")
	x := b.ReadUntil("text", func(l runner.JournalLine) bool { return l.Type == events.TextDelta }, b.MustStartTurn("wait", nil))
	b.Supervisor.Interrupt()
	x = b.ReadToEnd(x)
	if e := x.Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("ended %+v%s", e, x)
	}
	if y := b.RunTurnOK("hello", "You said: hello", nil); y.Started().PID != x.Started().PID {
		t.Error("the agent did not stay warm")
	}
	q := b.ReadUntil("start", func(l runner.JournalLine) bool { return l.Type == runner.AgentStarted }, b.MustStartTurn("quiet", nil))
	b.Supervisor.Interrupt()
	if e := b.ReadToEnd(q).Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("ended %+v", e)
	}
	z := b.MustStartTurn("wait", nil)
	b.Supervisor.Interrupt() // may come before the agent has the query
	if e := b.ReadToEnd(z).Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("ended %+v", e)
	}
}

// An agent may apply a late interrupt to the next turn, because it handles notifications asynchronously. That turn does
// not end: the agent is asked again, once.
func TestLateInterrupt_DoesNotEndTheNextTurn(t *testing.T) {
	t.Parallel()
	b := newBench(t, "late")
	x := b.ReadUntil("text", func(l runner.JournalLine) bool { return l.Type == events.TextDelta }, b.MustStartTurn("wait twice", nil))
	b.Supervisor.Interrupt()
	if e := b.ReadToEnd(x).Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("ended %+v", e)
	}
	y := b.RunTurnOK("hello", "You said: hello", nil)
	if logs := agenttest.DataOfType[events.Log](y, "log"); len(logs) != 1 || !strings.Contains(logs[0].Message, "it is asked again") {
		t.Errorf("told %+v", logs)
	}
	if e := b.RunTurn("cancelled", nil).Ended(); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_PROTOCOL" {
		t.Errorf("an agent that cancels of its own: %+v", e)
	}
}

func TestExit_EndsTheTurn(t *testing.T) {
	t.Parallel()
	b := newBench(t, "resumes")
	x := b.RunTurn("die", nil)
	if e := x.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_EXITED" {
		t.Errorf("ended %+v", e)
	}
	if c := x.FinishedBlocks(events.KindAssistantText); len(c) != 1 || c[0].Status != events.StatusError || c[0].Content != "dying" {
		t.Errorf("blocks %+v", c)
	}
	b.RunTurnOK("recall", "before: die,", nil)
}

// Lines that are not part of the protocol are journaled, and the turn continues.
func TestNoise_IsLoggedAndIgnored(t *testing.T) {
	t.Parallel()
	b := newBench(t, "plain")
	x := b.RunTurnOK("noise", "still here", nil)
	logs, errs := agenttest.DataOfType[events.Log](x, "log"), agenttest.DataOfType[events.Error](x, "error")
	var told strings.Builder
	for _, l := range logs {
		told.WriteString(l.Message + "\n")
	}
	for _, want := range []string{"this is not JSON", "_other/thing", "terminal/create", "brand_new", `session other`} {
		if !strings.Contains(told.String(), want) {
			t.Errorf("no log of %s in\n%s", want, told.String())
		}
	}
	if len(errs) != 6 {
		t.Errorf("%d errors: %+v", len(errs), errs)
	}
	for _, e := range errs {
		if e.Code != "AGENT_PROTOCOL" {
			t.Errorf("error %+v", e)
		}
	}
	if r := x.FinishedBlocks(events.KindToolResult); len(r) != 1 || !strings.Contains(r[0].Output, "hologram") {
		t.Errorf("results %+v", r)
	}
	if u := x.FinishedBlocks(events.KindToolUse); len(u) != 1 || string(u[0].Input) != `{"n":9007199254740993}` {
		t.Errorf("calls %+v", u)
	}
	if d := x.PermissionDecisions(); len(d) != 1 || d[0].Rule != "unreadable-request" {
		t.Errorf("decisions %+v", d)
	}
	b.RunTurnOK("hello", "You said: hello", nil)
}

func TestHandshakeFails(t *testing.T) {
	t.Parallel()
	for kind, code := range map[string]string{"version 2": "AGENT_PROTOCOL", "locked": "MODEL_UNAUTHORIZED"} {
		b := newBench(t, kind)
		for range 2 { // a process whose handshake failed is replaced
			if e := b.RunTurn("hello", nil).Ended(); e.Outcome != runner.OutcomeFailed || e.Code != code {
				t.Errorf("%s: ended %+v", kind, e)
			}
		}
	}
}

func TestCommand(t *testing.T) {
	t.Parallel()
	b := newBench(t, "plain")
	for _, c := range []struct {
		command []string
		code    string
		names   string
	}{
		{nil, "INVALID_COMMAND", "query.command"},
		{[]string{"no-such-agent"}, "AGENT_NOT_FOUND", "no-such-agent"},
		{[]string{"./agent"}, "AGENT_NOT_FOUND", "relative"},
		{[]string{"/no/such/agent"}, "AGENT_NOT_FOUND", "/no/such/agent"},
	} {
		refusal := b.StartTurn("hello", func(q *runner.Query) { q.Command = c.command })
		if refusal == nil || refusal.Code != c.code || !strings.Contains(refusal.Message, c.names) {
			t.Errorf("%q: refused with %v", c.command, refusal)
		}
	}
}
