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

// failExecution ends the execution with the terminal event outcome, which this executor decided and not the agent. It stores the events
// with in the same commit.
func (t *turn) failExecution(ctx context.Context, outcome events.Payload, with ...events.Payload) error {
	return t.endExecution(ctx, run.EndExecution{CommandMeta: t.w.runlog.NewMeta(), Outcome: outcome, With: t.NewEvents(with...)})
}

// endExecution stops charging the execution, completes its open blocks with their text so far, and appends the terminal event of e. It may
// need several commits; the last one has the terminal event.
func (t *turn) endExecution(ctx context.Context, e run.EndExecution) error {
	t.meter.Unregister(ctx)
	var err error
	if e.Blocks, err = t.w.openBlocks.OpenBlocks(ctx, t.Session, e.Before); err != nil {
		return err
	}
	if err := t.AppendEnd(ctx, e); err != nil {
		return err
	}
	t.Log.Info("execution ended", "phase", t.Session.Run.Phase, "sandbox", t.Session.Run.Sandbox.ID)
	return nil
}

// cancelExecution ends an execution that a control stopped as cancelled, without its runner. Either no agent of the execution runs, which
// the caller must know, or the control is a terminate, for which cancelExecution first terminates the sandbox.
func (t *turn) cancelExecution(ctx context.Context) error {
	c, sb := t.Control(), t.Session.Run.Sandbox
	outcome := events.ExecutionCancelled{Reason: c.Reason}
	if c.Kind != session.Terminate || sb.ID == "" || sb.Engine != t.w.cfg.Engine {
		return t.failExecution(ctx, outcome)
	}
	t.closeAgentStream()
	if err := t.w.sandboxes.Terminate(ctx, sb.ID, false); err != nil {
		return fmt.Errorf("end sandbox %s: %w", sb.ID, err)
	}
	return t.failExecution(ctx, outcome, events.SandboxTerminated{SandboxID: sb.ID, Reason: c.Reason, Kept: true})
}

// stopAndFail fails the execution, after it has stopped an agent that an earlier claim may have started. If the runner does not obey, it
// terminates the sandbox and keeps the workspace. If that fails too, the terminal event states that the agent could not be stopped.
func (t *turn) stopAndFail(ctx context.Context, failed events.ExecutionFailed) error {
	if !t.Session.Run.WasTakenOver() {
		return t.failExecution(ctx, failed)
	}
	t.closeAgentStream()
	sb := t.Session.Run.Sandbox
	err := t.w.dialer.StopAgent(ctx, sb, t.SessionRef(), t.Epoch)
	switch {
	case errors.Is(err, run.ErrFenced):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		return t.failExecution(ctx, failed)
	}
	t.Log.Warn("the runner does not stop its agent: the sandbox is ended", "sandbox", sb.ID, "error", err)
	if sb.Engine != t.w.cfg.Engine || sandboxes.IsUnavailable(err) {
		return t.failExecution(ctx, failed.WithStopFailure(err))
	}
	if err := t.ReloadLife(ctx); err != nil { // another executor may have claimed since, and ended the stream
		return err
	}
	if terr := t.w.sandboxes.Terminate(ctx, sb.ID, false); terr != nil {
		return t.failExecution(ctx, failed.WithStopFailure(errors.Join(err, terr)))
	}
	return t.failExecution(ctx, failed, events.SandboxTerminated{SandboxID: sb.ID, Reason: "unhealthy", Kept: true})
}

// recordHandedOver records that this executor leaves the execution to another one, because this executor is stopping or the turn has no
// slot. The claim then does not count as one without progress, after too many of which an execution fails. If the record cannot be
// appended, the claim counts; recordHandedOver logs the error unless it is run.ErrFenced.
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

// finishTurn acts on f.ended, the end of the turn in the runner's journal: it appends the last events and the terminal event. If the attempt
// died and another one follows, finishTurn appends only the events and returns an *attemptDeathError.
func (f *follower) finishTurn(ctx context.Context) error {
	// As in any commit, events that no longer apply are left out.
	d, err := run.Decide(f.Session.Run, run.RecordEvents{Epoch: f.Epoch, Events: f.commits.TakePending()})
	if err != nil {
		return err
	}
	e := f.ended
	f.maintenance.AwaitRegistration()
	d.Events = append(d.Events, f.meter.FinishExecution(ctx)...)
	_ = f.checkBudgets(d.Events) // handleLoadedLife logs the error
	if died, ok := f.deathOf(e); ok {
		if err := f.AppendEvents(ctx, d.Events); err != nil {
			return err
		}
		return &attemptDeathError{died}
	}
	err = f.endExecution(ctx, run.EndExecution{
		CommandMeta: events.CommandMeta{CommandID: events.DeriveID(events.KindCommand, f.translator.Journal, strconv.FormatUint(e.N, 10)), Now: e.Time},
		N:           e.N,
		Outcome:     f.terminalEventOf(e.TurnEnd),
		Before:      d.Events,
	})
	if err == nil {
		f.acknowledgeLines(f.agent.Link, f.Session.Run.Sandbox.N)
	}
	return err
}

// terminalEventOf returns the terminal event for the end of the turn in the runner's journal. If the turn was being stopped, the reason for
// that determines the event.
func (f *follower) terminalEventOf(e runner.TurnEnd) events.Payload {
	if e.Outcome == runner.OutcomeCompleted && !f.output.IsCut() {
		return events.ExecutionCompleted{Usage: e.Usage, CostUSD: e.CostUSD, Result: e.Result}
	}
	if why := f.stop.TerminalEvent(e.Usage); why != nil {
		return why
	}
	code, message := e.Code, e.Message
	switch {
	case e.Outcome != runner.OutcomeFailed:
		code, message = retries.CodeAgentExited, "the turn was ended inside the sandbox, and nobody had asked for it"
	case code == "":
		code = "INTERNAL"
	}
	if retries.IsDeath(code) {
		message += f.retryPolicy().AttemptSuffix(code, f.Session.Run.CurrentAttempt())
	}
	return events.ExecutionFailed{Code: code, Message: message, Usage: e.Usage}
}

// failRefused stores the pending events, and then fails the execution with why, the error with which the runner refused to start it.
func (f *follower) failRefused(ctx context.Context, why *runner.CommandError) error {
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	f.done = true
	return f.failExecution(ctx, events.ExecutionFailed{Code: why.Code, Message: why.Message})
}

// abortTurn ends an execution without the runner, because the runner does not obey or cannot be trusted: it appends the pending events,
// terminates the sandbox, and then appends the terminal event outcome. The workspace is kept for the next sandbox. After an error the
// execution has no terminal event yet.
func (f *follower) abortTurn(ctx context.Context, outcome events.Payload) error {
	id := f.Session.Run.Sandbox.ID
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	f.closeAgentStream()
	if err := f.w.sandboxes.Terminate(ctx, id, false); err != nil {
		return fmt.Errorf("end sandbox %s: %w", id, err)
	}
	reason := "unhealthy"
	if f.stop.Control().Kind == session.Terminate {
		reason = f.stop.Control().Reason
	}
	return f.failExecution(ctx, outcome, events.SandboxTerminated{SandboxID: id, Reason: reason, Kept: true})
}

// handOver stores the pending events, so that the next executor can continue the execution. It always returns permits.ErrStopping. The
// runner's journal still has events that could not be stored, and the next executor reads them there.
func (f *follower) handOver(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, flushTimeout)
	defer cancel()
	if err := f.commits.Flush(ctx); err != nil {
		f.Log.Warn("the last events are left to the next executor", "error", err)
	}
	return permits.ErrStopping
}
