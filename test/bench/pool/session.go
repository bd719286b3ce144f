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

// sessionTimes holds the times at which one measured session reached each step of its first turn.
type sessionTimes struct {
	system.TurnTimes
	created        time.Time // the client began to create the session
	ready, started time.Time // the WebSocket received that the sandbox is ready, and that the agent works
}

// measureSession creates the n-th session, takes its first turn and deletes the session. It returns an error if the
// sandbox did not come from the warm pool, or if the agent had not been started before the turn.
func (t *testbed) measureSession(ctx context.Context, n int) (s sessionTimes, err error) {
	if err := t.awaitFullPool(ctx); err != nil {
		return s, err
	}
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	client := system.NewClient(t.sys.URL)
	defer client.HTTP.CloseIdleConnections()
	s.created = time.Now()
	id, err := client.CreateSession(ctx, system.SessionSpec{Architecture: measuredArchitecture})
	if err != nil {
		return s, err
	}
	socket, err := client.JoinSession(ctx, id)
	if err != nil {
		return s, err
	}
	defer socket.Close()
	var sandbox events.SandboxReady
	var agent events.ExecutionStarted
	s.TurnTimes, err = client.TakeTurn(ctx, socket, id, fmt.Sprint("number ", n), func(w events.WireEvent, received time.Time) error {
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
	return s, errors.Join(err, t.sys.DeleteAndAwaitEnd(ctx, id))
}

// timeTurnWithoutSpool starts Claude Code without Spool, waits until its handshake is complete, and takes one turn. It
// returns the time from the message to the first text. n makes the name of its folder unique.
func (t *testbed) timeTurnWithoutSpool(ctx context.Context, n int) (time.Duration, error) {
	if err := t.awaitFullPool(ctx); err != nil {
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
