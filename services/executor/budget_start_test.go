package executor_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
)

// spender is an agent that reports 60 tokens and $0.50. It ends at once, or when it is interrupted if the message is "wait".
func spender(t *fakeTurn) {
	if t.Query.Content == "wait" {
		polite(t)
		return
	}
	t.Start()
	used := events.Usage{InputTokens: 60}
	t.Say("metadata_update", events.MetadataUpdate{Usage: used, CostUSD: 0.5})
	t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Usage: used, CostUSD: 0.5})
}

// requireRefused waits for the end of an execution. It must have failed for a budget or limit before it started.
func (s *talk) requireRefused(execution, code, message string) {
	s.b.t.Helper()
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != code || !strings.Contains(f.Message, message) {
		s.b.t.Errorf("%s ended with %+v, want %s: …%s…", execution, s.last(execution), code, message)
	}
	for _, e := range s.events() {
		if _, started := e.Data.(events.ExecutionStarted); started && e.ExecutionID == execution {
			s.b.t.Errorf("%s started", execution)
		}
	}
}

// TestSessionBudget_RefusesTheNextTurn tests that an executor does not start a turn beyond the budget of its session if no
// reactor has checked the budget before: the job is published as soon as the message is accepted.
func TestSessionBudget_RefusesTheNextTurn(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		budget  events.Budget
		query   string
		message string
	}{
		"turns":   {events.Budget{Turns: 1}, "go", "the session has had 1 turns, and its budget is 1"},
		"tokens":  {events.Budget{Tokens: 60}, "go", "the session has used 60 tokens, and its budget is 60"},
		"dollars": {events.Budget{CostUSD: 0.5}, "go", "the session has cost $0.5000, and its budget is $0.5000"},
		"time":    {events.Budget{TimeMs: 300}, "wait", "and its budget is 300 ms"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, spender)
			b.run()
			s := b.session(withBudget(c.budget))
			s.untilEnded(s.post(c.query))
			for range 2 {
				s.requireRefused(s.post("again"), "BUDGET_EXCEEDED", c.message)
			}
			if q := b.provider.onlyBox().runner.receivedQueries(); len(q) != 1 {
				t.Errorf("the agent got %d queries, want 1", len(q))
			}
			b.noJobs()
		})
	}
}

// TestSessionBudget_AllowsTheLastTurn tests that a turn within the budget of its session starts.
func TestSessionBudget_AllowsTheLastTurn(t *testing.T) {
	t.Parallel()
	b := newBench(t, spender)
	b.run()
	s := b.session(withBudget(events.Budget{Turns: 2, Tokens: 61, CostUSD: 0.6}))
	s.untilEnded(s.post("go"))
	if l := s.untilEnded(s.post("again")); l.Run.Phase != run.Completed {
		t.Errorf("the second of two turns ended as %s", l.Run.Phase)
	}
	b.noJobs()
}

// everything is a position after all commits of the log.
var everything = budget.Positions{0: math.MaxUint64}

// untilDelivered waits until n more jobs of a durable were delivered. If there is only one job, an executor has returned it n-1 times.
func (b *bench) untilDelivered(durable string, n uint64) {
	b.t.Helper()
	delivered := func() uint64 {
		c, err := b.js.Consumer(b.ctx, topology.StreamJobs, durable)
		if err != nil {
			b.t.Fatal(err)
		}
		return c.CachedInfo().Delivered.Consumer
	}
	before := delivered()
	b.until("the job was delivered again", func() bool { return delivered() >= before+n })
}

// tenantLimits are the limits of a tenant of which one turn of spender leaves nothing.
func tenantLimits() map[string]func(used bool) budget.Tenant {
	today := time.Now().UTC().AddDate(0, 0, 1).Format(time.DateOnly) // the day does not end during the test
	limit := func(limit events.Budget, spent events.BudgetUsage) func(bool) budget.Tenant {
		return func(used bool) budget.Tenant {
			b := budget.Budget{Period: events.PeriodTotal, Limit: limit}
			if used {
				b.Spent = spent
			}
			return budget.Tenant{Budgets: []budget.Budget{b}}
		}
	}
	return map[string]func(bool) budget.Tenant{
		"turns":   limit(events.Budget{Turns: 1}, events.BudgetUsage{Turns: 1}),
		"tokens":  limit(events.Budget{Tokens: 60}, events.BudgetUsage{Tokens: 60}),
		"dollars": limit(events.Budget{CostUSD: 0.5}, events.BudgetUsage{CostUSD: 0.5}),
		"time":    limit(events.Budget{TimeMs: 1}, events.BudgetUsage{TimeMs: 1}),
		"events": func(used bool) budget.Tenant {
			t := budget.Tenant{Limits: events.TenantLimits{EventsPerDay: 9}, Used: budget.DailyOutput{Day: today}}
			if used {
				t.Used.Logged.Events = 9
			}
			return t
		},
	}
}

// TestTenantBudget_RefusesTheNextTurn tests that the next turn of a session waits while the session service, which is frozen,
// has not counted the last one for the tenant, and that it fails when the session service has.
func TestTenantBudget_RefusesTheNextTurn(t *testing.T) {
	t.Parallel()
	for name, entry := range tenantLimits() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, spender)
			before := entry(false)
			before.Counted = budget.Positions{0: 1} // the tenant's other sessions
			s := b.session()
			b.setTenant(before)
			b.run()
			first := s.post("go")
			before.Counted = budget.Positions{0: s.load().LifeHead.Seq}
			b.setTenant(before)
			s.untilEnded(first)
			second := s.post("again")
			b.untilDelivered(topology.EngineJobsDurable(b.sandbox, b.engine), 2)
			if l := s.load(); l.Run.Execution != first {
				t.Fatalf("%s was claimed although the usage of %s is not counted", l.Run.Execution, first)
			}
			after := entry(true)
			after.Counted = everything
			b.setTenant(after)
			code := budget.CodeExceeded
			if name == "events" {
				code = events.CodeTenantEvents
			}
			s.requireRefused(second, code, "tenant default has")
			b.noJobs()
		})
	}
}

// TestTenantBudget_AllowsTheNextTurn tests that a turn that waited for its tenant's usage starts if the budget has something
// left, and that the entry of an earlier session service, which does not state what it has counted, delays no turn.
func TestTenantBudget_AllowsTheNextTurn(t *testing.T) {
	t.Parallel()
	for name, counts := range map[string]bool{"after it was counted": true, "with an entry of an earlier version": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, spender)
			entry := budget.Tenant{Budgets: []budget.Budget{{Period: events.PeriodTotal, Limit: events.Budget{Turns: 2}}}}
			if counts {
				entry.Counted = everything
			}
			b.setTenant(entry)
			b.run()
			s := b.session()
			s.untilEnded(s.post("go"))
			entry.Budgets[0].Spent.Turns = 1
			if counts {
				entry.Counted = budget.Positions{0: 1}
			}
			b.setTenant(entry)
			second := s.post("again")
			if counts {
				b.untilDelivered(topology.EngineJobsDurable(b.sandbox, b.engine), 1)
				entry.Counted = everything
				b.setTenant(entry)
			}
			if l := s.untilEnded(second); l.Run.Phase != run.Completed {
				t.Errorf("the second of two turns ended as %s", l.Run.Phase)
			}
			b.noJobs()
		})
	}
}

// TestTenantBudget_IncludesTurnsOfOtherSessions tests that a session's turn, which waits for the only slot until another
// session's turn ends, starts only when the usage of that turn is counted.
func TestTenantBudget_IncludesTurnsOfOtherSessions(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.Wait(end)
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	entry := budget.Tenant{Budgets: []budget.Budget{{Period: events.PeriodTotal, Limit: events.Budget{Turns: 1}}}}
	b.setTenant(entry)
	b.run(func(c *executor.Config) { c.Slots, c.Reserved = 1, -1 })
	s, other := b.session(), b.session()
	first := s.post("go")
	s.until("the turn runs", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	entry.Counted = budget.Positions{}
	waiting := mint(t, events.KindExecution)
	other.life(func(base session.CommandBase, _ *eventlog.SessionState) session.Command {
		return session.PostQuery{CommandBase: base, ExecutionID: waiting, Content: "go"}
	})
	entry.Counted.Include(0, other.load().LifeHead.Seq) // everything before the end of the first turn
	b.setTenant(entry)
	other.job()
	jobs := topology.ProviderJobsDurable(b.sandbox)
	b.untilDelivered(jobs, 1) // it waits for the slot
	close(end)
	s.untilEnded(first)
	b.untilDelivered(jobs, 2)
	if l := other.load(); l.Run.Execution != "" {
		t.Fatalf("%s was claimed although the usage of %s is not counted", l.Run.Execution, first)
	}
	entry.Budgets[0].Spent.Turns, entry.Counted = 1, everything
	b.setTenant(entry)
	other.requireRefused(waiting, budget.CodeExceeded, "tenant default has had 1 turns, and its budget is 1")
	b.noJobs()
}
