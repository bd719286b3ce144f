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
	var b command.RecoverExecution
	if err := decode(c, &b); err != nil {
		return nil, err
	}
	if err := events.CheckID("executionId", events.KindExecution, b.ExecutionID); err != nil {
		return nil, invalid("executionId", err.Error())
	}
	return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
		r := session.Recover{Base: base, ExecutionID: c.ExecutionID, Failed: b.ExecutionID, Environment: b.Environment, Run: l.View()}
		if l.Life.Status != session.Open || l.Life.Active.ExecutionID != b.ExecutionID || !r.Run.ActiveFailed {
			return r, nil // it is refused without the message, which may have been erased
		}
		var err error
		r.Message, err = h.cfg.Sessions.Message(ctx, l, l.Life.Active)
		return r, err
	}, checkEnvironment(b.Environment)
}
