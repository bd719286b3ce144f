package worker

import (
	"context"
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/retries"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// An attemptDeath is the unexpected end of an attempt: the agent's process exited, or the sandbox was lost. Another attempt may follow.
type attemptDeath struct {
	code, message string
	n             uint64 // number of the journal line of the end; 0 if the journal has none
	journal       string
	at            time.Time
}

// An attemptDeathError reports that an attempt died, and that another one may follow.
type attemptDeathError struct{ attemptDeath }

func (e *attemptDeathError) Error() string { return e.code + ": " + e.message }

// retryPolicy returns the retry policy of the turn's agent.
func (t *turn) retryPolicy() retries.Policy {
	p := retries.Policy{SandboxLost: t.w.cfg.MaxAttempts}
	if t.resolved != nil {
		p.Agent = t.resolved.Definition.Retries
	}
	return p
}

// nextAttemptWait returns the wait before the next attempt, after the present one has died with an error code. ok is false if the retry
// policy or the deadline allows no further attempt.
func (t *turn) nextAttemptWait(code string) (wait time.Duration, ok bool) {
	return t.retryPolicy().NextWait(code, t.Session.Run.CurrentAttempt(), t.w.deps.Now(), t.deadline())
}

// deathOf returns the attemptDeath for the end of a turn in the journal. It returns false if a control or a limit stopped the attempt, if
// the agent did not die, or if no further attempt follows.
func (f *follower) deathOf(e *translate.TurnEnd) (attemptDeath, bool) {
	if !retries.IsDeath(e.Code) || e.Outcome != runner.OutcomeFailed || f.stop.TerminalEvent(e.Usage) != nil || f.life.ControlOf(f.ID).N > 0 {
		return attemptDeath{}, false
	}
	_, ok := f.nextAttemptWait(e.Code)
	return attemptDeath{e.Code, e.Message, e.N, f.translator.Journal, e.Time}, ok
}

// recordDeath records that an attempt died, and the wait before the next one. It returns nil if the next attempt is due at once. If the
// next attempt has to wait, it returns an error that makes the bus deliver the job again later. If no attempt follows, it fails the
// execution.
func (t *turn) recordDeath(ctx context.Context, d attemptDeath) error {
	wait, ok := t.nextAttemptWait(d.code)
	if !ok {
		return t.failAfterDeath(ctx, d)
	}
	facts, err := t.w.openBlocks.CloseBlocks(ctx, t.Session)
	if err != nil {
		return err
	}
	for _, a := range t.Session.Run.Approvals {
		facts = append(facts, events.ApprovalRetracted{ApprovalID: a.ID, Reason: "attempt_failed"})
	}
	failed := events.AttemptFailed{
		Attempt: t.Session.Run.CurrentAttempt(), Attempts: t.retryPolicy().MaxAttempts(d.code), Code: d.code, Message: d.message, WaitMs: uint32(wait.Milliseconds()), //nolint:gosec // five minutes at most
	}
	list := t.NewEvents(facts...)
	meta := t.w.runlog.NewMeta()
	if d.n > 0 { // an event that is recorded again for the same line has the same id
		meta.CommandID = events.DeriveID(events.KindCommand, d.journal, strconv.FormatUint(d.n, 10))
	}
	m := events.NewEventList(meta)
	m.Add(t.ID, failed)
	last := m.Events()[0]
	last.N = d.n
	if err := t.AppendEvents(ctx, append(list, last)); err != nil {
		return err
	}
	t.Log.Warn("an attempt died; another one follows", "attempt", failed.Attempt, "of", failed.Attempts, "code", d.code, "message", d.message, "wait", wait)
	if wait > 0 {
		return t.w.admission.CheckDue(t.Session)
	}
	return nil
}

// failAfterDeath fails an execution whose last attempt died. If the sandbox was lost, it first terminates what is left of the sandbox on
// this engine.
func (t *turn) failAfterDeath(ctx context.Context, d attemptDeath) error {
	failed := events.ExecutionFailed{Code: d.code, Message: d.message + t.retryPolicy().AttemptSuffix(d.code, t.Session.Run.CurrentAttempt())}
	end := run.EndExecution{CommandMeta: t.w.runlog.NewMeta(), N: d.n, Outcome: failed}
	if d.code != retries.CodeSandboxLost {
		return t.endExecution(ctx, end)
	}
	sb := t.Session.Run.Sandbox
	here := sb.Engine == t.w.cfg.Engine // otherwise the engine is gone; if it comes back, its sweep ends the sandbox
	t.closeAgentStream()
	if here {
		if err := t.w.sandboxes.Terminate(ctx, sb.ID, false); err != nil {
			t.Log.Error("a lost sandbox could not be ended; the sweep will try again", "sandbox", sb.ID, "error", err)
			end.Outcome = failed.WithStopFailure(err)
		}
	}
	end.With = t.NewEvents(events.SandboxTerminated{SandboxID: sb.ID, Reason: "unhealthy", Kept: here})
	return t.endExecution(ctx, end)
}
