package reads

import (
	"context"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
)

// Budgets returns a tenant's budgets with the usage of each.
func (s *Store) Budgets(ctx context.Context, tenant string, now time.Time) ([]*spoolv1.TenantBudget, error) {
	const sum = `SELECT b.period, b.turns, b.tokens, b.cost_usd, b.time_ms,
			coalesce(sum(u.turns), 0)::bigint, coalesce(sum(u.tokens), 0)::bigint, coalesce(sum(u.cost_usd), 0), coalesce(sum(u.time_ms), 0)::bigint
		FROM tenant_budgets b LEFT JOIN tenant_usage u ON u.tenant = b.tenant
			AND u.day >= CASE b.period WHEN 'day' THEN $2 WHEN 'month' THEN $3 ELSE '' END
		WHERE b.tenant = $1 AND NOT b.removed
		GROUP BY b.tenant, b.period ORDER BY b.period`
	day, _ := events.PeriodDay.Span(now)
	month, _ := events.PeriodMonth.Span(now)
	var list []*spoolv1.TenantBudget
	err := s.rows(ctx, func(r row) error {
		var b budget.Budget
		err := r.Scan(&b.Period, &b.Limit.Turns, &b.Limit.Tokens, &b.Limit.CostUSD, &b.Limit.TimeMs, &b.Spent.Turns, &b.Spent.Tokens, &b.Spent.CostUSD, &b.Spent.TimeMs)
		if err != nil {
			return err
		}
		b.From, b.Until = b.Period.Span(now)
		out := &spoolv1.TenantBudget{
			Tenant: tenant, Period: string(b.Period), Budget: Budget(b.Limit), Spent: Budget(events.Budget(b.Spent)), From: b.From,
			Exceeded: b.Limit.Exceeded(b.Spent, b.Whose(tenant)),
		}
		if !b.Until.IsZero() {
			out.Until = wirejson.Time(b.Until)
		}
		list = append(list, out)
		return nil
	}, sum, tenant, day, month)
	return list, err
}

// Budget converts a budget to an API message.
func Budget(b events.Budget) *spoolv1.Budget {
	return &spoolv1.Budget{Turns: b.Turns, Tokens: float64(b.Tokens), CostUsd: b.CostUSD, TimeMs: float64(b.TimeMs)}
}
