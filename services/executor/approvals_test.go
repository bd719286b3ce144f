package executor_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
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

// Ask journals an approval request.
func (t *fakeTurn) Ask(local, class string) {
	t.Say("approval_requested", events.ApprovalRequested{ApprovalID: local, Kind: events.ApprovalTool, ToolName: "Bash", Class: class, Editable: true})
}

// Verdict waits for the decision on a request and journals its effect. It returns false if the agent is interrupted or
// killed first; then it has ended the turn.
func (t *fakeTurn) Verdict(local string) (v runner.ApprovalDecision, ok bool) {
	outcome := runner.OutcomeInterrupted
	select {
	case v = <-t.verdicts:
		resolved := events.ApprovalResolved{ApprovalID: local, Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson}
		if v.Decision == events.DecisionApproveAll {
			resolved.Class, resolved.All = "reads", true
		}
		switch v.Decision {
		case events.DecisionReject:
			resolved.Outcome = events.OutcomeRejected
		case events.DecisionSkip:
			resolved.Outcome = events.OutcomeSkipped
		case events.DecisionAnswer:
			resolved.Outcome = events.OutcomeAnswered
		}
		if v.Timeout {
			resolved.Outcome, resolved.Cause = events.OutcomeRejected, events.ResolvedByTimeout
		}
		t.Say("approval_resolved", resolved)
		return v, true
	case <-t.interrupted:
	case <-t.killed:
		outcome = runner.OutcomeKilled
	}
	t.Say("approval_retracted", events.ApprovalRetracted{ApprovalID: local, Reason: "turn_ended"})
	t.End(runner.TurnEnd{Outcome: outcome})
	return v, false
}

// cautious is an agent that asks once, and answers with the decision.
func cautious(t *fakeTurn) {
	t.Start()
	t.Ask("ask", "commands")
	if v, ok := t.Verdict("ask"); ok {
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: fmt.Sprintf("%s %v", v.Decision, v.Timeout)})
	}
}

// untilWaiting waits until the execution waits for n decisions, and returns the requests.
func (s *talk) untilWaiting(n int) []run.OpenApproval {
	s.b.t.Helper()
	l := s.until("it waits for a decision", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Waiting && len(l.Run.Approvals) == n })
	return l.Run.Approvals
}

// decision is a person's decision on a request.
func decision(execution, approval, what string) func(session.CommandBase, *eventlog.SessionState) session.Command {
	return func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		d := session.DecideApproval{CommandBase: base, ApprovalDecided: events.ApprovalDecided{ApprovalID: approval, Decision: what}, ExecutionID: execution}
		for _, a := range l.Run.Approvals {
			if a.ID == approval {
				d.Open = &session.OpenApproval{Kind: a.Kind, Class: a.Class, Editable: a.Editable}
			}
		}
		return d
	}
}

// A decision reaches the agent, and other executions use the slot while it waits.
func TestApprovals_WaitWithoutASlot(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		if t.Query.Content == "ask" {
			cautious(t)
			return
		}
		t.Start()
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	b.run(func(c *executor.Config) { c.Slots = 1 })
	s, other := b.session(), b.session()
	execution := s.post("ask")
	open := s.untilWaiting(1)
	if want := runner.ApprovalID(execution, s.load().Run.Sandbox.Journal, "ask"); open[0].ID != want || open[0].Class != "commands" {
		t.Errorf("open %+v, want the id %s", open, want)
	}
	other.untilEnded(other.post("go"))
	s.life(decision(execution, open[0].ID, events.DecisionApprove))
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed || l.Run.Approvals != nil {
		t.Errorf("end: %+v", l.Run)
	}
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != "approve false" {
		t.Errorf("end: %+v", s.last(execution))
	}
	b.noJobs()
}

// A decision that is made while no executor runs reaches the agent through the next executor, once.
func TestApprovals_SurviveTheExecutor(t *testing.T) {
	t.Parallel()
	b := newBench(t, cautious)
	first := b.run()
	s := b.session()
	execution := s.post("go")
	open := s.untilWaiting(1)
	first.wire.kill()
	s.life(decision(execution, open[0].ID, events.DecisionReject))
	b.run()
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != "reject false" {
		t.Errorf("end: %+v", s.last(execution))
	}
	if starts, asked, resolved := len(of[events.ExecutionStarted](s)), len(of[events.ApprovalRequested](s)), len(of[events.ApprovalResolved](s)); starts != 1 || asked != 1 || resolved != 1 {
		t.Errorf("%d starts, %d requests, %d resolved", starts, asked, resolved)
	}
}

// A decision that a stream loses is sent again over the next stream.
func TestApprovals_SendALostDecisionAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t, cautious)
	b.run()
	s := b.session()
	execution := s.post("go")
	open := s.untilWaiting(1)
	r := b.provider.onlyBox().runner
	r.mu.Lock()
	r.deaf = true
	r.mu.Unlock()
	s.life(decision(execution, open[0].ID, events.DecisionApprove))
	b.until("the decision was sent", func() bool { return slices.Contains(r.operations(), runner.OpDecide) })
	r.mu.Lock()
	r.deaf = false
	current := r.follower
	r.mu.Unlock()
	current.cut()
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != "approve false" {
		t.Errorf("end: %+v", s.last(execution))
	}
}

// If the agent dies, its request is retracted, a decision on it is refused, and the next attempt asks again. Classes that a
// person approved stay approved.
func TestApprovals_AskAgainAfterADeath(t *testing.T) {
	t.Parallel()
	die := make(chan struct{})
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		if t.Query.Attempt == 1 {
			t.Ask("first", "reads")
			if v, ok := t.Verdict("first"); !ok || v.Decision != events.DecisionApproveAll {
				return
			}
			t.Ask("ask", "commands")
			<-die
			t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_EXITED", Message: "the agent's process ended"})
			return
		}
		t.Ask("again", "commands")
		if _, ok := t.Verdict("again"); ok {
			t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: fmt.Sprint(t.Query.Approved)})
		}
	})
	b.run()
	s := b.session(of1(b.agent("careful", 3, events.AgentSpec{Architecture: "claude-code", Instructions: "Ask before you act.", Retries: events.Retries{Attempts: 2}})))
	execution := s.post("go")
	first := s.untilWaiting(1)[0]
	s.life(decision(execution, first.ID, events.DecisionApproveAll))
	var lost run.OpenApproval
	s.until("the second request", func(l *eventlog.SessionState) bool {
		if len(l.Run.Approvals) != 1 || l.Run.Approvals[0].ID == first.ID {
			return false
		}
		lost = l.Run.Approvals[0]
		return true
	})
	close(die)
	var again run.OpenApproval
	s.until("the next attempt asks", func(l *eventlog.SessionState) bool {
		if l.Run.Attempt != 2 || len(l.Run.Approvals) != 1 {
			return false
		}
		again = l.Run.Approvals[0]
		return true
	})
	retracted := of[events.ApprovalRetracted](s)
	if len(retracted) != 1 || retracted[0] != (events.ApprovalRetracted{ApprovalID: lost.ID, Reason: "attempt_failed"}) {
		t.Errorf("retracted %+v, want %s", retracted, lost.ID)
	}
	base := session.CommandBase{CommandMeta: events.CommandMeta{CommandID: mint(t, events.KindCommand), Now: time.Now()}}
	l := s.load()
	if _, err := session.Decide(l.Life, decision(execution, lost.ID, events.DecisionApprove)(base, l)); err == nil {
		t.Error("a decision on a retracted request was accepted")
	}
	s.life(decision(execution, again.ID, events.DecisionApprove))
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != "[reads]" {
		t.Errorf("end: %+v", s.last(execution))
	}
}

// sealedAnswers are secret answers by key.
type sealedAnswers map[string]string

func (s sealedAnswers) Open(_ context.Context, tenant, key string) (string, error) {
	if value, ok := s[tenant+"/"+key]; ok {
		return value, nil
	}
	return "", secret.ErrNotFound
}

// A secret answer reaches the agent and not the log, and the runner removes it from the output of this and of later attempts. An
// answer that can no longer be opened rejects the question.
func TestApprovals_SecretAnswers(t *testing.T) {
	t.Parallel()
	ask := func(t *fakeTurn, local string) runner.ApprovalDecision {
		t.Say("approval_requested", events.ApprovalRequested{ApprovalID: local, Kind: events.ApprovalQuestion, Questions: []events.Question{{ID: "pin", Question: "Which?", Secret: true}}})
		v, _ := t.Verdict(local)
		return v
	}
	got := make(chan runner.ApprovalDecision, 4)
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		got <- ask(t, fmt.Sprint("first", t.Query.Attempt))
		if t.Query.Attempt == 1 {
			t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_EXITED", Message: "the agent's process ended"})
			return
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	b.secrets = sealedAnswers{tenant + "/k": `["hunter2"]`}
	b.run()
	s := b.session(of1(b.agent("careful", 3, events.AgentSpec{Architecture: "claude-code", Instructions: "Ask before you act.", Retries: events.Retries{Attempts: 2}})))
	execution := s.post("go")
	answer := func(id, key string) {
		s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
			d := decision(execution, id, events.DecisionAnswer)(base, l).(session.DecideApproval)
			d.Sealed = map[string]string{"pin": key}
			return d
		})
	}
	answer(s.untilWaiting(1)[0].ID, "k")
	if v := <-got; !slices.Equal(v.Answers["pin"], []string{"hunter2"}) || !slices.Equal(v.Redact, []string{"hunter2"}) || v.Decision != events.DecisionAnswer {
		t.Errorf("verdict %+v", v)
	}
	s.until("the next attempt", func(l *eventlog.SessionState) bool { return l.Run.Attempt == 2 && len(l.Run.Approvals) == 1 })
	answer(s.untilWaiting(1)[0].ID, "lost")
	if v := <-got; v.Decision != events.DecisionReject || v.Comment == "" || len(v.Answers) > 0 {
		t.Errorf("verdict without its answer: %+v", v)
	}
	s.untilEnded(execution)
	if q := b.provider.onlyBox().runner.receivedQueries(); len(q) != 2 || !slices.Contains(q[1].Redact, "hunter2") {
		t.Errorf("the second query redacts %v", q[len(q)-1].Redact)
	}
	for _, e := range s.events() {
		if raw, err := json.Marshal(e.Data); err != nil || strings.Contains(string(raw), "hunter2") {
			t.Errorf("the log has %s, %v", raw, err)
		}
	}
}

// A request that nobody decides is rejected after the timeout of the agent's policy.
func TestApprovals_TimeOut(t *testing.T) {
	t.Parallel()
	b := newBench(t, cautious)
	b.run()
	s := b.session(of1(b.agent("careful", 3, events.AgentSpec{
		Architecture: "claude-code", Instructions: "Ask before you act.", Permissions: events.Permissions{Preset: events.PresetAsk, TimeoutMs: 50},
	})))
	execution := s.post("go")
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != " true" {
		t.Errorf("end: %+v", s.last(execution))
	}
	if r := of[events.ApprovalResolved](s); len(r) != 1 || r[0].Cause != events.ResolvedByTimeout || r[0].Outcome != events.OutcomeRejected {
		t.Errorf("resolved %+v", r)
	}
	if q := b.provider.onlyBox().runner.receivedQueries(); q[0].Permissions.Preset != events.PresetAsk {
		t.Errorf("the query has the permissions %+v", q[0].Permissions)
	}
}

// The turn limit does not run while the execution waits, and a cancel ends the wait with no request left open.
func TestApprovals_CancelAWaitingExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, cautious)
	b.run()
	s := b.session(func(c *events.SessionCreated) { c.Options.TurnLimitMs = 300 })
	execution := s.post("go")
	s.untilWaiting(1)
	waited := time.Now()
	s.until("the turn limit has passed", func(*eventlog.SessionState) bool { return time.Since(waited) > 600*time.Millisecond })
	if l := s.load(); l.Run.Phase != run.Waiting {
		t.Fatalf("after the turn limit: %s, %+v", l.Run.Phase, s.last(execution))
	}
	s.cancel(execution)
	if l := s.untilEnded(execution); l.Run.Phase != run.Cancelled || l.Run.Approvals != nil {
		t.Errorf("end: %+v", l.Run)
	}
	if r := of[events.ApprovalRetracted](s); len(r) != 1 {
		t.Errorf("retracted %+v", r)
	}
}

// An executor that is killed while a runner does not answer leaves no request open: the end retracts it.
func TestApprovals_AreRetractedByTheEnd(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.Ask("ask", "commands")
		<-t.killed
	})
	b.run()
	s := b.session()
	execution := s.post("go")
	open := s.untilWaiting(1)
	s.cancel(execution)
	if l := s.untilEnded(execution); l.Run.Phase != run.Cancelled || l.Run.Approvals != nil {
		t.Errorf("end: %+v", l.Run)
	}
	if r := of[events.ApprovalRetracted](s); len(r) != 1 || r[0].ApprovalID != open[0].ID || r[0].Reason != "execution_ended" {
		t.Errorf("retracted %+v", r)
	}
}
