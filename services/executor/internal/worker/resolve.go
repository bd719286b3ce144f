package worker

import (
	"context"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

// resolve resolves what the execution refers to, and stores the result unless the log has it. A *references.Error means that the
// execution cannot start.
func (t *turn) resolve(ctx context.Context) error {
	r, err := t.w.references.Resolve(ctx, references.Execution{
		ID: t.ID, Session: t.Session, Message: t.message,
		Report: func(ctx context.Context, e events.Error) error { return t.AppendFacts(ctx, e) },
	})
	if err != nil {
		return err
	}
	t.resolved = r
	t.meter.SetResolved(r)
	if t.Session.Run.Resolved.Known || r.IsEmpty() {
		return nil
	}
	return t.AppendFacts(ctx, r.ExecutionResolved)
}
