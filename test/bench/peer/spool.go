package peer

import (
	"context"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/test/bench/system"
)

// spoolConversation is a conversation with OpenCode through a session of Spool. It implements conversation.
type spoolConversation struct {
	sys    *system.System
	client *system.Client
	socket *system.SessionSocket
	id     string
}

// startSpoolConversation creates a session with OpenCode in the running system sys.
func startSpoolConversation(ctx context.Context, sys *system.System) (conversation, error) {
	c := &spoolConversation{sys: sys, client: system.NewClient(sys.URL)}
	agent := bareagent.OpenCode()
	var err error
	if c.id, err = c.client.CreateSession(ctx, system.SessionSpec{Architecture: agent.Architecture, Model: agent.Model}); err != nil {
		return nil, err
	}
	c.socket, err = c.client.JoinSession(ctx, c.id)
	return c, err
}

// Turn posts text as a message and returns the time to the first text of the answer, after the end of the turn. It
// implements conversation.
func (c *spoolConversation) Turn(ctx context.Context, text string) (time.Duration, error) {
	t, err := c.client.TakeTurn(ctx, c.socket, c.id, text, nil)
	return t.Latency(), err
}

// Close ends the conversation. It implements conversation.
func (c *spoolConversation) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), turnTimeout)
	defer cancel()
	defer c.socket.Close()
	return c.sys.DeleteAndAwaitEnd(ctx, c.id)
}
