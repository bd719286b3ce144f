package budget

import (
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// CodeExceeded is the code of an execution that fails because a budget is used up.
const CodeExceeded = "BUDGET_EXCEEDED"

// CheckStart returns the terminal event of a session's next execution if a budget of the session or its tenant t, or the
// tenant's limit of events, is used up. It returns nil if the execution may start.
func CheckStart(l *eventlog.SessionState, t Tenant, now time.Time) *events.ExecutionFailed {
	if why := l.Life.Options.Budget.ExceededLimit(l.Run.SessionUsage(), "the session"); why != "" {
		return &events.ExecutionFailed{Code: CodeExceeded, Message: why}
	}
	if why := t.ExceededBudget(l.Tenant, now); why != "" {
		return &events.ExecutionFailed{Code: CodeExceeded, Message: why}
	}
	if why := t.ExceededEventLimit(l.Tenant, now); why != "" {
		return &events.ExecutionFailed{Code: events.CodeTenantEvents, Message: why}
	}
	return nil
}
