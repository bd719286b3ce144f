package admission

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/waiting"
)

// A Slot is the permit of a turn to start an agent. Only the turn's goroutine uses it.
type Slot struct {
	controller *Controller
	tenant     string
	release    func() // nil while the turn only follows an agent that runs already
	endCount   func() // ends the count of a turn without a slot; nil if it began with one
}

// AcquireSlot blocks until the active execution of a session has a slot. It returns a Slot that is not held if the execution needs no slot
// now. The caller must close the Slot.
func (c *Controller) AcquireSlot(ctx context.Context, l *eventlog.SessionState) (*Slot, error) {
	began := c.Now()
	release, err := c.acquireSlot(ctx, l)
	if err != nil {
		c.recordRefusal(l, began, err)
		return nil, err
	}
	c.Waits.End(l.Life.Active.ExecutionID)
	s := &Slot{controller: c, tenant: l.Tenant, release: release}
	if release == nil {
		s.endCount = c.slots.CountWork(l.Tenant)
	}
	return s, nil
}

// TryAcquire acquires the slot if a permit is free now, and reports whether the slot is held. It returns false after Close, because a
// tenant's limits apply to the turn as to a new execution: its job has to be admitted again.
func (s *Slot) TryAcquire() bool {
	if s.release == nil && s.endCount != nil {
		s.release, _ = s.controller.slots.TryAcquire(s.tenant)
	}
	return s.release != nil
}

// IsHeld reports whether the slot is held, so that the turn may start an agent.
func (s *Slot) IsHeld() bool { return s.release != nil }

// Close releases the slot. Until SetPermit is called, the turn does not count as a running execution.
func (s *Slot) Close() {
	if s.release != nil {
		s.release()
	}
	if s.endCount != nil {
		s.endCount()
	}
	s.release, s.endCount = nil, nil
}

// AcquireBlocking blocks until a permit is free for the turn and the tenant may run a further execution, or ctx ends. wait is the result
// of NewWait for the turn's execution. Unlike the other methods of Slot it may be called by another goroutine. The turn's goroutine passes
// the returned function to SetPermit, or calls it to release the permit.
func (s *Slot) AcquireBlocking(ctx context.Context, wait waiting.Entry) (release func(), err error) {
	c := s.controller
	defer c.Waits.End(wait.Execution)
	c.Waits.Begin(c.describeNoSlot(wait, s.tenant))
	for {
		if release, err = c.slots.AcquireBlocking(ctx, s.tenant); err != nil {
			return nil, err
		}
		if err = c.checkTenantSlots(ctx, s.tenant); err == nil {
			return release, nil
		}
		release()
		c.Leases.Renew(ctx)
		if e, known := c.describeRefusal(wait, s.tenant, err); known {
			c.Waits.Begin(e)
		}
		timer := time.NewTimer(tenantSlotRetryDelay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}

// SetPermit sets the permit that the slot holds, by the function release that AcquireBlocking returned. The slot must be closed before.
func (s *Slot) SetPermit(release func()) { s.release = release }
