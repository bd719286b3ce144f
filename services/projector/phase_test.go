package projector_test

import (
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector"
)

// TestSessions_PhaseIsStored tests the phase, the failed execution and the totals of a session's row: also with a
// projector that keeps almost nothing in memory, and after a rebuild.
func TestSessions_PhaseIsStored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	s, other := w.session(0).create(), w.session(0).create()
	little := func(c *projector.Config, _ *projector.Deps) { c.PresentRows, c.BatchCommits = 1, 1 }
	stop := w.start(little)
	check := func(want string) {
		t.Helper()
		w.awaitProjected(s, other)
		const row = `SELECT concat_ws(' ', phase, open_approvals, input_tokens, output_tokens, cost_usd, failed_execution) FROM sessions WHERE id = $1`
		if got := queryOne[string](w, row, s.id); got != want {
			t.Errorf("the session has %q, want %q", got, want)
		}
	}
	check("idle 0 0 0 0 ")
	s.turn(1)
	check("idle 0 10 20 0.25 ")
	x := s.post(2)
	check("running 0 10 20 0.25 ")
	s.append(&s.run, x, events.ApprovalRequested{ApprovalID: "apr_1", Kind: events.ApprovalTool, ToolName: "Bash"})
	check("waiting_for_approval 1 10 20 0.25 ")
	other.turn(1) // the rows of s are no longer in memory
	s.append(&s.run, x, events.ExecutionFailed{Code: "AGENT_FAILED", Message: "m", Usage: events.Usage{InputTokens: 1}})
	check("failed 0 11 20 0.25 " + x)
	const since = "SELECT phase_since = updated_at FROM sessions WHERE id = $1"
	if !queryOne[bool](w, since, s.id) {
		t.Error("the phase does not begin with the last event")
	}
	w.checkAgainstLog(s)
	stop()
	w.sameAsRebuilt()
	// The next projector folds from the checkpoint on.
	w.start()
	s.append(&s.life, s.execution(3), events.MessageAccepted{Content: "next"})
	check("queued 0 11 20 0.25 " + x)
}
