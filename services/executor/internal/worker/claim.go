package worker

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// Execute claims the active execution of a session, or continues this executor's claim, and runs it to its end or its pause. It
// implements jobs.Turns.
func (w *Worker) Execute(ctx context.Context, l *eventlog.Loaded, b *handling.Session) error {
	if err := w.admission.Check(ctx, l); err != nil {
		return err
	}
	t, err := w.run(ctx, l, b)
	if errors.Is(err, errPaused) {
		return nil
	}
	if err != nil || t == nil {
		return err
	}
	return w.snapshotAfterTurn(ctx, t, b)
}

// run runs the active execution to its end. It returns nil for the turn if the claim ended the execution.
func (w *Worker) run(ctx context.Context, l *eventlog.Loaded, b *handling.Session) (*turn, error) {
	slot, err := w.admission.Acquire(ctx, l)
	if err != nil {
		return nil, err
	}
	defer slot.Close()
	bus.ReleaseSlot(ctx)
	execution := l.Life.Active.ExecutionID
	d, err := w.runlog.Decide(l.Run, run.Claim{Meta: w.runlog.Meta(), ExecutionID: execution, Turn: l.Life.Active.Turn, Executor: w.cfg.Executor})
	if err != nil {
		return nil, runlog.ErrChanged
	}
	w.handling.SetExecution(b, execution)
	defer w.handling.SetExecution(b, "")
	if err := w.runlog.Append(ctx, l, d); err != nil {
		return nil, err
	}
	if l.Run.Ended(execution) {
		return nil, nil // the claim failed it, after too many claims without progress
	}
	t := newTurn(w, l, b)
	t.slot = slot
	t.Log.Info("execution claimed", "sandbox", l.Run.Sandbox.ID, "slot", slot.IsHeld())
	return t, t.run(ctx)
}
