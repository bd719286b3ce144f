// Package jobs handles the jobs of sessions: it carries out all work that is due for a session that a job names.
package jobs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/admission"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// ExecutionRunner runs the executions of sessions.
type ExecutionRunner interface {
	// Execute runs the active execution of a session to its end or its pause. It returns an *admission.BudgetError if no executor has
	// claimed the execution and a budget does not allow its start.
	Execute(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error
}

// SandboxKeeper does the work in the sandbox of a session in which no execution runs.
type SandboxKeeper interface {
	// ReleaseSandbox takes a last snapshot of a session's sandbox and terminates it.
	ReleaseSandbox(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error
	// SyncWorkspace applies the requested file changes and takes a snapshot.
	SyncWorkspace(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error
}

// A Handler handles the jobs that the executor receives. Every field is required. It is safe for concurrent use.
type Handler struct {
	Executor string // id of this executor
	Sessions eventlog.Sessions
	Handling *handling.SessionSet
	Runs     *runlog.Writer
	Turns    ExecutionRunner
	Idle     SandboxKeeper
	Jobs     message.Publisher // of jobs that are for another engine; deduplicates by message id
	Logger   *slog.Logger
}

// Delays after which a job is delivered again.
const (
	heldSessionDelay = 2 * time.Second // another executor has the session
	handoverDelay    = time.Millisecond
	storeFullDelay   = 2 * time.Second // only the reserve of the store of NATS is left
)

// maxSessionLoads is the maximum number of times that the handler of one delivered job loads the session.
const maxSessionLoads = 64

// errHandledElsewhere is returned for a job whose session another delivery is handling.
var errHandledElsewhere = errors.New("another delivery handles the session")

// Handle carries out all work that is due for the session that a job names. It is a handler of package bus: an error makes
// the bus deliver the job again.
func (h *Handler) Handle(ctx context.Context, msg *message.Message) error {
	if err := bus.RequireRouted(ctx); err != nil {
		return err
	}
	ref, err := topology.DecodeSessionRef(msg.Payload)
	if err != nil {
		return bus.Poison(fmt.Errorf("job: %w", err))
	}
	b, waiter := h.Handling.BeginHandling(ref.Session, bus.Sequence(msg))
	if waiter != nil {
		return awaitHandling(ctx, waiter)
	}
	defer h.Handling.AbandonHandling(ref.Session, b)
	for {
		err := h.handleSession(ctx, ref, b)
		switch {
		case h.Handling.FinishHandling(ref.Session, b, err == nil):
			return h.moveJob(ctx, msg, jobResult(err))
		case isDraining(ctx):
			return bus.RetryAfter(permits.ErrStopping, handoverDelay)
		}
	}
}

// awaitHandling blocks until the handling of the job's session by another delivery has ended. It returns nil if the waiting
// job can be acknowledged, else an error that makes the bus deliver the job again.
func awaitHandling(ctx context.Context, w *handling.WaitingJob) error {
	select {
	case <-w.Done():
	default:
		bus.ReleaseSlot(ctx)
	}
	select {
	case <-w.Done():
	case <-bus.Draining(ctx):
	case <-ctx.Done():
	}
	switch {
	case isDraining(ctx):
		return bus.RetryAfter(permits.ErrStopping, handoverDelay)
	case w.CanAcknowledge():
		return nil
	}
	return bus.RetryAfter(errHandledElsewhere, heldSessionDelay)
}

// handleSession loads a session and carries out the work that is due, until nothing more is due.
func (h *Handler) handleSession(ctx context.Context, ref topology.SessionRef, b *handling.Session) error {
	fresh := eventlog.AnyReplica
	for range maxSessionLoads {
		l, err := h.Sessions.Load(ctx, ref.Tenant, ref.Session, fresh)
		if err != nil {
			return err
		}
		switch l.DueWork() {
		case run.ExecuteTurn:
			err = h.Turns.Execute(ctx, l, b)
			var exceeded *admission.BudgetError
			if errors.As(err, &exceeded) {
				h.Logger.Info("an execution is ended before its claim", "session", l.ID, "execution", l.Life.Active.ExecutionID, "reason", exceeded)
				err = h.endUnclaimed(ctx, l, exceeded.Failed)
			}
		case run.EndUnstarted:
			err = h.endUnclaimed(ctx, l, events.ExecutionCancelled{Reason: l.Life.ControlOf(l.Life.Active.ExecutionID).Reason})
		case run.ReleaseSandbox:
			err = h.Idle.ReleaseSandbox(ctx, l, b)
		case run.SyncWorkspace:
			err = h.Idle.SyncWorkspace(ctx, l, b)
		default:
			if fresh == eventlog.LeaderOnly {
				return nil
			}
		}
		// Only the leader knows that nothing is due.
		fresh = eventlog.LeaderOnly
		if err != nil && !errors.Is(err, runlog.ErrChanged) {
			return err
		}
		if isDraining(ctx) {
			return bus.RetryAfter(permits.ErrStopping, handoverDelay)
		}
	}
	return bus.RetryAfter(runlog.ErrChanged, heldSessionDelay)
}

// jobResult returns the error of a job's handling with the delay after which the bus is to deliver the job again. It returns
// nil for nil.
func jobResult(err error) error {
	switch {
	case errors.Is(err, permits.ErrStopping):
		return bus.RetryAfter(err, handoverDelay)
	case isStoreFull(err):
		return bus.RetryAfter(err, storeFullDelay)
	case errors.Is(err, run.ErrFenced), sandboxes.IsUnavailable(err):
		return bus.RetryAfter(err, heldSessionDelay)
	}
	return err
}

// isDraining reports whether the executor is stopping.
func isDraining(ctx context.Context) bool {
	select {
	case <-bus.Draining(ctx):
		return true
	default:
		return ctx.Err() != nil
	}
}

// endUnclaimed appends the terminal event outcome of the active execution, which no executor has claimed.
func (h *Handler) endUnclaimed(ctx context.Context, l *eventlog.SessionState, outcome events.Payload) error {
	d, err := h.Runs.Decide(l.Run, run.AbandonExecution{
		CommandMeta: h.Runs.NewMeta(), ExecutionID: l.Life.Active.ExecutionID, Turn: l.Life.Active.Turn, By: h.Executor, Outcome: outcome,
	})
	if err != nil {
		return runlog.ErrChanged
	}
	return h.Runs.AppendDecision(ctx, l, d)
}

// moveJob handles the result of a job whose sandbox is on another engine: it publishes the job to the executors of that
// engine and returns nil, so that the job is acknowledged here. If the job were returned to the queue, only executors of
// this engine would receive it. moveJob returns any other result unchanged.
func (h *Handler) moveJob(ctx context.Context, msg *message.Message, result error) error {
	var away *idle.OtherEngineError
	if !errors.As(result, &away) {
		return result
	}
	to := topology.EngineJobSubject(away.Sandbox.Provider, away.Sandbox.Engine)
	if bus.Subject(msg) == to {
		return result // its executors come back, or the engine is soon considered gone
	}
	// The id is derived from the message, so that it is published once, however often it is delivered.
	id := fmt.Sprintf("moved-%s-%d", bus.Stream(msg), bus.Sequence(msg))
	if err := h.Jobs.Publish(to, bus.NewMessage(ctx, id, msg.Payload)); err != nil {
		h.Logger.Warn("a job could not be moved to the engine of its sandbox; it is returned", "engine", away.Sandbox.Engine, "error", err)
		return result
	}
	return nil
}

// isStoreFull reports whether an error means that only the reserve of the NATS store is left.
func isStoreFull(err error) bool {
	var reserved *storage.ReservedError
	return errors.As(err, &reserved)
}
