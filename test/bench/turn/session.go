package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// session talks to an agent through Spool.
type session struct {
	sys    *system.System
	client *system.Client
	socket *system.Socket
	id     string

	claimed, started []time.Duration // of all turns, the first one too: from the message posted
}

func newSession(ctx context.Context, sys *system.System, architecture, model string) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, turnPatience)
	defer cancel()
	s := &session{sys: sys, client: system.NewClient(sys.URL)}
	var err error
	if s.id, err = s.client.CreateWith(ctx, architecture, model); err != nil {
		return nil, err
	}
	s.socket, err = s.client.Join(ctx, s.id)
	return s, err
}

// Close deletes the session and waits until its sandbox has ended, so that its
// agent does not run beside the next one's.
func (s *session) Close() error {
	defer s.socket.Close()
	ctx, cancel := context.WithTimeout(context.Background(), turnPatience)
	defer cancel()
	return s.sys.End(ctx, s.id)
}

// Turn implements bare.Talker.
func (s *session) Turn(ctx context.Context, text string) (first time.Duration, err error) {
	type posted struct {
		execution string
		err       error
	}
	answer := make(chan posted, 1)
	began := time.Now()
	go func() {
		execution, err := s.client.Post(ctx, s.id, text)
		answer <- posted{execution, err}
	}()
	// The text may come before the answer of REST does.
	for {
		w, at, err := s.socket.Next(ctx)
		if err != nil {
			return 0, err
		}
		switch w.Type {
		case (events.ExecutionClaimed{}).EventType():
			s.claimed = append(s.claimed, at.Sub(began))
		case (events.ExecutionStarted{}).EventType():
			s.started = append(s.started, at.Sub(began))
		}
		t, ok, err := system.TextOf(w)
		if err != nil {
			return 0, err
		}
		if ok && t.Piece != "" && first == 0 {
			first = at.Sub(began)
		}
		if !events.Terminal(w.Type) {
			continue
		}
		p := <-answer
		if p.err != nil {
			return 0, p.err
		}
		if w.ExecutionID != p.execution || first == 0 || w.Type != (events.ExecutionCompleted{}).EventType() {
			return 0, fmt.Errorf("it ended with %s of %s: %s", w.Type, w.ExecutionID, w.Data)
		}
		return first, nil
	}
}
