package bus_test

import (
	"context"
	"errors"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
)

// TestStreamHandle_KeepsTheHandleThatItFetched tests that a handle is kept after the first success, and that a
// failure is not kept.
func TestStreamHandle_KeepsTheHandleThatItFetched(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	s := bus.NewStreamHandle(b.js, "LATE")
	if _, err := s.Open(t.Context()); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("Open without a stream: %v", err)
	}
	if _, err := b.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "LATE", Subjects: []string{"late.>"}}); err != nil {
		t.Fatal(err)
	}
	first, err := s.Open(t.Context())
	if err != nil || first.CachedInfo().Config.Name != "LATE" {
		t.Fatalf("%v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if again, err := s.Open(ended); err != nil || again != first { // a kept handle needs no round trip
		t.Errorf("second Open: %v", err)
	}
}
