// Package admission decides whether an executor may run an execution, and gives the execution a slot.
package admission

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/lease"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// Leases returns which executions other executors run, according to their leases and their answers.
type Leases interface {
	// Ask asks an executor what it does for a session. The error wraps lease.ErrNoLease if the executor is gone, and lease.ErrNoAnswer if it
	// does not answer.
	Ask(ctx context.Context, executor string, ref topology.SessionRef) (topology.CtlResponse, error)
	// RunningExecutions returns the number of executions of a tenant that run on all executors, including this one, as each
	// executor last reported.
	RunningExecutions(ctx context.Context, tenant string) (int, error)
	// Renew publishes at once the number of executions that this executor runs.
	Renew(ctx context.Context)
}

// Budgets reads the budgets and limits of tenants, and their usage.
type Budgets interface {
	// Get returns the budgets and limits of a tenant, and the usage of all its sessions.
	Get(ctx context.Context, tenant string) (budget.Tenant, error)
	// Limits returns a tenant's own limits as they were last read. It does not block.
	Limits(tenant string) events.TenantLimits
	// AwaitCounted blocks until the usage of a tenant is counted up to the given positions of the log, or until ctx ends.
	AwaitCounted(ctx context.Context, tenant string, to budget.Positions) error
}

// SandboxChecker checks whether this executor can use the sandbox of a session.
type SandboxChecker interface {
	// CheckReachable returns an error if a sandbox is on an engine that this executor cannot reach.
	CheckReachable(sb run.Sandbox) error
	// CheckUnused returns an error while another executor works on the sandbox of a session in which nothing runs.
	CheckUnused(ctx context.Context, l *eventlog.SessionState) error
}

// WaitRecorder records the waits of executions.
type WaitRecorder interface {
	// Record records that an execution waits. It must be called again while the wait lasts.
	Record(e waiting.Entry)
	// Begin records that an execution waits, until End is called.
	Begin(e waiting.Entry)
	// End records that an execution no longer waits.
	End(execution string)
}

// Config configures a Controller. Every field is required except Budgets and Room.
type Config struct {
	Executor string // id of this executor
	Provider string // name of the sandbox provider
	Engine   string

	Slots           int // maximum number of concurrent executions
	Reserved        int // number of further executions, for tenants that run none here
	TenantSlots     int // maximum number of concurrent executions of a tenant without a limit of its own, over all executors; 0 is no limit
	TenantSandboxes int // maximum number of sandboxes of a tenant without a limit of its own; 0 is no limit

	Sessions eventlog.Sessions
	Leases   Leases
	Budgets  Budgets        // nil: no tenant has budgets or limits of its own
	Room     *storage.Watch // nil: the store of NATS is never full
	Idle     SandboxChecker
	Waits    WaitRecorder
	Sandbox  sandbox.Provider
	Dialer   *agents.Dialer
	Logger   *slog.Logger
	Now      func() time.Time
}

// A Controller decides whether this executor may start or continue an execution now. It is safe for concurrent use.
type Controller struct {
	Config
	slots    *permits.Limiter
	ends     turnEnds
	refusals tenantRefusals
}

// New returns a Controller.
func New(cfg Config) *Controller {
	c := &Controller{Config: cfg}
	c.slots = permits.New(cfg.Slots, cfg.Reserved, c.localExecutionLimit)
	return c
}

const (
	// claimRetryDelay is the delay after which a job is delivered again if its execution cannot be claimed now.
	claimRetryDelay = 2 * time.Second
	// tenantSlotRetryDelay is the delay after which a job is delivered again if its tenant runs its maximum number of executions.
	tenantSlotRetryDelay = 20 * time.Millisecond
)

// errNotDue is returned for an execution whose next attempt is not due yet. Its job is delivered again later, and meanwhile the
// execution has no slot.
var errNotDue = errors.New("the next attempt is not due yet")

// A tenantSlotsError is returned when the tenant runs its maximum number of executions, over all executors.
type tenantSlotsError struct{ limit, running int }

func (e *tenantSlotsError) Error() string {
	return fmt.Sprintf("the tenant runs %d executions, and its limit is %d", e.running, e.limit)
}

// CheckClaim returns nil if this executor may claim the active execution of a session now. It returns a *BudgetError if the execution must
// end because a budget is used up. Any other error contains the delay after which the job is to be delivered again.
func (c *Controller) CheckClaim(ctx context.Context, l *eventlog.SessionState) error {
	began := c.Now()
	err := c.checkClaim(ctx, l)
	c.recordRefusal(l, began, err)
	return err
}

// checkClaim is CheckClaim without the record of the wait.
func (c *Controller) checkClaim(ctx context.Context, l *eventlog.SessionState) error {
	if err := c.CheckDue(l); err != nil {
		return err
	}
	if l.Run.Execution != l.Life.Active.ExecutionID {
		if err := c.awaitBudgets(ctx, l); err != nil {
			return err
		}
		if err := c.Room.Check(ctx, 0); err != nil {
			return err
		}
	}
	if err := c.checkClaimable(ctx, l); err != nil {
		return err
	}
	if err := c.Idle.CheckUnused(ctx, l); err != nil {
		return err
	}
	return c.checkEngine(ctx, l)
}

// CheckDue returns an error for an execution whose next attempt is not due yet, and nil for any other execution. The error contains a short
// delay for the job, since the execution may be cancelled meanwhile.
func (c *Controller) CheckDue(l *eventlog.SessionState) error {
	r := l.Run
	if r.IsIdle() || l.Life.ControlOf(r.Execution).N > 0 {
		return nil
	}
	wait := r.NotBefore.Sub(c.Now())
	if wait <= 0 {
		return nil
	}
	return bus.RetryAfter(fmt.Errorf("%s of %s: %w", r.Execution, l.ID, errNotDue), min(wait, claimRetryDelay))
}

// acquireSlot blocks until the active execution has a slot, and returns the function that releases the slot. It returns nil if the execution
// needs no slot: only the start of an agent needs one. To follow a running agent, or to end an execution that a control stopped, needs
// none. An execution that waits for approval acquires its slot later, before the runner gets the decision.
func (c *Controller) acquireSlot(ctx context.Context, l *eventlog.SessionState) (release func(), err error) {
	r := l.Run
	claimed := r.Execution == l.Life.Active.ExecutionID
	attachable := r.Sandbox.Journal != "" && r.Sandbox.Engine == c.Engine && r.Sandbox.Provider == c.Provider
	switch {
	case l.Life.ControlOf(l.Life.Active.ExecutionID).N > 0, claimed && (r.Phase == run.Running || r.Phase == run.Waiting) && attachable:
		return nil, nil
	}
	if release, err = c.slots.Acquire(ctx, l.Tenant); err == nil {
		if err = c.checkTenantSlots(ctx, l.Tenant); err == nil && !claimed {
			err = c.checkBudgets(ctx, l) // another turn of the tenant may have ended while this one waited
		}
		if err != nil {
			release()
			release = nil
			c.Leases.Renew(ctx)
		}
	}
	if claimed && r.Phase == run.Starting && attachable && r.NotBefore.IsZero() && isWithoutSlot(err) && c.isAlreadyRunning(ctx, l) {
		return nil, nil
	}
	return release, err
}

// isWithoutSlot reports whether an error means that no slot is free, or that the tenant may not have another one.
func isWithoutSlot(err error) bool {
	var tenantSlots *tenantSlotsError
	return errors.Is(err, permits.ErrNoPermit) || errors.Is(err, permits.ErrQueueFull) || errors.As(err, &tenantSlots)
}

// tenantSlotLimit returns the maximum number of concurrent executions of a tenant, over all executors; 0 is no limit.
func (c *Controller) tenantSlotLimit(tenant string) int {
	if c.Budgets != nil {
		if own := c.Budgets.Limits(tenant).Slots; own > 0 {
			return int(own)
		}
	}
	return c.TenantSlots
}

// MaxSandboxes returns the maximum number of sandboxes of a tenant on this engine; 0 is no limit.
func (c *Controller) MaxSandboxes(tenant string) int {
	if c.Budgets != nil {
		if own := c.Budgets.Limits(tenant).Sandboxes; own > 0 {
			return int(own)
		}
	}
	return c.TenantSandboxes
}

// localExecutionLimit returns the maximum number of concurrent executions of a tenant on this executor; 0 is no limit. Each
// execution needs a sandbox.
func (c *Controller) localExecutionLimit(tenant string) int {
	slots, sandboxes := c.tenantSlotLimit(tenant), c.MaxSandboxes(tenant)
	if slots == 0 || sandboxes > 0 && sandboxes < slots {
		return sandboxes
	}
	return slots
}

// checkTenantSlots returns an error if a tenant runs more than its maximum number of executions, over all executors. The count includes the
// execution that has just acquired a slot in this executor.
func (c *Controller) checkTenantSlots(ctx context.Context, tenant string) error {
	if c.Budgets != nil {
		if _, err := c.Budgets.Get(ctx, tenant); err != nil { // the limits are not known yet after a start
			return bus.RetryAfter(fmt.Errorf("%w: %w", errLimitsUnknown, err), claimRetryDelay)
		}
	}
	most := c.tenantSlotLimit(tenant)
	if most == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	n, err := c.Leases.RunningExecutions(ctx, tenant)
	if err != nil {
		return bus.RetryAfter(fmt.Errorf("how many executions does tenant %s run? %w", tenant, err), claimRetryDelay)
	}
	if n > most {
		c.slots.RefuseTenant(tenant)
		refusal := &tenantSlotsError{limit: most, running: n - 1}
		c.refusals.add(tenant, refusal, c.Now())
		return bus.RetryAfter(refusal, tenantSlotRetryDelay)
	}
	return nil
}

// RunningByTenant returns the number of executions that run in this executor, by tenant.
func (c *Controller) RunningByTenant() map[string]int { return c.slots.WorkByTenant() }

// isAlreadyRunning reports whether the runner already runs the claimed execution although the log has no start of it, because the executor
// that claimed it died.
func (c *Controller) isAlreadyRunning(ctx context.Context, l *eventlog.SessionState) bool {
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	a, err := c.Dialer.DialOnce(ctx, l.Run.Sandbox, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, runner.Attach{Epoch: l.Run.Epoch, After: l.Run.Sandbox.N})
	if err != nil {
		c.Logger.Debug("it cannot be checked whether an execution has been started", "session", l.ID, "sandbox", l.Run.Sandbox.ID, "error", err)
		return false
	}
	defer a.Link.Close()
	return a.Hello.Status.ExecutionID == l.Run.Execution
}

// checkClaimable returns nil if the active execution may be claimed: nothing runs in the session, or the executor of the last claim is
// gone, or that executor answers that it does not run the execution.
func (c *Controller) checkClaimable(ctx context.Context, l *eventlog.SessionState) error {
	if err := c.Idle.CheckReachable(l.Run.Sandbox); err != nil {
		return err
	}
	if l.Run.IsIdle() || l.Run.Execution != l.Life.Active.ExecutionID || l.Run.Holder == c.Executor {
		return nil
	}
	answer, err := c.Leases.Ask(ctx, l.Run.Holder, topology.SessionRef{Tenant: l.Tenant, Session: l.ID})
	switch {
	case errors.Is(err, lease.ErrNoLease):
		return nil
	case err != nil:
		return bus.RetryAfter(fmt.Errorf("ask %s whether it still runs %s: %w", l.Run.Holder, l.Run.Execution, err), claimRetryDelay)
	case answer.Running == l.Run.Execution:
		return bus.RetryAfter(fmt.Errorf("%s is run by %s", answer.Running, l.Run.Holder), claimRetryDelay)
	}
	return nil
}

// checkEngine returns an error while the engine of a claimed execution's sandbox is unavailable. After a few claims without progress an
// execution fails, so it must not be claimed before the engine is available again.
func (c *Controller) checkEngine(ctx context.Context, l *eventlog.SessionState) error {
	sb := l.Run.Sandbox
	here := sb.Engine == c.Engine && sb.Provider == c.Provider
	if l.Run.IsIdle() || l.Run.Execution != l.Life.Active.ExecutionID || sb.Journal == "" || !here {
		return nil
	}
	_, err := c.Sandbox.Attach(ctx, sb.ID)
	if !sandboxes.IsUnavailable(err) {
		return nil // the claim handles any other error
	}
	c.Logger.Warn("the engine of an execution's sandbox is unavailable; the execution is claimed when it is back", "session", l.ID, "execution", l.Run.Execution, "sandbox", sb.ID, "error", err)
	return bus.RetryAfter(fmt.Errorf("reach sandbox %s: %w", sb.ID, err), claimRetryDelay)
}
