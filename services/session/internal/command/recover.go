package command

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// recoverBuilder returns the builder of TypeRecover.
func (h *Handler) recoverBuilder(ctx context.Context, c command.Command) (builder, error) {
	var b command.Recover
	if err := decode(c, &b); err != nil {
		return nil, err
	}
	if err := events.CheckID("executionId", events.KindExecution, b.ExecutionID); err != nil {
		return nil, invalid("executionId", err.Error())
	}
	return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
		r := session.RecoverExecution{CommandBase: base, ExecutionID: c.ExecutionID, Failed: b.ExecutionID, Environment: b.Environment, Run: l.RunView()}
		if l.Life.Status != session.Open || l.Life.Active.ExecutionID != b.ExecutionID || !r.Run.ActiveFailed {
			return r, nil // it is refused without the message, which may have been erased
		}
		var err error
		r.Message, err = h.cfg.Sessions.AcceptedMessage(ctx, l, l.Life.Active)
		return r, err
	}, checkEnvironment(b.Environment)
}
