package executor_test

import (
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor"
)

// toolCounter counts the approved tools that run at once. A tool runs until the test receives from running and sends to done.
type toolCounter struct {
	running chan string // ids of executions
	done    chan struct{}

	mu        sync.Mutex
	now, most int
}

// askThenUseTool is an agent that asks for approval and then runs the tool. A message "running" makes it run the tool at once.
func (c *toolCounter) askThenUseTool(t *fakeTurn) {
	t.Start()
	if t.Query.Content != "running" {
		t.Ask("ask", "commands")
		if _, ok := t.Verdict("ask"); !ok {
			return
		}
	}
	c.mu.Lock()
	c.now++
	c.most = max(c.most, c.now)
	c.mu.Unlock()
	c.running <- t.Query.ExecutionID
	if !t.Wait(c.done) {
		return
	}
	c.mu.Lock()
	c.now--
	c.mu.Unlock()
	t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
}

// untilFollowed journals a line and waits until the log has it, after which the session's executor has also seen all earlier decisions.
func (s *talk) untilFollowed() {
	s.b.t.Helper()
	s.b.provider.box(s.load().Run.Sandbox.ID).runner.between("followed")
	s.until("the execution is followed", func(*eventlog.SessionState) bool { return len(of[events.Log](s)) == 1 })
}

// TestApprovals_AcquireASlotAfterATakeover tests that executions that waited for approval when their executor was killed
// acquire a slot of the next executor, and one of their tenant, before they continue.
func TestApprovals_AcquireASlotAfterATakeover(t *testing.T) {
	t.Parallel()
	one := map[string]func(*executor.Config){
		"slots of the executor": func(c *executor.Config) { c.Slots, c.Reserved = 1, -1 },
		"slots of the tenant":   func(c *executor.Config) { c.TenantSlots = 1 },
	}
	for limit, config := range one {
		for decided, before := range map[string]bool{"decided before the takeover": true, "decided after it": false} {
			t.Run(limit+", "+decided, func(t *testing.T) {
				t.Parallel()
				const sessions = 3
				tools := &toolCounter{running: make(chan string, sessions), done: make(chan struct{})}
				b := newBench(t, tools.askThenUseTool)
				first := b.run()
				waiting := map[string]*talk{}
				for range sessions {
					s := b.session()
					waiting[s.post("go")] = s
				}
				approvals := map[string]string{}
				for execution, s := range waiting {
					approvals[execution] = s.untilWaiting(1)[0].ID
				}
				approve := func() {
					for execution, s := range waiting {
						s.life(decision(execution, approvals[execution], events.DecisionApprove))
					}
				}
				first.wire.kill()
				if before {
					approve()
				}
				b.run(config)
				for _, s := range waiting {
					s.untilFollowed()
				}
				if !before {
					approve()
				}
				for range sessions {
					execution := <-tools.running
					tools.done <- struct{}{}
					waiting[execution].untilEnded(execution)
				}
				if tools.most != 1 {
					t.Errorf("%d tools ran at once, want 1", tools.most)
				}
				for _, s := range waiting {
					if starts := len(of[events.ExecutionStarted](s)); starts != 1 {
						t.Errorf("the agent started %d times", starts)
					}
				}
				b.noJobs()
			})
		}
	}
}

// TestApprovals_WaitForARunningTurnAfterATakeover tests that an approved execution that another executor follows waits
// while an execution of the same tenant runs, and that it gets its decision afterwards.
func TestApprovals_WaitForARunningTurnAfterATakeover(t *testing.T) {
	t.Parallel()
	tools := &toolCounter{running: make(chan string, 2), done: make(chan struct{})}
	b := newBench(t, tools.askThenUseTool)
	first := b.run()
	s, other := b.session(), b.session()
	asks := s.post("go")
	id := s.untilWaiting(1)[0].ID
	first.wire.kill()
	b.run(func(c *executor.Config) { c.Slots, c.Reserved, c.TenantSlots = 1, -1, 1 })
	s.untilFollowed()
	runs := other.post("running")
	if got := <-tools.running; got != runs {
		t.Fatalf("%s runs", got)
	}
	s.life(decision(asks, id, events.DecisionApprove))
	other.until("the other runs", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	tools.done <- struct{}{}
	other.untilEnded(runs)
	<-tools.running
	tools.done <- struct{}{}
	s.untilEnded(asks)
	if tools.most != 1 {
		t.Errorf("%d tools ran at once, want 1", tools.most)
	}
	b.noJobs()
}
