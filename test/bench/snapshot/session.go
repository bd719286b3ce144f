package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// session is one of the built-in agent.
type session struct {
	sys    *system.System
	client *system.Client
	socket *system.Socket
	id     string
}

func newSession(ctx context.Context, sys *system.System) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, turnWithin)
	defer cancel()
	s := &session{sys: sys, client: system.NewClient(sys.URL)}
	var err error
	if s.id, err = s.client.CreateWith(ctx, "spool", "known-model"); err != nil {
		return nil, err
	}
	s.socket, err = s.client.Join(ctx, s.id)
	return s, err
}

func (s *session) close() error {
	defer s.socket.Close()
	ctx, cancel := context.WithTimeout(context.Background(), turnWithin)
	defer cancel()
	return s.sys.End(ctx, s.id)
}

// turn takes a turn and gives the snapshot at its end.
func (s *session) turn(ctx context.Context, text string) (synced events.WorkspaceSynced, err error) {
	ctx, cancel := context.WithTimeout(ctx, turnWithin)
	defer cancel()
	execution, err := s.client.Post(ctx, s.id, text)
	if err != nil {
		return synced, err
	}
	for over := false; ; {
		w, _, err := s.socket.Next(ctx)
		if err != nil {
			return synced, fmt.Errorf("waiting for the snapshot, turn over %t: %w", over, err)
		}
		if w.ExecutionID == execution && events.Terminal(w.Type) {
			if w.Type != (events.ExecutionCompleted{}).EventType() {
				return synced, fmt.Errorf("the turn ended with %s: %s", w.Type, w.Data)
			}
			over = true
		}
		if over && w.Type == synced.EventType() {
			err := read(w, "turn", &synced)
			return synced, err
		}
	}
}

// sync asks for a snapshot and gives it.
func (s *session) sync(ctx context.Context) (synced events.WorkspaceSynced, err error) {
	ctx, cancel := context.WithTimeout(ctx, turnWithin)
	defer cancel()
	if err := s.client.Sync(ctx, s.id); err != nil {
		return synced, err
	}
	for {
		w, _, err := s.socket.Next(ctx)
		if err != nil {
			return synced, fmt.Errorf("waiting for the snapshot that was asked for: %w", err)
		}
		if w.Type == synced.EventType() {
			err := read(w, "requested", &synced)
			return synced, err
		}
	}
}

// read decodes a snapshot's event, which must be of a reason.
func read(w events.Wire, reason string, into *events.WorkspaceSynced) error {
	if err := json.Unmarshal(w.Data, into); err != nil {
		return err
	}
	if into.Reason != reason {
		return fmt.Errorf("the snapshot was taken for %s, not for %s", into.Reason, reason)
	}
	return nil
}
