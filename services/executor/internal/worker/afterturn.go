package worker

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// snapshotAfterTurn takes a snapshot of the sandbox's workspace after a turn and records it in the log. It returns nil without a snapshot
// if the session has other work or the snapshot fails: the snapshot after the next turn contains the changes of both turns.
func (w *Worker) snapshotAfterTurn(ctx context.Context, t *turn, b *handling.Session) error {
	if w.deps.Workspaces == nil || t.Session.Run.Sandbox.ID == "" || t.Session.Run.Sandbox.Engine != w.cfg.Engine {
		return nil
	}
	work, stop := w.idle.InterruptibleContext(ctx, t.SessionRef(), b, idle.InterruptsSnapshot)
	defer stop()
	// The turn has released its slot among the deliveries already, so that no job waits for this one.
	release, err := w.idlePermits.AcquireBlocking(work, t.Session.Tenant)
	if err != nil {
		return nil
	}
	defer release()
	facts, err := w.takeSnapshot(work, t)
	if err == nil {
		err = w.appendAfterTurn(ctx, t, facts)
	}
	if err != nil && ctx.Err() == nil && work.Err() == nil && !errors.Is(err, runlog.ErrChanged) {
		t.Log.Warn("no snapshot was taken at the end of the turn; the next one has its changes", "sandbox", t.Session.Run.Sandbox.ID, "error", err)
	}
	return nil
}

// takeSnapshot takes a snapshot of the sandbox of a turn that has ended, and returns the event that records it.
func (w *Worker) takeSnapshot(ctx context.Context, t *turn) ([]events.Payload, error) {
	box, err := w.deps.Sandbox.Attach(ctx, t.Session.Run.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	s, err := w.contents.TakeSnapshot(ctx, t.Session, box, idle.SyncReasonTurn)
	return []events.Payload{s}, err
}

// appendAfterTurn appends facts about the session to the session's runs after a turn, under the epoch of the turn.
func (w *Worker) appendAfterTurn(ctx context.Context, t *turn, facts []events.Payload) error {
	d, err := w.runlog.Decide(t.Session.Run, run.RecordEvents{Epoch: t.Epoch, Events: w.runlog.NewEvents("", facts...)})
	if err != nil {
		return err
	}
	next := *t.Session
	err = w.runlog.AppendDecision(ctx, &next, d)
	t.Session = &next
	return err
}
