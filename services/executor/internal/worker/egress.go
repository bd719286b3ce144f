package worker

import (
	"context"

	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// register registers the turn's sandbox at the egress proxy. It waits for an unavailable proxy.
func (t *turn) register(ctx context.Context) error {
	err := t.w.sandboxes.Retry(ctx, t.agent.Sandbox, func() error { return t.meter.Register(ctx, t.agent.Sandbox) })
	if sandboxes.Unavailable(err) {
		return &sandboxError{id: t.agent.Sandbox, err: err, remains: true}
	}
	return err
}
