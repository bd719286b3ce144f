package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// times are of one session.
type times struct{ began, posted, text time.Time }

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
	t.text, err = first(ctx, socket)
	return t, errors.Join(err, <-failed, b.sys.End(ctx, id))
}

// first reads to the turn's end and gives when the first text was there. A
// sandbox that is not the pool's, or an agent that was not started, is an error.
func first(ctx context.Context, socket *system.Socket) (text time.Time, err error) {
	pooled, warm := false, false
	for {
		w, at, err := socket.Next(ctx)
		if err != nil {
			return text, err
		}
		switch w.Type {
		case events.SandboxReady{}.EventType():
			var d events.SandboxReady
			if err := json.Unmarshal(w.Data, &d); err != nil {
				return text, err
			}
			pooled = d.Pooled
		case events.ExecutionStarted{}.EventType():
			var d events.ExecutionStarted
			if err := json.Unmarshal(w.Data, &d); err != nil {
				return text, err
			}
			warm = d.Warm
		}
		s, ok, err := system.TextOf(w)
		if err != nil {
			return text, err
		}
		if ok && s.Piece != "" && text.IsZero() {
			text = at
		}
		if !events.Terminal(w.Type) {
			continue
		}
		switch {
		case w.Type != (events.ExecutionCompleted{}).EventType() || text.IsZero():
			return text, fmt.Errorf("it ended with %s: %s", w.Type, w.Data)
		case !pooled || !warm:
			return text, fmt.Errorf("it missed the pool: sandbox from the pool %t, agent warm %t", pooled, warm)
		}
		return text, nil
	}
}
