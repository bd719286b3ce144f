package fold

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
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
	Events     int64 // events that sessions appended to the log
	EventBytes int64 // bytes of those events, by events.OutputSizeOf
	Stored     int64 // bytes that the tenant stores now; only in the row of noDay
}

// noDay is the value of TenantUsage.Day in the row that contains the bytes that a tenant stores now.
const noDay = ""

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

// usageDay returns the key of the row of a tenant's usage on a day, such as 2026-01-31.
func (m *Model) usageDay(tenant, day string) Key {
	return Key{tenant, day + "/" + strconv.Itoa(int(m.group))}
}

// usageRow returns the row of tenant_usage of a tenant and a day, which counts as changed.
func (f *folding) usageRow(tenant, day string) *TenantUsage {
	k := f.model.usageDay(tenant, day)
	x := f.model.tenantUsage[k]
	if x == nil {
		x = &entry[TenantUsage]{row: TenantUsage{Tenant: k.Tenant, ID: k.ID, Group: f.model.group, Day: day}}
		f.model.tenantUsage[k] = x
	}
	return markChanged(&f.tenantUsage, x)
}

// dayUsage is the part of a tenant's usage on one day (a row of tenant_usage) that one session added.
type dayUsage struct {
	Turns   int64   `json:"turns,omitempty"`
	Tokens  int64   `json:"tokens,omitempty"`
	CostUSD float64 `json:"costUsd,omitempty"`
	TimeMs  int64   `json:"timeMs,omitempty"`

	Events     int64 `json:"events,omitempty"`
	EventBytes int64 `json:"eventBytes,omitempty"`

	Stored int64 `json:"stored,omitempty"` // only in the row of noDay
}

// plus returns the sum of d and o.
func (d dayUsage) plus(o dayUsage) dayUsage {
	return dayUsage{d.Turns + o.Turns, d.Tokens + o.Tokens, finite(d.CostUSD + o.CostUSD), d.TimeMs + o.TimeMs, d.Events + o.Events, d.EventBytes + o.EventBytes, d.Stored + o.Stored}
}

// minus returns d minus o.
func (d dayUsage) minus(o dayUsage) dayUsage {
	return dayUsage{d.Turns - o.Turns, d.Tokens - o.Tokens, d.CostUSD - o.CostUSD, d.TimeMs - o.TimeMs, d.Events - o.Events, d.EventBytes - o.EventBytes, d.Stored - o.Stored}
}

// decodeDayUsage decodes Session.Spent or Deleted.Spent.
func decodeDayUsage(text string) (map[string]dayUsage, error) {
	shares := map[string]dayUsage{}
	if text == "" {
		return shares, nil
	}
	if err := json.Unmarshal([]byte(text), &shares); err != nil {
		return nil, fmt.Errorf("decode a session's stored usage: %w", err)
	}
	return shares, nil
}

// retiredUsage returns the budget usage of a deleted session, which run_retired states, as JSON.
func retiredUsage(d events.RunRetired) (string, error) {
	shares := map[string]dayUsage{}
	for _, u := range d.Usage {
		s := u.Spent
		shares[clean(u.Day)] = dayUsage{
			Turns: int64(s.Turns), Tokens: clampInt64(s.Tokens), CostUSD: s.CostUSD, TimeMs: clampInt64(s.TimeMs), Events: clampInt64(u.Logged.Events), EventBytes: clampInt64(u.Logged.Bytes),
		}
	}
	if d.Stored > 0 {
		shares[noDay] = dayUsage{Stored: clampInt64(d.Stored)}
	}
	if len(shares) == 0 {
		return "", nil
	}
	return marshal(shares)
}

// addUsage adds the usage d, on the day of an event, to the session's share and to its tenant's row.
func (f *folding) addUsage(a *aggregate, e events.Event, d dayUsage) error {
	on := f.model.day(e.Time)
	row := f.usageRow(a.key.Tenant, on)
	f.session(a, e)
	if a.shares == nil {
		var err error
		if a.shares, err = decodeDayUsage(a.session.row.Spent); err != nil {
			return err
		}
	}
	shares := a.shares
	if d.Stored != 0 {
		had := shares[noDay].Stored
		shares[noDay] = dayUsage{Stored: max(0, had+d.Stored)}
		f.usageRow(a.key.Tenant, noDay).Stored += shares[noDay].Stored - had
		d.Stored = 0
	}
	row.add(d)
	shares[on] = shares[on].plus(d)
	a.sharesChanged = true
	return nil
}

// encodeShares sets Session.Spent to the JSON of a.shares, if a.shares has changed since Spent was set.
func (a *aggregate) encodeShares() (err error) {
	if a.sharesChanged && a.session != nil {
		a.session.row.Spent, err = marshal(a.shares)
	}
	a.sharesChanged = false
	return err
}

// finite limits a sum of dollars to finite numbers, because JSON cannot encode others.
func finite(usd float64) float64 { return max(-math.MaxFloat64, min(usd, math.MaxFloat64)) }

// add adds a session's usage to the row.
func (u *TenantUsage) add(d dayUsage) {
	u.Turns += d.Turns
	u.Tokens += d.Tokens
	u.CostUSD += d.CostUSD
	u.TimeMs += d.TimeMs
	u.Events += d.Events
	u.EventBytes += d.EventBytes
	u.Stored += d.Stored
}

// countEvents adds the events of a session's commit to the usage of the session and its tenant, up to and including the
// one that deletes the session. Later events are Spool's own and are not counted.
func (f *folding) countEvents(a *aggregate, rec eventlog.Record) error {
	if f.bare || a.deleted {
		return nil
	}
	type share struct {
		day   string
		first events.Event // the first event of the day
		usage dayUsage
	}
	var shares []share // nearly always one
	for i, e := range rec.Events {
		e.Time = clampTime(e.Time)
		on, size := f.model.day(e.Time), events.OutputSizeOf(e)
		usage := dayUsage{Events: clampInt64(size.Events), EventBytes: clampInt64(size.Bytes), Stored: objectBytes(e)}
		if i == 0 {
			usage.Stored += rec.Bytes
		}
		at := slices.IndexFunc(shares, func(s share) bool { return s.day == on })
		if at < 0 {
			at, shares = len(shares), append(shares, share{day: on, first: e})
		}
		shares[at].usage = shares[at].usage.plus(usage)
		if _, gone := e.Data.(events.SessionDeleted); gone {
			break
		}
	}
	slices.SortFunc(shares, func(a, b share) int { return strings.Compare(a.day, b.day) })
	for _, s := range shares {
		if err := f.addUsage(a, s.first, s.usage); err != nil {
			return err
		}
	}
	return nil
}

// replaceUsage sets what a deleted session added to its tenant's usage to the value in run_retired. That changes nothing
// for a fold that read the whole session. A fold that starts after the removal of content, or in the middle of it,
// adds the part that it did not read.
func (f *folding) replaceUsage(a *aggregate, d events.RunRetired) error {
	had, err := decodeDayUsage(a.tombstone.row.Spent)
	if err != nil {
		return err
	}
	text, err := retiredUsage(d)
	if err != nil {
		return err
	}
	has, err := decodeDayUsage(text)
	if err != nil {
		return err
	}
	if _, stated := has[noDay]; !stated {
		has[noDay] = dayUsage{}
	}
	gone := markChanged(&f.deleted, a.tombstone)
	// The row is no longer read as a session's parent, and the commit with the fork's parent may be removed.
	gone.Spent, gone.Parent, gone.Forked = text, "", ""
	for _, on := range slices.Sorted(maps.Keys(has)) {
		now, before := has[on], had[on]
		if now == before {
			continue
		}
		f.usageRow(a.key.Tenant, on).add(now.minus(before))
	}
	return nil
}

// addReportedUsage adds the usage that an event reports. x is the event's execution before the event, or nil. Usage that the
// egress proxy metered counts; for an execution without metered usage, the usage that the agent reports at its end
// counts.
func (f *folding) addReportedUsage(a *aggregate, x *Execution, e events.Event) error {
	switch d := e.Data.(type) {
	case events.ModelCalled:
		if x != nil && x.ended() && !x.Metered && x.tokens() > 0 {
			return nil // metered late; the usage was counted at the end of the execution
		}
		return f.addUsage(a, e, dayUsage{Tokens: clampInt64(d.Usage.Tokens()), CostUSD: d.CostUSD})
	case events.SandboxUsage:
		return f.addUsage(a, e, dayUsage{CostUSD: d.CostUSD})
	case events.ExecutionStarted:
		if x != nil && !x.ended() && x.StartedAt == nil {
			return f.addUsage(a, e, dayUsage{Turns: 1})
		}
	}
	return nil
}

// addUsageAfterDeletion adds the cost of a deleted session's sandbox, which ends after session_deleted. The later run_retired
// includes this cost.
func (f *folding) addUsageAfterDeletion(a *aggregate, e events.Event, d events.SandboxUsage) error {
	if f.bare {
		return nil
	}
	shares, err := decodeDayUsage(a.tombstone.row.Spent)
	if err != nil {
		return err
	}
	on, cost := f.model.day(e.Time), dayUsage{CostUSD: d.CostUSD}
	shares[on] = shares[on].plus(cost)
	f.usageRow(a.key.Tenant, on).add(cost)
	markChanged(&f.deleted, a.tombstone).Spent, err = marshal(shares)
	return err
}

// addUsageAtEnd adds the usage that is known when an execution ends.
func (f *folding) addUsageAtEnd(a *aggregate, x *Execution, e events.Event) error {
	if x.StartedAt == nil {
		return nil // nothing ran
	}
	took := dayUsage{TimeMs: x.DurationMs}
	if !x.Metered {
		took.Tokens, took.CostUSD = x.tokens(), x.CostUSD
	}
	return f.addUsage(a, e, took)
}

func (x *Execution) tokens() int64 { return x.Input + x.Output + x.CacheRead + x.CacheWrite }

// budgetPeriod returns the period of an event about a tenant's budget, "" for another event.
func budgetPeriod(e events.Event) string {
	switch d := e.Data.(type) {
	case events.TenantBudgetSet:
		return rowKey(string(d.Period))
	case events.TenantBudgetRemoved:
		return rowKey(string(d.Period))
	}
	return ""
}

// foldBudget folds a commit about a tenant's budget.
func (f *folding) foldBudget(rec eventlog.Record) {
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
		row := markChanged(&f.tenantBudgets, x)
		row.SetAt, row.Removed = pgTime(e.Time), true
		if d, set := e.Data.(events.TenantBudgetSet); set {
			row.Turns, row.Tokens, row.CostUSD, row.TimeMs = int64(d.Budget.Turns), clampInt64(d.Budget.Tokens), d.Budget.CostUSD, clampInt64(d.Budget.TimeMs)
			row.Removed = false
		}
	}
}

// These types identify rows of tenants in lookup.seen.
type (
	tenantUsageRef  Key
	tenantBudgetRef Key
	tenantLimitsRef string
)

// requestUsageRows requests the rows that an event of a session may add to. Each event counts on its own day.
func (w *lookup) requestUsageRows(tenant string, e events.Event) {
	if on := w.model.day(e.Time); tenant != w.usageTenant || on != w.usageDay {
		w.usageTenant, w.usageDay = tenant, on // events of the same day follow each other
		w.requestUsageDay(tenant, noDay)
		w.requestUsageDay(tenant, on)
	}
	if d, retired := e.Data.(events.RunRetired); retired {
		for _, u := range d.Usage {
			w.requestUsageDay(tenant, clean(u.Day))
		}
	}
}

// requestUsageDay requests the row of a tenant's usage on a day.
func (w *lookup) requestUsageDay(tenant, day string) {
	k := w.model.usageDay(tenant, day)
	if _, present := w.model.tenantUsage[k]; !present && !w.seen[tenantUsageRef(k)] {
		w.seen[tenantUsageRef(k)] = true
		w.out.TenantUsage = append(w.out.TenantUsage, k)
	}
}

// requestTenant requests the budget or limits that an event is about.
func (w *lookup) requestTenant(tenant string, e events.Event) {
	if period := budgetPeriod(e); period != "" {
		k := Key{tenant, period}
		if _, present := w.model.tenantBudgets[k]; !present && !w.seen[tenantBudgetRef(k)] {
			w.seen[tenantBudgetRef(k)] = true
			w.out.TenantBudgets = append(w.out.TenantBudgets, k)
		}
	}
	if _, about := limitsOf(e); about {
		if _, present := w.model.tenantLimits[tenant]; !present && !w.seen[tenantLimitsRef(tenant)] {
			w.seen[tenantLimitsRef(tenant)] = true
			w.out.TenantLimits = append(w.out.TenantLimits, tenant)
		}
	}
}

// putTenants puts the usage, budgets and limits of tenants into the model, as Put does. A requested row that p does not have is
// recorded as not existing.
func (m *Model) putTenants(asked Missing, p Present) {
	for _, k := range asked.TenantUsage {
		m.tenantUsage[k] = nil
	}
	for _, k := range asked.TenantBudgets {
		m.tenantBudgets[k] = nil
	}
	for _, tenant := range asked.TenantLimits {
		m.tenantLimits[tenant] = nil
	}
	for _, r := range p.TenantLimits {
		m.tenantLimits[r.Tenant] = &entry[TenantLimits]{row: r, stored: true}
	}
	for _, r := range p.TenantUsage {
		m.tenantUsage[Key{r.Tenant, r.ID}] = &entry[TenantUsage]{row: r, stored: true}
	}
	for _, r := range p.TenantBudgets {
		m.tenantBudgets[Key{r.Tenant, r.ID}] = &entry[TenantBudget]{row: r, stored: true}
	}
}
