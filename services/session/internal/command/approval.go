package command

import (
	"slices"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// approvalCommandBuilder returns the builder for a command of type TypeDecideApproval, a person's decision about an
// approval request.
func approvalCommandBuilder(c command.Command) (sessionCommandBuilder, error) {
	var b command.DecideApproval
	if err := decodeBody(c, &b); err != nil {
		return nil, err
	}
	if err := events.CheckID("approvalId", events.KindApproval, b.ApprovalID); err != nil {
		return nil, invalidFieldError("approvalId", err.Error())
	}
	return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
		d := session.DecideApproval{CommandBase: base, ApprovalDecided: b.ApprovalDecided, ExecutionID: c.ExecutionID}
		if l.Run.Execution != c.ExecutionID {
			return d, nil
		}
		i := slices.IndexFunc(l.Run.Approvals, func(a run.OpenApproval) bool { return a.ID == b.ApprovalID })
		if i >= 0 {
			a := l.Run.Approvals[i]
			d.Open = &session.OpenApproval{Kind: a.Kind, Class: a.Class, Editable: a.Editable}
		}
		return d, nil
	}, nil
}
