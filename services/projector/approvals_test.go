package projector_test

import (
	"encoding/json"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector"
)

// TestApprovals_AreStored tests the rows of approval requests: also of a projector that keeps almost nothing in memory, after
// the end of the execution, after a rebuild, and after the deletion of the session.
func TestApprovals_AreStored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	s, other := w.session(0).create(), w.session(0).create()
	little := func(c *projector.Config, _ *projector.Deps) { c.PresentRows, c.BatchCommits = 1, 1 }
	stop := w.start(little)
	x := s.post(1)
	ask := func(id string) events.ApprovalRequested {
		return events.ApprovalRequested{ApprovalID: id, Kind: events.ApprovalTool, ToolName: "Bash", ToolUseID: "call_" + id, Input: json.RawMessage(`{"nul":"\u0000"}`)}
	}
	s.append(&s.run, x, ask("apr_1"))
	s.append(&s.run, x, ask("apr_2"), ask("apr_3"))
	w.awaitProjected(s)
	if got := queryOne[string](w, "SELECT phase||' '||open_approvals FROM executions WHERE id = $1", x); got != "waiting_for_approval 3" {
		t.Errorf("the execution has %q", got)
	}
	other.turn(1) // the rows of s are no longer in memory
	w.awaitProjected(other)
	s.append(&s.life, x, events.ApprovalDecided{ApprovalID: "apr_1", Decision: events.DecisionApprove})
	s.append(&s.run, x, events.ApprovalResolved{ApprovalID: "apr_1", Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson})
	s.append(&s.life, x, events.ApprovalDecided{ApprovalID: "apr_2", Decision: events.DecisionSkip})
	w.awaitProjected(s)
	if got := queryOne[string](w, "SELECT string_agg(id||' '||status||' '||(decision IS NOT NULL), ',' ORDER BY id) FROM approvals"); got != "apr_1 approved true,apr_2 decided true,apr_3 pending false" {
		t.Errorf("the requests are %q", got)
	}
	if got := queryOne[string](w, "SELECT decision FROM tool_calls WHERE tool_use_id = 'call_apr_1'"); got != "approved" {
		t.Errorf("the decision on the call is %q", got)
	}
	other.turn(2)
	w.awaitProjected(other)
	s.append(&s.run, x, events.ExecutionCancelled{Reason: "interrupted"})
	w.awaitProjected(s)
	if got := queryOne[string](w, "SELECT string_agg(id||' '||status||' '||cause||' '||(ended_seq = (SELECT tip FROM sessions WHERE id = $1)), ',' ORDER BY id) FROM approvals WHERE id <> 'apr_1'", s.id); got != "apr_2 retracted execution_ended true,apr_3 retracted execution_ended true" {
		t.Errorf("after the end the requests are %q", got)
	}
	w.checkAgainstLog(s)
	stop()
	w.sameAsRebuilt()
	w.start()
	s.append(&s.life, "", events.SessionDeleted{})
	w.awaitProjected(s)
	if n := queryOne[int](w, "SELECT count(*) FROM approvals"); n != 0 {
		t.Errorf("%d requests of a deleted session are left", n)
	}
}
