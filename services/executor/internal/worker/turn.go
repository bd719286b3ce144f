package worker

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/admission"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/loops"
	"github.com/spoolhq/spool/services/executor/internal/metering"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/provision"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/retries"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// nextAttemptDelay is the delay after which the job is delivered again of an execution whose attempt died and that has no slot for the next
// attempt.
const nextAttemptDelay = 20 * time.Millisecond

// A turn runs one execution that this executor has claimed. It runs in the goroutine of the job's delivery.
type turn struct {
	*runlog.Execution
	w         *Worker
	claimedAt time.Time // when an executor first claimed the execution
	changed   <-chan struct{}
	slot      *admission.Slot
	meter     *metering.Meter

	agent      *agents.Agent // nil until attached
	attempt    uint32        // number of the attempt that runs or is next
	message    events.MessageAccepted
	translator *translate.Translator
	resolved   *references.Resolved // nil until resolve has returned
	loops      *loops.Detector      // nil until restoreLoops has returned
	answered   []string             // secret answers that a person gave in earlier attempts
	sockets    []string             // of the MCP servers in containers, in their order
}

// newTurn returns a turn for the active execution of l, which this executor has claimed.
func newTurn(w *Worker, l *eventlog.SessionState, b *handling.Session) *turn {
	x := w.runlog.Execution(l, w.deps.Logger)
	return &turn{Execution: x, meter: metering.New(w.proxy, w.deps.Budgets, x), w: w, claimedAt: l.Run.ClaimedAt, changed: b.Changed()}
}

// runAttempts runs attempts of the execution until the execution has ended, and then returns nil. Other errors leave the execution to
// another delivery or executor: errPaused, permits.ErrStopping, permits.ErrNoPermit, run.ErrFenced, the wait for the next attempt, and
// errors of the log.
func (t *turn) runAttempts(ctx context.Context) (err error) {
	defer func() { t.releaseAgent(err) }()
	defer func() {
		// A claim does not count as failed because this executor stops or has no slot.
		if errors.Is(err, permits.ErrStopping) || errors.Is(err, permits.ErrNoPermit) || err != nil && ctx.Err() != nil {
			t.recordHandedOver(ctx)
		}
	}()
	if t.Session.Run.HasTooManyClaims() {
		return t.stopAndFail(ctx, run.ClaimsExhaustedFailure())
	}
	if t.message, err = t.w.deps.Sessions.AcceptedMessage(ctx, t.Session, t.Session.Life.Active); err != nil {
		return err
	}
	if err := t.recordResumed(ctx); err != nil {
		return err
	}
	if err := t.resolveReferences(ctx); err != nil {
		var wrong *references.Error
		if errors.As(err, &wrong) {
			return t.stopAndFail(ctx, wrong.FailedEvent())
		}
		return err
	}
	if err := t.restoreLoops(ctx); err != nil {
		return err
	}
	if err := t.meter.UpdateLimits(ctx, t.Session.Life.Options.Budget); err != nil {
		return err
	}
	for {
		if c := t.Control(); c.N > 0 && (c.Kind == session.Terminate || t.Session.Run.Sandbox.Journal == "" || t.w.deps.Now().Before(t.Session.Run.NotBefore)) {
			return t.cancelExecution(ctx)
		}
		err := t.runAttempt(ctx)
		var died *attemptDeathError
		switch {
		case errors.As(err, &died):
		case errors.Is(err, agents.ErrLost):
			died = &attemptDeathError{attemptDeath{code: retries.CodeSandboxLost, message: err.Error()}}
			t.Log.Warn("the sandbox was lost in mid-execution", "sandbox", t.Session.Run.Sandbox.ID, "error", err)
		default:
			return err
		}
		if err := t.recordDeath(ctx, died.attemptDeath); err != nil || t.Session.Run.HasEnded(t.ID) {
			return err
		}
		if !t.slot.TryAcquire() {
			return bus.RetryAfter(permits.ErrNoPermit, nextAttemptDelay) // the attempt's death is recorded: the next attempt waits for a slot
		}
	}
}

// runAttempt starts an attempt of the execution, or follows one that already runs, and returns nil when the execution has ended. Another
// attempt may follow after an *attemptDeathError, and after an error that wraps agents.ErrLost because the sandbox is gone.
func (t *turn) runAttempt(ctx context.Context) error {
	err := t.attachSandbox(ctx)
	if err != nil {
		var wrong *references.Error
		if errors.As(err, &wrong) {
			return t.stopAndFail(ctx, wrong.FailedEvent())
		}
		if errors.Is(err, provision.ErrCancelled) {
			return t.cancelExecution(ctx)
		}
		var broken *provision.Error
		if errors.As(err, &broken) {
			failed := events.ExecutionFailed{Code: broken.Code(), Message: broken.Error()}
			if broken.Remains {
				return t.stopAndFail(ctx, failed)
			}
			return t.failExecution(ctx, failed, events.SandboxFailed{SandboxID: broken.SandboxID, Code: broken.Code(), Message: broken.Error()})
		}
		return err
	}
	if len(t.Session.Run.Approvals) > 0 {
		if err := t.ReloadLife(ctx); err != nil { // an earlier executor may have sent the runner decisions that a replica which lags does not have
			return err
		}
	}
	if t.Session.Run.DiedAttempts > 0 {
		if t.answered, err = t.secretAnswers(ctx); err != nil {
			return err
		}
	}
	if t.Control().N > 0 && !t.agent.MayBeRunning(t.ID, t.Session.Run.Sandbox.N) {
		return t.cancelExecution(ctx)
	}
	return t.followJournal(ctx)
}

// newQuery returns the query that starts the execution in the runner: the user's message, the agent's definition, and the values of its
// variables and secrets.
func (t *turn) newQuery() *runner.Query {
	content, parts := queryOf(t.message)
	launch := t.w.cfg.Agent(t.Session.Life.Architecture, t.Session.Life.Options)
	q := &runner.Query{
		SessionID: t.Session.ID, ExecutionID: t.ID, Attempt: t.attempt,
		Architecture: t.Session.Life.Architecture, Model: launch.Model, ModelSet: launch.Set,
		Content: content, Parts: parts,
		ExecutionPermissions: t.message.Permissions, Approved: t.Session.Run.Approved, Env: launch.Env, Command: launch.Command, Pace: t.w.cfg.Pace,
	}
	q.Resume, q.Fork = provision.ConversationToContinue(t.Session)
	q.ContinueAfterLoss = !provision.HasConversation(t.Session) ||
		cmp.Or(t.Session.Life.Options.OnConversationLoss, t.resolved.Definition.Conversation.OnLoss) == events.OnLossContinue
	t.resolved.AddToQuery(q, t.w.deps.Egress != nil, t.sockets)
	q.Redact = slices.Concat(q.Redact, t.answered)
	if t.resolved.InspectsRequests {
		q.Authority = t.meter.AuthorityCertificate()
	}
	return q
}
