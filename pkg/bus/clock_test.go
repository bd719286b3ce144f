package bus_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/topology"
)

// fakeClock is a clock that a test can set.
type fakeClock struct{ off atomic.Int64 }

func (h *fakeClock) set(off time.Duration) { h.off.Store(int64(off)) }
func (h *fakeClock) now() time.Time        { return time.Now().Add(time.Duration(h.off.Load())) }

// TestClock_ReturnsTheTimeOfTheServer tests that the clock returns the server's time when the host's clock is wrong,
// and after the host's clock jumps.
func TestClock_ReturnsTheTimeOfTheServer(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	for _, off := range []time.Duration{0, time.Hour, -time.Hour} {
		var h fakeClock
		h.set(off)
		c := bus.NewClock(bus.ClockConfig{JetStream: b.js, Stream: "WORK", Host: h.now})
		if err := c.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(c.Now()).Abs(); d > time.Minute {
			t.Errorf("on a host that is off by %s the clock is off by %s", off, d)
		}
		h.set(0) // the Go runtime's monotonic reading hides such a jump of a real clock
		if err := c.Measure(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(c.Now()).Abs(); d > time.Minute {
			t.Errorf("after a jump of %s the clock is off by %s", -off, d)
		}
	}
}

// TestDeadline_IsJudgedByTheServersClock tests that a host whose clock is an hour off runs a command that has time
// left, and drops a command whose time to live has passed.
func TestDeadline_IsJudgedByTheServersClock(t *testing.T) {
	t.Parallel()
	for _, off := range []time.Duration{time.Hour, -time.Hour} {
		b := newFixture(t)
		msg := message.NewMessage("given up", nil)
		msg.Metadata.Set(topology.HeaderTimeToLive, "1ms")
		msg.Metadata.Set(topology.HeaderCommandID, "given up")
		b.publish(t, "work.a", msg)
		var h fakeClock
		h.set(off)
		clock := bus.NewClock(bus.ClockConfig{JetStream: b.js, Stream: "WORK", Host: h.now})
		if err := clock.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		var late atomic.Int64
		b.route(t, bus.RouterConfig{Clock: clock, Now: h.now}, b.quick(t), "work.a", func(_ context.Context, msg *message.Message) error {
			if msg.Metadata.Get(topology.HeaderCommandID) == "given up" {
				late.Add(1)
			}
			return bus.Reply(b.nc, msg, bus.Answer{})
		})
		answered, end := context.WithTimeout(t.Context(), time.Minute)
		defer end()
		if _, err := bus.Request(answered, b.js, bus.Command{Subject: "work.a", ID: "wanted"}); err != nil {
			t.Errorf("on a host that is off by %s: %v", off, err)
		}
		if n := late.Load(); n > 0 {
			t.Errorf("on a host that is off by %s an expired command ran", off)
		}
	}
}
