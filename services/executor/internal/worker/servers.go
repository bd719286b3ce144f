package worker

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
)

// startServers makes sure that the MCP servers in containers run next to the turn's sandbox.
func (t *turn) startServers(ctx context.Context) error {
	all := t.resolved.Containers()
	companion, ok := t.w.deps.Sandbox.(sandbox.Companion)
	if len(all) == 0 || !ok {
		return nil
	}
	sockets, errs := make([]string, len(all)), make([]error, len(all))
	var group errgroup.Group
	for n, c := range all {
		group.Go(func() error {
			errs[n] = t.w.sandboxes.Retry(ctx, t.agent.Sandbox, func() (err error) {
				sockets[n], err = companion.Serve(ctx, t.agent.Sandbox, n, sandbox.Server{Image: c.Image, Egress: len(t.Session.Life.Options.Egress) > 0})
				return err
			})
			return nil
		})
	}
	_ = group.Wait() // errs has the errors
	for n, c := range all {
		var typed *sandbox.Error
		switch err := errs[n]; {
		case err == nil:
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, sandbox.ErrNotFound):
			return fmt.Errorf("%w: %w", agents.ErrLost, err)
		case errors.As(err, &typed):
			named := &sandbox.Error{Code: typed.Code, Message: fmt.Sprintf("%s.image: server %s: %s", c.Field, c.Name, typed.Message), Err: err}
			return &sandboxError{id: t.agent.Sandbox, err: named, remains: true}
		default:
			return fmt.Errorf("start MCP server %s beside sandbox %s: %w", c.Name, t.agent.Sandbox, err)
		}
	}
	t.sockets = sockets
	return nil
}
