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

// TenantUsage is a row of the table tenant_usage: what a tenant used on one day.
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
	Stored     int64 // bytes that the tenant stores now; only in the row of storedBytesDay
}

// storedBytesDay is the value of TenantUsage.Day in the row that counts the bytes that a tenant stores at present,
// instead of the usage of a day.
const storedBytesDay = ""

// TenantBudget is a row of the table tenant_budgets. ID is the period of the budget.
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

// usageDayKey returns the key of the row of a tenant's usage on a day, such as 2026-01-31.
func (m *Model) usageDayKey(tenant, day string) RowKey {
	return RowKey{tenant, day + "/" + strconv.Itoa(int(m.group))}
}

// changedUsageRow returns the row of tenant_usage for a tenant and a day, and marks it as changed. The caller may then
// change it.
func (f *batchFold) changedUsageRow(tenant, day string) *TenantUsage {
	k := f.model.usageDayKey(tenant, day)
	x := f.model.tenantUsage[k]
	if x == nil {
		x = &cachedRow[TenantUsage]{row: TenantUsage{Tenant: k.Tenant, ID: k.ID, Group: f.model.group, Day: day}}
		f.model.tenantUsage[k] = x
	}
	return markChanged(&f.tenantUsage, x)
}

// dayUsage is the amount that one session added to its tenant's usage on one day, a row of tenant_usage.
type dayUsage struct {
	Turns   int64   `json:"turns,omitempty"`
	Tokens  int64   `json:"tokens,omitempty"`
	CostUSD float64 `json:"costUsd,omitempty"`
	TimeMs  int64   `json:"timeMs,omitempty"`

	Events     int64 `json:"events,omitempty"`
	EventBytes int64 `json:"eventBytes,omitempty"`

	Stored int64 `json:"stored,omitempty"` // only in the row of storedBytesDay
}

// plus returns the sum of d and o.
func (d dayUsage) plus(o dayUsage) dayUsage {
	return dayUsage{d.Turns + o.Turns, d.Tokens + o.Tokens, clampFinite(d.CostUSD + o.CostUSD), d.TimeMs + o.TimeMs, d.Events + o.Events, d.EventBytes + o.EventBytes, d.Stored + o.Stored}
}

// minus returns d minus o.
func (d dayUsage) minus(o dayUsage) dayUsage {
	return dayUsage{d.Turns - o.Turns, d.Tokens - o.Tokens, d.CostUSD - o.CostUSD, d.TimeMs - o.TimeMs, d.Events - o.Events, d.EventBytes - o.EventBytes, d.Stored - o.Stored}
}

// decodeDayUsage decodes Session.Spent or DeletedSession.Spent, the JSON of what a session added to its tenant's usage,
// by day.
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

// retiredUsageJSON returns the JSON of what a deleted session added to its tenant's usage, by day, as its run_retired
// event states it.
func retiredUsageJSON(d events.RunRetired) (string, error) {
	shares := map[string]dayUsage{}
	for _, u := range d.Usage {
		s := u.Spent
		shares[validText(u.Day)] = dayUsage{
			Turns: int64(s.Turns), Tokens: clampInt64(s.Tokens), CostUSD: s.CostUSD, TimeMs: clampInt64(s.TimeMs), Events: clampInt64(u.Logged.Events), EventBytes: clampInt64(u.Logged.Bytes),
		}
	}
	if d.Stored > 0 {
		shares[storedBytesDay] = dayUsage{Stored: clampInt64(d.Stored)}
	}
	if len(shares) == 0 {
		return "", nil
	}
	return marshalUnescaped(shares)
}

// addUsage adds the usage d to the session and to its tenant, on the day of the event e.
func (f *batchFold) addUsage(a *sessionRows, e events.Event, d dayUsage) error {
	on := f.model.cachedUTCDay(e.Time)
	row := f.changedUsageRow(a.key.Tenant, on)
	f.findOrAddSession(a, e)
	if a.usageByDay == nil {
		var err error
		if a.usageByDay, err = decodeDayUsage(a.session.row.Spent); err != nil {
			return err
		}
	}
	shares := a.usageByDay
	if d.Stored != 0 {
		had := shares[storedBytesDay].Stored
		shares[storedBytesDay] = dayUsage{Stored: max(0, had+d.Stored)}
		f.changedUsageRow(a.key.Tenant, storedBytesDay).Stored += shares[storedBytesDay].Stored - had
		d.Stored = 0
	}
	row.add(d)
	shares[on] = shares[on].plus(d)
	a.usageByDayChanged = true
	return nil
}

// encodeDayUsage sets Session.Spent to the JSON of what the session added to its tenant's usage, if that has changed.
func (a *sessionRows) encodeDayUsage() (err error) {
	if a.usageByDayChanged && a.session != nil {
		a.session.row.Spent, err = marshalUnescaped(a.usageByDay)
	}
	a.usageByDayChanged = false
	return err
}

// clampFinite returns the finite number that is nearest to usd, because JSON cannot encode infinity.
func clampFinite(usd float64) float64 { return max(-math.MaxFloat64, min(usd, math.MaxFloat64)) }

// add adds the usage d of a session to the row.
func (u *TenantUsage) add(d dayUsage) {
	u.Turns += d.Turns
	u.Tokens += d.Tokens
	u.CostUSD += d.CostUSD
	u.TimeMs += d.TimeMs
	u.Events += d.Events
	u.EventBytes += d.EventBytes
	u.Stored += d.Stored
}

// countEvents adds the number and the size of the events in a session's commit to the usage of the session and its
// tenant, up to and including the event that deletes the session. Later events are Spool's own and are not counted.
func (f *batchFold) countEvents(a *sessionRows, rec eventlog.Record) error {
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
		on, size := f.model.cachedUTCDay(e.Time), events.OutputSizeOf(e)
		usage := dayUsage{Events: clampInt64(size.Events), EventBytes: clampInt64(size.Bytes), Stored: objectBytesChange(e)}
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

// replaceSessionUsage sets what a deleted session added to its tenant's usage to the values in its run_retired event.
// This changes nothing if the fold read the whole session. A fold that started after commits of the session were erased
// adds what it did not read.
func (f *batchFold) replaceSessionUsage(a *sessionRows, d events.RunRetired) error {
	had, err := decodeDayUsage(a.tombstone.row.Spent)
	if err != nil {
		return err
	}
	text, err := retiredUsageJSON(d)
	if err != nil {
		return err
	}
	has, err := decodeDayUsage(text)
	if err != nil {
		return err
	}
	if _, stated := has[storedBytesDay]; !stated {
		has[storedBytesDay] = dayUsage{}
	}
	gone := markChanged(&f.deleted, a.tombstone)
	// The row is no longer read as a session's parent, and the commit with the fork's parent may be removed.
	gone.Spent, gone.Parent, gone.Forked = text, "", ""
	for _, on := range slices.Sorted(maps.Keys(has)) {
		now, before := has[on], had[on]
		if now == before {
			continue
		}
		f.changedUsageRow(a.key.Tenant, on).add(now.minus(before))
	}
	return nil
}

// addReportedUsage adds the usage that an event reports to the session and its tenant. x is the event's execution as it
// was before the event, or nil. Usage that the egress proxy metered counts; for an execution without metered usage, the
// usage that the agent reports at its end counts.
func (f *batchFold) addReportedUsage(a *sessionRows, x *Execution, e events.Event) error {
	switch d := e.Data.(type) {
	case events.ModelCalled:
		if x != nil && x.hasEnded() && !x.Metered && x.totalTokens() > 0 {
			return nil // metered late; the usage was counted at the end of the execution
		}
		return f.addUsage(a, e, dayUsage{Tokens: clampInt64(d.Usage.Tokens()), CostUSD: d.CostUSD})
	case events.SandboxUsage:
		return f.addUsage(a, e, dayUsage{CostUSD: d.CostUSD})
	case events.ExecutionStarted:
		if x != nil && !x.hasEnded() && x.StartedAt == nil {
			return f.addUsage(a, e, dayUsage{Turns: 1})
		}
	}
	return nil
}

// addSandboxCostAfterDeletion adds the cost of a sandbox that ends after its session was deleted to the usage of the
// tenant. The later run_retired event includes this cost.
func (f *batchFold) addSandboxCostAfterDeletion(a *sessionRows, e events.Event, d events.SandboxUsage) error {
	if f.bare {
		return nil
	}
	shares, err := decodeDayUsage(a.tombstone.row.Spent)
	if err != nil {
		return err
	}
	on, cost := f.model.cachedUTCDay(e.Time), dayUsage{CostUSD: d.CostUSD}
	shares[on] = shares[on].plus(cost)
	f.changedUsageRow(a.key.Tenant, on).add(cost)
	markChanged(&f.deleted, a.tombstone).Spent, err = marshalUnescaped(shares)
	return err
}

// addUsageAtExecutionEnd adds the usage that is known only when an execution ends, such as its duration, to the session
// and its tenant.
func (f *batchFold) addUsageAtExecutionEnd(a *sessionRows, x *Execution, e events.Event) error {
	if x.StartedAt == nil {
		return nil // nothing ran
	}
	took := dayUsage{TimeMs: x.DurationMs}
	if !x.Metered {
		took.Tokens, took.CostUSD = x.totalTokens(), x.CostUSD
	}
	return f.addUsage(a, e, took)
}

// totalTokens returns the sum of the execution's tokens of all kinds.
func (x *Execution) totalTokens() int64 { return x.Input + x.Output + x.CacheRead + x.CacheWrite }

// budgetPeriod returns the period of the tenant's budget that an event sets or removes, or "" for another event.
func budgetPeriod(e events.Event) string {
	switch d := e.Data.(type) {
	case events.TenantBudgetSet:
		return validRowID(string(d.Period))
	case events.TenantBudgetRemoved:
		return validRowID(string(d.Period))
	}
	return ""
}

// foldBudget folds a commit that sets or removes a tenant's budget into the row of the budget.
func (f *batchFold) foldBudget(rec eventlog.Record) {
	if f.bare {
		return
	}
	for _, e := range rec.Events {
		period := budgetPeriod(e)
		if period == "" {
			continue
		}
		k := RowKey{rec.Subject.Tenant, period}
		x := f.model.tenantBudgets[k]
		if x == nil {
			x = &cachedRow[TenantBudget]{row: TenantBudget{Tenant: k.Tenant, ID: k.ID, Group: f.model.group}}
			f.model.tenantBudgets[k] = x
		}
		row := markChanged(&f.tenantBudgets, x)
		row.SetAt, row.Removed = postgresTime(e.Time), true
		if d, set := e.Data.(events.TenantBudgetSet); set {
			row.Turns, row.Tokens, row.CostUSD, row.TimeMs = int64(d.Budget.Turns), clampInt64(d.Budget.Tokens), d.Budget.CostUSD, clampInt64(d.Budget.TimeMs)
			row.Removed = false
		}
	}
}

// These types identify rows of tenants in missingRowCollector.requested.
type (
	requestedTenantUsage  RowKey
	requestedTenantBudget RowKey
	requestedTenantLimits string
)

// requestUsageRows requests the rows of tenant_usage to which an event of a session may add usage. Each event counts on
// its own day.
func (w *missingRowCollector) requestUsageRows(tenant string, e events.Event) {
	if on := w.model.cachedUTCDay(e.Time); tenant != w.usageTenant || on != w.usageDay {
		w.usageTenant, w.usageDay = tenant, on // events of the same day follow each other
		w.requestUsageDay(tenant, storedBytesDay)
		w.requestUsageDay(tenant, on)
	}
	if d, retired := e.Data.(events.RunRetired); retired {
		for _, u := range d.Usage {
			w.requestUsageDay(tenant, validText(u.Day))
		}
	}
}

// requestUsageDay requests the row of tenant_usage for a tenant and a day.
func (w *missingRowCollector) requestUsageDay(tenant, day string) {
	k := w.model.usageDayKey(tenant, day)
	if _, present := w.model.tenantUsage[k]; !present && !w.requested[requestedTenantUsage(k)] {
		w.requested[requestedTenantUsage(k)] = true
		w.out.TenantUsage = append(w.out.TenantUsage, k)
	}
}

// requestBudgetOrLimits requests the row of the tenant's budget or limits that an event sets or removes.
func (w *missingRowCollector) requestBudgetOrLimits(tenant string, e events.Event) {
	if period := budgetPeriod(e); period != "" {
		k := RowKey{tenant, period}
		if _, present := w.model.tenantBudgets[k]; !present && !w.requested[requestedTenantBudget(k)] {
			w.requested[requestedTenantBudget(k)] = true
			w.out.TenantBudgets = append(w.out.TenantBudgets, k)
		}
	}
	if _, about := limitsOf(e); about {
		if _, present := w.model.tenantLimits[tenant]; !present && !w.requested[requestedTenantLimits(tenant)] {
			w.requested[requestedTenantLimits(tenant)] = true
			w.out.TenantLimits = append(w.out.TenantLimits, tenant)
		}
	}
}

// putTenantRows puts the rows about usage, budgets and limits of tenants that Postgres has (p) into the model, as
// PutRows does. It records the other requested rows (asked) as not existing.
func (m *Model) putTenantRows(asked MissingRows, p FoundRows) {
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
		m.tenantLimits[r.Tenant] = &cachedRow[TenantLimits]{row: r, stored: true}
	}
	for _, r := range p.TenantUsage {
		m.tenantUsage[RowKey{r.Tenant, r.ID}] = &cachedRow[TenantUsage]{row: r, stored: true}
	}
	for _, r := range p.TenantBudgets {
		m.tenantBudgets[RowKey{r.Tenant, r.ID}] = &cachedRow[TenantBudget]{row: r, stored: true}
	}
}
