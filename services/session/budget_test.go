package session_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session"
)

// TestTenantBudgets_AreSetAndRemovedOnce tests that a repeated request sets or removes a budget once, and that each
// period has its own budget.
func TestTenantBudgets_AreSetAndRemovedOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	set := func(p events.Period, b events.Budget) command.Answer {
		return s.send(command.TypeSetBudget, "", "", command.SetBudget{Period: p, Budget: b})
	}
	remove := func(p events.Period) command.Answer {
		return s.send(command.TypeRemoveBudget, "", "", command.RemoveBudget{Period: p})
	}
	for _, a := range []command.Answer{
		set(events.PeriodDay, events.Budget{Tokens: 5}), set(events.PeriodDay, events.Budget{Tokens: 5}),
		set(events.PeriodDay, events.Budget{Tokens: 7}), set(events.PeriodTotal, events.Budget{Turns: 1}), remove(events.PeriodDay),
	} {
		if a.Error != nil || a.Position == "" {
			t.Fatalf("%+v", a)
		}
	}
	for field, a := range map[string]command.Answer{
		"period": set("week", events.Budget{Turns: 1}), "budget": set(events.PeriodDay, events.Budget{}), "budget.costUsd": set(events.PeriodDay, events.Budget{CostUSD: -1}),
	} {
		if a.Error == nil || a.Error.Code != "INVALID_REQUEST" || a.Error.Field != field {
			t.Errorf("%s: %+v", field, a.Error)
		}
	}
	if a := remove(events.PeriodDay); a.Error == nil || a.Error.Code != "BUDGET_NOT_FOUND" || a.Error.Field != "period" {
		t.Errorf("removed twice: %+v", a.Error)
	}
	var list []string
	for rec, err := range s.log.Read(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		must(t, err)
		for _, e := range rec.Events {
			body, err := json.Marshal(e.Data)
			must(t, err)
			list = append(list, string(e.Type())+" "+string(body))
		}
	}
	if got, want := strings.Join(list, "\n"), strings.Join([]string{
		`tenant_budget_set {"tenant":"default","period":"day","budget":{"tokens":5}}`, `tenant_budget_set {"tenant":"default","period":"day","budget":{"tokens":7}}`,
		`tenant_budget_set {"tenant":"default","period":"total","budget":{"turns":1}}`, `tenant_budget_removed {"tenant":"default","period":"day"}`,
	}, "\n"); got != want {
		t.Errorf("the log holds\n%s\nwant\n%s", got, want)
	}
}

// TestTurnsBudget_RequiresTheProxy tests that, where no egress proxy counts requests, an agent whose requests only
// the proxy can count is refused.
func TestTurnsBudget_RequiresTheProxy(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{Providers: []string{"local", "docker"}})
	for slug, architecture := range map[string]string{"counts": "claude-code", "does-not": "codex"} {
		a := s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: events.Reference{Slug: slug}, Spec: events.AgentSpec{
			Architecture: architecture, Instructions: "You do things.", Limits: events.Limits{Turns: 3},
		}})
		if a.Error != nil {
			t.Fatal(a.Error)
		}
	}
	s.mustRefuse(command.CreateSession{Agent: "does-not"}, "INVALID_REQUEST", "sandbox")
	s.mustCreate(id(events.KindSession), command.CreateSession{Agent: "does-not", Provider: "docker"})
	s.mustCreate(id(events.KindSession), command.CreateSession{Agent: "counts"})
}

// failedWith waits for the end of an execution. It must have failed for a budget before an executor claimed it.
func (s *stack) failedWith(sid, exe, says string) {
	s.t.Helper()
	var claimedBy string
	for _, e := range s.awaitEnd(sid, exe) {
		if e.ExecutionID != exe {
			continue
		}
		switch d := e.Data.(type) {
		case events.ExecutionClaimed:
			claimedBy = d.Executor
		case events.ExecutionFailed:
			if d.Code != "BUDGET_EXCEEDED" || !strings.Contains(d.Message, says) {
				s.t.Errorf("the execution failed with %+v, want %q", d, says)
			}
			if !strings.HasPrefix(claimedBy, "session/") {
				s.t.Errorf("the execution was claimed by %q", claimedBy)
			}
			return
		}
	}
	s.t.Errorf("%s did not fail", exe)
}

// TestBudget_IsAppliedAtDispatch tests that queries fail in their order, without a job for an executor, while the
// budget of the session or of its tenant is used up. With a higher budget, or in another period, the session
// continues.
func TestBudget_IsAppliedAtDispatch(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	s.executors(2)
	sid := s.create(events.Options{Budget: events.Budget{Turns: 2}})
	for range 2 {
		exe := s.post(sid)
		s.awaitEnd(sid, exe)
	}
	over := []string{s.post(sid), s.post(sid)}
	for _, exe := range over {
		s.failedWith(sid, exe, "the session has had 2 turns, and its budget is 2")
	}
	if a := s.send(command.TypeUpdateSession, sid, "", command.UpdateSession{Options: &events.Options{Budget: events.Budget{Turns: 3}}}); a.Error != nil {
		t.Fatal(a.Error)
	}
	third := s.post(sid)
	if l := s.await(sid, "the third", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(third) }); l.Run.SessionUsage().Turns != 3 {
		t.Errorf("the session used %+v", l.Run.SessionUsage())
	}
	s.failedWith(sid, s.post(sid), "had 3 turns")

	setUsage := func(until time.Time) {
		t.Helper()
		s.setTenantEntry(budget.Tenant{Budgets: []budget.Budget{{Period: events.PeriodDay, From: "2026-01-31", Until: until, Limit: events.Budget{CostUSD: 1}, Spent: events.BudgetUsage{CostUSD: 1.5}}}})
	}
	setUsage(time.Now().Add(time.Hour))
	other := s.create(events.Options{})
	// The service may see the new entry of the bucket one or two messages later.
	for i := range 1000 {
		exe := s.post(other)
		s.awaitEnd(other, exe)
		if failed := count[events.ExecutionFailed](s.history(other)); failed == 1 {
			s.failedWith(other, exe, "tenant default on 2026-01-31 has cost $1.5000, and its budget is $1.0000")
			break
		} else if i == 999 {
			t.Fatal("the tenant's budget is not applied")
		}
	}
	setUsage(time.Now().Add(-time.Second)) // the day has ended
	for i := range 1000 {
		exe := s.post(other)
		list := s.awaitEnd(other, exe)
		if _, completed := list[len(list)-1].Data.(events.ExecutionCompleted); completed {
			break
		} else if i == 999 {
			t.Fatal("the next day's budget is used up too")
		}
	}
}
