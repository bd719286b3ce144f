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

// A death is the unexpected end of an attempt, after which another attempt may follow: the agent's process exited, or the sandbox was lost.
type death struct {
	code, message string
	n             uint64 // number of the journal line of the end; 0 if the journal has none
	journal       string
	at            time.Time
}

// A deathError reports that an attempt died, and that another one may follow.
type deathError struct{ death }

func (e *deathError) Error() string { return e.code + ": " + e.message }

// retries returns the retry policy of the turn's agent.
func (t *turn) retries() retries.Policy {
	p := retries.Policy{SandboxLost: t.w.cfg.MaxAttempts}
	if t.resolved != nil {
		p.Agent = t.resolved.Definition.Retries
	}
	return p
}

// nextWait returns the wait before the next attempt, after the present one died with an error code. ok is false if the retry policy or the
// deadline allows no further attempt.
func (t *turn) nextWait(code string) (wait time.Duration, ok bool) {
	return t.retries().Next(code, t.Session.Run.CurrentAttempt(), t.w.deps.Now(), t.deadline())
}

// deathOf returns the death that an end in the journal stands for. The bool is true if the attempt died unexpectedly, without a control or a
// limit that stopped it, and another attempt follows.
func (f *follower) deathOf(e *translate.Ended) (death, bool) {
	if !retries.IsDeath(e.Code) || e.Outcome != runner.OutcomeFailed || f.stop.Outcome(e.Usage) != nil || f.life.ControlOf(f.ID).N > 0 {
		return death{}, false
	}
	_, ok := f.nextWait(e.Code)
	return death{e.Code, e.Message, e.N, f.translator.Journal, e.Time}, ok
}

// recordDeath records that an attempt died, and the wait before the next one. If the next attempt is due at once, it returns nil; if the next
// attempt has to wait, it returns an error that makes the bus deliver the job again later. If no attempt follows, recordDeath fails the
// execution.
func (t *turn) recordDeath(ctx context.Context, d death) error {
	wait, ok := t.nextWait(d.code)
	if !ok {
		return t.failAfterDeath(ctx, d)
	}
	facts, err := t.w.openBlocks.Close(ctx, t.Session)
	if err != nil {
		return err
	}
	for _, a := range t.Session.Run.Approvals {
		facts = append(facts, events.ApprovalRetracted{ApprovalID: a.ID, Reason: "attempt_failed"})
	}
	failed := events.AttemptFailed{
		Attempt: t.Session.Run.CurrentAttempt(), Attempts: t.retries().Attempts(d.code), Code: d.code, Message: d.message, WaitMs: uint32(wait.Milliseconds()), //nolint:gosec // five minutes at most
	}
	list := t.NewEvents(facts...)
	meta := t.w.runlog.Meta()
	if d.n > 0 { // an event that is recorded again for the same line has the same id
		meta.CommandID = events.Derive(events.KindCommand, d.journal, strconv.FormatUint(d.n, 10))
	}
	m := events.NewEventList(meta)
	m.Add(t.ID, failed)
	last := m.Events()[0]
	last.N = d.n
	if err := t.Append(ctx, append(list, last)); err != nil {
		return err
	}
	t.Log.Warn("an attempt died; another one follows", "attempt", failed.Attempt, "of", failed.Attempts, "code", d.code, "message", d.message, "wait", wait)
	if wait > 0 {
		return t.w.admission.CheckDue(t.Session)
	}
	return nil
}

// failAfterDeath fails an execution whose last attempt died. If the sandbox was lost, failAfterDeath first terminates what is left of it on
// this engine.
func (t *turn) failAfterDeath(ctx context.Context, d death) error {
	failed := events.ExecutionFailed{Code: d.code, Message: d.message + t.retries().Suffix(d.code, t.Session.Run.CurrentAttempt())}
	end := run.End{Meta: t.w.runlog.Meta(), N: d.n, Outcome: failed}
	if d.code != retries.CodeSandboxLost {
		return t.end(ctx, end)
	}
	sb := t.Session.Run.Sandbox
	here := sb.Engine == t.w.cfg.Engine // otherwise the engine is gone; if it comes back, its sweep ends the sandbox
	t.detach()
	if here {
		if err := t.w.sandboxes.Terminate(ctx, sb.ID, false); err != nil {
			t.Log.Error("a lost sandbox could not be ended; the sweep will try again", "sandbox", sb.ID, "error", err)
			end.Outcome = failed.NotStopped(err)
		}
	}
	end.With = t.NewEvents(events.SandboxTerminated{SandboxID: sb.ID, Reason: "unhealthy", Kept: here})
	return t.end(ctx, end)
}
