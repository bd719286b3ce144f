package idle

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

// ReleaseSandbox takes a last snapshot of a session's sandbox and terminates it. It records the end of the sandbox in the log first, whose
// guard ensures that nothing runs in the sandbox. If a later step fails, the sweep completes the work. ReleaseSandbox returns
// runlog.ErrChanged if work of the session becomes due that must not wait for the snapshot.
func (k *Keeper) ReleaseSandbox(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error {
	sb := l.Run.Sandbox
	if err := k.CheckReachable(sb); err != nil {
		return err
	}
	permit, err := k.Permits.Acquire(ctx, l.Tenant)
	if err != nil {
		return err
	}
	defer permit()
	bus.ReleaseSlot(ctx)
	here := sb.Engine == k.Engine
	deleted := l.Life.Status == session.Deleted
	var facts []events.Payload
	var synced *events.WorkspaceSynced
	if here {
		work, stop := k.InterruptibleContext(ctx, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, s, interruptsRelease)
		synced, err = k.TakeLastSnapshot(work, l, run.ReleaseReason(&l.Life))
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
	ended := events.SandboxTerminated{SandboxID: sb.ID, Reason: run.ReleaseReason(&l.Life), Kept: here && synced == nil && !deleted}
	if err := k.Runs.AppendEvents(ctx, l, append(k.EgressEvents(ctx, l.Run), k.Runs.NewEvents("", append(facts, ended)...)...)); err != nil {
		return err
	}
	k.Agents.ShutdownRunner(ctx, l.ID, l.Run.Epoch+1)
	if !here {
		return nil // the engine is gone; if it comes back, its sweep finds the sandbox
	}
	if err := k.Sandboxes.Terminate(ctx, sb.ID, deleted || synced != nil && !k.Sandboxes.KeepsWorkspaces()); err != nil {
		k.Logger.Error("a sandbox was given up but could not be ended; the sweep will try again", "sandbox", sb.ID, "session", l.ID, "error", err)
	}
	return nil
}

// NearsEndOfLife reports whether the provider will soon end a sandbox, because the sandbox has reached four fifths of its maximum life. The
// last fifth is for a turn that has just begun, and for the time that the sandbox was in the warm pool.
func (k *Keeper) NearsEndOfLife(sb run.Sandbox) bool {
	return k.SandboxLife > 0 && !sb.ReadyAt.IsZero() && k.Now().Sub(sb.ReadyAt) > k.SandboxLife/5*4
}

// InterruptibleContext returns a context for work on a sandbox in which no execution runs. The context ends with ctx, when this executor
// stops, or when mustStop returns true for the session. The caller must call stop when the work is done.
func (k *Keeper) InterruptibleContext(ctx context.Context, ref topology.SessionRef, s *handling.Session, mustStop func(*eventlog.SessionState) bool) (work context.Context, stop func()) {
	work, cancel := context.WithCancel(ctx)
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		defer cancel()
		var again <-chan time.Time
		for {
			select {
			case <-s.Changed():
			case <-again:
			case <-bus.Draining(ctx):
				return
			case <-over:
				return
			}
			again = nil
			// In most cases the signal is a late one, for the last events of the turn itself.
			switch l, err := k.Sessions.Load(work, ref.Tenant, ref.Session, eventlog.LeaderOnly); {
			case err != nil:
				again = time.After(k.Beat)
			case mustStop(l):
				return
			}
		}
	}()
	return work, func() {
		close(over)
		cancel()
		<-ended
	}
}

// InterruptsSnapshot reports whether work of the session is due that must not wait for the end of a snapshot.
func InterruptsSnapshot(l *eventlog.SessionState) bool {
	switch l.DueWork() {
	case run.ExecuteTurn, run.EndUnstarted, run.ReleaseSandbox:
		return true
	}
	return false
}

// interruptsRelease reports whether work of the session is due that must not wait for the snapshot before a release: a turn, or the end of
// the session, which needs no snapshot.
func interruptsRelease(l *eventlog.SessionState) bool {
	switch l.DueWork() {
	case run.ExecuteTurn, run.EndUnstarted:
		return true
	case run.ReleaseSandbox:
		return l.Life.Status == session.Deleted
	}
	return false
}
