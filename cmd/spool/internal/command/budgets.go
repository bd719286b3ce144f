package command

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/pkg/events"
)

type budgetsCommand struct {
	Set budgetsSet `cmd:"" help:"Set a tenant's budget for a period; it replaces the previous one. Requires the root key."`
	Ls  budgetsLs  `cmd:"" help:"List a tenant's budgets and their usage."`
	Rm  budgetsRm  `cmd:"" help:"Remove budgets. Requires the root key."`
}

// budgetFlags are the limits of a budget. 0 means no limit.
type budgetFlags struct {
	USD    float64       `name:"usd" placeholder:"DOLLARS" help:"Limit in US dollars."`
	Tokens uint64        `placeholder:"N" help:"Limit of input and output tokens, cached ones included."`
	Turns  uint32        `placeholder:"N" help:"Limit of started executions."`
	Time   time.Duration `placeholder:"T" help:"Limit of execution time, such as 90m."`
}

// budget returns the budget of the flags, or nil if none is set.
func (f budgetFlags) budget(prefix string) (*client.Budget, error) {
	if f.USD < 0 {
		return nil, usage("%susd: value is less than 0", prefix)
	}
	if f.Time < 0 || f.Time > 0 && f.Time < time.Millisecond {
		return nil, usage("%stime: %s is less than 1ms", prefix, f.Time)
	}
	b := client.Budget{Turns: f.Turns, Tokens: f.Tokens, CostUSD: f.USD, TimeMs: uint64(f.Time.Milliseconds())} //nolint:gosec // not negative
	if b == (client.Budget{}) {
		return nil, nil
	}
	return &b, nil
}

type budgetsSet struct {
	server
	Period string `arg:"" help:"day or month (calendar, in UTC), or total."`
	Tenant string `placeholder:"T" help:"The tenant; by default the caller's."`
	budgetFlags
}

// Run sets a budget.
func (c *budgetsSet) Run(a *app) error {
	if err := events.CheckPeriod("period", events.Period(c.Period)); err != nil {
		return usage("%v", err)
	}
	b, err := c.budget("")
	if err != nil {
		return err
	}
	if b == nil {
		return usage("the budget has no limit: set --usd, --tokens, --turns or --time, or remove the budget")
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	out, err := cl.SetBudget(ctx, c.Tenant, c.Period, *b)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(out)
	}
	fmt.Fprintln(a.Err, "set")
	return nil
}

type budgetsLs struct {
	server
	Tenant string `placeholder:"T" help:"The tenant; by default the caller's."`
}

// Run lists budgets.
func (c *budgetsLs) Run(a *app) error {
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	all, err := cl.Budgets(ctx, c.Tenant)
	if err != nil {
		return err
	}
	items := func(yield func(client.Doc[client.TenantBudget], error) bool) {
		for _, b := range all {
			if !yield(b, nil) {
				return
			}
		}
	}
	return list(a, c.JSON, 0, items, []any{"PERIOD", "SINCE", "DOLLARS", "TOKENS", "TURNS", "TIME", "USED UP"}, func(b client.TenantBudget) []any {
		of := func(spent, limit string, bound bool) string {
			if !bound {
				return spent
			}
			return spent + " of " + limit
		}
		usd := func(v float64) string { return strconv.FormatFloat(v, 'f', 4, 64) }
		ms := func(v uint64) string { return (time.Duration(v) * time.Millisecond).String() } //nolint:gosec // no budget is that long
		l, s := b.Budget, b.Spent
		return []any{
			b.Period, b.From, of(usd(s.CostUSD), usd(l.CostUSD), l.CostUSD > 0), of(strconv.FormatUint(s.Tokens, 10), strconv.FormatUint(l.Tokens, 10), l.Tokens > 0),
			of(strconv.Itoa(int(s.Turns)), strconv.Itoa(int(l.Turns)), l.Turns > 0), of(ms(s.TimeMs), ms(l.TimeMs), l.TimeMs > 0), b.Exceeded,
		}
	})
}

type budgetsRm struct {
	server
	Periods []string `arg:"" name:"period" help:"day, month or total."`
	Tenant  string   `placeholder:"T" help:"The tenant; by default the caller's."`
}

// Run removes budgets.
func (c *budgetsRm) Run(a *app) error {
	for _, p := range c.Periods {
		if err := events.CheckPeriod("period", events.Period(p)); err != nil {
			return usage("%v", err)
		}
	}
	return c.every(a, c.Periods, "removed", func(ctx context.Context, cl *client.Client, period string) (any, error) {
		return cl.RemoveBudget(ctx, c.Tenant, period)
	})
}
