package fold_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// approvals is a session whose execution exe_1 is running.
type approvals struct {
	*memory
	model *fold.Model
	seq   uint64
}

// newApprovals returns a session that keeps at most limit rows in memory between commits.
func newApprovals(t *testing.T, limit int) *approvals {
	a := &approvals{memory: newMemory(t), model: fold.New(3, limit)}
	a.add(events.SessionCreated{}, events.MessageAccepted{}, events.ExecutionDispatched{}, events.ExecutionClaimed{}, events.ExecutionStarted{Attempt: 1})
	return a
}

// add folds one commit for each payload.
func (a *approvals) add(list ...events.Payload) {
	for _, d := range list {
		a.seq++
		e := events.Event{ExecutionID: "exe_1", ConversationID: "main", Time: time.Unix(int64(a.seq), 0), Data: d}
		rec := eventlog.Record{Position: eventlog.Position{Seq: a.seq}, Subject: events.LifeSubject("t", "ses_1"), Events: []events.Event{e}}
		rec.Commit.Actor = events.Actor{Kind: "key", ID: "key_1", Key: "key_1", User: "ann", Service: "session/1", Address: "192.0.2.1"}
		a.fold(a.model, fold.CommitBatch{Records: []eventlog.Record{rec}})
	}
}

func (a *approvals) row(id string) fold.Approval { return a.approvals[child("t", "ses_1", id)] }

func (a *approvals) execution() fold.Execution { return a.executions[child("t", "ses_1", "exe_1")] }

func requested(id string) events.ApprovalRequested {
	return events.ApprovalRequested{ApprovalID: id, Kind: events.ApprovalTool, ToolName: "Bash", ToolUseID: "call_" + id}
}

func decided(id string) events.ApprovalDecided {
	return events.ApprovalDecided{ApprovalID: id, Decision: events.DecisionApprove, Comment: "<ok>"}
}

func resolved(id, outcome string) events.ApprovalResolved {
	return events.ApprovalResolved{ApprovalID: id, Outcome: outcome, Cause: events.ResolvedByPerson}
}

func retracted(id string) events.ApprovalRetracted {
	return events.ApprovalRetracted{ApprovalID: id, Reason: "withdrawn"}
}

func TestApprovals_StatusFollowsTheEvents(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		list                []events.Payload
		status, cause, tool string
		phase               string
		decided             bool
	}{
		"requested":                  {[]events.Payload{requested("a")}, "pending", "", "", "waiting_for_approval", false},
		"decided":                    {[]events.Payload{requested("a"), decided("a")}, "decided", "", "", "waiting_for_approval", true},
		"decided twice":              {[]events.Payload{requested("a"), decided("a"), events.ApprovalDecided{ApprovalID: "a", Decision: "reject"}}, "decided", "", "", "waiting_for_approval", true},
		"approved":                   {[]events.Payload{requested("a"), decided("a"), resolved("a", "approved")}, "approved", "person", "approved", "running", true},
		"rejected by timeout":        {[]events.Payload{requested("a"), events.ApprovalResolved{ApprovalID: "a", Outcome: "rejected", Cause: "timeout"}}, "rejected", "timeout", "rejected", "running", false},
		"decided after the timeout":  {[]events.Payload{requested("a"), events.ApprovalResolved{ApprovalID: "a", Outcome: "rejected", Cause: "timeout"}, decided("a")}, "rejected", "timeout", "rejected", "running", false},
		"retracted":                  {[]events.Payload{requested("a"), retracted("a")}, "retracted", "withdrawn", "", "running", false},
		"decided after a retraction": {[]events.Payload{requested("a"), retracted("a"), decided("a")}, "retracted", "withdrawn", "", "running", false},
		"resolved after retraction":  {[]events.Payload{requested("a"), retracted("a"), resolved("a", "approved")}, "retracted", "withdrawn", "", "running", false},
		"requested twice":            {[]events.Payload{requested("a"), retracted("a"), requested("a")}, "retracted", "withdrawn", "", "running", false},
		"one of two retracted":       {[]events.Payload{requested("a"), requested("b"), retracted("a")}, "retracted", "withdrawn", "", "waiting_for_approval", false},
		"both retracted":             {[]events.Payload{requested("a"), requested("b"), retracted("a"), retracted("b")}, "retracted", "withdrawn", "", "running", false},
		"paused":                     {[]events.Payload{requested("a"), events.ExecutionPaused{}}, "pending", "", "", "paused", false},
		"requested while paused":     {[]events.Payload{events.ExecutionPaused{}, requested("a")}, "pending", "", "", "paused", false},
		"retracted while paused":     {[]events.Payload{requested("a"), events.ExecutionPaused{}, retracted("a")}, "retracted", "withdrawn", "", "paused", false},
		"resumed":                    {[]events.Payload{requested("a"), events.ExecutionPaused{}, events.ExecutionResumed{}}, "pending", "", "", "waiting_for_approval", false},
		"the attempt failed":         {[]events.Payload{requested("a"), retracted("a"), events.AttemptFailed{}, events.ExecutionStarted{Attempt: 2}}, "retracted", "withdrawn", "", "running", false},
		"completed":                  {[]events.Payload{requested("a"), events.ExecutionCompleted{}}, "retracted", "execution_ended", "", "completed", false},
		"cancelled after a decision": {[]events.Payload{requested("a"), decided("a"), events.ExecutionCancelled{}}, "retracted", "execution_ended", "", "cancelled", true},
		"decided after the end":      {[]events.Payload{requested("a"), events.ExecutionFailed{}, decided("a")}, "retracted", "execution_ended", "", "failed", false},
	} {
		for _, limit := range []int{1000, 0} {
			a := newApprovals(t, limit)
			a.add(c.list...)
			p := a.row("a")
			if p.Status != c.status || p.Cause != c.cause || (p.Decision != nil) != c.decided {
				t.Errorf("%s, %d rows in memory: the request is %+v", name, limit, p)
			}
			if open := p.Status == "pending" || p.Status == "decided"; open != (p.EndedSeq == 0) || open != (p.EndedAt == nil) {
				t.Errorf("%s: the request ended at %d, %v", name, p.EndedSeq, p.EndedAt)
			}
			if x := a.execution(); x.Phase != c.phase {
				t.Errorf("%s, %d rows in memory: the phase is %s, want %s", name, limit, x.Phase, c.phase)
			}
			if got := a.calls[child("t", "ses_1", "call_a")]; got.Decision != c.tool || got.ToolName != "Bash" {
				t.Errorf("%s: the call is %+v", name, got)
			}
		}
	}
}

func TestApprovals_KeepRequestDecisionAndActor(t *testing.T) {
	t.Parallel()
	a := newApprovals(t, 0)
	r := requested("a")
	r.Title = "Run echo\x00"
	r.Input = json.RawMessage(`{"command":"echo \u0000<b>"}`)
	a.add(r, decided("a"), resolved("a", "approved"))
	p := a.row("a")
	if want := `{"approvalId":"a","kind":"tool","toolName":"Bash","toolUseId":"call_a","title":"Run echo\u0000","input":{"command":"echo \u0000<b>"}}`; p.Request != want {
		t.Errorf("the request is %s, want %s", p.Request, want)
	}
	if p.Decision == nil || *p.Decision != `{"approvalId":"a","decision":"approve","comment":"<ok>"}` {
		t.Errorf("the decision is %v", p.Decision)
	}
	if p.Actor == nil || *p.Actor != `{"kind":"key","id":"key_1","key":"key_1","user":"ann"}` {
		t.Errorf("the actor is %v", *p.Actor)
	}
	if p.RequestedSeq != 6 || p.DecidedSeq != 7 || p.EndedSeq != 8 || p.RequestedAt.Unix() != 6 || p.DecidedAt.Unix() != 7 || p.EndedAt.Unix() != 8 {
		t.Errorf("the request is %+v", p)
	}
	if p.Execution != "exe_1" || p.Conversation != "main" || p.Kind != "tool" || p.Title != "Run echo\uFFFD" || p.Verdict != "approve" {
		t.Errorf("the request is %+v", p)
	}
}
