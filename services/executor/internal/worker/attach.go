package worker

import (
	"context"

	"github.com/spoolhq/spool/services/executor/internal/provision"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// attach makes the session's sandbox ready for the turn, with a stream to its runner.
func (t *turn) attach(ctx context.Context) error {
	t.detach()
	ready, err := t.w.provisioner.Attach(ctx, provision.Request{Execution: t.Execution, Resolved: t.resolved, Meter: t.meter, Changed: t.changed})
	t.agent, t.sockets = ready.Agent, ready.Sockets
	if err != nil {
		return err
	}
	t.attempt = t.Session.Run.Attempt + 1
	if hello := t.agent.Hello; hello != nil && hello.Status.ExecutionID == t.ID {
		t.attempt = max(hello.Status.Attempt, 1)
	}
	since := t.Session.Run.ClaimedAt
	if t.translator != nil {
		since = t.translator.Time
	}
	t.translator = &translate.Translator{
		Journal: t.agent.Journal, ExecutionID: t.ID, Epoch: t.Epoch, Attempt: t.attempt, Last: t.agent.Last, Time: since,
	}
	return nil
}
