package worker

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// health asks a runner for its status, and returns an event if the health of the sandbox has changed.
func (w *Worker) health(ctx context.Context, sb run.Sandbox, l *link.Link, epoch uint64) []events.Payload {
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	now := events.SandboxHealth{SandboxID: sb.ID, Status: events.Healthy}
	r, err := l.Call(ctx, runner.Command{Op: runner.OpStatus, Epoch: epoch})
	if err != nil {
		now.Status, now.Reason = events.Unhealthy, err.Error()
	} else if r.Status != nil {
		now.MemoryBytes, now.DiskBytes = r.Status.MemoryBytes, r.Status.DiskBytes
	}
	if (now.Status == events.Unhealthy) == sb.Unhealthy {
		return nil
	}
	return []events.Payload{now}
}

// restingHealth records the health of the sandboxes of resting agents; it implements agents.Health.
type restingHealth struct{ w *Worker }

// CheckHealth records a change of the health of a resting agent's sandbox, before a turn needs it.
func (h restingHealth) CheckHealth(ctx context.Context, a *agents.Agent, epoch uint64) error {
	l, err := h.w.d.Sessions.Load(ctx, a.Session.Tenant, a.Session.Session, eventlog.Leader)
	if err != nil || l.Run.Sandbox.ID != a.Sandbox || !l.Run.Over() {
		return err
	}
	facts := h.w.health(ctx, l.Run.Sandbox, a.Link, epoch)
	if len(facts) == 0 {
		return nil
	}
	if err := h.w.runlog.AppendFacts(ctx, l, facts...); err != nil && !errors.Is(err, runlog.ErrChanged) {
		return err
	}
	return nil
}

// CheckGone records that the sandbox of a resting agent has ended, if it has.
func (h restingHealth) CheckGone(ctx context.Context, a *agents.Agent) error {
	_, err := h.w.d.Sandbox.Attach(ctx, a.Sandbox)
	if !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	for range maxRounds {
		l, err := h.w.d.Sessions.Load(ctx, a.Session.Tenant, a.Session.Session, eventlog.Leader)
		if err != nil || l.Run.Sandbox.ID != a.Sandbox || !l.Run.Over() || l.Run.Sandbox.Unhealthy {
			return err
		}
		err = h.w.runlog.AppendFacts(ctx, l, events.SandboxHealth{SandboxID: a.Sandbox, Status: events.Unhealthy, Reason: "it has ended while it rested; the next message makes another, with the same workspace where that is left"})
		// The stream is not checked again, so a snapshot that was stored meanwhile must not keep this out of the log.
		if !errors.Is(err, runlog.ErrChanged) {
			return err
		}
	}
	return runlog.ErrChanged
}

// Warm maintains the resting agents until ctx ends.
func (w *Worker) Warm(ctx context.Context, every time.Duration) {
	w.agents.Run(ctx, every, restingHealth{w})
}

// Close closes the streams to resting agents. The agents stay, for the next executor.
func (w *Worker) Close() { w.agents.Close() }

// Pool keeps the pool filled until ctx ends; then it ends the sandboxes that are left in it.
func (w *Worker) Pool(ctx context.Context) { w.pool.Run(ctx) }
