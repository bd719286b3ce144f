package peer

import (
	"context"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/test/bench/system"
)

// viaSpool is a conversation with OpenCode through a session of Spool. It implements conversation.
type viaSpool struct {
	sys    *system.System
	client *system.Client
	socket *system.Socket
	id     string
}

func startSpool(ctx context.Context, sys *system.System) (conversation, error) {
	c := &viaSpool{sys: sys, client: system.NewClient(sys.URL)}
	agent := bareagent.OpenCode()
	var err error
	if c.id, err = c.client.Create(ctx, system.SessionSpec{Architecture: agent.Architecture, Model: agent.Model}); err != nil {
		return nil, err
	}
	c.socket, err = c.client.Join(ctx, c.id)
	return c, err
}

// Turn implements conversation.
func (c *viaSpool) Turn(ctx context.Context, text string) (time.Duration, error) {
	t, err := c.client.TakeTurn(ctx, c.socket, c.id, text, nil)
	return t.Latency(), err
}

// Close implements conversation.
func (c *viaSpool) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), turnTimeout)
	defer cancel()
	defer c.socket.Close()
	return c.sys.End(ctx, c.id)
}
