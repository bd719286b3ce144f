package worker

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/retries"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// fail ends the execution with the terminal event outcome, which this executor decided and not the agent. The events with are stored in
// the same commit.
func (t *turn) fail(ctx context.Context, outcome events.Payload, with ...events.Payload) error {
	return t.end(ctx, run.End{Meta: t.w.runlog.Meta(), Outcome: outcome, With: t.NewEvents(with...)})
}

// end ends the charging of the execution, completes its open blocks with the text that is known, and appends the terminal event. The events
// may need several commits; the terminal event is in the last one.
func (t *turn) end(ctx context.Context, e run.End) error {
	t.meter.Unregister(ctx)
	var err error
	if e.Blocks, err = t.w.openBlocks.Open(ctx, t.Session, e.Before); err != nil {
		return err
	}
	if err := t.AppendEnd(ctx, e); err != nil {
		return err
	}
	t.Log.Info("execution ended", "phase", t.Session.Run.Phase, "sandbox", t.Session.Run.Sandbox.ID)
	return nil
}

// cancel ends an execution that a control stopped, as cancelled, without its runner. The caller must know that no agent of the execution
// runs, or the control must be a terminate, for which cancel terminates the sandbox first.
func (t *turn) cancel(ctx context.Context) error {
	c, sb := t.Control(), t.Session.Run.Sandbox
	outcome := events.ExecutionCancelled{Reason: c.Reason}
	if c.Kind != session.Terminate || sb.ID == "" || sb.Engine != t.w.cfg.Engine {
		return t.fail(ctx, outcome)
	}
	t.detach()
	if err := t.w.sandboxes.Terminate(ctx, sb.ID, false); err != nil {
		return fmt.Errorf("end sandbox %s: %w", sb.ID, err)
	}
	return t.fail(ctx, outcome, events.SandboxTerminated{SandboxID: sb.ID, Reason: c.Reason, Kept: true})
}

// stopAndFail fails the execution, after it has stopped an agent that an earlier claim may have started. If the
// runner does not obey, stopAndFail ends the sandbox and keeps the workspace. If that fails too, the terminal event
// states that the agent could not be stopped.
func (t *turn) stopAndFail(ctx context.Context, failed events.ExecutionFailed) error {
	if !t.Session.Run.TakenOver() {
		return t.fail(ctx, failed)
	}
	t.detach()
	sb := t.Session.Run.Sandbox
	err := t.w.dialer.Stop(ctx, sb, t.Ref(), t.Epoch)
	switch {
	case errors.Is(err, run.ErrFenced):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		return t.fail(ctx, failed)
	}
	t.Log.Warn("the runner does not stop its agent: the sandbox is ended", "sandbox", sb.ID, "error", err)
	if sb.Engine != t.w.cfg.Engine || sandboxes.Unavailable(err) {
		return t.fail(ctx, failed.NotStopped(err))
	}
	if err := t.Refresh(ctx); err != nil { // another executor may have claimed since, and ended the stream
		return err
	}
	if terr := t.w.sandboxes.Terminate(ctx, sb.ID, false); terr != nil {
		return t.fail(ctx, failed.NotStopped(errors.Join(err, terr)))
	}
	return t.fail(ctx, failed, events.SandboxTerminated{SandboxID: sb.ID, Reason: "unhealthy", Kept: true})
}

// recordHandedOver records that this executor leaves the execution to another one, because it stops or has no slot. Its claim then does not
// count as one without progress, after too many of which an execution fails. If the record cannot be appended, the claim
// counts, and recordHandedOver logs the error unless it is run.ErrFenced.
func (t *turn) recordHandedOver(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	if t.Session.Run.IsIdle() {
		return
	}
	if err := t.AppendFacts(ctx, events.ExecutionHandedOver{Epoch: t.Epoch}); err != nil && !errors.Is(err, run.ErrFenced) {
		t.Log.Warn("the log does not say that the execution is handed over", "error", err)
	}
}

// finish acts on the end of the turn in the journal, f.ended: it appends the last events and the terminal event. If the attempt died and
// another one follows, finish appends the events alone and returns a *deathError.
func (f *follower) finish(ctx context.Context) error {
	// As in any commit, events that no longer apply are left out.
	d, err := run.Decide(f.Session.Run, run.Record{Epoch: f.Epoch, Events: f.commits.Take()})
	if err != nil {
		return err
	}
	e := f.ended
	f.maintenance.AwaitRegistration()
	d.Events = append(d.Events, f.meter.Final(ctx)...)
	_ = f.checkBudgets(d.Events) // updateLife logs the error
	if died, ok := f.deathOf(e); ok {
		if err := f.Append(ctx, d.Events); err != nil {
			return err
		}
		return &deathError{died}
	}
	err = f.end(ctx, run.End{
		Meta:    events.Meta{CommandID: events.Derive(events.KindCommand, f.translator.Journal, strconv.FormatUint(e.N, 10)), Now: e.Time},
		N:       e.N,
		Outcome: f.outcome(e.TurnEnd),
		Before:  d.Events,
	})
	if err == nil {
		f.acknowledge(f.agent.Link, f.Session.Run.Sandbox.N)
	}
	return err
}

// outcome returns the terminal event for an end of the turn in the journal. If the turn was being stopped, the reason for that
// determines the event.
func (f *follower) outcome(e runner.TurnEnd) events.Payload {
	if e.Outcome == runner.OutcomeCompleted && !f.output.Cut() {
		return events.ExecutionCompleted{Usage: e.Usage, CostUSD: e.CostUSD, Result: e.Result}
	}
	if why := f.stop.Outcome(e.Usage); why != nil {
		return why
	}
	code, message := e.Code, e.Message
	switch {
	case e.Outcome != runner.OutcomeFailed:
		code, message = retries.CodeExited, "the turn was ended inside the sandbox, and nobody had asked for it"
	case code == "":
		code = "INTERNAL"
	}
	if retries.IsDeath(code) {
		message += f.retries().Suffix(code, f.Session.Run.CurrentAttempt())
	}
	return events.ExecutionFailed{Code: code, Message: message, Usage: e.Usage}
}

// failRefused fails the execution with the error with which the runner refused to start it, after it has stored the pending events.
func (f *follower) failRefused(ctx context.Context, why *runner.CommandError) error {
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	f.done = true
	return f.fail(ctx, events.ExecutionFailed{Code: why.Code, Message: why.Message})
}

// abort ends an execution without the runner, because the runner does not obey or is not reliable: it appends the pending events,
// terminates the sandbox, and then appends outcome, the terminal event. The workspace is kept for the next sandbox. After an error
// the execution has no terminal event yet.
func (f *follower) abort(ctx context.Context, outcome events.Payload) error {
	id := f.Session.Run.Sandbox.ID
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	f.detach()
	if err := f.w.sandboxes.Terminate(ctx, id, false); err != nil {
		return fmt.Errorf("end sandbox %s: %w", id, err)
	}
	reason := "unhealthy"
	if f.stop.Control().Kind == session.Terminate {
		reason = f.stop.Control().Reason
	}
	return f.fail(ctx, outcome, events.SandboxTerminated{SandboxID: id, Reason: reason, Kept: true})
}

// handover stores the pending events, so that the next executor can continue the execution. It always returns permits.ErrStopping. Events
// that cannot be stored are still in the runner's journal, where the next executor reads them.
func (f *follower) handover(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, flushTimeout)
	defer cancel()
	if err := f.commits.Flush(ctx); err != nil {
		f.Log.Warn("the last events are left to the next executor", "error", err)
	}
	return permits.ErrStopping
}
