package snapshot

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// session is a session of the built-in agent, in which the benchmark runs commands and takes snapshots.
type session struct {
	sys    *system.System
	client *system.Client
	socket *system.Socket
	id     string
}

func newSession(ctx context.Context, sys *system.System) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	s := &session{sys: sys, client: system.NewClient(sys.URL)}
	var err error
	if s.id, err = s.client.Create(ctx, system.SessionSpec{Architecture: "spool", Model: "known-model"}); err != nil {
		return nil, err
	}
	s.socket, err = s.client.Join(ctx, s.id)
	return s, err
}

func (s *session) close() error {
	defer s.socket.Close()
	ctx, cancel := context.WithTimeout(context.Background(), turnTimeout)
	defer cancel()
	return s.sys.End(ctx, s.id)
}

// turn takes a turn and returns the snapshot at its end.
func (s *session) turn(ctx context.Context, text string) (synced events.WorkspaceSynced, err error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	execution, err := s.client.Post(ctx, s.id, text)
	if err != nil {
		return synced, err
	}
	for ended := false; ; {
		w, _, err := s.socket.Next(ctx)
		if err != nil {
			return synced, fmt.Errorf("waiting for the snapshot, turn ended %t: %w", ended, err)
		}
		if w.ExecutionID == execution && events.Terminal(w.Type) {
			if w.Type != (events.ExecutionCompleted{}).EventType() {
				return synced, fmt.Errorf("the turn ended with %s: %s", w.Type, w.Data)
			}
			ended = true
		}
		if ended && w.Type == synced.EventType() {
			err := read(w, "turn", &synced)
			return synced, err
		}
	}
}

// sync requests a snapshot and returns it.
func (s *session) sync(ctx context.Context) (synced events.WorkspaceSynced, err error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	if err := s.client.Sync(ctx, s.id); err != nil {
		return synced, err
	}
	for {
		w, _, err := s.socket.Next(ctx)
		if err != nil {
			return synced, fmt.Errorf("waiting for the requested snapshot: %w", err)
		}
		if w.Type == synced.EventType() {
			err := read(w, "requested", &synced)
			return synced, err
		}
	}
}

// read decodes the event of a snapshot. A snapshot for another reason is an error.
func read(w events.Wire, reason string, into *events.WorkspaceSynced) error {
	if err := json.Unmarshal(w.Data, into); err != nil {
		return err
	}
	if into.Reason != reason {
		return fmt.Errorf("the reason of the snapshot is %s, want %s", into.Reason, reason)
	}
	return nil
}
