package snapshot

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// session is a session of the built-in agent, in which the benchmark takes turns and snapshots.
type session struct {
	sys    *system.System
	client *system.Client
	socket *system.SessionSocket
	id     string
}

// newSession creates a session of the built-in agent in the running system sys, and joins it over a WebSocket.
func newSession(ctx context.Context, sys *system.System) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	s := &session{sys: sys, client: system.NewClient(sys.URL)}
	var err error
	if s.id, err = s.client.CreateSession(ctx, system.SessionSpec{Architecture: "spool", Model: "known-model"}); err != nil {
		return nil, err
	}
	s.socket, err = s.client.JoinSession(ctx, s.id)
	return s, err
}

// close deletes the session and blocks until its sandbox has ended.
func (s *session) close() error {
	defer s.socket.Close()
	ctx, cancel := context.WithTimeout(context.Background(), turnTimeout)
	defer cancel()
	return s.sys.DeleteAndAwaitEnd(ctx, s.id)
}

// takeTurn posts text as a message, blocks until the turn has ended, and returns the event of the snapshot at its end.
func (s *session) takeTurn(ctx context.Context, text string) (synced events.WorkspaceSynced, err error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	execution, err := s.client.PostMessage(ctx, s.id, text)
	if err != nil {
		return synced, err
	}
	for ended := false; ; {
		w, _, err := s.socket.Next(ctx)
		if err != nil {
			return synced, fmt.Errorf("waiting for the snapshot, turn ended %t: %w", ended, err)
		}
		if w.ExecutionID == execution && events.IsTerminal(w.Type) {
			if w.Type != (events.ExecutionCompleted{}).EventType() {
				return synced, fmt.Errorf("the turn ended with %s: %s", w.Type, w.Data)
			}
			ended = true
		}
		if ended && w.Type == synced.EventType() {
			err := decodeSnapshot(w, "turn", &synced)
			return synced, err
		}
	}
}

// requestSnapshot requests a snapshot of the workspace, blocks until it is stored, and returns its event.
func (s *session) requestSnapshot(ctx context.Context) (synced events.WorkspaceSynced, err error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	if err := s.client.RequestSnapshot(ctx, s.id); err != nil {
		return synced, err
	}
	for {
		w, _, err := s.socket.Next(ctx)
		if err != nil {
			return synced, fmt.Errorf("waiting for the requested snapshot: %w", err)
		}
		if w.Type == synced.EventType() {
			err := decodeSnapshot(w, "requested", &synced)
			return synced, err
		}
	}
}

// decodeSnapshot decodes the event of a snapshot. It returns an error if the snapshot was taken for another reason.
func decodeSnapshot(w events.WireEvent, reason string, into *events.WorkspaceSynced) error {
	if err := json.Unmarshal(w.Data, into); err != nil {
		return err
	}
	if into.Reason != reason {
		return fmt.Errorf("the reason of the snapshot is %s, want %s", into.Reason, reason)
	}
	return nil
}
