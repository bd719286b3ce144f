package natstest

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// writeTimeout is the time for which WriteStreams waits for the acknowledgement of one message.
	writeTimeout = 500 * time.Millisecond
	// RecoveryTimeout is the time within which streams must accept messages again after the disk of NATS had no space.
	RecoveryTimeout = 30 * time.Second
)

// StreamWriter publishes messages to each stream of an installation, and counts those that NATS acknowledged.
type StreamWriter struct {
	js       jetstream.JetStream
	subjects map[string]string // by stream
	acked    map[string]uint64 // last acknowledged sequence by stream
}

// NewStreamWriter provisions the streams of an installation.
func NewStreamWriter(t testing.TB, js jetstream.JetStream) *StreamWriter {
	t.Helper()
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	w := &StreamWriter{js: js, subjects: map[string]string{}, acked: map[string]uint64{}}
	list := js.ListStreams(t.Context())
	for info := range list.Info() {
		w.subjects[info.Config.Name] = strings.NewReplacer("*", "x", ">", "x").Replace(info.Config.Subjects[0])
	}
	if err := list.Err(); err != nil {
		t.Fatal(err)
	}
	return w
}

// Write publishes a message to each stream, in the order of their names, and returns the streams that did not acknowledge it.
// NATS acknowledges text in flight before it writes it; in a fixed order it has written it before the next call gets there.
func (w *StreamWriter) Write(t testing.TB) (failed []string) {
	t.Helper()
	for _, stream := range slices.Sorted(maps.Keys(w.subjects)) {
		ctx, cancel := context.WithTimeout(t.Context(), writeTimeout)
		ack, err := w.js.Publish(ctx, w.subjects[stream], make([]byte, 64<<10))
		cancel()
		if err != nil {
			failed = append(failed, stream)
			continue
		}
		w.acked[stream] = ack.Sequence
	}
	return failed
}

// Streams returns the number of streams.
func (w *StreamWriter) Streams() int { return len(w.subjects) }

// AwaitWritable writes to all streams until each has acknowledged a message. It fails the test after RecoveryTimeout.
func (w *StreamWriter) AwaitWritable(t testing.TB) {
	t.Helper()
	for began := time.Now(); ; {
		failed := w.Write(t)
		if len(failed) == 0 {
			t.Logf("all streams accept messages again after %s", time.Since(began).Round(100*time.Millisecond))
			return
		}
		if time.Since(began) > RecoveryTimeout {
			t.Fatalf("%s after the disk has space, %q do not accept messages", RecoveryTimeout, failed)
		}
	}
}

// CheckAcknowledged checks that no stream has lost an acknowledged message. The stream of text in flight may: NATS
// writes it after the acknowledgement.
func (w *StreamWriter) CheckAcknowledged(t testing.TB) {
	t.Helper()
	for stream, last := range w.acked {
		s, err := w.js.Stream(t.Context(), stream)
		if err != nil {
			t.Fatal(err)
		}
		if state := s.CachedInfo().State; stream != topology.StreamDeltas && state.LastSeq < last {
			t.Errorf("%s ends at %d, but has acknowledged %d", stream, state.LastSeq, last)
		}
		if _, err := s.GetMsg(t.Context(), last); err != nil && stream != topology.StreamDeltas {
			t.Errorf("%s: message %d was acknowledged: %v", stream, last, err)
		}
	}
}
