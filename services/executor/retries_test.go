package executor_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor"
)

// retryingSession returns a session of an agent with a retry policy.
func (b *bench) retryingSession(r events.Retries) *talk {
	b.t.Helper()
	return b.session(of1(b.agent("stubborn", 11, events.AgentSpec{Architecture: "claude-code", Instructions: "Do not give up.", Retries: r})))
}

// exits is an agent that dies in each attempt before the given one.
func exits(last uint32) script {
	return func(t *fakeTurn) {
		t.Start()
		if t.Query.Attempt < last {
			t.Say("transcript_written", events.TranscriptWritten{AgentSessionID: "agent-session-7"})
			t.Open("torn")
			t.Stream("torn", 0, "half")
			t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_EXITED", Message: "the agent's process ended"})
			return
		}
		t.Text("whole", "done")
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	}
}

// A process that dies is replaced by another one, which resumes the agent's own record in the same sandbox.
func TestRetries_ResumeInTheSameSandbox(t *testing.T) {
	t.Parallel()
	b := newBench(t, exits(3))
	b.run()
	s := b.retryingSession(events.Retries{Attempts: 3})
	l := s.untilEnded(s.post("go"))
	if l.Run.Phase != run.Completed || l.Run.Attempt != 3 || b.provider.made != 1 {
		t.Errorf("after two deaths: %+v", l.Run)
	}
	q := b.provider.onlyBox().runner.receivedQueries()
	if len(q) != 3 || q[1].Attempt != 2 || q[1].Resume != "agent-session-7" || q[2].Attempt != 3 {
		t.Errorf("asked %+v", q)
	}
	failed := of[events.AttemptFailed](s)
	want := events.AttemptFailed{Attempt: 2, Attempts: 3, Code: "AGENT_EXITED", Message: "the agent's process ended"}
	if len(failed) != 2 || failed[0].Attempt != 1 || failed[1] != want {
		t.Errorf("told %+v", failed)
	}
	if got := wrote(s.events()); got != "[done]" {
		t.Errorf("wrote %s", got)
	}
	b.noJobs()
}

// The terminal event has the reason of the last failure, and the number of its attempt.
func TestRetries_LastFailureIsTheEnd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		retries      events.Retries
		script       script
		code, end    string // of the failure, and how its message ends
		starts, made int
	}{
		"a process, as long as nobody says otherwise": {events.Retries{}, exits(9), "AGENT_EXITED", "process ended", 1, 1},
		"a process":      {events.Retries{Attempts: 2}, exits(9), "AGENT_EXITED", "process ended (attempt 2 of 2)", 2, 1},
		"never again":    {events.Retries{Attempts: 1}, lostSandbox, "SANDBOX_LOST", "", 1, 1},
		"a sandbox":      {events.Retries{Attempts: 2, BackoffMs: 1}, lostSandbox, "SANDBOX_LOST", "(attempt 2 of 2)", 2, 2},
		"one by another": {events.Retries{Attempts: 2}, memoryThenSandbox, "SANDBOX_LOST", "(attempt 2 of 2)", 2, 1},
		"not a death":    {events.Retries{Attempts: 5}, refused, "MODEL_ERROR", "no", 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var starts atomic.Int32
			b := newBench(t, func(t *fakeTurn) {
				starts.Add(1)
				c.script(t)
			})
			b.run()
			s := b.retryingSession(c.retries)
			execution := s.post("go")
			s.untilEnded(execution)
			if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != c.code || !strings.HasSuffix(f.Message, c.end) {
				t.Errorf("end: %+v", s.last(execution))
			}
			if n := int(starts.Load()); n != c.starts || b.provider.made != c.made {
				t.Errorf("%d starts in %d sandboxes, want %d in %d: %s", n, b.provider.made, c.starts, c.made, types(s.events()))
			}
			b.noJobs()
		})
	}
}

func lostSandbox(t *fakeTurn) {
	t.Start()
	go t.r.die()
	<-t.killed
}

func memoryThenSandbox(t *fakeTurn) {
	if t.Query.Attempt > 1 {
		lostSandbox(t)
		return
	}
	t.Start()
	t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "OUT_OF_MEMORY", Message: "no memory"})
}

func refused(t *fakeTurn) {
	t.Start()
	t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_ERROR", Message: "no"})
}

// An execution that waits for its next attempt occupies no slot: with one slot another session runs meanwhile.
func TestBackoff_HoldsNoSlot(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		if t.Query.Content == "other" {
			answers(t)
			return
		}
		exits(3)(t)
	})
	b.run(func(c *executor.Config) { c.Slots = 1 })
	s := b.retryingSession(events.Retries{Attempts: 3, BackoffMs: 1500})
	execution := s.post("go")
	s.until("the first attempt died", func(l *eventlog.SessionState) bool { return l.Run.DiedAttempts == 1 })
	other := b.session()
	other.untilEnded(other.post("other"))
	if l := s.load(); l.Run.DiedAttempts != 1 || l.Run.Phase != run.Starting {
		t.Errorf("meanwhile: %+v", l.Run)
	}
	s.untilEnded(execution)
	// Each wait is twice the previous one.
	var died []time.Time
	var starts []time.Time
	for _, e := range s.events() {
		switch e.Data.(type) {
		case events.AttemptFailed:
			died = append(died, e.Time)
		case events.ExecutionStarted:
			starts = append(starts, e.Time)
		}
	}
	if len(died) != 2 || len(starts) != 3 {
		t.Fatalf("%d deaths, %d starts", len(died), len(starts))
	}
	for i, want := range []time.Duration{1500 * time.Millisecond, 3 * time.Second} {
		if got := starts[i+1].Sub(died[i]); got < want || got > want+4*time.Second {
			t.Errorf("wait %d took %s, want %s", i+1, got, want)
		}
	}
	b.noJobs()
}

// The wait survives the executor, and so does the count of attempts.
func TestBackoff_SurvivesTheExecutor(t *testing.T) {
	t.Parallel()
	b := newBench(t, exits(9))
	a := b.run()
	s := b.retryingSession(events.Retries{Attempts: 2, BackoffMs: 5000})
	execution := s.post("go")
	l := s.until("the first attempt died", func(l *eventlog.SessionState) bool { return l.Run.DiedAttempts == 1 })
	due := l.Run.NotBefore
	a.wire.kill()
	b.run()
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || !strings.HasSuffix(f.Message, "(attempt 2 of 2)") {
		t.Errorf("end: %+v", s.last(execution))
	}
	for _, e := range s.events() {
		if d, ok := e.Data.(events.ExecutionStarted); ok && d.Attempt == 2 && e.Time.Before(due) {
			t.Errorf("started at %s, and was due at %s", e.Time, due)
		}
	}
	if n := len(b.provider.onlyBox().runner.receivedQueries()); n != 2 {
		t.Errorf("started %d times", n)
	}
	b.noJobs()
}

// Executor and sandbox are lost together during the only allowed attempt.
func TestRetries_SingleAttemptWithItsExecutorLost(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		<-t.killed
	})
	a := b.run()
	s := b.retryingSession(events.Retries{Attempts: 1})
	execution := s.post("go")
	s.until("the agent runs", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	a.wire.kill()
	b.provider.onlyBox().runner.die()
	b.run()
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "SANDBOX_LOST" || b.provider.made != 1 {
		t.Errorf("end: %+v after %d sandboxes", s.last(execution), b.provider.made)
	}
}

// A control ends an execution that waits for its next attempt, and no further attempt starts.
func TestCancel_EndsTheWaitForAnAttempt(t *testing.T) {
	t.Parallel()
	b := newBench(t, exits(9))
	b.run()
	s := b.retryingSession(events.Retries{Attempts: 5, BackoffMs: 300_000})
	execution := s.post("go")
	s.until("the first attempt died", func(l *eventlog.SessionState) bool { return l.Run.DiedAttempts == 1 })
	s.cancel(execution)
	if l := s.untilEnded(execution); l.Run.Phase != run.Cancelled {
		t.Errorf("end: %+v", s.last(execution))
	}
	if n := len(b.provider.onlyBox().runner.receivedQueries()); n != 1 {
		t.Errorf("started %d times", n)
	}
	b.noJobs()
}

// If the next attempt could not begin within the execution's time limit, the execution ends without waiting.
func TestBackoff_PastTheTimeLimitEndsTheExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, exits(9))
	b.run()
	ref := b.agent("stubborn", 11, events.AgentSpec{Architecture: "claude-code", Instructions: "Do not give up.", Retries: events.Retries{Attempts: 5, BackoffMs: 300_000}})
	s := b.session(of1(ref), func(c *events.SessionCreated) { c.Options.TurnLimitMs = 60_000 })
	execution := s.post("go")
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "AGENT_EXITED" || !strings.Contains(f.Message, "(attempt 1 of 5; the next would begin after") {
		t.Errorf("end: %+v", s.last(execution))
	}
}

// The engine of the only allowed attempt is gone with its sandbox, which an executor of another engine must not end.
func TestRetries_SingleAttemptWithItsEngineLost(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		<-t.killed
	})
	b.engine = "elsewhere"
	a := b.run()
	s := b.retryingSession(events.Retries{Attempts: 1})
	execution := s.post("go")
	s.until("the agent runs", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	first := b.provider.onlyBox().spec.ID
	a.wire.kill()
	b.engine = "here"
	b.run(func(c *executor.Config) { c.EngineGone = time.Second })
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "SANDBOX_LOST" || b.provider.made != 1 {
		t.Errorf("end: %+v after %d sandboxes", s.last(execution), b.provider.made)
	}
	if _, terminated := b.provider.wiped(first); terminated {
		t.Error("a sandbox of another engine was ended")
	}
}
