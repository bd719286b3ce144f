package reads

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// A Wait is what the read models contain about the wait of an execution that has not ended. Texts and times are zero for
// none.
type Wait struct {
	Provider                       string // of the session
	SandboxProvider, SandboxEngine string // of the session's sandbox
	ActiveExecution, ActivePhase   string // of the session
	Approval                       string // id of the execution's oldest approval request that nobody has decided
	ApprovalRequestedAt            time.Time
	PausedAt                       time.Time // of a paused execution
}

// ExecutionWait returns what the read models contain about the wait of a tenant's execution, and the zero Wait if they do not
// contain the execution.
func (s *Store) ExecutionWait(ctx context.Context, tenant, execution string) (Wait, error) {
	r, err := s.queries.ExecutionWait(ctx, tenant, execution)
	if errors.Is(err, pgx.ErrNoRows) {
		return Wait{}, nil
	}
	if err != nil {
		return Wait{}, err
	}
	w := Wait{
		Provider: r.Provider, SandboxProvider: r.SandboxProvider, SandboxEngine: r.SandboxEngine, ActiveExecution: r.ActiveExecution, ActivePhase: r.ActivePhase,
		Approval: r.Approval, ApprovalRequestedAt: r.ApprovalRequestedAt,
	}
	if r.PausedAt != "" {
		if w.PausedAt, err = time.Parse(time.RFC3339Nano, r.PausedAt); err != nil {
			return Wait{}, errUnreadableEvent(fmt.Errorf("time of execution_paused: %w", err))
		}
	}
	return w, nil
}
