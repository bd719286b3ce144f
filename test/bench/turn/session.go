package turn

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// session is a conversation with an agent through a session of Spool. It implements bareagent.Conversation.
type session struct {
	sys    *system.System
	client *system.Client
	socket *system.SessionSocket
	id     string

	claimed, started []time.Duration // of all turns, including the first: times from the POST of the message
}

// newSession creates a session in the running system sys, and joins it over a WebSocket.
func newSession(ctx context.Context, sys *system.System, spec system.SessionSpec) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	s := &session{sys: sys, client: system.NewClient(sys.URL)}
	var err error
	if s.id, err = s.client.CreateSession(ctx, spec); err != nil {
		return nil, err
	}
	s.socket, err = s.client.JoinSession(ctx, s.id)
	return s, err
}

// Close deletes the session and blocks until its sandbox has ended, so that its agent does not run during the next
// measurement.
func (s *session) Close() error {
	defer s.socket.Close()
	ctx, cancel := context.WithTimeout(context.Background(), turnTimeout)
	defer cancel()
	return s.sys.DeleteAndAwaitEnd(ctx, s.id)
}

// Turn posts text as a message and returns the time to the first text of the answer, after the end of the turn. It
// implements bareagent.Conversation.
func (s *session) Turn(ctx context.Context, text string) (time.Duration, error) {
	var claimed, started time.Time
	t, err := s.client.TakeTurn(ctx, s.socket, s.id, text, func(w events.WireEvent, received time.Time) error {
		switch w.Type {
		case (events.ExecutionClaimed{}).EventType():
			claimed = received
		case (events.ExecutionStarted{}).EventType():
			started = received
		}
		return nil
	})
	s.claimed, s.started = append(s.claimed, claimed.Sub(t.Posted)), append(s.started, started.Sub(t.Posted))
	return t.Latency(), err
}
