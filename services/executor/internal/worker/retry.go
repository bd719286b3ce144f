package worker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// Codes of deaths after which another attempt may follow.
const (
	codeSandboxLost = "SANDBOX_LOST"
	codeExited      = "AGENT_EXITED"
	codeSilent      = "AGENT_SILENT"
	codeOutOfMemory = "OUT_OF_MEMORY"
)

// errNotDue is returned for an execution whose next attempt is not due yet. Its job is delivered again; it has no slot.
var errNotDue = errors.New("the next attempt is not due yet")

// A death is the end of an attempt that is not the end of the turn.
type death struct {
	code, message string
	n             uint64 // number of the journal line of the end; 0 if the journal has none
	journal       string
	at            time.Time
}

// A deathError reports that an attempt died, and that another one may follow.
type deathError struct{ death }

func (e *deathError) Error() string { return e.code + ": " + e.message }

// retries returns the retry policy of the turn's agent; the zero value if it has none.
func (t *turn) retries() events.Retries {
	if t.resolved == nil {
		return events.Retries{}
	}
	return t.resolved.Definition.Retries
}

// maxAttempts returns how often the agent may be started, by the code of the last death.
func (t *turn) maxAttempts(code string) uint32 {
	switch n := t.retries().Attempts; {
	case n > 0:
		return n
	case code == codeSandboxLost:
		return t.w.cfg.MaxAttempts
	}
	return 1
}

// nextWait returns how long the next attempt waits. ok is false if there is no further attempt, or none before the execution's deadline.
func (t *turn) nextWait(code string) (wait time.Duration, ok bool) {
	dying := t.l.Run.Dying()
	if dying >= t.maxAttempts(code) {
		return 0, false
	}
	wait = t.retries().Backoff(dying)
	limit := t.deadline()
	return wait, limit.IsZero() || t.w.deps.Now().Add(wait).Before(limit)
}

// deathOf returns the death that the end of the turn in the journal is, and reports whether it is one: no control asked for the end, and another
// attempt follows.
func (f *follower) deathOf(e *translate.Ended) (death, bool) {
	switch e.Code {
	case codeExited, codeSilent, codeOutOfMemory:
	default:
		return death{}, false
	}
	if e.Outcome != runner.Failed || f.stop.Outcome(e.Usage) != nil || f.life.ControlOf(f.execution).N > 0 {
		return death{}, false
	}
	_, ok := f.nextWait(e.Code)
	return death{e.Code, e.Message, e.N, f.translator.Journal, e.Time}, ok
}

// recordDeath records that an attempt died and how long the next one waits. It returns nil if that is due at once, else the delay of the job.
// If no attempt follows, it ends the execution.
func (t *turn) recordDeath(ctx context.Context, d death) error {
	wait, ok := t.nextWait(d.code)
	if !ok {
		return t.failAfterDeath(ctx, d)
	}
	facts, err := t.closedBlocks(ctx)
	if err != nil {
		return err
	}
	failed := events.AttemptFailed{
		Attempt: t.l.Run.Dying(), Attempts: t.maxAttempts(d.code), Code: d.code, Message: d.message, WaitMs: uint32(wait.Milliseconds()), //nolint:gosec // five minutes at most
	}
	list := t.newEvents(facts)
	meta := t.w.runlog.Meta()
	if d.n > 0 { // an event that is recorded again for the same line has the same id
		meta.CommandID = events.Derive(events.KindCommand, d.journal, strconv.FormatUint(d.n, 10))
	}
	m := events.NewMint(meta)
	m.Add(t.execution, failed)
	last := m.Events()[0]
	last.N = d.n
	if err := t.append(ctx, append(list, last)); err != nil {
		return err
	}
	t.log.Warn("an attempt died; another one follows", "attempt", failed.Attempt, "of", failed.Attempts, "code", d.code, "message", d.message, "wait", wait)
	if wait > 0 {
		return t.w.checkDue(t.l)
	}
	return nil
}

// checkDue returns the delay of the job of an execution whose next attempt is not due yet; nil for any other. The delay is short, since the
// execution may be cancelled.
func (w *Worker) checkDue(l eventlog.Loaded) error {
	r := l.Run
	if r.Over() || l.Life.ControlOf(r.Execution).N > 0 {
		return nil
	}
	wait := r.NotBefore.Sub(w.deps.Now())
	if wait <= 0 {
		return nil
	}
	return bus.Later(fmt.Errorf("%s of %s: %w", r.Execution, l.ID, errNotDue), min(wait, heldDelay))
}

// closedBlocks returns the completion of each open block, with the content that is known.
func (t *turn) closedBlocks(ctx context.Context) ([]events.Payload, error) {
	known, err := t.openBlocks(ctx, nil)
	if err != nil {
		return nil, err
	}
	var facts []events.Payload
	for _, open := range t.l.Run.Open {
		b, ok := known[open.ID]
		if !ok {
			b = events.Block{ID: open.ID, Kind: events.KindError, Time: t.w.deps.Now().UTC(), ConversationID: events.MainConversation}
		}
		b.Status = events.StatusError
		facts = append(facts, events.BlockComplete{Block: b})
	}
	return facts, nil
}

// failAfterDeath fails an execution after its last attempt, and ends its sandbox if that was lost.
func (t *turn) failAfterDeath(ctx context.Context, d death) error {
	failed := events.ExecutionFailed{Code: d.code, Message: d.message + t.attemptSuffix(d.code)}
	end := run.End{Meta: t.w.runlog.Meta(), N: d.n, Outcome: failed}
	if d.code != codeSandboxLost {
		return t.end(ctx, end)
	}
	sb := t.l.Run.Sandbox
	here := sb.Engine == t.w.cfg.Engine // else its engine is gone, and its sweep ends the sandbox should it come back
	t.detach()
	if here {
		if err := t.w.sandboxes.Terminate(ctx, sb.ID, false); err != nil {
			t.log.Error("a lost sandbox could not be ended; the sweep will try again", "sandbox", sb.ID, "error", err)
			end.Outcome = failed.NotStopped(err)
		}
	}
	end.With = t.newEvents([]events.Payload{events.SandboxTerminated{SandboxID: sb.ID, Reason: "unhealthy", Kept: here}})
	return t.end(ctx, end)
}

// attemptSuffix returns which attempt the last one was, for a message; "" if only one was allowed.
func (t *turn) attemptSuffix(code string) string {
	dying, of := t.l.Run.Dying(), t.maxAttempts(code)
	switch {
	case of <= 1:
		return ""
	case dying < of:
		return fmt.Sprintf(" (attempt %d of %d; the next would begin after the execution's time limit)", dying, of)
	}
	return fmt.Sprintf(" (attempt %d of %d)", dying, of)
}
