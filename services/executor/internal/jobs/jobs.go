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
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// Turns runs the executions of sessions.
type Turns interface {
	// Execute runs the active execution of a session to its end or its pause.
	Execute(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error
}

// Idle does the work in sandboxes of sessions in which no execution runs.
type Idle interface {
	// Release gives up the sandbox of a session.
	Release(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error
	// Sync applies file changes and takes a snapshot.
	Sync(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error
}

// A Handler handles jobs; every field is required. It is safe for concurrent use.
type Handler struct {
	Executor string // id of this executor
	Sessions eventlog.Sessions
	Handling *handling.Set
	Runs     *runlog.Writer
	Turns    Turns
	Idle     Idle
	Jobs     message.Publisher // of jobs that are for another engine; deduplicates by message id
	Logger   *slog.Logger
}

// Delays after which a job is delivered again.
const (
	heldDelay     = 2 * time.Second // another executor has the session
	handoverDelay = time.Millisecond
	reservedDelay = 2 * time.Second // only the reserve of the store of NATS is left
)

// maxPasses is the maximum number of times that the handler of one delivered job loads the session.
const maxPasses = 64

var errHandled = errors.New("another delivery handles the session")

// Handle carries out the work that is due for the session of a job. It is a handler of the bus.
func (h *Handler) Handle(ctx context.Context, msg *message.Message) error {
	if err := bus.RequireRouted(ctx); err != nil {
		return err
	}
	ref, err := topology.DecodeSessionRef(msg.Payload)
	if err != nil {
		return bus.Poison(fmt.Errorf("job: %w", err))
	}
	b, waiter := h.Handling.Begin(ref.Session, bus.Sequence(msg))
	if waiter != nil {
		return await(ctx, waiter)
	}
	defer h.Handling.Abandon(ref.Session, b)
	for {
		err := h.handleSession(ctx, ref, b)
		switch {
		case h.Handling.Finish(ref.Session, b, err == nil):
			return h.moveJob(ctx, msg, jobResult(err))
		case isDraining(ctx):
			return bus.RetryAfter(permits.ErrStopping, handoverDelay)
		}
	}
}

// await waits for the end of the delivery that handles the session, and returns nil if this one can be acknowledged.
func await(ctx context.Context, w *handling.Waiter) error {
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
	case w.Covered():
		return nil
	}
	return bus.RetryAfter(errHandled, heldDelay)
}

// handleSession carries out the work of a session until no more is due.
func (h *Handler) handleSession(ctx context.Context, ref topology.SessionRef, b *handling.Session) error {
	fresh := eventlog.AnyReplica
	for range maxPasses {
		l, err := h.Sessions.Load(ctx, ref.Tenant, ref.Session, fresh)
		if err != nil {
			return err
		}
		switch l.DueWork() {
		case run.ExecuteTurn:
			err = h.Turns.Execute(ctx, l, b)
		case run.EndUnstarted:
			err = h.refuse(ctx, l)
		case run.ReleaseSandbox:
			err = h.Idle.Release(ctx, l, b)
		case run.SyncWorkspace:
			err = h.Idle.Sync(ctx, l, b)
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
	return bus.RetryAfter(runlog.ErrChanged, heldDelay)
}

// jobResult returns the error with which the bus delivers a job again after the right delay. err is the error of the
// job's handling.
func jobResult(err error) error {
	switch {
	case errors.Is(err, permits.ErrStopping):
		return bus.RetryAfter(err, handoverDelay)
	case isStoreFull(err):
		return bus.RetryAfter(err, reservedDelay)
	case errors.Is(err, run.ErrFenced), sandboxes.Unavailable(err):
		return bus.RetryAfter(err, heldDelay)
	}
	return err
}

// isDraining reports whether the executor stops.
func isDraining(ctx context.Context) bool {
	select {
	case <-bus.Draining(ctx):
		return true
	default:
		return ctx.Err() != nil
	}
}

// refuse ends an execution that a control reached before any executor claimed it.
func (h *Handler) refuse(ctx context.Context, l *eventlog.SessionState) error {
	active := l.Life.Active.ExecutionID
	d, err := h.Runs.Decide(l.Run, run.AbandonExecution{
		CommandMeta: h.Runs.Meta(), ExecutionID: active, Turn: l.Life.Active.Turn, By: h.Executor,
		Outcome: events.ExecutionCancelled{Reason: l.Life.ControlOf(active).Reason},
	})
	if err != nil {
		return runlog.ErrChanged
	}
	return h.Runs.Append(ctx, l, d)
}

// moveJob handles the result of a job whose work only executors of another engine can do: it publishes the job for
// these executors and returns nil, so that the delivery is acknowledged here. It returns any other result unchanged.
// A job that is returned to the queue is delivered only to executors of its own subject, which may never reach the
// sandbox.
func (h *Handler) moveJob(ctx context.Context, msg *message.Message, result error) error {
	var away *idle.ElsewhereError
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

// isStoreFull reports whether an error means that only the reserve of the store of NATS is left.
func isStoreFull(err error) bool {
	var reserved *storage.ReservedError
	return errors.As(err, &reserved)
}
