package provision

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
)

// skillLoader is implemented by providers whose sandboxes share no folder of skills, so that skills are copied into each sandbox.
type skillLoader interface {
	// LoadSkills copies skills that were provided on the engine into a sandbox. The error wraps sandbox.ErrNotFound
	// if the sandbox does not exist.
	LoadSkills(ctx context.Context, id string, digests []string) error
}

// loadSkills copies the execution's skills into the sandbox, if the provider's sandboxes do not share a folder of skills. The error wraps
// agents.ErrLost if the sandbox is gone.
func (p *sandboxPreparation) loadSkills(ctx context.Context) error {
	loader, ok := p.Provider.(skillLoader)
	if !ok {
		return nil
	}
	digests := p.Resolved.SkillDigests()
	if len(digests) == 0 {
		return nil
	}
	err := p.Sandboxes.RetryWhileUnavailable(ctx, p.agent.Sandbox, func() error { return loader.LoadSkills(ctx, p.agent.Sandbox, digests) })
	if errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("%w: %w", agents.ErrLost, err)
	}
	return err
}
