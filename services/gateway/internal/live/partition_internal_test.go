package live

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
)

// TestMissesFrames_ComparesNumbers tests which last frames of DELTAS show that a partition has not received all frames.
func TestMissesFrames_ComparesNumbers(t *testing.T) {
	t.Parallel()
	began := time.Now()
	h := NewHub(Config{})
	p := &partition{began: began, seen: map[string]uint64{"known": 7}}
	frame := func(executor string, number uint64, at time.Time) []deltas.Frame {
		return []deltas.Frame{{Executor: executor, Number: number, Time: at}}
	}
	for _, c := range []struct {
		name string
		last []deltas.Frame
		want bool
	}{
		{"the last received frame", frame("known", 7, began), false},
		{"a frame that was received after the question", frame("known", 6, began), false},
		{"a later frame", frame("known", 9, began), true},
		{"the same later frame, for which DELTAS was read", frame("known", 9, began), false},
		{"a frame from before the subscription", frame("gone", 100, began.Add(-time.Second)), false},
		{"a frame of an executor that was never heard", frame("new", 1, began.Add(time.Second)), true},
		{"nothing", nil, false},
	} {
		if got := h.recordMissedFrames(p, c.last); got != c.want {
			t.Errorf("%s: missesFrames = %v", c.name, got)
		}
	}
}

// TestHandleFrame_NoticesGapsInNumbers tests that only a gap in the numbers of an executor's frames counts as a loss.
func TestHandleFrame_NoticesGapsInNumbers(t *testing.T) {
	t.Parallel()
	lost := 0
	h := NewHub(Config{Metrics: Metrics{Reread: func(why string) {
		if why != "text-frame" {
			t.Errorf("DELTAS is read because of %q", why)
		}
		lost++
	}}})
	p := &partition{seen: map[string]uint64{}}
	for _, c := range []struct {
		executor string
		number   uint64
		want     int
	}{{"a", 5, 0}, {"a", 6, 0}, {"b", 1, 0}, {"a", 8, 1}, {"a", 9, 1}, {"a", 9, 1}, {"b", 2, 1}, {"b", 9, 2}} {
		h.handleFrame(p, &nats.Msg{Subject: events.FrameSubject(0, c.executor), Data: events.AppendFrameHeader(nil, c.number)})
		if lost != c.want {
			t.Errorf("after frame %d of %s: %d losses, want %d", c.number, c.executor, lost, c.want)
		}
	}
}
