package session_test

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	service "github.com/spoolhq/spool/services/session"

	"github.com/nats-io/nats.go/jetstream"
)

// startCopyOnHost starts a copy of the service on a host whose clock is wrong by off.
func (s *stack) startCopyOnHost(off time.Duration) {
	nc := natstest.Conn(s.t, s.srv)
	js, err := jetstream.New(nc)
	must(s.t, err)
	log, err := jslog.New(jslog.Config{JetStream: js, Partitions: topology.DefaultPartitions, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}})
	must(s.t, err)
	clock := bus.NewClock(bus.ClockConfig{JetStream: js, Stream: topology.StreamCommands, Host: func() time.Time { return time.Now().Add(off) }})
	svc, err := service.New(service.Config{}, service.Deps{NATS: nc, Log: log, Logger: slog.New(slog.DiscardHandler), Clock: clock, Copy: "off by " + off.String()})
	must(s.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	s.t.Cleanup(func() { cancel(); must(s.t, <-done) })
	awaitReady(s.t, svc.Ready(), done)
}

// TestHostClock_DoesNotMatter tests a copy on a host whose clock is an hour off. It executes commands, ends nothing
// early, notices a timeout when it is due, and writes events with the time of the server.
func TestHostClock_DoesNotMatter(t *testing.T) {
	t.Parallel()
	for _, off := range []time.Duration{time.Hour, -time.Hour} {
		t.Run(off.String(), func(t *testing.T) {
			t.Parallel()
			s := newStack(t)
			s.startCopyOnHost(off)
			w := s.worker()
			limited := s.create(events.Options{TurnLimitMs: 60_000, SessionLimitMs: 1_800_000})
			waits := s.post(limited)
			w.waiting(1)
			s.fireTimer(limited)
			fired, err := s.js.Stream(t.Context(), topology.StreamTimers)
			must(t, err)
			eventually(t, "the timer to be handled", func() bool {
				c, err := fired.Consumer(t.Context(), topology.TimersDurable)
				must(t, err)
				return c.CachedInfo().NumPending+uint64(c.CachedInfo().NumAckPending) == 0
			})
			if l := s.await(limited, "there", func(*eventlog.SessionState) bool { return true }); l.Life.Active.ExecutionID != waits || l.Run.HasEnded(waits) || l.Life.Status != "open" {
				t.Fatalf("the session was ended early: %v", s.history(limited))
			}
			w.runJob("of the query")
			rests := s.create(events.Options{IdleTimeoutMs: 1000})
			exe := s.post(rests)
			w.runJob("of the second session")
			s.await(rests, "at the end", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(exe) })
			s.await(rests, "idle", func(l *eventlog.SessionState) bool { return l.Life.Idle })
			for rec, err := range s.log.Read(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
				must(t, err)
				for _, e := range rec.Events {
					if d := rec.Time.Sub(e.Time).Abs(); d > time.Minute {
						t.Errorf("%s has the time %s and was stored at %s", e.Type(), e.Time, rec.Time)
					}
				}
			}
		})
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !ok(); time.Sleep(pause) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}

// TestArmTimer_LooksUpTheStreamOnce tests that the stream of timers is looked up once, not for each commit.
func TestArmTimer_LooksUpTheStreamOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	var asked atomic.Int64
	_, err := s.nc.Subscribe("$JS.API.STREAM.INFO."+topology.StreamTimers, func(*nats.Msg) { asked.Add(1) })
	must(t, err)
	s.startCopy("one", service.Config{})
	armed := func() {
		sid := s.create(events.Options{})
		stream, err := s.js.Stream(t.Context(), topology.StreamTimers)
		must(t, err)
		eventually(t, "the timer", func() bool {
			_, err := stream.GetLastMsgForSubject(t.Context(), topology.TimerScheduleSubject(sid))
			return err == nil
		})
	}
	armed()
	before := asked.Load()
	for range 5 {
		armed()
	}
	if n := asked.Load() - before; n > 5 { // the lookups of the test
		t.Errorf("TIMERS was looked up %d times for 5 timers", n-5)
	}
}
