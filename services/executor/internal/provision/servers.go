package provision

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
)

// startServers starts the agent's MCP servers of type docker, each in a container next to the sandbox, and sets p.sockets to the paths
// of their sockets. It does not restart running servers. The error is an *Error if a server cannot be started, and wraps agents.ErrLost
// if the sandbox is gone.
func (p *sandboxPreparation) startServers(ctx context.Context) error {
	all := p.Resolved.Containers()
	host, ok := p.Provider.(sandbox.ServerHost)
	if len(all) == 0 || !ok {
		return nil
	}
	sockets, errs := make([]string, len(all)), make([]error, len(all))
	var group errgroup.Group
	for n, c := range all {
		group.Go(func() error {
			errs[n] = p.Sandboxes.RetryWhileUnavailable(ctx, p.agent.Sandbox, func() (err error) {
				sockets[n], err = host.StartServer(ctx, p.agent.Sandbox, n, sandbox.MCPServer{Image: c.Image, Egress: len(p.Session.Life.Options.Egress) > 0})
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
			return &Error{SandboxID: p.agent.Sandbox, Err: named, Remains: true}
		default:
			return fmt.Errorf("start MCP server %s beside sandbox %s: %w", c.Name, p.agent.Sandbox, err)
		}
	}
	p.sockets = sockets
	return nil
}
