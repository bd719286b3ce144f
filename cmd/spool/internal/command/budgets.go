package command

import (
	"context"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type budgetsCommand struct {
	Set budgetsSetCommand `cmd:"" help:"Set a tenant's budget for a period; it replaces the previous one. Requires the root key."`
	Ls  budgetsLsCommand  `cmd:"" help:"List a tenant's budgets and their usage."`
	Rm  budgetsRmCommand  `cmd:"" help:"Remove budgets. Requires the root key."`
}

// budgetFlags are the flags with the limits of a budget. 0 means no limit.
type budgetFlags struct {
	USD    float64       `name:"usd" placeholder:"DOLLARS" help:"Limit in US dollars."`
	Tokens uint64        `placeholder:"N" help:"Limit of input and output tokens, cached ones included."`
	Turns  uint32        `placeholder:"N" help:"Limit of started executions."`
	Time   time.Duration `placeholder:"T" help:"Limit of execution time, such as 90m."`
}

// toBudget returns the budget that the flags describe, or nil if no flag is set.
func (f budgetFlags) toBudget(prefix string) (*spoolv1.Budget, error) {
	if f.USD < 0 {
		return nil, usageError("%susd: value is less than 0", prefix)
	}
	if f.Time < 0 || f.Time > 0 && f.Time < time.Millisecond {
		return nil, usageError("%stime: %s is less than 1ms", prefix, f.Time)
	}
	b := &spoolv1.Budget{Turns: f.Turns, Tokens: float64(f.Tokens), CostUsd: f.USD, TimeMs: float64(f.Time.Milliseconds())}
	if proto.Size(b) == 0 {
		return nil, nil
	}
	return b, nil
}

type budgetsSetCommand struct {
	tenantFlags
	Period string `arg:"" help:"day or month (calendar, in UTC), or total."`
	budgetFlags
}

// Run replaces a tenant's budget for a period by the budget in the flags. A quantity without a flag has no limit.
func (c *budgetsSetCommand) Run(a *app) error {
	if err := events.CheckPeriod("period", events.Period(c.Period)); err != nil {
		return usageError("%v", err)
	}
	b, err := c.toBudget("")
	if err != nil {
		return err
	}
	if b == nil {
		return usageError("the budget has no limit: set --usd, --tokens, --turns or --time, or remove the budget")
	}
	return c.changeAndPrint(a, "set", func(ctx context.Context, cl *client.Client) (any, error) {
		return client.Call(ctx, cl.Budgets.SetBudget, &spoolv1.SetBudgetRequest{Period: c.Period, Tenant: c.Tenant, Budget: b})
	})
}

type budgetsLsCommand struct{ tenantFlags }

// Run prints a tenant's budgets, and how much of each was used.
func (c *budgetsLsCommand) Run(a *app) error {
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		budgets := client.List[*spoolv1.TenantBudget](ctx, cl.Budgets.ListBudgets, &spoolv1.ListBudgetsRequest{Tenant: c.Tenant})
		return printList(a, c.JSON, 0, budgets, []any{"PERIOD", "SINCE", "DOLLARS", "TOKENS", "TURNS", "TIME", "USED UP"}, budgetColumns)
	})
}

// budgetColumns returns the columns that "spool budgets ls" prints for a budget: each usage, with its limit if there is
// one.
func budgetColumns(b *spoolv1.TenantBudget) []any {
	column := func(value func(*spoolv1.Budget) float64, format func(float64) string) string {
		spent, limit := value(b.Spent), value(b.Budget)
		if limit > 0 {
			return format(spent) + " of " + format(limit)
		}
		return format(spent)
	}
	duration := func(ms float64) string { return (time.Duration(ms) * time.Millisecond).String() }
	return []any{
		b.Period, b.From,
		column((*spoolv1.Budget).GetCostUsd, func(v float64) string { return strconv.FormatFloat(v, 'f', 4, 64) }),
		column((*spoolv1.Budget).GetTokens, formatWholeNumber),
		column(func(b *spoolv1.Budget) float64 { return float64(b.GetTurns()) }, formatWholeNumber),
		column((*spoolv1.Budget).GetTimeMs, duration),
		b.Exceeded,
	}
}

// formatWholeNumber formats a number without decimals and without an exponent.
func formatWholeNumber(v float64) string { return strconv.FormatFloat(v, 'f', 0, 64) }

type budgetsRmCommand struct {
	tenantFlags
	Periods []string `arg:"" name:"period" help:"day, month or total."`
}

// Run removes the tenant's budgets for the given periods.
func (c *budgetsRmCommand) Run(a *app) error {
	for _, p := range c.Periods {
		if err := events.CheckPeriod("period", events.Period(p)); err != nil {
			return usageError("%v", err)
		}
	}
	return forEachName(c.serverFlags, a, c.Periods, "removed", func(ctx context.Context, cl *client.Client, period string) (any, error) {
		return client.Call(ctx, cl.Budgets.RemoveBudget, &spoolv1.RemoveBudgetRequest{Period: period, Tenant: c.Tenant})
	})
}
