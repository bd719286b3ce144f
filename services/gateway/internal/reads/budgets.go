package reads

import (
	"context"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// Budgets returns a tenant's budgets with the usage of each.
func (s *Store) Budgets(ctx context.Context, tenant string, now time.Time) ([]*spoolv1.TenantBudget, error) {
	day, _ := events.PeriodDay.Bounds(now)
	month, _ := events.PeriodMonth.Bounds(now)
	var list []*spoolv1.TenantBudget
	rows, err := s.queries.Budgets(ctx, queries.BudgetsParams{Tenant: tenant, Today: day, Month: month})
	for _, r := range rows {
		b := budget.Budget{
			Period: events.Period(r.Period), Limit: events.Budget{Turns: uint32(r.Turns), Tokens: uint64(r.Tokens), CostUSD: r.CostUsd, TimeMs: uint64(r.TimeMs)},
		}
		b.Spent.Turns, b.Spent.Tokens, b.Spent.CostUSD, b.Spent.TimeMs = uint32(r.UsedTurns), uint64(r.UsedTokens), r.UsedCostUsd, uint64(r.UsedTimeMs)
		b.From, b.Until = b.Period.Bounds(now)
		out := &spoolv1.TenantBudget{
			Tenant: tenant, Period: string(b.Period), Budget: BudgetMessage(b.Limit), Spent: BudgetMessage(events.Budget(b.Spent)), From: b.From,
			Exceeded: b.Limit.ExceededLimit(b.Spent, b.Describe(tenant)),
		}
		if !b.Until.IsZero() {
			out.Until = wirejson.TimestampOf(b.Until)
		}
		list = append(list, out)
	}
	return list, err
}

// BudgetMessage converts a budget to an API message.
func BudgetMessage(b events.Budget) *spoolv1.Budget {
	return &spoolv1.Budget{Turns: b.Turns, Tokens: float64(b.Tokens), CostUsd: b.CostUSD, TimeMs: float64(b.TimeMs)}
}
