package command

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// recoverCommandBuilder returns the builder for a command of type TypeRecover, which continues a failed execution.
func (h *Handler) recoverCommandBuilder(ctx context.Context, c command.Command) (sessionCommandBuilder, error) {
	var b command.RecoverExecution
	if err := decodeBody(c, &b); err != nil {
		return nil, err
	}
	if err := events.CheckID("executionId", events.KindExecution, b.ExecutionID); err != nil {
		return nil, invalidFieldError("executionId", err.Error())
	}
	return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
		r := session.RecoverExecution{CommandBase: base, ExecutionID: c.ExecutionID, Failed: b.ExecutionID, Environment: b.Environment, Run: l.RunView()}
		if l.Life.Status != session.Open || l.Life.Active.ExecutionID != b.ExecutionID || !r.Run.ActiveFailed {
			return r, nil // it is refused without the message, which may have been erased
		}
		var err error
		r.Message, err = h.cfg.Sessions.AcceptedMessage(ctx, l, l.Life.Active)
		return r, err
	}, checkVariables(b.Environment)
}
