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

// resolveReferences sets t.resolved to the versions of everything that the execution refers to, and records them in the log, unless the log
// already has them. A *references.Error means that the execution cannot start and has to fail.
func (t *turn) resolveReferences(ctx context.Context) error {
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

// attachSandbox makes the session's sandbox ready for the turn. It sets t.agent to a stream to the sandbox's runner, and t.attempt and
// t.translator. Its errors are those of provision.Provisioner.Attach.
func (t *turn) attachSandbox(ctx context.Context) error {
	t.closeAgentStream()
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

// releaseAgent ends the turn's use of its agent. If err, the turn's error, is nil, the agent stays warm for the session's next turn;
// otherwise releaseAgent closes the stream to the agent.
func (t *turn) releaseAgent(err error) {
	if t.agent == nil {
		return
	}
	if err == nil && t.agent.IsAlive() {
		if t.translator != nil { // nil if the turn failed before it read a line
			t.agent.Last = t.translator.Last
		}
		t.w.agents.AddResting(t.agent, time.Duration(t.Session.Life.Options.HealthIntervalMs)*time.Millisecond)
		return
	}
	t.closeAgentStream()
}

// closeAgentStream closes the stream to the agent's runner, if there is one. The agent continues to run.
func (t *turn) closeAgentStream() {
	if t.agent != nil {
		t.w.agents.Remove(t.agent)
		t.agent.Link.Close()
		t.agent = nil
	}
}

// reopenAgentStream opens a new stream to the same runner. The runner sends the journal lines after the last one that was read. The error
// wraps run.ErrFenced if another executor has claimed the session, and agents.ErrLost if the sandbox is gone.
func (t *turn) reopenAgentStream(ctx context.Context) error {
	a := t.agent
	a.Link.Close()
	next, err := t.w.dialer.Dial(ctx, t.Session.Run.Sandbox, t.SessionRef(), runner.Attach{Epoch: t.Epoch, After: t.translator.Last})
	if errors.Is(err, link.ErrFenced) {
		return fmt.Errorf("%w: %w", run.ErrFenced, err)
	}
	if err != nil {
		return err
	}
	t.w.agents.Remove(a)
	t.agent = next
	t.w.agents.AddWorking(next, t.Epoch)
	return nil
}
