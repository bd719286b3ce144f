package worker

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
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

// skillLoader is a provider whose sandboxes do not share a folder of skills.
type skillLoader interface {
	// Stock copies skills, which Skills has provided, into a sandbox. The error wraps sandbox.ErrNotFound if the sandbox is gone.
	Stock(ctx context.Context, id string, digests []string) error
}

// loadSkills makes sure that the turn's sandbox has its skills.
func (t *turn) loadSkills(ctx context.Context) error {
	loader, ok := t.w.deps.Sandbox.(skillLoader)
	if !ok || t.resolved == nil {
		return nil
	}
	digests := t.resolved.SkillDigests()
	if len(digests) == 0 {
		return nil
	}
	err := t.w.sandboxes.Retry(ctx, t.agent.Sandbox, func() error { return loader.Stock(ctx, t.agent.Sandbox, digests) })
	if errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("%w: %w", agents.ErrLost, err)
	}
	return err
}
