package holder

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/lease"
)

// execute takes the active execution over, or on, and runs it to its end.
func (h *Holder) execute(ctx context.Context, l eventlog.Loaded, b *busy) error {
	if err := h.early(l); err != nil {
		return err
	}
	if l.Run.Execution != l.Life.Active.ExecutionID {
		if err := h.d.Room.Check(ctx, 0); err != nil {
			return err
		}
	}
	if err := h.mayClaim(ctx, l); err != nil {
		return err
	}
	if err := h.mayUse(ctx, l); err != nil {
		return err
	}
	if err := h.mayReach(ctx, l); err != nil {
		return err
	}
	t, err := h.run(ctx, l, b)
	if err != nil || t == nil {
		return err
	}
	return h.afterTurn(ctx, t, b)
}

// run runs the active execution to its end; nil if its claim was the end of it.
func (h *Holder) run(ctx context.Context, l eventlog.Loaded, b *busy) (*turn, error) {
	release, err := h.slotFor(ctx, l)
	if err != nil {
		return nil, err
	}
	s := &slot{slots: h.slots, tenant: l.Tenant, release: release}
	if release == nil {
		s.follow = h.slots.follow(l.Tenant)
	}
	defer s.end()
	bus.ReleaseSlot(ctx)
	execution := l.Life.Active.ExecutionID
	d, err := h.decide(l.Run, run.Claim{Meta: h.meta(), ExecutionID: execution, Turn: l.Life.Active.Turn, Executor: h.cfg.Executor})
	if err != nil {
		return nil, errAgain
	}
	h.handling.runs(b, execution)
	defer h.handling.runs(b, "")
	if err := h.first(ctx, &l, d); err != nil {
		return nil, err
	}
	if l.Run.Ended(execution) {
		return nil, nil // claimed too often without progress: failed by the claim
	}
	t := newTurn(h, l, b)
	t.slot = s
	t.log.Info("execution claimed", "sandbox", l.Run.Sandbox.ID, "slot", release != nil)
	return t, t.run(ctx)
}

// slot is a turn's permit to start an agent. The turn's goroutine owns it.
type slot struct {
	slots   *limit
	tenant  string
	release func() // nil while the turn only follows what runs already
	follow  func() // ends what such a turn counts as; nil for others
}

// take reports whether the turn may start an agent: it has a slot already, or one is free now.
func (s *slot) take() bool {
	if s.release == nil {
		s.release, _ = s.slots.try(s.tenant)
	}
	return s.release != nil
}

func (s *slot) end() {
	if s.release != nil {
		s.release()
	}
	if s.follow != nil {
		s.follow()
	}
}

// slotFor waits for a slot for the active execution, if it needs one, and returns its release; nil if it needs none.
// Only an agent that is started needs a slot. An execution that runs already is followed at once, and one that a
// control ends is ended at once, however many others wait.
func (h *Holder) slotFor(ctx context.Context, l eventlog.Loaded) (release func(), err error) {
	r := l.Run
	claimed := r.Execution == l.Life.Active.ExecutionID
	attachable := r.Sandbox.Journal != "" && r.Sandbox.Engine == h.cfg.Engine && r.Sandbox.Provider == h.cfg.Provider
	switch {
	case l.Life.ControlOf(l.Life.Active.ExecutionID).N > 0, claimed && r.Phase == run.Running && attachable:
		return nil, nil
	}
	if release, err = h.slots.acquire(ctx, l.Tenant); err == nil {
		if err = h.mayStart(ctx, l.Tenant); err != nil {
			release()
			release = nil
			h.d.Leases.Renew(ctx)
		}
	}
	if claimed && r.Phase == run.Starting && attachable && r.NotBefore.IsZero() && (errors.Is(err, errFull) || errors.Is(err, errCrowded) || errors.Is(err, errTenant)) && h.isRunning(ctx, l) {
		return nil, nil
	}
	return release, err
}

// tenantSlots returns how many executions a tenant may run at once, over all executors; 0 is no limit.
func (h *Holder) tenantSlots(tenant string) int {
	if h.d.Budgets != nil {
		if own := h.d.Budgets.Limits(tenant).Slots; own > 0 {
			return int(own)
		}
	}
	return h.cfg.TenantSlots
}

// mostHere returns how many executions of a tenant this executor may run at once; 0 is no limit. Each needs a sandbox.
func (h *Holder) mostHere(tenant string) int {
	slots, sandboxes := h.tenantSlots(tenant), h.tenantSandboxes(tenant)
	if slots == 0 || sandboxes > 0 && sandboxes < slots {
		return sandboxes
	}
	return slots
}

// mayStart returns an error if the tenant runs more on all executors than it may, together with the execution that has a slot here already.
func (h *Holder) mayStart(ctx context.Context, tenant string) error {
	if h.d.Budgets != nil {
		if _, err := h.d.Budgets.Of(ctx, tenant); err != nil { // an executor that has just begun does not know the limits yet
			return bus.Later(err, heldDelay)
		}
	}
	most := h.tenantSlots(tenant)
	if most == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	n, err := h.d.Leases.Running(ctx, tenant)
	if err != nil {
		return bus.Later(fmt.Errorf("how many executions does tenant %s run? %w", tenant, err), heldDelay)
	}
	if n > most {
		h.slots.refuse(tenant)
		return bus.Later(errTenant, returnDelay)
	}
	return nil
}

// Working returns how many executions of each tenant run here.
func (h *Holder) Working() map[string]int { return h.slots.counts() }

// isRunning reports whether the session's runner runs the claimed execution, whose start the log does not have. Its
// executor, which has the same epoch, is gone.
func (h *Holder) isRunning(ctx context.Context, l eventlog.Loaded) bool {
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	a, err := h.dialOnce(ctx, l.Run.Sandbox, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, runner.Attach{Epoch: l.Run.Epoch, After: l.Run.Sandbox.N})
	if err != nil {
		h.d.Logger.Debug("whether an execution has been started cannot be told", "session", l.ID, "sandbox", l.Run.Sandbox.ID, "error", err)
		return false
	}
	defer a.link.Close()
	return a.hello.Status.ExecutionID == l.Run.Execution
}

// mayClaim tells whether the session's runs may be taken: nothing runs, or the
// holder lives no more, or says that it does not run this.
func (h *Holder) mayClaim(ctx context.Context, l eventlog.Loaded) error {
	if err := h.reachable(l.Run.Sandbox); err != nil {
		return err
	}
	if l.Run.Over() || l.Run.Execution != l.Life.Active.ExecutionID || l.Run.Holder == h.cfg.Executor {
		return nil
	}
	answer, err := h.d.Leases.Ask(ctx, l.Run.Holder, topology.SessionRef{Tenant: l.Tenant, Session: l.ID})
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
func (h *Holder) mayReach(ctx context.Context, l eventlog.Loaded) error {
	sb := l.Run.Sandbox
	here := sb.Engine == h.cfg.Engine && sb.Provider == h.cfg.Provider
	if l.Run.Over() || l.Run.Execution != l.Life.Active.ExecutionID || sb.Journal == "" || !here {
		return nil
	}
	_, err := h.d.Sandbox.Attach(ctx, sb.ID)
	if !unavailable(err) {
		return nil // whatever it is, the claim deals with it
	}
	h.d.Logger.Warn("the engine of an execution's sandbox is away; the execution is claimed when it is back", "session", l.ID, "execution", l.Run.Execution, "sandbox", sb.ID, "error", err)
	return bus.Later(fmt.Errorf("reach sandbox %s: %w", sb.ID, err), heldDelay)
}

// mayUse returns nil when no other executor works on the sandbox at rest: none has begun to since the last claim, or it
// has ended, or it is gone. An executor that works on it is told by the question that it has to give way, and the job
// comes again soon.
func (h *Holder) mayUse(ctx context.Context, l eventlog.Loaded) error {
	other := l.Run.Syncing
	if other == "" || other == h.cfg.Executor || !l.Run.Over() {
		return nil
	}
	answer, err := h.d.Leases.Ask(ctx, other, topology.SessionRef{Tenant: l.Tenant, Session: l.ID})
	switch {
	case errors.Is(err, lease.ErrNoLease):
		return nil
	case err != nil:
		return bus.Later(fmt.Errorf("is the sandbox of %s still in use? %w", l.ID, err), heldDelay)
	case answer.Syncing:
		return bus.Later(fmt.Errorf("the sandbox of %s is in use by %s", l.ID, other), fullDelay)
	}
	return nil
}
