package bus

import (
	"context"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go/jetstream"
)

// StreamHandle opens a JetStream stream on first use and caches the handle, because fetching it is a round trip to
// the stream's leader. It is safe for concurrent use.
type StreamHandle struct {
	js   jetstream.JetStream
	name string

	mu     sync.Mutex
	handle jetstream.Stream // nil until Open has fetched it
}

// NewStreamHandle returns the StreamHandle of a stream. It sends no request.
func NewStreamHandle(js jetstream.JetStream, name string) *StreamHandle {
	return &StreamHandle{js: js, name: name}
}

// Open returns the handle of the stream. After a failure the next call requests the handle again.
func (s *StreamHandle) Open(ctx context.Context) (jetstream.Stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.handle != nil {
		return s.handle, nil
	}
	handle, err := s.js.Stream(ctx, s.name)
	if err != nil {
		return nil, fmt.Errorf("open stream %s: %w", s.name, err)
	}
	s.handle = handle
	return handle, nil
}
