package projector_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector"
)

// budget returns a writer for a tenant's budget.
func (w *world) budget(tenant string, p events.Period) *session {
	subject := events.BudgetSubject(tenant, p)
	return &session{w: w, tenant: tenant, id: subject.ID, life: eventlog.Head{Subject: subject}}
}

// tenantUsage returns the budgets and limits of a tenant, and what the tenant has used at the given time.
func (w *world) tenantUsage(tenant string, now time.Time) (budget.Tenant, error) {
	conn, err := pgx.Connect(w.t.Context(), w.url)
	if err != nil {
		return budget.Tenant{}, err
	}
	t, err := tenantUsageOn(w.t.Context(), conn, tenant, now)
	return t, errors.Join(err, conn.Close(context.WithoutCancel(w.t.Context())))
}

func tenantUsageOn(ctx context.Context, conn *pgx.Conn, tenant string, now time.Time) (budget.Tenant, error) {
	var t budget.Tenant
	rows, err := conn.Query(ctx, "SELECT period, turns, tokens, cost_usd, time_ms FROM spool.tenant_budgets WHERE tenant = $1 AND NOT removed ORDER BY period", tenant)
	if err != nil {
		return t, err
	}
	t.Budgets, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (b budget.Budget, err error) {
		err = r.Scan(&b.Period, &b.Limit.Turns, &b.Limit.Tokens, &b.Limit.CostUSD, &b.Limit.TimeMs)
		b.From, b.Until = b.Period.Bounds(now)
		return b, err
	})
	if err != nil {
		return t, err
	}
	for i := range t.Budgets {
		b := &t.Budgets[i]
		err := conn.QueryRow(ctx, `SELECT coalesce(sum(turns), 0), coalesce(sum(tokens), 0), coalesce(sum(cost_usd), 0), coalesce(sum(time_ms), 0)
			FROM spool.tenant_usage WHERE tenant = $1 AND day >= $2`, tenant, b.From).Scan(&b.Spent.Turns, &b.Spent.Tokens, &b.Spent.CostUSD, &b.Spent.TimeMs)
		if err != nil {
			return t, err
		}
	}
	var limits string
	err = conn.QueryRow(ctx, "SELECT coalesce((SELECT limits FROM spool.tenant_limits WHERE tenant = $1 AND NOT removed), '{}')", tenant).Scan(&limits)
	if err != nil {
		return t, err
	}
	if err := json.Unmarshal([]byte(limits), &t.Limits); err != nil {
		return t, err
	}
	t.Used.Day, _ = events.PeriodDay.Bounds(now)
	return t, conn.QueryRow(ctx, "SELECT coalesce(sum(events), 0), coalesce(sum(event_bytes), 0) FROM spool.tenant_usage WHERE tenant = $1 AND day >= $2", tenant, t.Used.Day).
		Scan(&t.Used.Logged.Events, &t.Used.Logged.Bytes)
}

// awaitUsage waits until the read models hold the budgets of a tenant and what it has used.
func (w *world) awaitUsage(tenant string, now time.Time, want ...budget.Budget) {
	w.t.Helper()
	eventually(w.t, "the read models hold the usage of "+tenant+"", func() error {
		have, err := w.tenantUsage(tenant, now)
		if err != nil {
			return err
		}
		if got, want := fmt.Sprintf("%+v", have.Budgets), fmt.Sprintf("%+v", want); got != want {
			return fmt.Errorf("the usage is %s, want %s", got, want)
		}
		return nil
	})
}

// TestTenantUsage_AddsUpOverGroupsAndOutlivesSessions tests that the usage of a tenant's sessions adds up over all
// partition groups, and stays when a session is deleted.
func TestTenantUsage_AddsUpOverGroupsAndOutlivesSessions(t *testing.T) {
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

	agentOnly, metered, other := w.session(1).create(), w.session(6).create(), w.session(2)
	other.tenant = "other"
	other.life.Subject, other.run.Subject = events.LifeSubject("other", other.id), events.RunSubject("other", other.id)
	other.create()
	for _, s := range []*session{agentOnly, other} {
		s.turn(1) // 30 tokens, $0.25 and 1,234 ms, as reported by the agent
	}
	x := metered.post(1)
	call := events.ModelCalled{Provider: "anthropic", Model: "m", Status: 200, Usage: events.Usage{InputTokens: 100, OutputTokens: 5, CacheReadTokens: 7, CacheWriteTokens: 1}, CostUSD: 0.5}
	metered.append(&metered.run, x, call, events.ExecutionStarted{Attempt: 2}, call)
	// Usage that was metered and that the agent also reports counts once.
	metered.append(&metered.run, x, events.MetadataUpdate{Usage: events.Usage{InputTokens: 200}, CostUSD: 0.75},
		events.ExecutionFailed{DurationMs: 766, Usage: events.Usage{InputTokens: 200}, Code: "X"})
	metered.append(&metered.run, "", call) // outside of an execution
	metered.append(&metered.run, x, call)  // after the end of its execution
	// An execution that did not start uses nothing.
	never := metered.execution(2)
	metered.append(&metered.life, never, events.MessageAccepted{BlockID: "b"}, events.ExecutionQueued{Ahead: 1}, events.ExecutionWithdrawn{Reason: "cancelled"})

	spent := events.BudgetUsage{Turns: 2, Tokens: 30 + 4*113, CostUSD: 0.25 + 4*0.5, TimeMs: 1234 + 766}
	midnight := time.Date(2026, 5, 7, 0, 0, 0, 0, time.UTC)
	day := budget.Budget{Period: events.PeriodDay, From: "2026-05-06", Until: midnight, Limit: daily, Spent: spent}
	all := budget.Budget{Period: events.PeriodTotal, Limit: total, Spent: spent}
	w.awaitUsage("default", testTime, day, all)
	w.awaitUsage("other", testTime)

	metered.append(&metered.life, "", events.SessionDeleted{})
	w.awaitProjected(agentOnly)
	w.awaitUsage("default", testTime, day, all)
	if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log}, true); err != nil {
		t.Error(err)
	}

	stop()
	dayBudget.append(&dayBudget.life, "", events.TenantBudgetRemoved{Tenant: "default", Period: events.PeriodDay})
	agentOnly.turn(2)
	w.start(now)
	all.Spent = all.Spent.Plus(events.BudgetUsage{Turns: 1, Tokens: 30, CostUSD: 0.25, TimeMs: 1234})
	w.awaitUsage("default", testTime, all)
	totalBudget.append(&totalBudget.life, "", events.TenantBudgetRemoved{Tenant: "default", Period: events.PeriodTotal})
	w.awaitUsage("default", testTime)
}

// TestTenantUsage_IsCountedByDay tests that a budget of a day does not include the usage of another day.
func TestTenantUsage_IsCountedByDay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	now := testTime.AddDate(0, 0, 1)
	w.start(func(c *projector.Config, d *projector.Deps) { d.Now = func() time.Time { return now } })
	var want []budget.Budget
	limit := events.Budget{Tokens: 5}
	for _, p := range []events.Period{events.PeriodDay, events.PeriodMonth} {
		b := w.budget("default", p)
		b.append(&b.life, "", events.TenantBudgetSet{Tenant: "default", Period: p, Budget: limit})
		from, until := p.Bounds(now)
		want = append(want, budget.Budget{Period: p, From: from, Until: until, Limit: limit})
	}
	w.session(-1).create().turn(1)
	want[1].Spent = events.BudgetUsage{Turns: 1, Tokens: 30, CostUSD: 0.25, TimeMs: 1234}
	w.awaitUsage("default", now, want...)
	if got := (budget.Tenant{Budgets: want}).ExceededBudget("default", now); got != "tenant default since 2026-05-01 has used 30 tokens, and its budget is 5" {
		t.Error(got)
	}
	if got := (budget.Tenant{Budgets: want}).ExceededBudget("default", now.AddDate(0, 1, 0)); got != "" {
		t.Error(got)
	}
}
