package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/lease"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// execute claims the active execution, or continues this executor's claim, and runs it to its end.
func (w *Worker) execute(ctx context.Context, l eventlog.Loaded, b *handling.Session) error {
	if err := w.checkDue(l); err != nil {
		return err
	}
	if l.Run.Execution != l.Life.Active.ExecutionID {
		if err := w.deps.Room.Check(ctx, 0); err != nil {
			return err
		}
	}
	if err := w.checkClaimable(ctx, l); err != nil {
		return err
	}
	if err := w.idle.CheckUnused(ctx, l); err != nil {
		return err
	}
	if err := w.checkEngine(ctx, l); err != nil {
		return err
	}
	t, err := w.run(ctx, l, b)
	if err != nil || t == nil {
		return err
	}
	return w.snapshotAfterTurn(ctx, t, b)
}

// run runs the active execution to its end. It returns nil for the turn if the claim ended the execution.
func (w *Worker) run(ctx context.Context, l eventlog.Loaded, b *handling.Session) (*turn, error) {
	release, err := w.acquireSlot(ctx, l)
	if err != nil {
		return nil, err
	}
	s := &slot{slots: w.slots, tenant: l.Tenant, release: release}
	if release == nil {
		s.endCount = w.slots.Count(l.Tenant)
	}
	defer s.close()
	bus.ReleaseSlot(ctx)
	execution := l.Life.Active.ExecutionID
	d, err := w.runlog.Decide(l.Run, run.Claim{Meta: w.runlog.Meta(), ExecutionID: execution, Turn: l.Life.Active.Turn, Executor: w.cfg.Executor})
	if err != nil {
		return nil, runlog.ErrChanged
	}
	w.handling.SetExecution(b, execution)
	defer w.handling.SetExecution(b, "")
	if err := w.runlog.Append(ctx, &l, d); err != nil {
		return nil, err
	}
	if l.Run.Ended(execution) {
		return nil, nil // the claim failed it, after too many claims without progress
	}
	t := newTurn(w, l, b)
	t.slot = s
	t.Log.Info("execution claimed", "sandbox", l.Run.Sandbox.ID, "slot", release != nil)
	return t, t.run(ctx)
}

// errTenant is returned when the tenant runs as many executions as it may, over all executors.
var errTenant = errors.New("the tenant runs as many executions as it may")

// tenantDelay is the delay of a job that errTenant returns.
const tenantDelay = 20 * time.Millisecond

// A slot is a turn's permit to start an agent. Only the turn's goroutine uses it.
type slot struct {
	slots    *permits.Limiter
	tenant   string
	release  func() // nil while the turn only follows an agent that runs already
	endCount func() // ends the count of a turn without a slot; nil if it began with one
}

// acquire reports whether the turn may start an agent: it has a slot already, or one is free now.
func (s *slot) acquire() bool {
	if s.release == nil {
		s.release, _ = s.slots.TryAcquire(s.tenant)
	}
	return s.release != nil
}

func (s *slot) close() {
	if s.release != nil {
		s.release()
	}
	if s.endCount != nil {
		s.endCount()
	}
}

// acquireSlot waits for a slot for the active execution, and returns its release; nil if the execution needs none. Only starting an agent
// needs a slot: an execution that runs already is followed, and one that a control ends is ended, however many jobs wait.
func (w *Worker) acquireSlot(ctx context.Context, l eventlog.Loaded) (release func(), err error) {
	r := l.Run
	claimed := r.Execution == l.Life.Active.ExecutionID
	attachable := r.Sandbox.Journal != "" && r.Sandbox.Engine == w.cfg.Engine && r.Sandbox.Provider == w.cfg.Provider
	switch {
	case l.Life.ControlOf(l.Life.Active.ExecutionID).N > 0, claimed && r.Phase == run.Running && attachable:
		return nil, nil
	}
	if release, err = w.slots.Acquire(ctx, l.Tenant); err == nil {
		if err = w.checkTenantSlots(ctx, l.Tenant); err != nil {
			release()
			release = nil
			w.deps.Leases.Renew(ctx)
		}
	}
	if claimed && r.Phase == run.Starting && attachable && r.NotBefore.IsZero() && (errors.Is(err, permits.ErrNoneFree) || errors.Is(err, permits.ErrNoSeat) || errors.Is(err, errTenant)) && w.isRunning(ctx, l) {
		return nil, nil
	}
	return release, err
}

// tenantSlots returns how many executions a tenant may run at once, over all executors; 0 is no limit.
func (w *Worker) tenantSlots(tenant string) int {
	if w.deps.Budgets != nil {
		if own := w.deps.Budgets.Limits(tenant).Slots; own > 0 {
			return int(own)
		}
	}
	return w.cfg.TenantSlots
}

// tenantSandboxes returns how many sandboxes a tenant may have on this engine; 0 is no limit.
func (w *Worker) tenantSandboxes(tenant string) int {
	if w.deps.Budgets != nil {
		if own := w.deps.Budgets.Limits(tenant).Sandboxes; own > 0 {
			return int(own)
		}
	}
	return w.cfg.TenantSandboxes
}

// maxExecutions returns how many executions of a tenant this executor may run at once; 0 is no limit. Each execution needs a sandbox.
func (w *Worker) maxExecutions(tenant string) int {
	slots, sandboxes := w.tenantSlots(tenant), w.tenantSandboxes(tenant)
	if slots == 0 || sandboxes > 0 && sandboxes < slots {
		return sandboxes
	}
	return slots
}

// checkTenantSlots returns an error if a tenant runs more executions than it may, over all executors. The execution that has just got its
// slot here is counted.
func (w *Worker) checkTenantSlots(ctx context.Context, tenant string) error {
	if w.deps.Budgets != nil {
		if _, err := w.deps.Budgets.Of(ctx, tenant); err != nil { // the limits are not known yet after a start
			return bus.Later(err, heldDelay)
		}
	}
	most := w.tenantSlots(tenant)
	if most == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	n, err := w.deps.Leases.Running(ctx, tenant)
	if err != nil {
		return bus.Later(fmt.Errorf("how many executions does tenant %s run? %w", tenant, err), heldDelay)
	}
	if n > most {
		w.slots.Refuse(tenant)
		return bus.Later(errTenant, tenantDelay)
	}
	return nil
}

// Working returns how many executions of each tenant run here.
func (w *Worker) Working() map[string]int { return w.slots.Working() }

// isRunning reports whether the runner already runs the claimed execution, whose start is not in the log because the executor that claimed it
// is gone.
func (w *Worker) isRunning(ctx context.Context, l eventlog.Loaded) bool {
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	a, err := w.dialer.DialOnce(ctx, l.Run.Sandbox, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, runner.Attach{Epoch: l.Run.Epoch, After: l.Run.Sandbox.N})
	if err != nil {
		w.deps.Logger.Debug("it cannot be checked whether an execution has been started", "session", l.ID, "sandbox", l.Run.Sandbox.ID, "error", err)
		return false
	}
	defer a.Link.Close()
	return a.Hello.Status.ExecutionID == l.Run.Execution
}

// checkClaimable returns an error unless the active execution may be claimed: nothing runs in the session, or the executor that claimed it is
// gone, or answers that it does not run it.
func (w *Worker) checkClaimable(ctx context.Context, l eventlog.Loaded) error {
	if err := w.idle.CheckReachable(l.Run.Sandbox); err != nil {
		return err
	}
	if l.Run.Over() || l.Run.Execution != l.Life.Active.ExecutionID || l.Run.Holder == w.cfg.Executor {
		return nil
	}
	answer, err := w.deps.Leases.Ask(ctx, l.Run.Holder, topology.SessionRef{Tenant: l.Tenant, Session: l.ID})
	switch {
	case errors.Is(err, lease.ErrNoLease):
		return nil
	case err != nil:
		return bus.Later(fmt.Errorf("ask %s whether it still runs %s: %w", l.Run.Holder, l.Run.Execution, err), heldDelay)
	case answer.Running == l.Run.Execution:
		return bus.Later(fmt.Errorf("%s is run by %s", answer.Running, l.Run.Holder), heldDelay)
	}
	return nil
}

// checkEngine returns an error while the engine is unavailable on which a claimed execution may be running. An execution survives only a few
// claims that come to nothing, so it is claimed once the engine is back.
func (w *Worker) checkEngine(ctx context.Context, l eventlog.Loaded) error {
	sb := l.Run.Sandbox
	here := sb.Engine == w.cfg.Engine && sb.Provider == w.cfg.Provider
	if l.Run.Over() || l.Run.Execution != l.Life.Active.ExecutionID || sb.Journal == "" || !here {
		return nil
	}
	_, err := w.deps.Sandbox.Attach(ctx, sb.ID)
	if !sandboxes.Unavailable(err) {
		return nil // the claim handles any other error
	}
	w.deps.Logger.Warn("the engine of an execution's sandbox is unavailable; the execution is claimed when it is back", "session", l.ID, "execution", l.Run.Execution, "sandbox", sb.ID, "error", err)
	return bus.Later(fmt.Errorf("reach sandbox %s: %w", sb.ID, err), heldDelay)
}
