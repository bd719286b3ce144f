package idle

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// HealthEvents requests a runner's status, and returns an event if the health of the sandbox has changed
// since the last recorded one.
func HealthEvents(ctx context.Context, sb run.Sandbox, l *link.Link, epoch uint64) []events.Payload {
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

// CheckHealth records a change of the health of a resting agent's sandbox in the log. It implements
// agents.HealthRecorder.
func (k *Keeper) CheckHealth(ctx context.Context, a *agents.Agent, epoch uint64) error {
	l, err := k.Sessions.Load(ctx, a.Session.Tenant, a.Session.Session, eventlog.LeaderOnly)
	if err != nil || l.Run.Sandbox.ID != a.Sandbox || !l.Run.IsIdle() {
		return err
	}
	facts := HealthEvents(ctx, l.Run.Sandbox, a.Link, epoch)
	if len(facts) == 0 {
		return nil
	}
	if err := k.Runs.AppendFacts(ctx, l, facts...); err != nil && !errors.Is(err, runlog.ErrChanged) {
		return err
	}
	return nil
}

// CheckGone records in the log that the sandbox of a resting agent has ended, if it has. It implements
// agents.HealthRecorder.
func (k *Keeper) CheckGone(ctx context.Context, a *agents.Agent) error {
	_, err := k.Provider.Attach(ctx, a.Sandbox)
	if !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	for range maxReloads {
		l, err := k.Sessions.Load(ctx, a.Session.Tenant, a.Session.Session, eventlog.LeaderOnly)
		if err != nil || l.Run.Sandbox.ID != a.Sandbox || !l.Run.IsIdle() || l.Run.Sandbox.Unhealthy {
			return err
		}
		err = k.Runs.AppendFacts(ctx, l, events.SandboxHealth{SandboxID: a.Sandbox, Status: events.Unhealthy, Reason: "it has ended while it rested; the next message makes another, with the same workspace where that is left"})
		// The stream is not checked again, so a snapshot that was stored meanwhile must not keep this out of the log.
		if !errors.Is(err, runlog.ErrChanged) {
			return err
		}
	}
	return runlog.ErrChanged
}
