package reactor

import (
	"context"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/topology"
)

// HandleDeadJob handles the dead letter of a job: it fails the execution for which the job was published. Without this,
// no other job would follow, and the execution and the messages behind it would wait for the turn limit.
func (r *Reactor) HandleDeadJob(ctx context.Context, msg *message.Message) error {
	if err := bus.RequireRouted(ctx); err != nil {
		return err
	}
	ref, err := topology.DecodeSessionRef(msg.Payload)
	if err != nil {
		// The letter stays in DEAD, where operators can read it.
		r.cfg.Logger.Error("a dead job names no session", "sequence", bus.Sequence(msg), "error", err)
		return nil
	}
	id := msg.Metadata.Get(topology.HeaderDeadMessageID)
	reason := msg.Metadata.Get(topology.HeaderDeadReason)
	return bus.Transient(eventlog.RetryOnConflict(func() error {
		l, err := r.cfg.Sessions.Load(ctx, ref.Tenant, ref.Session, eventlog.LeaderOnly)
		if err != nil || l.DueWork() != run.ExecuteTurn || !isJobOfActiveExecution(l, id) {
			return err
		}
		return r.endActiveExecution(ctx, l, events.ExecutionFailed{Code: "JOB_DEAD", Message: "the execution's job was given up: " + reason}, r.cfg.Now())
	}))
}

// isJobOfActiveExecution reports whether the job with a message id was published for the session's active execution.
func isJobOfActiveExecution(l *eventlog.SessionState, id string) bool {
	active := l.Life.Active
	for _, cause := range []string{active.Dispatch, l.Life.Pause.Cause, l.Life.ControlOf(active.ExecutionID).Cause} {
		if cause != "" && strings.HasPrefix(id, cause) {
			return true
		}
	}
	return false
}
