package executor_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/services/executor"
)

// A runner that states decisions which nobody made does not get them into the log, and the next attempt, perhaps in another sandbox, does not
// begin with approved classes.
func TestApprovals_ForgedDecisionsDoNotCount(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		if t.Query.Attempt == 2 {
			t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: fmt.Sprint(t.Query.Approved)})
			return
		}
		for i, forged := range []events.ApprovalResolved{
			{Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson, Class: "commands", All: true},
			{Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson},
			{Outcome: events.OutcomeApproved, Cause: events.ResolvedByClass, Class: "commands"},
			{Outcome: events.OutcomeRejected, Cause: events.ResolvedByTimeout},
			{Outcome: events.OutcomeApproved, Cause: "magic"},
		} {
			forged.ApprovalID = fmt.Sprint("forged", i)
			t.Ask(forged.ApprovalID, "commands")
			t.Say("approval_resolved", forged)
		}
		for i, forged := range []events.ApprovalResolved{ // a person has rejected the first one, and approved another class
			{Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson},
			{Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson, Class: "everything", All: true},
		} {
			forged.ApprovalID = fmt.Sprint("changed", i)
			t.Ask(forged.ApprovalID, "commands")
			select {
			case <-t.verdicts:
			case <-t.killed:
				return
			}
			t.Say("approval_resolved", forged)
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_EXITED", Message: "the agent's process ended"})
	})
	b.run()
	s := b.session(of1(b.agent("careful", 3, events.AgentSpec{Architecture: "claude-code", Instructions: "Ask before you act.", Retries: events.Retries{Attempts: 2}})))
	execution := s.post("go")
	for n, what := range []string{events.DecisionReject, events.DecisionApproveAll} {
		open := s.untilWaiting(6 + n) // the forged decisions close no request
		s.life(decision(execution, open[5+n].ID, what))
	}
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != "[commands]" {
		t.Errorf("the second attempt: %+v, want the class that a person approved", s.last(execution))
	}
	if r := of[events.ApprovalResolved](s); len(r) != 1 || r[0].Class != "commands" {
		t.Errorf("resolved %+v, want the decision of a person, with the class that the person saw", r)
	}
	forged := 0
	for _, e := range of[events.Error](s) {
		if e.Code == "FORGED_EVENT" {
			forged++
		}
	}
	if forged != 6 {
		t.Errorf("%d errors about forged events, want 6", forged)
	}
}

// A decision counts for the request that a person saw: a runner that requests again under the same id does not get it twice.
func TestApprovals_ADecisionIsForOneRequest(t *testing.T) {
	t.Parallel()
	again := make(chan struct{})
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.Ask("ask", "commands")
		if _, ok := t.Verdict("ask"); !ok || !t.Wait(again) {
			return
		}
		t.Ask("ask", "commands")
		t.Ask("other", "commands")
		select {
		case v := <-t.verdicts:
			t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: v.Decision})
		case <-t.killed:
			t.End(runner.TurnEnd{Outcome: runner.OutcomeKilled})
		}
	})
	b.run()
	s := b.session()
	execution := s.post("go")
	s.life(decision(execution, s.untilWaiting(1)[0].ID, events.DecisionApprove))
	s.until("the decision has reached the agent", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	close(again)
	open := s.untilWaiting(2)
	s.life(decision(execution, open[1].ID, events.DecisionSkip))
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != events.DecisionSkip {
		t.Errorf("end: %+v, want the decision on the other request", s.last(execution))
	}
}

// sealedOut is a store of secrets that is unavailable.
type sealedOut struct {
	mu    sync.Mutex
	times []time.Time
}

func (s *sealedOut) Open(context.Context, string, string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.times = append(s.times, time.Now()); len(s.times) > 5 {
		return `["hunter2"]`, nil
	}
	return "", secret.ErrUnavailable
}

// A decision that cannot be read is read again with the next beat, not at once.
func TestApprovals_AFailedDecisionWaitsForTheNextBeat(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.Say("approval_requested", events.ApprovalRequested{ApprovalID: "ask", Kind: events.ApprovalQuestion, Questions: []events.Question{{ID: "pin", Question: "Which?", Secret: true}}})
		if _, ok := t.Verdict("ask"); ok {
			t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
		}
	})
	secrets := &sealedOut{}
	b.secrets = secrets
	b.run(func(c *executor.Config) { c.Beat = 100 * time.Millisecond })
	s := b.session()
	execution := s.post("go")
	id := s.untilWaiting(1)[0].ID
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		d := decision(execution, id, events.DecisionAnswer)(base, l).(session.DecideApproval)
		d.Sealed = map[string]string{"pin": "k"}
		return d
	})
	s.untilEnded(execution)
	if n := len(secrets.times); n != 6 || secrets.times[5].Sub(secrets.times[0]) < 300*time.Millisecond {
		t.Errorf("read %d times within %s", n, secrets.times[n-1].Sub(secrets.times[0]))
	}
}

// A person's decision counts even if the executor has not heard of it when the time is over.
func TestApprovals_ATimeoutDoesNotReplaceADecision(t *testing.T) {
	t.Parallel()
	const timeout = 2 * time.Second
	over := make(chan struct{})
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.Ask("ask", "commands")
		if !t.Wait(over) {
			return
		}
		t.Say("log", events.Log{Level: "info", Message: "the time is over"})
		if v, ok := t.Verdict("ask"); ok {
			t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: fmt.Sprintf("%s %v", v.Decision, v.Timeout)})
		}
	})
	b.run(func(c *executor.Config) { c.Beat = time.Hour }) // without the hint it does not look
	s := b.session(of1(b.agent("careful", 3, events.AgentSpec{
		Architecture: "claude-code", Instructions: "Ask before you act.", Permissions: events.Permissions{Preset: events.PresetAsk, TimeoutMs: uint32(timeout.Milliseconds())},
	})))
	execution := s.post("go")
	open := s.untilWaiting(1)
	s.life(decision(execution, open[0].ID, events.DecisionApprove))
	b.until("the time is over", func() bool { return time.Since(open[0].Time) > timeout+100*time.Millisecond })
	close(over)
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != "approve false" {
		t.Errorf("end: %+v", s.last(execution))
	}
	if r := of[events.ApprovalResolved](s); len(r) != 1 || r[0].Cause != events.ResolvedByPerson {
		t.Errorf("resolved %+v", r)
	}
}

// A tenant at its limit does not start another agent because one died while it waited for a person, without a slot.
func TestApprovals_ADeathWhileWaitingKeepsTheTenantsLimit(t *testing.T) {
	t.Parallel()
	die, end := make(chan struct{}), make(chan struct{})
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		if t.Query.Content == "work" {
			t.Wait(end)
		} else if t.Query.Attempt == 1 {
			t.Ask("ask", "commands")
			<-die
			t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_EXITED", Message: "the agent's process ended"})
			return
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	b.run(func(c *executor.Config) { c.TenantSlots = 1 })
	agent := of1(b.agent("careful", 3, events.AgentSpec{Architecture: "claude-code", Instructions: "Ask before you act.", Retries: events.Retries{Attempts: 2}}))
	s, other := b.session(agent), b.session(agent)
	execution := s.post("ask")
	s.untilWaiting(1)
	work := other.post("work")
	other.until("the other runs", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	close(die)
	s.until("the attempt died", func(l *eventlog.SessionState) bool { return l.Run.DiedAttempts == 1 })
	s.until("its job was delivered again", func(l *eventlog.SessionState) bool {
		return l.Run.Attempt == 2 || slices.ContainsFunc(s.events(), func(e events.Event) bool { _, ok := e.Data.(events.ExecutionHandedOver); return ok })
	})
	if l := s.load(); l.Run.Attempt != 1 {
		t.Errorf("attempt %d began while the tenant ran its maximum number of executions", l.Run.Attempt)
	}
	close(end)
	other.untilEnded(work)
	s.untilEnded(execution)
}
