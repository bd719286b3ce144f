// Package budget tells services the limits of tenants, what they may take, and what they have taken:
// what the projector keeps in the bucket budgets, out of the one counter that the
// read models have across sessions.
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
	"github.com/spoolhq/spool/pkg/topology"
)

// Tenant is what the bucket holds under a tenant; one without limits of its own and without a budget has no entry.
type Tenant struct {
	Budgets []Budget            `json:"budgets"`
	Limits  events.TenantLimits `json:"limits,omitzero"`
	Used    Used                `json:"used,omitzero"` // of limits of events; nothing where there are none
}

// Used is what a tenant's sessions have added to the log on a day.
type Used struct {
	Day    string        `json:"day"` // in UTC, as 2026-01-31
	Logged events.Output `json:"logged"`
}

// LimitsEvents reports whether the tenant has a limit of what its sessions add to the log on a day.
func (t Tenant) LimitsEvents() bool {
	return t.Limits.EventsPerDay > 0 || t.Limits.EventBytesPerDay > 0
}

// EventsExceeded says in a sentence which limit of events of a day is reached, "" for none. On a day that the entry does not
// know of yet nothing has been added.
func (t Tenant) EventsExceeded(tenant string, now time.Time) string {
	today, _ := events.PeriodDay.Span(now)
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

// Empty reports whether the tenant needs no entry.
func (t Tenant) Empty() bool { return len(t.Budgets) == 0 && t.Limits == (events.TenantLimits{}) }

// Budget is what a tenant may take in a period, and what it has taken.
type Budget struct {
	Period events.Period `json:"period"`
	From   string        `json:"from,omitempty"` // the period's first day in UTC, as 2026-01-31; "" for ever
	Until  time.Time     `json:"until,omitzero"` // when the next one begins; zero for never
	Limit  events.Budget `json:"limit"`
	Spent  events.Spent  `json:"spent"` // from From on
}

// At is the budget in the period that holds a time: in one that the entry does
// not know of yet nothing has been taken.
func (b Budget) At(now time.Time) Budget {
	if b.Until.IsZero() || now.Before(b.Until) {
		return b
	}
	b.From, b.Until = b.Period.Span(now)
	b.Spent = events.Spent{}
	return b
}

// Whose is who has the budget, as in sentences of events.Budget.Exceeded.
func (b Budget) Whose(tenant string) string {
	switch b.Period {
	case events.PeriodDay:
		return "tenant " + tenant + " on " + b.From
	case events.PeriodMonth:
		return "tenant " + tenant + " since " + b.From
	}
	return "tenant " + tenant
}

// Exceeded says in a sentence what of a tenant's budgets is used up, "" for nothing.
func (t Tenant) Exceeded(tenant string, now time.Time) string {
	for _, b := range t.Budgets {
		b = b.At(now)
		if why := b.Limit.Exceeded(b.Spent, b.Whose(tenant)); why != "" {
			return why
		}
	}
	return ""
}

// awaitEvery is how often await looks.
const awaitEvery = 10 * time.Millisecond

// Await blocks until services are told a tenant's budget for a period as it was set, or, of a zero limit, that there is none.
func Await(ctx context.Context, js jetstream.JetStream, tenant string, p events.Period, limit events.Budget) error {
	return await(ctx, js, tenant, func(t Tenant) bool {
		var told events.Budget
		for _, b := range t.Budgets {
			if b.Period == p {
				told = b.Limit
			}
		}
		return told == limit
	})
}

// AwaitLimits blocks until services are told a tenant's limits as they were set; zero limits are none.
func AwaitLimits(ctx context.Context, js jetstream.JetStream, tenant string, limits events.TenantLimits) error {
	return await(ctx, js, tenant, func(t Tenant) bool { return t.Limits == limits })
}

// await blocks until the bucket's entry of a tenant is as wanted.
func await(ctx context.Context, js jetstream.JetStream, tenant string, wanted func(Tenant) bool) error {
	kv, err := js.KeyValue(ctx, topology.BucketBudgets)
	if err != nil {
		return fmt.Errorf("open bucket %s: %w", topology.BucketBudgets, err)
	}
	tick := time.NewTicker(awaitEvery)
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

// Watch follows the bucket. It is safe for concurrent use.
type Watch struct {
	js     jetstream.JetStream
	logger *slog.Logger

	ready chan struct{} // closed once all that is there was seen
	once  sync.Once

	mu      sync.Mutex
	tenants map[string]Tenant
}

// NewWatch makes a Watch; Run feeds it.
func NewWatch(js jetstream.JetStream, logger *slog.Logger) *Watch {
	return &Watch{js: js, logger: logger, ready: make(chan struct{}), tenants: map[string]Tenant{}}
}

// rewatch is the pause before the bucket is watched again after a failure.
const rewatch = time.Second

// Run follows the bucket until ctx ends. While it cannot, what was seen last counts.
func (w *Watch) Run(ctx context.Context) error {
	for {
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		w.logger.Warn("the budgets of tenants are not watched; trying again", "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(rewatch):
		}
	}
}

func (w *Watch) follow(ctx context.Context) error {
	kv, err := w.js.KeyValue(ctx, topology.BucketBudgets)
	if err != nil {
		return fmt.Errorf("open bucket %s: %w", topology.BucketBudgets, err)
	}
	watcher, err := kv.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("watch bucket %s: %w", topology.BucketBudgets, err)
	}
	seen := map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			return watcher.Stop()
		case entry, ok := <-watcher.Updates():
			switch {
			case !ok:
				return errors.New("the watch ended")
			case entry == nil: // all that was there
				w.forgetOthers(seen)
				w.once.Do(func() { close(w.ready) })
				seen = nil
			default:
				if seen != nil {
					seen[entry.Key()] = true
				}
				w.see(entry)
			}
		}
	}
}

func (w *Watch) see(entry jetstream.KeyValueEntry) {
	var t Tenant
	if entry.Operation() == jetstream.KeyValuePut {
		if err := json.Unmarshal(entry.Value(), &t); err != nil {
			w.logger.Error("the budgets of a tenant do not decode: what was known counts", "tenant", entry.Key(), "error", err)
			return
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if t.Empty() {
		delete(w.tenants, entry.Key())
		return
	}
	w.tenants[entry.Key()] = t
}

// Limits returns a tenant's own limits, as they were told last. It does not wait: before the first sight of the bucket a tenant has none.
func (w *Watch) Limits(tenant string) events.TenantLimits {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tenants[tenant].Limits
}

// forgetOthers drops what a bucket that was made anew does not have.
func (w *Watch) forgetOthers(seen map[string]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for tenant := range w.tenants {
		if !seen[tenant] {
			delete(w.tenants, tenant)
		}
	}
}

// readyWithin bounds how long a question waits for the first sight of the bucket.
const readyWithin = 5 * time.Second

// Of gives a tenant's budgets. Until what the bucket holds was seen once it waits, for 5 s at most.
func (w *Watch) Of(ctx context.Context, tenant string) (Tenant, error) {
	select {
	case <-w.ready:
	default:
		ctx, cancel := context.WithTimeout(ctx, readyWithin)
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
