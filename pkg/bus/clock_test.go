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

// host is a clock that can be set.
type host struct{ off atomic.Int64 }

func (h *host) set(off time.Duration) { h.off.Store(int64(off)) }
func (h *host) now() time.Time        { return time.Now().Add(time.Duration(h.off.Load())) }

// TestClock_TellsTheTimeOfTheServer: whatever the host's clock says, also when it jumps.
func TestClock_TellsTheTimeOfTheServer(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	for _, off := range []time.Duration{0, time.Hour, -time.Hour} {
		var h host
		h.set(off)
		c := bus.NewClock(bus.ClockConfig{JetStream: b.js, Stream: "WORK", Host: h.now})
		if err := c.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(c.Now()).Abs(); d > time.Minute {
			t.Errorf("on a host that is off by %s the clock is off by %s", off, d)
		}
		h.set(0) // jumps; the Go runtime's monotonic reading hides this from a real clock
		if err := c.Measure(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(c.Now()).Abs(); d > time.Minute {
			t.Errorf("after a jump of %s the clock is off by %s", -off, d)
		}
	}
}

// TestDeadline_IsJudgedByTheServersClock: a command is carried out on a host whose clock is an hour off, and one whose time
// to live has passed is dropped there.
func TestDeadline_IsJudgedByTheServersClock(t *testing.T) {
	t.Parallel()
	for _, off := range []time.Duration{time.Hour, -time.Hour} {
		b := newBed(t)
		msg := message.NewMessage("given up", nil)
		msg.Metadata.Set(topology.HeaderTimeToLive, "1ms")
		msg.Metadata.Set(topology.HeaderCommandID, "given up")
		b.publish(t, "work.a", msg)
		var h host
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
			t.Errorf("on a host that is off by %s a command ran that nobody waits for", off)
		}
	}
}
