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

// execute takes the active execution over, or on, and runs it to its end.
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

// run runs the active execution to its end; nil if its claim was the end of it.
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
		return nil, nil // claimed too often without progress: failed by the claim
	}
	t := newTurn(w, l, b)
	t.slot = s
	t.log.Info("execution claimed", "sandbox", l.Run.Sandbox.ID, "slot", release != nil)
	return t, t.run(ctx)
}

// errTenant is returned when the tenant runs as many executions as it may, over all executors.
var errTenant = errors.New("the tenant runs as many executions as it may")

// tenantDelay is the delay of a job that errTenant returns.
const tenantDelay = 20 * time.Millisecond

// slot is a turn's permit to start an agent. The turn's goroutine owns it.
type slot struct {
	slots    *permits.Limiter
	tenant   string
	release  func() // nil while the turn only follows what runs already
	endCount func() // ends what such a turn counts as; nil for others
}

// take reports whether the turn may start an agent: it has a slot already, or one is free now.
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

// slotFor waits for a slot for the active execution, if it needs one, and returns its release; nil if it needs none.
// Only an agent that is started needs a slot. An execution that runs already is followed at once, and one that a
// control ends is ended at once, however many others wait.
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

// mostHere returns how many executions of a tenant this executor may run at once; 0 is no limit. Each needs a sandbox.
func (w *Worker) maxExecutions(tenant string) int {
	slots, sandboxes := w.tenantSlots(tenant), w.tenantSandboxes(tenant)
	if slots == 0 || sandboxes > 0 && sandboxes < slots {
		return sandboxes
	}
	return slots
}

// mayStart returns an error if the tenant runs more on all executors than it may, together with the execution that has a slot here already.
func (w *Worker) checkTenantSlots(ctx context.Context, tenant string) error {
	if w.deps.Budgets != nil {
		if _, err := w.deps.Budgets.Of(ctx, tenant); err != nil { // an executor that has just begun does not know the limits yet
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

// isRunning reports whether the session's runner runs the claimed execution, whose start the log does not have. Its
// executor, which has the same epoch, is gone.
func (w *Worker) isRunning(ctx context.Context, l eventlog.Loaded) bool {
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	a, err := w.dialer.DialOnce(ctx, l.Run.Sandbox, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, runner.Attach{Epoch: l.Run.Epoch, After: l.Run.Sandbox.N})
	if err != nil {
		w.deps.Logger.Debug("whether an execution has been started cannot be told", "session", l.ID, "sandbox", l.Run.Sandbox.ID, "error", err)
		return false
	}
	defer a.Link.Close()
	return a.Hello.Status.ExecutionID == l.Run.Execution
}

// mayClaim tells whether the session's runs may be taken: nothing runs, or the
// holder lives no more, or says that it does not run this.
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
		return bus.Later(fmt.Errorf("is %s still held? %w", l.Run.Execution, err), heldDelay)
	case answer.Running == l.Run.Execution:
		return bus.Later(fmt.Errorf("%s is held by %s", answer.Running, l.Run.Holder), heldDelay)
	}
	return nil
}

// mayReach returns an error while the engine is away on which a claimed execution may run. Another claim could only come to nothing,
// and an execution survives few of these. However long the engine is away, the execution is claimed once it is back.
func (w *Worker) checkEngine(ctx context.Context, l eventlog.Loaded) error {
	sb := l.Run.Sandbox
	here := sb.Engine == w.cfg.Engine && sb.Provider == w.cfg.Provider
	if l.Run.Over() || l.Run.Execution != l.Life.Active.ExecutionID || sb.Journal == "" || !here {
		return nil
	}
	_, err := w.deps.Sandbox.Attach(ctx, sb.ID)
	if !sandboxes.Unavailable(err) {
		return nil // whatever it is, the claim deals with it
	}
	w.deps.Logger.Warn("the engine of an execution's sandbox is away; the execution is claimed when it is back", "session", l.ID, "execution", l.Run.Execution, "sandbox", sb.ID, "error", err)
	return bus.Later(fmt.Errorf("reach sandbox %s: %w", sb.ID, err), heldDelay)
}
