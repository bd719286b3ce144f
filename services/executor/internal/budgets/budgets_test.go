package budgets_test

import (
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
)

var (
	now       = time.Date(2026, 3, 10, 12, 0, 0, 0, time.UTC)
	execution = budgets.Execution{Tenant: "acme", Session: "ses_1", ID: "exe_1"}
)

// tenant returns the limits of a tenant with a budget of this month, of which it has used reported.
func tenant(limit events.Budget, reported events.BudgetUsage) budgets.Limits {
	from, until := events.PeriodMonth.Bounds(now)
	return budgets.Limits{Tenant: budget.Tenant{Budgets: []budget.Budget{{Period: events.PeriodMonth, From: from, Until: until, Limit: limit, Spent: reported}}}}
}

// used returns the state of a session's runs whose execution was claimed 30 seconds ago and has used the given
// tokens.
func used(tokens uint64) run.State {
	var s run.State
	s.ClaimedAt = now.Add(-30 * time.Second)
	s.Metered = events.BudgetUsage{Tokens: tokens}
	return s
}

// TestTracker_Budgets: each budget with a limit is listed with its use; turns count for the execution alone.
func TestTracker_Budgets(t *testing.T) {
	t.Parallel()
	s := used(100)
	s.Calls, s.Before = 4, events.BudgetUsage{Tokens: 1000, TimeMs: 5000}
	e := execution
	e.Own = events.Budget{Turns: 10, Tokens: 500}
	l := tenant(events.Budget{Tokens: 9000, Turns: 7}, events.BudgetUsage{Tokens: 2000})
	l.Session = events.Budget{Tokens: 5000, Turns: 7}
	var tracker budgets.Tracker
	list := tracker.Budgets(e, l, s, now)
	if len(list) != 3 {
		t.Fatalf("%d budgets, want those of the execution, the session and the tenant", len(list))
	}
	if b := list[0]; b.Account != "exe_1" || b.Limit != e.Own || b.Spent.Tokens != 100 || b.Spent.Turns != 4 {
		t.Errorf("the execution's: %+v", b)
	}
	if b := list[1]; b.Account != "ses_1" || b.Limit != (events.Budget{Tokens: 5000}) || b.Spent.Tokens != 1100 || b.Spent.TimeMs != 35000 {
		t.Errorf("the session's: %+v", b)
	}
	if b := list[2]; !strings.HasPrefix(b.Account, "tenant/acme/month/") || b.Limit != (events.Budget{Tokens: 9000}) || b.Spent.Tokens != 2000 || b.Spent.TimeMs != 30000 {
		t.Errorf("the tenant's: %+v", b)
	}
	if list := tracker.Budgets(execution, budgets.Limits{}, s, now); len(list) != 0 {
		t.Errorf("budgets without a limit: %+v", list)
	}
}

// TestTracker_AddsUseSinceTheReport: a tenant's use contains what the execution used since the last report, and never decreases.
func TestTracker_AddsUseSinceTheReport(t *testing.T) {
	t.Parallel()
	var tracker budgets.Tracker
	for i, c := range []struct{ own, reported, want uint64 }{
		{own: 100, reported: 1000, want: 1000}, // the report has, or soon has, the use at the claim
		{own: 150, reported: 1000, want: 1050},
		{own: 150, reported: 1020, want: 1050}, // a report that lags
		{own: 170, reported: 1400, want: 1400}, // other sessions have used more
		{own: 190, reported: 1400, want: 1420},
	} {
		list := tracker.Budgets(execution, tenant(events.Budget{Tokens: 9000}, events.BudgetUsage{Tokens: c.reported}), used(c.own), now)
		if got := list[0].Spent.Tokens; got != c.want {
			t.Errorf("step %d: %d tokens, want %d", i, got, c.want)
		}
	}
}

// TestTracker_Exceeded: the first exceeded budget is returned, and a limit of turns is not one.
func TestTracker_Exceeded(t *testing.T) {
	t.Parallel()
	today, _ := events.PeriodDay.Bounds(now)
	full := budget.Tenant{Limits: events.TenantLimits{EventsPerDay: 10}, Used: budget.DailyOutput{Day: today, Logged: events.OutputSize{Events: 10}}}
	for name, c := range map[string]struct {
		own     events.Budget
		limits  budgets.Limits
		code    string
		message string
	}{
		"no limits":               {},
		"within all budgets":      {own: events.Budget{Tokens: 101}, limits: tenant(events.Budget{Tokens: 101}, events.BudgetUsage{})},
		"turns are used up":       {own: events.Budget{Turns: 4}},
		"of the execution":        {own: events.Budget{Tokens: 100}, code: budget.CodeExceeded, message: "the execution has used 100 tokens"},
		"of the session":          {limits: budgets.Limits{Session: events.Budget{TimeMs: 30000}}, code: budget.CodeExceeded, message: "the session has run for 30000 ms"},
		"of the tenant":           {limits: tenant(events.Budget{CostUSD: 1}, events.BudgetUsage{CostUSD: 2}), code: budget.CodeExceeded, message: "tenant acme since"},
		"events of the tenant":    {limits: budgets.Limits{Tenant: full}, code: events.CodeTenantEvents, message: "tenant acme has added 10 events"},
		"execution before tenant": {own: events.Budget{Tokens: 1}, limits: budgets.Limits{Tenant: full}, code: budget.CodeExceeded, message: "the execution"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := used(100)
			s.Calls = 4
			e := execution
			e.Own = c.own
			var tracker budgets.Tracker
			code, message := tracker.ExceededLimit(e, c.limits, s, now)
			if code != c.code || !strings.HasPrefix(message, c.message) || (message == "") != (code == "") {
				t.Errorf("%q, %q; want %q, %q", code, message, c.code, c.message)
			}
		})
	}
}

// TestLimits_SameBudgets: other limits of the tenant do not count.
func TestLimits_SameBudgets(t *testing.T) {
	t.Parallel()
	a, b := tenant(events.Budget{Tokens: 1}, events.BudgetUsage{}), tenant(events.Budget{Tokens: 1}, events.BudgetUsage{})
	b.Tenant.Limits.Slots = 5
	if !a.SameBudgets(b) {
		t.Error("the same budgets differ")
	}
	if a.SameBudgets(tenant(events.Budget{Tokens: 1}, events.BudgetUsage{Tokens: 1})) {
		t.Error("budgets with another use are the same")
	}
}
