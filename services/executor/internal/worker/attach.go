package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/provision"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// resolve resolves the references of the execution, and stores the result unless the log has it. A *references.Error
// means that the execution cannot start.
func (t *turn) resolve(ctx context.Context) error {
	r, err := t.w.references.Resolve(ctx, references.Execution{
		ID: t.ID, Session: t.Session, Message: t.message,
		Report: func(ctx context.Context, e events.Error) error { return t.AppendFacts(ctx, e) },
	})
	if err != nil {
		return err
	}
	t.resolved = r
	t.meter.SetResolved(r)
	if t.Session.Run.Resolved.Known || r.IsEmpty() {
		return nil
	}
	return t.AppendFacts(ctx, r.ExecutionResolved)
}

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

// releaseAgent keeps the agent warm for the next turn, or closes its stream if the turn failed.
func (t *turn) releaseAgent(err error) {
	if t.agent == nil {
		return
	}
	if err == nil && t.agent.IsAlive() {
		if t.translator != nil { // nil if the turn failed before it read a line
			t.agent.Last = t.translator.Last
		}
		t.w.agents.Rest(t.agent, time.Duration(t.Session.Life.Options.HealthIntervalMs)*time.Millisecond)
		return
	}
	t.detach()
}

// detach closes the stream to the agent. The agent continues to run.
func (t *turn) detach() {
	if t.agent != nil {
		t.w.agents.Remove(t.agent)
		t.agent.Link.Close()
		t.agent = nil
	}
}

// reattach opens a new stream to the same runner, after the last line that was read.
func (t *turn) reattach(ctx context.Context) error {
	a := t.agent
	a.Link.Close()
	next, err := t.w.dialer.Dial(ctx, t.Session.Run.Sandbox, t.Ref(), runner.Attach{Epoch: t.Epoch, After: t.translator.Last})
	if errors.Is(err, link.ErrFenced) {
		return fmt.Errorf("%w: %w", run.ErrFenced, err)
	}
	if err != nil {
		return err
	}
	t.w.agents.Remove(a)
	t.agent = next
	t.w.agents.Use(next, t.Epoch)
	return nil
}
