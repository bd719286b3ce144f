package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// The codes of executions whose MCP servers cannot run as the agent wants them.
const (
	codeUnsupported = "MCP_SERVER_UNSUPPORTED"
	codeExposed     = "SECRET_EXPOSED"
)

// container is an MCP server that runs in a container of its own.
type container struct {
	events.MCPServer
	field string // of the definition
}

// containers are those of an agent, in its order.
func (r *resolution) containers() []container {
	var out []container
	for i, m := range r.agent.MCPServers {
		if m.Type == events.MCPDocker {
			out = append(out, container{m, fmt.Sprintf("mcpServers[%d]", i)})
		}
	}
	return out
}

// mayServe refuses servers in containers that this provider has not, and secrets
// in their arguments, which every process can read. Nothing is filled in yet.
func (t *turn) mayServe(r *resolution) error {
	for _, c := range r.containers() {
		if _, ok := t.w.d.Sandbox.(sandbox.Companion); !ok {
			return &unresolved{codeUnsupported, fmt.Errorf("%s.type: docker MCP servers need provider docker, and this session's is %s: server %s", c.field, t.w.cfg.Provider, c.Name)}
		}
		for i, arg := range c.Command {
			for _, name := range layers.Placeholders(arg) {
				if r.secret(name) {
					return &unresolved{codeExposed, fmt.Errorf("%s.command[%d]: variable %s is a secret, and every process can read arguments: give it to server %s in env", c.field, i, name, c.Name)}
				}
			}
		}
	}
	return nil
}

// secret tells whether a variable is one.
func (r *resolution) secret(name string) bool {
	return slices.ContainsFunc(r.Variables, func(v events.Provenance) bool { return v.Secret && v.Name == name })
}

// serve makes sure that the turn's MCP servers in containers run beside its sandbox.
func (t *turn) serve(ctx context.Context) error {
	all := t.resolution.containers()
	companion, ok := t.w.d.Sandbox.(sandbox.Companion)
	if len(all) == 0 || !ok {
		return nil
	}
	sockets, errs := make([]string, len(all)), make([]error, len(all))
	var group errgroup.Group
	for n, c := range all {
		group.Go(func() error {
			errs[n] = t.w.patiently(ctx, t.agent.sandbox, func() (err error) {
				sockets[n], err = companion.Serve(ctx, t.agent.sandbox, n, sandbox.Server{Image: c.Image, Egress: len(t.l.Life.Options.Egress) > 0})
				return err
			})
			return nil
		})
	}
	_ = group.Wait() // each has its own error
	for n, c := range all {
		var typed *sandbox.Error
		switch err := errs[n]; {
		case err == nil:
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, sandbox.ErrNotFound):
			return fmt.Errorf("%w: %w", errLost, err)
		case errors.As(err, &typed):
			named := &sandbox.Error{Code: typed.Code, Message: fmt.Sprintf("%s.image: server %s: %s", c.field, c.Name, typed.Message), Err: err}
			return &sandboxError{id: t.agent.sandbox, err: named, stays: true}
		default:
			return fmt.Errorf("start MCP server %s beside sandbox %s: %w", c.Name, t.agent.sandbox, err)
		}
	}
	t.resolution.sockets = sockets
	return nil
}
