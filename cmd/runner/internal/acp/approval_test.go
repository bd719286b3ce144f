package acp_test

import (
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

const all = " reject_always allow_always reject_once allow_once"

// newAskingBench runs the scripted agent of a kind with a policy by which a person decides every call.
func newAskingBench(t *testing.T, kind string) *agenttest.Harness {
	t.Helper()
	b := newBench(t, kind)
	b.Query.Permissions = events.Permissions{Default: events.PermissionAsk}
	return b
}

// The answer is an option for this call alone, chosen by its kind.
func TestApproval_Answers(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, "plain")
	for _, c := range []struct{ decision, options, answer, outcome string }{
		{events.DecisionApprove, all, "opt-allow_once", events.OutcomeApproved},
		{events.DecisionSkip, all, "opt-reject_once", events.OutcomeSkipped},
		{events.DecisionReject, all, "opt-reject_once", events.OutcomeRejected},
		{events.DecisionApproveAll, all, "opt-allow_once", events.OutcomeApproved},
	} {
		x := b.RunTurnDeciding("permission: edit a.txt"+c.options, nil, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: c.decision}))
		r, done := x.ApprovalRequests(), x.ApprovalResolutions()
		if e := x.Ended(); len(r) != 1 || r[0].ToolName != "a tool" || r[0].ToolUseID != "c1" || len(done) != 1 || done[0].Outcome != c.outcome || e.Result != "answered "+c.answer {
			t.Errorf("%s: ended %+v%s", c.decision, e, x)
		}
	}
	// An approval that the agent does not offer is refused before a person is asked.
	x := b.RunTurnOK("permission: edit a.txt allow_always reject_once", "answered cancelled", nil)
	if d := x.PermissionDecisions(); len(d) != 1 || d[0].Rule != "no-option" || len(x.ApprovalRequests()) != 0 {
		t.Errorf("%s", x)
	}
}

// An agent that offers no rejection of this call alone is stopped when a person rejects the call.
func TestApproval_RejectionThatIsNotOffered(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, "plain")
	for _, options := range []string{" allow_once", " reject_always allow_once"} {
		x := b.RunTurnDeciding("permission: edit a.txt"+options, nil, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionReject}))
		if e := x.Ended(); e.Outcome != runner.OutcomeInterrupted {
			t.Errorf("%s: %s", options, x)
		}
	}
	b.RunTurnOK("hello", "You said: hello", nil)
}

func TestApproval_CommentGoesWithTheNextQuery(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, "images")
	b.RunTurnDeciding("permission: edit a.txt"+all, nil, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionReject, Comment: "Use another file."}))
	b.RunTurnOK("everything", "Use another file.", nil)
	if x := b.RunTurnOK("everything", "everything", nil); strings.Contains(x.Ended().Result, "Use another file.") {
		t.Errorf("told twice: %s", x.Ended().Result)
	}
}

// The protocol demands that the requests of an interrupted turn are cancelled.
func TestApproval_InterruptCancelsTheRequest(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, "plain")
	x := b.ReadUntilRequests(1, b.MustStartTurn("permission: edit a.txt"+all, nil))
	b.Supervisor.Interrupt()
	x = b.ReadToEnd(x)
	if r := x.ApprovalRetractions(); len(r) != 1 || x.Ended().Outcome != runner.OutcomeInterrupted {
		t.Errorf("%s", x)
	}
	if y := b.RunTurnOK("hello", "You said: hello", nil); !y.Started().Warm {
		t.Errorf("started %+v", y.Started())
	}
}

func TestApproval_KillWhileItWaits(t *testing.T) {
	t.Parallel()
	b := newAskingBench(t, "resumes")
	x := b.ReadUntilRequests(1, b.MustStartTurn("permission: edit a.txt"+all, nil))
	if err := syscall.Kill(x.Started().PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	x = b.ReadToEnd(x)
	if e := x.Ended(); e.Code != "AGENT_EXITED" || len(x.ApprovalRetractions()) != 1 {
		t.Errorf("%s", x)
	}
	y := b.RunTurnDeciding("permission: edit a.txt"+all, func(q *runner.Query) { q.Attempt = 2 }, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionApprove}))
	if e := y.Ended(); e.Result != "answered opt-allow_once" {
		t.Errorf("%s", y)
	}
}
