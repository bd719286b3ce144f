package admission

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// maxUsageWait is the maximum time for which a job waits until its tenant's usage is counted. Afterwards the job is delivered again.
const maxUsageWait = time.Second

var (
	// errUsageUnknown is returned while the session service has not counted the usage of turns that have ended.
	errUsageUnknown = errors.New("the usage of the tenant's last turns is not counted yet")
	// errLimitsUnknown is returned while the executor has not read the budgets and limits of tenants.
	errLimitsUnknown = errors.New("the budgets and limits of the tenant are not known yet")
)

// A BudgetError is returned for an execution that must not start, because a budget or the tenant's limit of events is used up. Failed is
// the execution's terminal event.
type BudgetError struct{ Failed events.ExecutionFailed }

func (e *BudgetError) Error() string { return e.Failed.Code + ": " + e.Failed.Message }

// checkBudgets returns a *BudgetError if the active execution of a session, which no executor has claimed, must not start because a budget
// is used up. The session service checks the budgets too, before it publishes a job. But an executor may see an execution without a job,
// and the session service may check before it has counted the usage of the last turn.
//
// The usage of the session is exact, because a claim fails if the session's runs have changed. The usage of the tenant must include all
// turns that usagePositions names; otherwise the error is errUsageUnknown, with the delay after which the job is to be delivered again.
func (c *Controller) checkBudgets(ctx context.Context, l *eventlog.SessionState) error {
	t, err := c.countedUsage(ctx, l)
	if failed := budget.CheckStart(l, t, c.Now()); failed != nil {
		return &BudgetError{*failed}
	}
	return err
}

// countedUsage returns the budgets, limits and usage of a session's tenant, or an error and no budgets if the usage is not known.
func (c *Controller) countedUsage(ctx context.Context, l *eventlog.SessionState) (budget.Tenant, error) {
	if c.Budgets == nil {
		return budget.Tenant{}, nil
	}
	t, err := c.Budgets.Get(ctx, l.Tenant)
	if err != nil {
		return budget.Tenant{}, bus.RetryAfter(fmt.Errorf("%w: %w", errLimitsUnknown, err), claimRetryDelay)
	}
	if t.HasLimitedUsage() && !t.HasCounted(c.usagePositions(l)) {
		return budget.Tenant{}, bus.RetryAfter(fmt.Errorf("tenant %s: %w", l.Tenant, errUsageUnknown), tenantSlotRetryDelay)
	}
	c.ends.removeCounted(l.Tenant, t)
	return t, nil
}

// awaitBudgets is checkBudgets, but it waits for a moment until the usage of the tenant is counted.
func (c *Controller) awaitBudgets(ctx context.Context, l *eventlog.SessionState) error {
	err := c.checkBudgets(ctx, l)
	if !errors.Is(err, errUsageUnknown) {
		return err
	}
	bus.ReleaseSlot(ctx)
	within, cancel := context.WithTimeout(ctx, maxUsageWait)
	defer cancel()
	if err := c.Budgets.AwaitCounted(within, l.Tenant, c.usagePositions(l)); err != nil {
		return bus.RetryAfter(fmt.Errorf("tenant %s: %w: %w", l.Tenant, errUsageUnknown, err), tenantSlotRetryDelay)
	}
	return c.checkBudgets(ctx, l)
}

// usagePositions returns the positions up to which the usage of a session's tenant must be counted before the session's next execution may
// start: those of the session's last commits, and of the ends of the tenant's turns on this executor. The dispatch of the execution is one
// of these commits, so that the usage includes all turns in the session's shard that ended before it.
func (c *Controller) usagePositions(l *eventlog.SessionState) budget.Positions {
	to := c.ends.positions(l.Tenant)
	last := c.Sessions.Position(l.ID, max(l.LifeHead.Seq, l.RunHead.Seq))
	to.Include(last.Shard, last.Seq)
	return to
}

// RecordTurn records the end of a turn on this executor. The next turn of its tenant starts only when the tenant's usage includes it. l is
// the state of the session after the turn. RecordTurn must be called before the turn's slot is closed.
func (c *Controller) RecordTurn(ctx context.Context, l *eventlog.SessionState) {
	if c.Budgets == nil {
		return
	}
	if t, err := c.Budgets.Get(ctx, l.Tenant); err == nil && !t.HasLimitedUsage() {
		return
	}
	c.ends.add(l.Tenant, c.Sessions.Position(l.ID, l.RunHead.Seq))
}

// turnEnds holds the positions of the ends of turns on this executor that the usage of their tenants may not include yet. The zero value
// holds none. It is safe for concurrent use.
type turnEnds struct {
	mu       sync.Mutex
	byTenant map[string]budget.Positions
}

// add records the position of the end of a turn.
func (e *turnEnds) add(tenant string, p eventlog.Position) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.byTenant == nil {
		e.byTenant = map[string]budget.Positions{}
	}
	if e.byTenant[tenant] == nil {
		e.byTenant[tenant] = budget.Positions{}
	}
	e.byTenant[tenant].Include(p.Shard, p.Seq)
}

// positions returns a new map with the last recorded position of a tenant in each shard.
func (e *turnEnds) positions(tenant string) budget.Positions {
	e.mu.Lock()
	defer e.mu.Unlock()
	to := budget.Positions{}
	maps.Copy(to, e.byTenant[tenant])
	return to
}

// removeCounted removes the positions that the usage of a tenant includes.
func (e *turnEnds) removeCounted(tenant string, t budget.Tenant) {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.byTenant[tenant], func(shard int, seq uint64) bool { return t.HasCounted(budget.Positions{shard: seq}) })
	if len(e.byTenant[tenant]) == 0 {
		delete(e.byTenant, tenant)
	}
}
