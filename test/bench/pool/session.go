package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/bare"
	"github.com/spoolhq/spool/test/bench/system"
)

// times are of one session.
type times struct {
	began, posted        time.Time
	ready, started, text time.Time // seen on the WebSocket: the sandbox, the agent at work, the first text
}

// session makes a session, takes its first turn and deletes it.
func (b *bench) session(ctx context.Context, n int) (t times, err error) {
	if err := b.full(ctx); err != nil {
		return t, err
	}
	ctx, cancel := context.WithTimeout(ctx, turnWithin)
	defer cancel()
	client := system.NewClient(b.sys.URL)
	defer client.HTTP.CloseIdleConnections()
	t.began = time.Now()
	id, err := client.Create(ctx, architecture)
	if err != nil {
		return t, err
	}
	socket, err := client.Join(ctx, id)
	if err != nil {
		return t, err
	}
	defer socket.Close()
	failed := make(chan error, 1)
	t.posted = time.Now()
	go func() {
		// The text may come before the answer of REST does.
		_, err := client.Post(ctx, id, fmt.Sprint("number ", n))
		failed <- err
	}()
	err = t.follow(ctx, socket)
	return t, errors.Join(err, <-failed, b.sys.End(ctx, id))
}

// follow reads to the turn's end. A sandbox that is not the pool's, or an agent
// that was not started before, is an error.
func (t *times) follow(ctx context.Context, socket *system.Socket) error {
	var sandbox events.SandboxReady
	var agent events.ExecutionStarted
	for {
		w, at, err := socket.Next(ctx)
		if err != nil {
			return err
		}
		switch w.Type {
		case sandbox.EventType():
			t.ready, err = at, json.Unmarshal(w.Data, &sandbox)
		case agent.EventType():
			t.started, err = at, json.Unmarshal(w.Data, &agent)
		}
		if err != nil {
			return err
		}
		s, ok, err := system.TextOf(w)
		if err != nil {
			return err
		}
		if ok && s.Piece != "" && t.text.IsZero() {
			t.text = at
		}
		switch {
		case !events.Terminal(w.Type):
		case w.Type != (events.ExecutionCompleted{}).EventType() || t.text.IsZero():
			return fmt.Errorf("it ended with %s: %s", w.Type, w.Data)
		case !sandbox.Pooled || !agent.Warm:
			return fmt.Errorf("it missed the pool: sandbox from the pool %t, agent warm %t", sandbox.Pooled, agent.Warm)
		default:
			return nil
		}
	}
}

// plain is the first turn of a Claude Code that has just shaken hands, without Spool.
func (b *bench) plain(ctx context.Context, n int) (time.Duration, error) {
	if err := b.full(ctx); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, turnWithin)
	defer cancel()
	agent, err := bare.Claude(b.claude, filepath.Join(b.dir, fmt.Sprint("bare-", n)), b.url)
	if err != nil {
		return 0, err
	}
	d, err := agent.Turn(ctx, fmt.Sprint("number ", n))
	return d, errors.Join(err, agent.Close())
}
