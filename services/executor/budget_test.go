package executor_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/topology"
)

// setSpent stores the usage of a tenant where dispatch reads it.
func (b *bench) setSpent(limit events.Budget, spent events.BudgetUsage) {
	b.t.Helper()
	from, until := events.PeriodMonth.Bounds(time.Now())
	b.setTenant(budget.Tenant{Budgets: []budget.Budget{{Period: events.PeriodMonth, From: from, Until: until, Limit: limit, Spent: spent}}})
}

// setTenant stores a tenant's entry where dispatch reads it.
func (b *bench) setTenant(tenant budget.Tenant) {
	b.t.Helper()
	body, err := json.Marshal(tenant)
	if err != nil {
		b.t.Fatal(err)
	}
	kv, err := b.js.KeyValue(b.ctx, topology.BucketBudgets)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := kv.Put(b.ctx, "default", body); err != nil {
		b.t.Fatal(err)
	}
}

// lastGrant returns the usage and the limit of an account in the last registration.
func (e *fakeEgress) lastGrant(prefix string) (spent events.BudgetUsage, limit events.Budget, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.grants) == 0 {
		return spent, limit, false
	}
	for _, x := range e.grants[len(e.grants)-1].Budgets {
		if strings.HasPrefix(x.Account, prefix) {
			return x.Spent, x.Limit, true
		}
	}
	return spent, limit, false
}

func withBudget(x events.Budget) func(*events.SessionCreated) {
	return func(c *events.SessionCreated) { c.Options.Budget = x }
}

// The usage of all executions of a session counts against its budget, and the execution that exhausts the budget is
// stopped.
func TestSessionBudget_CountsAllExecutions(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.egress = &fakeEgress{}
	b.run()
	s := b.session(withBudget(events.Budget{Tokens: 100, Turns: 2}))
	first := s.post("go")
	s.untilStarted()
	b.egress.say(first, events.ModelCalled{Usage: events.Usage{InputTokens: 60}})
	b.until("it is counted", func() bool { return s.load().Run.Metered.Tokens == 60 })
	s.interrupt()
	s.untilEnded(first)

	second := s.post("go on") // the second of two turns: a limit of turns does not stop a running turn
	b.until("it runs", func() bool { l := s.load(); return l.Run.Execution == second && l.Run.Phase == run.Running })
	if spent, limit, ok := b.egress.lastGrant(s.id); !ok || spent.Tokens != 60 || limit != (events.Budget{Tokens: 100}) {
		t.Errorf("the proxy is told %+v of %+v", spent, limit)
	}
	b.egress.say(second, events.ModelCalled{Usage: events.Usage{OutputTokens: 40}})
	s.untilEnded(second)
	failed := of[events.ExecutionFailed](s)
	if len(failed) != 1 || failed[0].Code != "BUDGET_EXCEEDED" || failed[0].Message != "the session has used 100 tokens, and its budget is 100" {
		t.Errorf("it failed with %+v", failed)
	}
	if spent := s.load().Run.SessionUsage(); spent.Turns != 2 || spent.Tokens != 100 {
		t.Errorf("the session took %+v", spent)
	}
	b.noJobs()
}

// A turn is stopped when the session has reached its limit of running time.
func TestSessionBudget_StopsATurnAtItsTime(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run()
	s := b.session(withBudget(events.Budget{TimeMs: 300}))
	s.untilEnded(s.post("go"))
	failed := of[events.ExecutionFailed](s)
	if len(failed) != 1 || failed[0].Code != "BUDGET_EXCEEDED" || !strings.Contains(failed[0].Message, "and its budget is 300 ms") {
		t.Errorf("it failed with %+v", failed)
	}
	if spent := s.load().Run.SessionUsage(); spent.TimeMs < 300 {
		t.Errorf("the session took %+v", spent)
	}
	b.noJobs()
}

// The proxy gets the usage of the tenant's other sessions, also during a turn, and a turn is stopped when its tenant
// has exhausted its budget.
func TestTenantBudget_CountsOtherSessions(t *testing.T) {
	t.Parallel()
	for name, proxied := range map[string]bool{"with a proxy": true, "by the agent's report": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, polite)
			if proxied {
				b.egress = &fakeEgress{}
			}
			limit := events.Budget{Tokens: 1000, Turns: 8}
			b.setSpent(limit, events.BudgetUsage{Tokens: 10, Turns: 7})
			b.run()
			s := b.session()
			x := s.post("go")
			s.untilStarted()
			if proxied {
				spent, told, _ := b.egress.lastGrant("tenant/default/month/20")
				if spent.Tokens != 10 || told != (events.Budget{Tokens: 1000}) {
					t.Errorf("the proxy is told %+v of %+v", spent, told)
				}
				b.egress.say(x, events.ModelCalled{Usage: events.Usage{InputTokens: 500}})
				b.until("it is counted", func() bool { return s.load().Run.Metered.Tokens == 500 })
				b.setSpent(limit, events.BudgetUsage{Tokens: 400})
				b.until("what the turn took itself is not forgotten", func() bool {
					spent, _, _ := b.egress.lastGrant("tenant/")
					return spent.Tokens == 510
				})
				b.setSpent(limit, events.BudgetUsage{Tokens: 700})
				b.until("the proxy knows what others took", func() bool { spent, _, _ := b.egress.lastGrant("tenant/"); return spent.Tokens == 700 })
			}
			b.setSpent(limit, events.BudgetUsage{Tokens: 1200})
			s.untilEnded(x)
			failed := of[events.ExecutionFailed](s)
			if len(failed) != 1 || failed[0].Code != "BUDGET_EXCEEDED" || !strings.HasPrefix(failed[0].Message, "tenant default since 20") || !strings.HasSuffix(failed[0].Message, "has used 1200 tokens, and its budget is 1000") {
				t.Errorf("it failed with %+v", failed)
			}
			b.noJobs()
		})
	}
}

// A running turn ends with TENANT_EVENTS once its tenant has reached its limit of events, with and without a proxy.
func TestTenantEvents_EndATurn(t *testing.T) {
	t.Parallel()
	for name, proxied := range map[string]bool{"with a proxy": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, polite)
			if proxied {
				b.egress = &fakeEgress{}
			}
			today := time.Now().UTC().AddDate(0, 0, 1).Format(time.DateOnly) // the executor's clock is ahead, so that midnight does not affect the test
			entry := func(logged uint64) budget.Tenant {
				return budget.Tenant{Limits: events.TenantLimits{EventsPerDay: 100}, Used: budget.DailyOutput{Day: today, Logged: events.OutputSize{Events: logged}}}
			}
			b.setTenant(entry(99))
			b.run()
			s := b.session()
			x := s.post("go")
			s.untilStarted()
			b.setTenant(entry(100))
			s.untilEnded(x)
			failed := of[events.ExecutionFailed](s)
			if len(failed) != 1 || failed[0].Code != "TENANT_EVENTS" || failed[0].Message != "tenant default has added 100 events to the log on "+today+", and its limit is 100" {
				t.Errorf("it failed with %+v", failed)
			}
			b.noJobs()
		})
	}
}

// If the agent does not enforce the limit of turns itself, the proxy gets the limit of requests of an execution. The
// executor leaves the enforcement to the proxy, because the last request may be the answer.
func TestTurnLimit_IsEnforcedByTheProxy(t *testing.T) {
	t.Parallel()
	for architecture, told := range map[string]uint32{"claude-code": 0, "codex": 1} {
		t.Run(architecture, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, polite)
			b.egress = &fakeEgress{}
			b.run()
			agent := b.agent("a", 2, events.AgentSpec{Architecture: architecture, Instructions: "You do things.", Limits: events.Limits{Turns: 1, Tokens: 1000}})
			s := b.session(of1(agent), func(c *events.SessionCreated) { c.Architecture = architecture })
			x := s.post("go")
			s.untilStarted()
			if _, limit, _ := b.egress.lastGrant(x); limit != (events.Budget{Turns: told, Tokens: 1000}) {
				t.Errorf("the proxy is told %+v", limit)
			}
			b.egress.say(x, events.ModelCalled{Status: 529}, events.ModelCalled{Status: 200, Usage: events.Usage{InputTokens: 1}})
			b.until("it is counted", func() bool { r := s.load().Run; return r.Calls == 1 && r.Metered.Tokens == 1 })
			s.interrupt()
			s.untilEnded(x)
			if failed := of[events.ExecutionFailed](s); len(failed) > 0 {
				t.Errorf("it failed with %+v", failed)
			}
			b.noJobs()
		})
	}
}
