package executor_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor"
)

// outage is a provider whose engine can become unavailable: its streams end, and every call fails. Sandboxes continue.
type outage struct {
	pausable
	away    *atomic.Bool
	refused *atomic.Int64 // calls of Attach during the outage
	code    string
}

func (p outage) err() error {
	if !p.away.Load() {
		return nil
	}
	return &sandbox.Error{Code: p.code, Message: "the engine does not answer"}
}

func (p outage) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if err := p.err(); err != nil {
		return nil, err
	}
	return p.pausable.Create(ctx, spec)
}

func (p outage) Attach(ctx context.Context, id string) (sandbox.Sandbox, error) {
	if err := p.err(); err != nil {
		p.refused.Add(1)
		return nil, err
	}
	return p.pausable.Attach(ctx, id)
}

func (p outage) List(ctx context.Context) ([]sandbox.Info, error) {
	if err := p.err(); err != nil {
		return nil, err
	}
	return p.pausable.List(ctx)
}

func (p outage) Terminate(ctx context.Context, id string, wipe bool) error {
	// An engine with a rate limit refuses one call and accepts the next one.
	if err := p.err(); err != nil && p.code != sandbox.CodeQuotaExceeded {
		return err
	}
	return p.pausable.Terminate(ctx, id, wipe)
}

// begin cuts every stream.
func (p outage) begin() {
	p.away.Store(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.boxes {
		b.runner.mu.Lock()
		if b.runner.follower != nil {
			b.runner.follower.cut()
		}
		b.runner.mu.Unlock()
	}
}

// outOf makes the bench's engine one that can become unavailable.
func (b *bench) outOf(code string) outage {
	o := outage{pausable: pausable{b.provider}, away: &atomic.Bool{}, refused: &atomic.Int64{}, code: code}
	b.wrap = func(sandbox.Provider) sandbox.Provider { return o }
	return o
}

// impatient sets a short wait for an engine, so that an outage covers many attempts.
func impatient(c *executor.Config) { c.EngineGone = 100 * time.Millisecond }

// awaitAttempts waits until the engine was found unavailable the given number of times. After the turn was requeued,
// each time is one delivery of its job.
func (o outage) awaitAttempts(s *talk, execution string, times int64) {
	s.b.t.Helper()
	from := o.refused.Load()
	for i := range times {
		s.b.until(fmt.Sprintf("the engine is found away, time %d", i+1), func() bool { return o.refused.Load() > from+i || s.load().Run.HasEnded(execution) })
	}
	if l := s.load(); l.Run.HasEnded(execution) {
		s.b.t.Fatalf("the execution ended while the engine was away: %+v", s.last(execution))
	}
}

// The engine is unavailable during a turn, for much longer than an executor waits for it. The agent continues; none of
// its events is lost or stored twice, and the outage does not count as failed claims.
func TestOutage_InMidTurnLosesNothing(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(3, allow))
	b.extendTimeout(8 * time.Minute)
	o := b.outOf(sandbox.CodeEngineUnavailable)
	b.run(impatient)
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	o.begin()
	allow <- struct{}{} // while nobody follows
	o.awaitAttempts(s, execution, 3*run.MaxClaimsWithoutProgress)
	o.away.Store(false)
	allow <- struct{}{}
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed || l.Run.Attempt != 1 || b.provider.made != 1 {
		t.Errorf("after the outage: %+v", s.last(execution))
	}
	if got := wrote(s.events()); got != "[a b c]" || len(b.provider.onlyBox().runner.receivedQueries()) != 1 {
		t.Errorf("wrote %s", got)
	}
	b.noJobs()
}

// Controls that are requested during an outage take effect after it.
func TestOutage_ControlsAreObeyedAfterIt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ask    func(s *talk, execution string)
		reason string
		left   bool
	}{
		"interrupt": {func(s *talk, _ string) { s.interrupt() }, "interrupted", true},
		"cancel":    {func(s *talk, execution string) { s.cancel(execution) }, "cancelled", true},
		"terminate": {func(s *talk, _ string) { s.terminate() }, "terminated", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, polite)
			b.extendTimeout(8 * time.Minute)
			o := b.outOf(sandbox.CodeEngineUnavailable)
			b.run(impatient)
			s := b.session()
			execution := s.post("go")
			s.untilStarted()
			o.begin()
			c.ask(s, execution)
			o.awaitAttempts(s, execution, 3)
			o.away.Store(false)
			l := s.untilEnded(execution)
			if end, ok := s.last(execution).(events.ExecutionCancelled); !ok || end.Reason != c.reason || (l.Run.Sandbox.ID != "") != c.left {
				t.Errorf("the end: %+v; sandbox %+v", s.last(execution), l.Run.Sandbox)
			}
			b.noJobs()
		})
	}
}

// A turn waits while the engine of the session's sandbox is unavailable, or refuses requests for a temporary reason.
// The sandbox is not lost.
func TestOutage_BetweenTurns(t *testing.T) {
	t.Parallel()
	for _, code := range []string{sandbox.CodeEngineUnavailable, sandbox.CodeQuotaExceeded, sandbox.CodeCredentialsRefused} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, answers)
			b.extendTimeout(8 * time.Minute)
			o := b.outOf(code)
			b.run(impatient)
			s := b.session()
			s.untilEnded(s.post("one"))
			o.begin()
			second := s.post("two")
			o.awaitAttempts(s, second, 5)
			o.away.Store(false)
			s.untilEnded(second)
			if got := wrote(s.events()); got != "[Hello, one Hello, two]" || b.provider.made != 1 {
				t.Errorf("wrote %s in %d sandboxes", got, b.provider.made)
			}
		})
	}
}

// The executor dies during an outage; the next one follows the turn after it.
func TestOutage_ExecutorKilledMeanwhile(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	b.extendTimeout(8 * time.Minute)
	o := b.outOf(sandbox.CodeEngineUnavailable)
	first := b.run(impatient)
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	o.begin()
	first.wire.kill()
	b.run(impatient)
	o.awaitAttempts(s, execution, 3)
	o.away.Store(false)
	s.until("the next executor follows", func(l *eventlog.SessionState) bool { return l.Run.Epoch > 1 })
	allow <- struct{}{}
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed || l.Run.Attempt != 1 {
		t.Errorf("after the outage: %+v", s.last(execution))
	}
	if got := wrote(s.events()); got != "[a b]" {
		t.Errorf("wrote %s", got)
	}
	b.noJobs()
}
