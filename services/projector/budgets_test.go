package projector_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
)

// budget returns a writer for a tenant's budget.
func (w *world) budget(tenant string, p events.Period) *session {
	subject := events.BudgetOf(tenant, p)
	return &session{w: w, tenant: tenant, id: subject.ID, life: eventlog.Head{Subject: subject}}
}

// told waits until the bucket has the given budgets of a tenant.
func (w *world) told(tenant string, want ...budget.Budget) {
	w.t.Helper()
	kv, err := w.js.KeyValue(w.t.Context(), topology.BucketBudgets)
	if err != nil {
		w.t.Fatal(err)
	}
	eventually(w.t, "the bucket tells what "+tenant+" has taken", func() error {
		var have budget.Tenant
		entry, err := kv.Get(w.t.Context(), tenant)
		switch {
		case errors.Is(err, jetstream.ErrKeyNotFound):
		case err != nil:
			return err
		default:
			if err := json.Unmarshal(entry.Value(), &have); err != nil {
				return err
			}
		}
		if got, want := fmt.Sprintf("%+v", have.Budgets), fmt.Sprintf("%+v", want); got != want {
			return fmt.Errorf("the bucket has %s, want %s", got, want)
		}
		return nil
	})
}

// TestTenantBudgets_SumOverAllGroups tests that the usage of a tenant's sessions is summed over all partition groups, is published to
// the services, and is kept when a session is deleted.
func TestTenantBudgets_SumOverAllGroups(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	now := func(c *projector.Config, d *projector.Deps) { d.Now = func() time.Time { return testTime } }
	stop := w.start(now)
	set := func(p events.Period, limit events.Budget) events.Payload {
		return events.TenantBudgetSet{Tenant: "default", Period: p, Budget: limit}
	}
	daily, total := events.Budget{Tokens: 1000, Turns: 9}, events.Budget{CostUSD: 12.5, TimeMs: 1 << 40}
	dayBudget, totalBudget := w.budget("default", events.PeriodDay), w.budget("default", events.PeriodTotal)
	dayBudget.append(&dayBudget.life, "", set(events.PeriodDay, events.Budget{Turns: 1}), set(events.PeriodDay, daily))
	totalBudget.append(&totalBudget.life, "", set(events.PeriodTotal, total))

	told, metered, other := w.session(1).create(), w.session(6).create(), w.session(2)
	other.tenant = "other"
	other.life.Subject, other.run.Subject = events.LifeOf("other", other.id), events.RunOf("other", other.id)
	other.create()
	for _, s := range []*session{told, other} {
		s.turn(1) // 30 tokens, $0.25, 1,234 ms, as the agent reports
	}
	x := metered.post(1)
	call := events.ModelCalled{Provider: "anthropic", Model: "m", Status: 200, Usage: events.Usage{InputTokens: 100, OutputTokens: 5, CacheReadTokens: 7, CacheWriteTokens: 1}, CostUSD: 0.5}
	metered.append(&metered.run, x, call, events.ExecutionStarted{Attempt: 2}, call)
	// Usage that was metered and is also reported by the agent counts once.
	metered.append(&metered.run, x, events.MetadataUpdate{Usage: events.Usage{InputTokens: 200}, CostUSD: 0.75},
		events.ExecutionFailed{DurationMs: 766, Usage: events.Usage{InputTokens: 200}, Code: "X"})
	metered.append(&metered.run, "", call) // outside of an execution
	metered.append(&metered.run, x, call)  // after the end of its execution
	// An execution that never ran uses nothing.
	never := metered.execution(2)
	metered.append(&metered.life, never, events.MessageAccepted{BlockID: "b"}, events.ExecutionQueued{Ahead: 1}, events.ExecutionWithdrawn{Reason: "cancelled"})

	spent := events.Spent{Turns: 2, Tokens: 30 + 4*113, CostUSD: 0.25 + 4*0.5, TimeMs: 1234 + 766}
	midnight := time.Date(2026, 5, 7, 0, 0, 0, 0, time.UTC)
	day := budget.Budget{Period: events.PeriodDay, From: "2026-05-06", Until: midnight, Limit: daily, Spent: spent}
	all := budget.Budget{Period: events.PeriodTotal, Limit: total, Spent: spent}
	w.told("default", day, all)
	w.told("other")

	metered.append(&metered.life, "", events.SessionDeleted{})
	w.projected(told)
	w.told("default", day, all)
	if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log}, true); err != nil {
		t.Error(err)
	}

	// A projector that starts publishes what the former one did not.
	stop()
	dayBudget.append(&dayBudget.life, "", events.TenantBudgetRemoved{Tenant: "default", Period: events.PeriodDay})
	told.turn(2)
	w.start(now)
	all.Spent = all.Spent.Plus(events.Spent{Turns: 1, Tokens: 30, CostUSD: 0.25, TimeMs: 1234})
	w.told("default", all)
	totalBudget.append(&totalBudget.life, "", events.TenantBudgetRemoved{Tenant: "default", Period: events.PeriodTotal})
	w.told("default")
}

// TestTenantBudgets_OfADayStartAtZero tests that the usage of a daily budget starts at zero on the next day.
func TestTenantBudgets_OfADayStartAtZero(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	now := testTime.AddDate(0, 0, 1)
	w.start(func(c *projector.Config, d *projector.Deps) { d.Now = func() time.Time { return now } })
	var want []budget.Budget
	limit := events.Budget{Tokens: 5}
	for _, p := range []events.Period{events.PeriodDay, events.PeriodMonth} {
		b := w.budget("default", p)
		b.append(&b.life, "", events.TenantBudgetSet{Tenant: "default", Period: p, Budget: limit})
		from, until := p.Span(now)
		want = append(want, budget.Budget{Period: p, From: from, Until: until, Limit: limit})
	}
	w.session(-1).create().turn(1)
	want[1].Spent = events.Spent{Turns: 1, Tokens: 30, CostUSD: 0.25, TimeMs: 1234}
	w.told("default", want...)
	if got := (budget.Tenant{Budgets: want}).Exceeded("default", now); got != "tenant default since 2026-05-01 has used 30 tokens, and its budget is 5" {
		t.Error(got)
	}
	if got := (budget.Tenant{Budgets: want}).Exceeded("default", now.AddDate(0, 1, 0)); got != "" {
		t.Error(got)
	}
}
