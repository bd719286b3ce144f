package admission

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/waiting"
)

// NewWait returns an entry for a wait of the active execution of a session that begins now. It has no reason yet.
func (c *Controller) NewWait(l *eventlog.SessionState) waiting.Entry { return newWait(l, c.Now()) }

// newWait returns an entry for a wait of the active execution of a session, without a reason.
func newWait(l *eventlog.SessionState, since time.Time) waiting.Entry {
	e := waiting.Entry{Execution: l.Life.Active.ExecutionID, Since: since}
	if l.Run.Execution == e.Execution {
		e.Holder, e.Attempt = l.Run.Holder, l.Run.Attempt
	}
	return e
}

// recordRefusal records the wait of an execution whose check began at a time and returned err. It records nothing if the
// reason is not known, or if err does not make the execution wait.
func (c *Controller) recordRefusal(l *eventlog.SessionState, began time.Time, err error) {
	if err == nil {
		return
	}
	wait := newWait(l, began)
	if errors.Is(err, errNotDue) {
		wait.Reason, wait.Until = waiting.NotBefore, l.Run.NotBefore
		wait.Detail = fmt.Sprintf("Attempt %d failed; the next one begins at %s.", l.Run.DiedAttempts, wait.Until.UTC().Format(time.RFC3339))
		c.Waits.Record(wait)
		return
	}
	if e, known := c.describeRefusal(wait, l.Tenant, err); known {
		c.Waits.Record(e)
	}
}

// RecordStoreFull records that the output of the active execution of a session waits for room in the NATS store. The caller
// ends the wait.
func (c *Controller) RecordStoreFull(l *eventlog.SessionState) {
	wait := c.NewWait(l)
	wait.Reason, wait.Detail = waiting.Disk, "Only the reserve of the NATS store is left, so the output of the agent waits."
	c.Waits.Record(wait)
}

// NewSandboxWait returns the entry of the active execution of a session for a wait that begins now, because the tenant has as
// many sandboxes as it may have on this engine, all of which are in use.
func (c *Controller) NewSandboxWait(l *eventlog.SessionState) waiting.Entry {
	most := c.MaxSandboxes(l.Tenant)
	return describeTenantLimit(c.NewWait(l), sandboxesLimit, most, most)
}

// describeRefusal returns wait with the reason that err states, and false if err states none.
func (c *Controller) describeRefusal(wait waiting.Entry, tenant string, err error) (waiting.Entry, bool) {
	var tenantSlots *tenantSlotsError
	var reserved *storage.ReservedError
	var unavailable *sandbox.Error
	switch {
	case errors.As(err, &tenantSlots):
		return describeTenantLimit(wait, executionsLimit, tenantSlots.limit, tenantSlots.running), true
	case isWithoutSlot(err):
		return c.describeNoSlot(wait, tenant), true
	case errors.Is(err, errUsageUnknown), errors.Is(err, errLimitsUnknown):
		wait.Reason, wait.Detail = waiting.Budget, "The usage of the tenant's last turns is not counted yet, so its budgets cannot be checked."
		if errors.Is(err, errLimitsUnknown) {
			wait.Detail = "The executor has not received the budgets and limits of the tenant yet."
		}
		return wait, true
	case errors.As(err, &reserved):
		wait.Reason, wait.Detail = waiting.Disk, "Only the reserve of the NATS store is left, so no execution is started."
		return wait, true
	case errors.As(err, &unavailable) && unavailable.Code == sandbox.CodeEngineUnavailable:
		wait.Reason, wait.Detail = waiting.EngineGone, fmt.Sprintf("Engine %s of provider %s does not answer.", c.Engine, c.Provider)
		return wait, true
	}
	return wait, false
}

// describeNoSlot returns wait with the reason why the executor gives no slot to an execution of a tenant. While the tenant is at
// its limit over all executors, only some of its jobs are refused for that, and the others wait for their turn to be checked.
func (c *Controller) describeNoSlot(wait waiting.Entry, tenant string) waiting.Entry {
	if refusal := c.refusals.find(tenant, c.Now()); refusal != nil {
		return describeTenantLimit(wait, executionsLimit, refusal.limit, refusal.running)
	}
	work, reached := c.slots.HasReachedLimit(tenant)
	switch limit := c.localExecutionLimit(tenant); {
	case !reached:
		wait.Reason, wait.Limit = waiting.Slot, waiting.Count(c.Slots)
		wait.Detail = fmt.Sprintf("The executor that has the job has no free slot for it; it has %d slots.", c.Slots)
		return wait
	case limit == c.tenantSlotLimit(tenant):
		return describeTenantLimit(wait, executionsLimit, limit, work)
	default:
		return describeTenantLimit(wait, sandboxesLimit, limit, work)
	}
}

// refusalAge is the time for which a refusal of a tenant explains why its other jobs have no slot. It exceeds the time for which
// a job waits for a slot.
const refusalAge = 2 * time.Second

// tenantRefusals holds the tenants that were lately refused because they run their maximum number of executions over all
// executors. The zero value holds none. It is safe for concurrent use.
type tenantRefusals struct {
	mu       sync.Mutex
	byTenant map[string]tenantRefusal
}

type tenantRefusal struct {
	err *tenantSlotsError
	at  time.Time
}

// add records a refusal, and forgets those that are too old.
func (r *tenantRefusals) add(tenant string, err *tenantSlotsError, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byTenant == nil {
		r.byTenant = map[string]tenantRefusal{}
	}
	maps.DeleteFunc(r.byTenant, func(_ string, have tenantRefusal) bool { return now.Sub(have.at) > refusalAge })
	r.byTenant[tenant] = tenantRefusal{err, now}
}

// find returns the last refusal of a tenant, or nil if there is none or it is too old.
func (r *tenantRefusals) find(tenant string, now time.Time) *tenantSlotsError {
	r.mu.Lock()
	defer r.mu.Unlock()
	have, ok := r.byTenant[tenant]
	if !ok || now.Sub(have.at) > refusalAge {
		return nil
	}
	return have.err
}

// What a limit of a tenant limits.
const (
	executionsLimit = "executions"
	sandboxesLimit  = "sandboxes on this engine"
)

// describeTenantLimit returns wait with a limit of the tenant as its reason. what names what is limited.
func describeTenantLimit(wait waiting.Entry, what string, limit, used int) waiting.Entry {
	wait.Reason, wait.Limit, wait.Used = waiting.TenantLimit, waiting.Count(limit), waiting.Count(used)
	wait.Detail = fmt.Sprintf("The tenant uses %d of at most %d %s.", used, limit, what)
	return wait
}
