package executor_test

import (
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor"
)

// An executor on a host whose clock is an hour off, with an egress proxy on the same host, ends nothing early and
// everything in time. It takes over an execution from a host with a correct clock, and hands it back. Its events have
// the time of the log.
func TestHostsClock_DoesNotMatter(t *testing.T) {
	t.Parallel()
	for _, off := range []time.Duration{time.Hour, -time.Hour} {
		t.Run(off.String(), func(t *testing.T) {
			t.Parallel()
			allow := make(chan struct{})
			b := newStoreBench(t, func(f *fakeTurn) {
				switch f.Query.Content {
				case "steps":
					steps(3, allow)(f)
				case "hang":
					stubborn(f)
				case "exit":
					exits(2)(f)
				default:
					quick(f)
				}
			})
			b.egress = &fakeEgress{off: off}
			sweeps := func(c *executor.Config) { c.SweepEvery = 50 * time.Millisecond }
			right := b.run(sweeps)
			s := b.session(func(c *events.SessionCreated) {
				c.Options = events.Options{IdleTimeoutMs: 1_800_000, TurnLimitMs: 1_800_000, SessionLimitMs: 1_800_000, SandboxMaxAgeMs: 1_800_000}
			})
			execution := s.post("steps")
			allow <- struct{}{}
			s.untilBlocks(1)
			b.off = off
			wrong := b.run(sweeps)
			right.wire.kill()
			s.until("the executor whose host's clock is off has claimed", func(l *eventlog.SessionState) bool { return l.Run.Holder == wrong.ID() })
			b.egress.say(execution, events.ModelCalled{Provider: "p", Model: "m"})
			allow <- struct{}{}
			s.untilBlocks(2)
			s.until("the request to the model is in the log", func(*eventlog.SessionState) bool { return len(of[events.ModelCalled](s)) == 1 })
			b.off = 0
			third := b.run(sweeps)
			wrong.wire.kill()
			s.until("an executor whose host's clock is right has claimed", func(l *eventlog.SessionState) bool { return l.Run.Holder == third.ID() })
			allow <- struct{}{}
			s.untilEnded(execution)
			third.wire.kill()

			b.off = off
			b.run(sweeps)
			if l := s.untilEnded(s.post("again")); l.Run.Phase != run.Completed || b.provider.made != 1 {
				t.Errorf("%d sandboxes were made; the turn ended with %+v", b.provider.made, s.last(l.Run.Execution))
			}
			limited := b.session(func(c *events.SessionCreated) { c.Options.TurnLimitMs = 500 })
			hangs := limited.post("hang")
			limited.untilEnded(hangs)
			if f, ok := limited.last(hangs).(events.ExecutionFailed); !ok || f.Code != "TURN_LIMIT_EXCEEDED" {
				t.Errorf("the end is %+v", limited.last(hangs))
			}
			retried := b.retryingSession(events.Retries{Attempts: 2, BackoffMs: 1500})
			if l := retried.untilEnded(retried.post("exit")); l.Run.Phase != run.Completed || l.Run.Attempt != 2 {
				t.Errorf("the retried execution ended with %+v", retried.last(l.Run.Execution))
			}
			if wrote(s.events()) != "[a b c done]" {
				t.Errorf("wrote %s after %s", wrote(s.events()), strings.ReplaceAll(types(s.events()), " ", ", "))
			}
			b.timesAreOfTheLog()
		})
	}
}

// timesAreOfTheLog checks that the time of each executor's event is close to the time at which the log stored it.
func (b *bench) timesAreOfTheLog() {
	b.t.Helper()
	for rec, err := range b.log.Read(b.ctx, eventlog.Position{}, eventlog.Filter{}) {
		if err != nil {
			b.t.Fatal(err)
		}
		if rec.Subject.Aspect != events.Run {
			continue // written by the test
		}
		for _, e := range rec.Events {
			if d := rec.Time.Sub(e.Time).Abs(); d > 2*within {
				b.t.Errorf("%s has the time %s and was stored at %s", e.Type(), e.Time, rec.Time)
			}
		}
	}
}
