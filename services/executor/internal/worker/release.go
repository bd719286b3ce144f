package worker

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// release gives up a sandbox, with a snapshot first. The log is told before the
// sandbox ends: its guard makes sure that nothing runs in it. Should the rest
// fail, the sweep does it. It returns runlog.ErrChanged when the snapshot gave way to what is due meanwhile.
func (w *Worker) release(ctx context.Context, l eventlog.Loaded, b *handling.Session) error {
	sb := l.Run.Sandbox
	if err := w.reachable(sb); err != nil {
		return err
	}
	permit, err := w.upkeep.Acquire(ctx, l.Tenant)
	if err != nil {
		return err
	}
	defer permit()
	bus.ReleaseSlot(ctx)
	here := sb.Engine == w.cfg.Engine
	deleted := l.Life.Status == session.Deleted
	var facts []events.Payload
	var synced *events.WorkspaceSynced
	if here {
		work, stop := w.interruptible(ctx, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, b, delayedByRelease)
		synced, err = w.last(work, l, run.ReleaseReason(l.Life))
		interrupted := work.Err() != nil && ctx.Err() == nil
		stop()
		if err != nil && interrupted {
			return runlog.ErrChanged
		}
		if err != nil {
			code, final := sandboxes.FinalCode(err)
			if !final {
				return err
			}
			facts = append(facts, events.Error{Code: code, Message: "no snapshot could be taken before the sandbox was given up: " + err.Error()})
		}
	}
	if synced != nil {
		facts = append(facts, *synced)
	}
	ended := events.SandboxTerminated{SandboxID: sb.ID, Reason: run.ReleaseReason(l.Life), Kept: here && synced == nil && !deleted}
	if err := w.runlog.AppendEvents(ctx, l, append(w.late(ctx, l.Run), w.runlog.Events("", append(facts, ended)...)...)); err != nil {
		return err
	}
	w.agents.Shutdown(ctx, l.ID, l.Run.Epoch+1)
	if !here {
		return nil // its engine is gone; should it come back, its sweep finds it
	}
	if err := w.sandboxes.Terminate(ctx, sb.ID, deleted || synced != nil && !w.sandboxes.KeepsWorkspaces()); err != nil {
		w.d.Logger.Error("a sandbox was given up but could not be ended; the sweep will try again", "sandbox", sb.ID, "session", l.ID, "error", err)
	}
	return nil
}

// nearsEnd reports whether the provider ends a sandbox soon, by its own limit: four fifths of its life are over. What is left is for
// a turn that has just begun, and for the time that the sandbox was in the pool.
func (w *Worker) nearsEnd(sb run.Sandbox) bool {
	return w.cfg.SandboxLife > 0 && !sb.ReadyAt.IsZero() && w.d.Now().Sub(sb.ReadyAt) > w.cfg.SandboxLife/5*4
}

// retire replaces a sandbox that is too old, between two turns.
func (t *turn) retire(ctx context.Context) error {
	sb, limit := t.l.Run.Sandbox, t.l.Life.Options.SandboxMaxAgeMs
	old := limit > 0 && !sb.ReadyAt.IsZero() && t.w.d.Now().Sub(sb.ReadyAt) > time.Duration(limit)*time.Millisecond || t.w.nearsEnd(sb)
	// What was taken over may run already.
	if !old || t.l.Run.TakenOver() || sb.Engine != t.w.cfg.Engine {
		return nil
	}
	var synced *events.WorkspaceSynced
	l := t.l
	err := t.whileWanted(ctx, func(ctx context.Context) (err error) {
		synced, err = t.w.last(ctx, l, syncMaxAge)
		return err
	})
	if err != nil {
		return err
	}
	var facts []events.Payload
	if synced != nil {
		facts = append(facts, *synced)
	}
	if err := t.say(ctx, append(facts, events.SandboxTerminated{SandboxID: sb.ID, Reason: syncMaxAge, Kept: synced == nil})...); err != nil {
		return err
	}
	t.w.agents.Shutdown(ctx, t.l.ID, t.epoch)
	if err := t.w.sandboxes.Terminate(ctx, sb.ID, synced != nil && !t.w.sandboxes.KeepsWorkspaces()); err != nil {
		t.log.Error("a sandbox was retired but could not be ended; the sweep will try again", "sandbox", sb.ID, "error", err)
	}
	return nil
}
