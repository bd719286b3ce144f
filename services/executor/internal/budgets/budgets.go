// Package budgets computes what remains of the budgets of an execution, its session and its tenant, and of the limits
// of an agent's output.
package budgets

import (
	"reflect"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// Limits are the budgets of a session and its tenant, and the tenant's usage.
type Limits struct {
	Session events.Budget
	Tenant  budget.Tenant
}

// SameBudgets reports whether l and m have the same budgets. It does not compare the limits of the tenant that are not
// budgets.
func (l Limits) SameBudgets(m Limits) bool {
	return l.Session == m.Session && reflect.DeepEqual(l.Tenant.Budgets, m.Tenant.Budgets)
}

// An Execution identifies the execution whose usage a Tracker counts, and has its own budget.
type Execution struct {
	Tenant  string
	Session string
	ID      string
	Own     events.Budget // of this execution alone; Turns is 0 unless the egress proxy counts the model requests
}

// A Tracker computes for one execution how much of each budget is used. The usage of a tenant is reported with a delay, so the
// Tracker adds what this execution has used since the last report; its results never decrease. The zero value is ready for use.
// It is not safe for concurrent use.
type Tracker struct {
	allocations map[string]allocation
}

// An allocation is the usage of one budget of a tenant as the Tracker has last computed it.
type allocation struct {
	total events.BudgetUsage // of all executions
	own   events.BudgetUsage // of this execution, when total was computed
}

// Budgets returns the budgets that the usage of the execution counts against, each with its usage so far. s is the
// state of the session's runs. Budgets without a limit are left out.
func (t *Tracker) Budgets(e Execution, l Limits, s run.State, now time.Time) []api.Budget {
	var out []api.Budget
	add := func(account, whose string, limit events.Budget, spent events.BudgetUsage) {
		if limit != (events.Budget{}) {
			out = append(out, api.Budget{Account: account, Whose: whose, Limit: limit, Spent: spent})
		}
	}
	own := s.TotalUsage()
	spent := own
	if e.Own.Turns > 0 {
		spent.Turns = s.Calls
	}
	add(e.ID, "the execution", e.Own, spent)
	own.TimeMs = s.RunMilliseconds(now)
	spent = s.SessionUsage()
	spent.TimeMs += own.TimeMs
	l.Session.Turns = 0
	add(e.Session, "the session", l.Session, spent)
	for _, b := range l.Tenant.Budgets {
		b = b.InPeriodAt(now)
		account := "tenant/" + e.Tenant + "/" + string(b.Period) + "/" + b.From
		b.Limit.Turns = 0
		add(account, b.Describe(e.Tenant), b.Limit, t.updateTenantUsage(account, b.Spent, own))
	}
	return out
}

// ExceededLimit returns the code and the message of the first budget or tenant limit that is used up, "" if there is none. It
// ignores limits of turns: the last allowed request may be the answer, and the egress proxy refuses the next one.
func (t *Tracker) ExceededLimit(e Execution, l Limits, s run.State, now time.Time) (code, message string) {
	for _, b := range t.Budgets(e, l, s, now) {
		b.Limit.Turns = 0
		if message := b.Limit.ExceededLimit(b.Spent, b.Whose); message != "" {
			return budget.CodeExceeded, message
		}
	}
	if message := l.Tenant.ExceededEventLimit(e.Tenant, now); message != "" {
		return events.CodeTenantEvents, message
	}
	return "", ""
}

// updateTenantUsage returns the usage of the tenant budget account: the greater of the reported usage, and the last result plus
// what the execution has used since. own is the total usage of the execution.
func (t *Tracker) updateTenantUsage(account string, reported, own events.BudgetUsage) events.BudgetUsage {
	if t.allocations == nil {
		t.allocations = map[string]allocation{}
	}
	a, seen := t.allocations[account]
	if !seen {
		// Tokens and cost of the execution before this claim are reported, or soon are. Its time is reported when it ends.
		a.own = events.BudgetUsage{Tokens: own.Tokens, CostUSD: own.CostUSD}
	}
	since := events.BudgetUsage{Tokens: own.Tokens - min(own.Tokens, a.own.Tokens), CostUSD: max(0, own.CostUSD-a.own.CostUSD)}
	a.total, a.own = a.total.Plus(since).Max(events.BudgetUsage{Tokens: reported.Tokens, CostUSD: reported.CostUSD, TimeMs: reported.TimeMs}), own
	t.allocations[account] = a
	return a.total.Plus(events.BudgetUsage{TimeMs: own.TimeMs})
}
