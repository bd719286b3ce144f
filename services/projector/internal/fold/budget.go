package fold

import (
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// TenantUsage is a row of tenant_usage.
type TenantUsage struct {
	Tenant, ID string
	Group      int16
	Day        string
	Turns      int64
	Tokens     int64
	CostUSD    float64
	TimeMs     int64
}

// TenantBudget is a row of tenant_budgets; ID is the period.
type TenantBudget struct {
	Tenant, ID string
	Group      int16
	Turns      int64
	Tokens     int64
	CostUSD    float64
	TimeMs     int64
	SetAt      time.Time
	Removed    bool
}

// spends tells whether an event may add to what a tenant has taken.
func spends(e events.Event) bool {
	switch e.Data.(type) {
	case events.ModelCalled, events.ExecutionStarted:
		return true
	}
	return events.Terminal(e.Type())
}

// usageDay is the row of what a tenant takes on the day of an event.
func (m *Model) usageDay(tenant string, e events.Event) Key {
	return Key{tenant, day(e.Time) + "/" + strconv.Itoa(int(m.group))}
}

// spent gives the row that an event adds to.
func (f *folding) spent(a *aggregate, e events.Event) *TenantUsage {
	k := f.model.usageDay(a.key.Tenant, e)
	x := f.model.tenantUsage[k]
	if x == nil {
		x = &entry[TenantUsage]{row: TenantUsage{Tenant: k.Tenant, ID: k.ID, Group: f.model.group, Day: day(e.Time)}}
		f.model.tenantUsage[k] = x
	}
	f.spentBy(k.Tenant)
	return touch(&f.tenantUsage, x)
}

// spentBy notes a tenant whose budgets, or what it took of them, changed.
func (f *folding) spentBy(tenant string) {
	if f.out.Tenants == nil {
		f.out.Tenants = map[string]bool{}
	}
	f.out.Tenants[tenant] = true
}

// spend adds what an event says that the tenant took. x is the event's execution
// as it was before, nil outside of one. What the egress proxy meters counts; of an
// execution that it told nothing of, what the agent told at its end.
func (f *folding) spend(a *aggregate, x *Execution, e events.Event) {
	switch d := e.Data.(type) {
	case events.ModelCalled:
		if x != nil && x.ended() && !x.Metered && x.tokens() > 0 {
			return // the proxy tells late what was counted at the end
		}
		row := f.spent(a, e)
		row.Tokens += count(d.Usage.Tokens())
		row.CostUSD += d.CostUSD
	case events.ExecutionStarted:
		if x != nil && !x.ended() && x.StartedAt == nil {
			f.spent(a, e).Turns++
		}
	}
}

// spendAtEnd adds what is known of an execution once it has ended.
func (f *folding) spendAtEnd(a *aggregate, x *Execution, e events.Event) {
	if x.StartedAt == nil {
		return // nothing ran
	}
	row := f.spent(a, e)
	row.TimeMs += x.DurationMs
	if !x.Metered {
		row.Tokens += x.tokens()
		row.CostUSD += x.CostUSD
	}
}

func (x *Execution) tokens() int64 { return x.Input + x.Output + x.CacheRead + x.CacheWrite }

// budgetPeriod is the period that an event of a tenant's budget is about.
func budgetPeriod(e events.Event) string {
	switch d := e.Data.(type) {
	case events.TenantBudgetSet:
		return rowKey(string(d.Period))
	case events.TenantBudgetRemoved:
		return rowKey(string(d.Period))
	}
	return ""
}

// budget folds a commit about a tenant's budget.
func (f *folding) budget(rec eventlog.Record) {
	if f.bare {
		return
	}
	for _, e := range rec.Events {
		period := budgetPeriod(e)
		if period == "" {
			continue
		}
		k := Key{rec.Subject.Tenant, period}
		x := f.model.tenantBudgets[k]
		if x == nil {
			x = &entry[TenantBudget]{row: TenantBudget{Tenant: k.Tenant, ID: k.ID, Group: f.model.group}}
			f.model.tenantBudgets[k] = x
		}
		row := touch(&f.tenantBudgets, x)
		row.SetAt, row.Removed = moment(e.Time), true
		if d, set := e.Data.(events.TenantBudgetSet); set {
			row.Turns, row.Tokens, row.CostUSD, row.TimeMs = int64(d.Budget.Turns), count(d.Budget.Tokens), d.Budget.CostUSD, count(d.Budget.TimeMs)
			row.Removed = false
		}
		f.spentBy(k.Tenant)
	}
}

type (
	tenantUsageRef  Key
	tenantBudgetRef Key
)

// tenant wants what an event adds to, or says, of a tenant.
func (w *want) tenant(tenant string, e events.Event) {
	if spends(e) {
		k := w.model.usageDay(tenant, e)
		if _, present := w.model.tenantUsage[k]; !present && !w.seen[tenantUsageRef(k)] {
			w.seen[tenantUsageRef(k)] = true
			w.out.TenantUsage = append(w.out.TenantUsage, k)
		}
	}
	if period := budgetPeriod(e); period != "" {
		k := Key{tenant, period}
		if _, present := w.model.tenantBudgets[k]; !present && !w.seen[tenantBudgetRef(k)] {
			w.seen[tenantBudgetRef(k)] = true
			w.out.TenantBudgets = append(w.out.TenantBudgets, k)
		}
	}
}

// putTenants makes present what was looked up of tenants.
func (m *Model) putTenants(asked Missing, p Present) {
	for _, k := range asked.TenantUsage {
		m.tenantUsage[k] = nil
	}
	for _, k := range asked.TenantBudgets {
		m.tenantBudgets[k] = nil
	}
	for _, r := range p.TenantUsage {
		m.tenantUsage[Key{r.Tenant, r.ID}] = &entry[TenantUsage]{row: r, stored: true}
	}
	for _, r := range p.TenantBudgets {
		m.tenantBudgets[Key{r.Tenant, r.ID}] = &entry[TenantBudget]{row: r, stored: true}
	}
}
