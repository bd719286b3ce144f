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

// Execute claims the active execution of a session, or continues this executor's claim, and runs the execution to its end or its pause.
// After the end it takes a snapshot. The error is an *admission.BudgetError if the execution must end instead of being claimed. It implements
// jobs.ExecutionRunner.
func (w *Worker) Execute(ctx context.Context, l *eventlog.SessionState, b *handling.Session) error {
	if err := w.admission.CheckClaim(ctx, l); err != nil {
		return err
	}
	t, err := w.claimAndRun(ctx, l, b)
	if errors.Is(err, errPaused) {
		return nil
	}
	if err != nil || t == nil {
		return err
	}
	return w.snapshotAfterTurn(ctx, t, b)
}

// claimAndRun waits for a slot, claims the active execution and runs it to its end. The returned turn is nil if the claim failed the
// execution, because too many earlier claims made no progress. The error is runlog.ErrChanged if the execution can no longer be claimed.
func (w *Worker) claimAndRun(ctx context.Context, l *eventlog.SessionState, b *handling.Session) (*turn, error) {
	slot, err := w.admission.AcquireSlot(ctx, l)
	if err != nil {
		return nil, err
	}
	defer slot.Close()
	bus.ReleaseSlot(ctx)
	execution := l.Life.Active.ExecutionID
	w.handling.SetExecution(b, execution)
	defer w.handling.SetExecution(b, "")
	if err := w.appendClaim(ctx, l); err != nil {
		return nil, err
	}
	if l.Run.HasEnded(execution) {
		return nil, nil // the claim has failed the execution
	}
	t := newTurn(w, l, b)
	t.slot = slot
	defer func() { w.admission.RecordTurn(ctx, t.Session) }()
	t.Log.Info("execution claimed", "sandbox", l.Run.Sandbox.ID, "slot", slot.IsHeld())
	return t, t.runAttempts(ctx)
}

// appendClaim appends the event with which this executor claims the active execution, and updates l. It returns runlog.ErrChanged if the
// execution can no longer be claimed.
func (w *Worker) appendClaim(ctx context.Context, l *eventlog.SessionState) error {
	active := l.Life.Active
	d, err := w.runlog.Decide(l.Run, run.ClaimExecution{CommandMeta: w.runlog.NewMeta(), ExecutionID: active.ExecutionID, Turn: active.Turn, Executor: w.cfg.Executor})
	if err != nil {
		return runlog.ErrChanged
	}
	return w.runlog.AppendDecision(ctx, l, d)
}
