// Package budget reads the limits, budgets and usage of tenants. The session service folds them from the log over all
// sessions and writes them to the bucket budgets; this package watches that bucket.
package budget

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/kvwatch"
	"github.com/spoolhq/spool/pkg/topology"
)

// Tenant is the value of a tenant's key in the bucket budgets: the tenant's limits and budgets, with the usage that
// counts against them. A tenant that has neither has no key.
type Tenant struct {
	Budgets []Budget            `json:"budgets"`
	Limits  events.TenantLimits `json:"limits,omitzero"`
	Used    DailyOutput         `json:"used,omitzero"` // counted against the event limits; empty if the tenant has none
	// Counted is the position in each shard of the log up to which the usage is counted. It is nil in an entry that an
	// earlier version wrote.
	Counted Positions `json:"counted,omitempty"`
}

// Positions holds a stream sequence for each of several shards of the log.
type Positions map[int]uint64

// Include raises the position in a shard to seq, unless it is higher already.
func (p Positions) Include(shard int, seq uint64) { p[shard] = max(p[shard], seq) }

// HasLimitedUsage reports whether the tenant has a limit that its usage can reach: a budget or a daily limit on events.
func (t Tenant) HasLimitedUsage() bool { return len(t.Budgets) > 0 || t.HasDailyEventLimit() }

// HasCounted reports whether the tenant's usage includes its commits up to the given positions. It returns true if
// no limit depends on the usage, or if an earlier version wrote the entry, which does not state what it has counted.
func (t Tenant) HasCounted(to Positions) bool {
	if !t.HasLimitedUsage() || t.Counted == nil {
		return true
	}
	for shard, seq := range to {
		if t.Counted[shard] < seq {
			return false
		}
	}
	return true
}

// DailyOutput is the amount that a tenant's sessions have appended to the log on one day.
type DailyOutput struct {
	Day    string            `json:"day"` // in UTC, as 2026-01-31
	Logged events.OutputSize `json:"logged"`
}

// HasDailyEventLimit reports whether the tenant has a daily limit on the events that its sessions append to the log.
func (t Tenant) HasDailyEventLimit() bool {
	return t.Limits.EventsPerDay > 0 || t.Limits.EventBytesPerDay > 0
}

// ExceededEventLimit returns a sentence that names the daily event limit that the tenant has reached, or "" if the
// tenant has reached none. If t.Used is of an earlier day, the tenant has not appended anything today.
func (t Tenant) ExceededEventLimit(tenant string, now time.Time) string {
	today, _ := events.PeriodDay.Bounds(now)
	if t.Used.Day < today {
		return ""
	}
	l, used := t.Limits, t.Used.Logged
	switch {
	case l.EventsPerDay > 0 && used.Events >= l.EventsPerDay:
		return fmt.Sprintf("tenant %s has added %d events to the log on %s, and its limit is %d", tenant, used.Events, t.Used.Day, l.EventsPerDay)
	case l.EventBytesPerDay > 0 && used.Bytes >= l.EventBytesPerDay:
		return fmt.Sprintf("tenant %s has added events of %d bytes to the log on %s, and its limit is %d", tenant, used.Bytes, t.Used.Day, l.EventBytesPerDay)
	}
	return ""
}

// IsEmpty reports whether the tenant has neither budgets nor limits, and so needs no key in the bucket budgets.
func (t Tenant) IsEmpty() bool { return len(t.Budgets) == 0 && t.Limits == (events.TenantLimits{}) }

// Budget is the limit of a tenant for a period, and the usage in that period.
type Budget struct {
	Period events.Period      `json:"period"`
	From   string             `json:"from,omitempty"` // the period's first day in UTC, as 2026-01-31; "" if the period has no beginning
	Until  time.Time          `json:"until,omitzero"` // when the next period begins; zero if the period has no end
	Limit  events.Budget      `json:"limit"`
	Spent  events.BudgetUsage `json:"spent"` // usage since From
}

// InPeriodAt returns the budget in the period that contains now. If b is of an earlier period, the returned usage is
// zero.
func (b Budget) InPeriodAt(now time.Time) Budget {
	if b.Until.IsZero() || now.Before(b.Until) {
		return b
	}
	b.From, b.Until = b.Period.Bounds(now)
	b.Spent = events.BudgetUsage{}
	return b
}

// Describe returns the subject of the sentence of events.Budget.Exceeded, for example "tenant acme since 2026-01-01".
func (b Budget) Describe(tenant string) string {
	switch b.Period {
	case events.PeriodDay:
		return "tenant " + tenant + " on " + b.From
	case events.PeriodMonth:
		return "tenant " + tenant + " since " + b.From
	}
	return "tenant " + tenant
}

// ExceededBudget returns a sentence that names the tenant's first exhausted budget, or "" if none is exhausted.
func (t Tenant) ExceededBudget(tenant string, now time.Time) string {
	for _, b := range t.Budgets {
		b = b.InPeriodAt(now)
		if why := b.Limit.ExceededLimit(b.Spent, b.Describe(tenant)); why != "" {
			return why
		}
	}
	return ""
}

// pollInterval is the interval at which awaitTenant polls the bucket budgets.
const pollInterval = 10 * time.Millisecond

// AwaitBudget blocks until the bucket budgets has limit as the tenant's budget for the period. If limit is zero, AwaitBudget blocks
// until the bucket has no budget of the tenant for the period.
func AwaitBudget(ctx context.Context, js jetstream.JetStream, tenant string, p events.Period, limit events.Budget) error {
	return awaitTenant(ctx, js, tenant, func(t Tenant) bool {
		var told events.Budget
		for _, b := range t.Budgets {
			if b.Period == p {
				told = b.Limit
			}
		}
		return told == limit
	})
}

// AwaitLimits blocks until the bucket budgets has the given limits for the tenant. If limits is zero, AwaitLimits
// blocks until the bucket has no limits of the tenant.
func AwaitLimits(ctx context.Context, js jetstream.JetStream, tenant string, limits events.TenantLimits) error {
	return awaitTenant(ctx, js, tenant, func(t Tenant) bool { return t.Limits == limits })
}

// awaitTenant blocks until wanted returns true for the tenant's value in the bucket budgets.
func awaitTenant(ctx context.Context, js jetstream.JetStream, tenant string, wanted func(Tenant) bool) error {
	kv, err := js.KeyValue(ctx, topology.BucketBudgets)
	if err != nil {
		return fmt.Errorf("open bucket %s: %w", topology.BucketBudgets, err)
	}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		var t Tenant
		entry, err := kv.Get(ctx, tenant)
		if err == nil {
			err = json.Unmarshal(entry.Value(), &t)
		}
		if err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
			return fmt.Errorf("budgets of tenant %s: %w", tenant, err)
		}
		if wanted(t) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// Watch keeps a copy of the bucket budgets in memory up to date. It is safe for concurrent use.
type Watch struct {
	js     jetstream.JetStream
	logger *slog.Logger

	ready chan struct{} // closed after the first read of the whole bucket
	once  sync.Once

	mu      sync.Mutex
	tenants map[string]Tenant
	changed chan struct{} // closed and replaced when tenants changes
}

// NewWatch returns a Watch whose copy is empty until Run has read the bucket.
func NewWatch(js jetstream.JetStream, logger *slog.Logger) *Watch {
	return &Watch{js: js, logger: logger, ready: make(chan struct{}), tenants: map[string]Tenant{}, changed: make(chan struct{})}
}

// Run keeps the copy of the bucket budgets up to date until ctx ends. While the bucket cannot be watched, the last
// known values stay in use.
func (w *Watch) Run(ctx context.Context) error {
	return kvwatch.WatchBucket(ctx, w.js, topology.BucketBudgets, w.logger, func() func(jetstream.KeyValueEntry) {
		seen := map[string]bool{} // nil after the initial values
		return func(entry jetstream.KeyValueEntry) {
			if entry == nil {
				w.keepOnly(seen)
				w.once.Do(func() { close(w.ready) })
				seen = nil
				return
			}
			if seen != nil {
				seen[entry.Key()] = true
			}
			w.applyEntry(entry)
		}
	})
}

func (w *Watch) applyEntry(entry jetstream.KeyValueEntry) {
	var t Tenant
	if entry.Operation() == jetstream.KeyValuePut {
		if err := json.Unmarshal(entry.Value(), &t); err != nil {
			w.logger.Error("decode the budgets of a tenant: the last known values stay in use", "tenant", entry.Key(), "error", err)
			return
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signalChange()
	if t.IsEmpty() {
		delete(w.tenants, entry.Key())
		return
	}
	w.tenants[entry.Key()] = t
}

// signalChange wakes all calls of AwaitCounted. The caller holds mu.
func (w *Watch) signalChange() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// Limits returns the tenant's own limits, as Run has read them last from the bucket budgets. It does not block: until
// Run has read the bucket once, it returns no limits.
func (w *Watch) Limits(tenant string) events.TenantLimits {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tenants[tenant].Limits
}

// keepOnly removes all tenants that are not in seen from the copy. seen holds the tenants that the bucket has after it
// was created again.
func (w *Watch) keepOnly(seen map[string]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signalChange()
	for tenant := range w.tenants {
		if !seen[tenant] {
			delete(w.tenants, tenant)
		}
	}
}

// firstReadTimeout is the maximum time that Get waits for the first read of the bucket.
const firstReadTimeout = 5 * time.Second

// Get returns a tenant's limits and budgets, as Run has read them last from the bucket budgets. It blocks until Run has
// read the bucket once, and returns an error after 5 s.
func (w *Watch) Get(ctx context.Context, tenant string) (Tenant, error) {
	select {
	case <-w.ready:
	default:
		ctx, cancel := context.WithTimeout(ctx, firstReadTimeout)
		defer cancel()
		select {
		case <-w.ready:
		case <-ctx.Done():
			return Tenant{}, fmt.Errorf("the budgets of tenant %s are not known yet: %w", tenant, ctx.Err())
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tenants[tenant], nil
}

// AwaitCounted blocks until the usage of a tenant is counted up to the given positions (Tenant.HasCounted), or until ctx
// ends. It returns the error of ctx, or of Get.
func (w *Watch) AwaitCounted(ctx context.Context, tenant string, to Positions) error {
	for {
		w.mu.Lock()
		changed := w.changed
		w.mu.Unlock()
		t, err := w.Get(ctx, tenant)
		if err != nil || t.HasCounted(to) {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
