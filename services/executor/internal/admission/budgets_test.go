package admission_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/admission"
)

// counted is the usage of every tenant. The session service counts nothing more.
type counted struct{ budget.Tenant }

func (c *counted) Get(context.Context, string) (budget.Tenant, error) { return c.Tenant, nil }
func (c *counted) Limits(string) events.TenantLimits                  { return c.Tenant.Limits }
func (c *counted) AwaitCounted(ctx context.Context, _ string, _ budget.Positions) error {
	<-ctx.Done()
	return ctx.Err()
}

// limitedTo returns a tenant that may have one turn, and whose usage is counted up to a position of the only shard.
func limitedTo(turns uint32, position uint64) *counted {
	return &counted{budget.Tenant{
		Budgets: []budget.Budget{{Period: events.PeriodTotal, Limit: events.Budget{Turns: 1}, Spent: events.BudgetUsage{Turns: turns}}}, Counted: budget.Positions{0: position},
	}}
}

// dispatched returns a session of a tenant whose execution was dispatched at a position.
func dispatched(tenant string, seq uint64) *eventlog.SessionState {
	l := queued(tenant)
	l.LifeHead.Seq = seq
	return l
}

func newBudgetController(t *testing.T, b admission.Budgets) *admission.Controller {
	t.Helper()
	log, err := memlog.New(memlog.Config{Shards: 1})
	if err != nil {
		t.Fatal(err)
	}
	return newController(func(c *admission.Config) { c.Budgets, c.Sessions = b, eventlog.Sessions{Log: log} })
}

// isExceeded reports whether an error is a *admission.BudgetError.
func isExceeded(err error) bool {
	var exceeded *admission.BudgetError
	return errors.As(err, &exceeded) && exceeded.Failed.Code == budget.CodeExceeded
}

func TestCheckClaim_ChecksBudgetsOnCountedUsage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct {
			usage          *counted
			sessionTurns   uint32 // budget of the session, which has had one turn
			want, exceeded bool
		}{
			"a turn is left":                        {usage: limitedTo(0, 5), want: true},
			"the tenant's turns are used up":        {usage: limitedTo(1, 5), exceeded: true},
			"the dispatch is not counted":           {usage: limitedTo(0, 4)},
			"and the tenant had its turns before":   {usage: limitedTo(1, 4)},
			"and the session's turns are used up":   {usage: limitedTo(0, 4), sessionTurns: 1, exceeded: true},
			"the tenant has no budget":              {usage: &counted{}, want: true},
			"the session of a tenant without one":   {usage: &counted{}, sessionTurns: 1, exceeded: true},
			"an entry of an earlier version":        {usage: &counted{budget.Tenant{Budgets: limitedTo(0, 0).Budgets}}, want: true},
			"an exceeded entry of an earlier build": {usage: &counted{budget.Tenant{Budgets: limitedTo(1, 0).Budgets}}, exceeded: true},
		} {
			l := dispatched("acme", 5)
			l.Life.Options.Budget.Turns, l.Run.Before.Turns = c.sessionTurns, 1
			err := newBudgetController(t, c.usage).CheckClaim(t.Context(), l)
			if (err == nil) != c.want || isExceeded(err) != c.exceeded {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// TestAcquireSlot_ChecksBudgetsAgain tests that an execution that has waited for a slot does not keep it if its tenant's budget was used
// up meanwhile, or may have been by a turn that ended here.
func TestAcquireSlot_ChecksBudgetsAgain(t *testing.T) {
	t.Parallel()
	usage := limitedTo(0, 5)
	c := newBudgetController(t, usage)
	l := dispatched("acme", 5)
	ended := dispatched("acme", 1)
	ended.RunHead.Seq = 7
	c.RecordTurn(t.Context(), ended)
	if _, err := c.AcquireSlot(t.Context(), l); err == nil || isExceeded(err) {
		t.Errorf("before the last turn is counted: %v", err)
	}
	usage.Tenant = limitedTo(1, 7).Tenant
	if _, err := c.AcquireSlot(t.Context(), l); !isExceeded(err) {
		t.Errorf("after the last turn is counted: %v", err)
	}
	usage.Tenant = budget.Tenant{}
	slot, err := c.AcquireSlot(t.Context(), l) // the only slot
	if err != nil || !slot.IsHeld() {
		t.Fatalf("without a budget: %v", err)
	}
	slot.Close()
}
