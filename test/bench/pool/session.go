package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// times holds the times at which one session reached each step.
type times struct {
	system.Turn
	created        time.Time // the client began to create the session
	ready, started time.Time // the WebSocket received that the sandbox is ready, and that the agent works
}

// session creates a session, takes its first turn and deletes it. A sandbox that did not come from the pool, or an agent
// that was not started before the turn, is an error.
func (t *testbed) session(ctx context.Context, n int) (s times, err error) {
	if err := t.awaitFull(ctx); err != nil {
		return s, err
	}
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	client := system.NewClient(t.sys.URL)
	defer client.HTTP.CloseIdleConnections()
	s.created = time.Now()
	id, err := client.Create(ctx, system.SessionSpec{Architecture: architecture})
	if err != nil {
		return s, err
	}
	socket, err := client.Join(ctx, id)
	if err != nil {
		return s, err
	}
	defer socket.Close()
	var sandbox events.SandboxReady
	var agent events.ExecutionStarted
	s.Turn, err = client.TakeTurn(ctx, socket, id, fmt.Sprint("number ", n), func(w events.Wire, received time.Time) error {
		switch w.Type {
		case sandbox.EventType():
			s.ready = received
			return json.Unmarshal(w.Data, &sandbox)
		case agent.EventType():
			s.started = received
			return json.Unmarshal(w.Data, &agent)
		}
		return nil
	})
	if err == nil && (!sandbox.Pooled || !agent.Warm) {
		err = fmt.Errorf("the session missed the pool: sandbox from the pool %t, agent warm %t", sandbox.Pooled, agent.Warm)
	}
	return s, errors.Join(err, t.sys.End(ctx, id))
}

// bareTurn returns the time to the first text of a Claude Code without Spool that has just completed its handshake.
func (t *testbed) bareTurn(ctx context.Context, n int) (time.Duration, error) {
	if err := t.awaitFull(ctx); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	agent, err := bareagent.ClaudeCode().Warm(t.claude, filepath.Join(t.dir, fmt.Sprint("bare-", n)), t.url)
	if err != nil {
		return 0, err
	}
	d, err := agent.Turn(ctx, fmt.Sprint("number ", n))
	return d, errors.Join(err, agent.Close())
}
