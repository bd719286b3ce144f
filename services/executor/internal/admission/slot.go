package admission

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/services/executor/internal/permits"
)

// A Slot is the permit of a turn to start an agent. Only the turn's goroutine uses it.
type Slot struct {
	slots    *permits.Limiter
	check    func(ctx context.Context, tenant string) error // returns an error if the tenant runs too many executions over all executors
	renew    func(ctx context.Context)                      // publishes the number of running executions at once
	tenant   string
	release  func() // nil while the turn only follows an agent that runs already
	endCount func() // ends the count of a turn without a slot; nil if it began with one
}

// Acquire waits for the slot of the active execution of a session. The Slot is not held if the execution needs none now. The caller
// must close it.
func (c *Controller) Acquire(ctx context.Context, l *eventlog.SessionState) (*Slot, error) {
	release, err := c.acquire(ctx, l)
	if err != nil {
		return nil, err
	}
	s := &Slot{slots: c.slots, check: c.checkTenantSlots, renew: c.Leases.Renew, tenant: l.Tenant, release: release}
	if release == nil {
		s.endCount = c.slots.Count(l.Tenant)
	}
	return s, nil
}

// TryAcquire reports whether the turn may start an agent: the slot is held already, or one is free now. A turn whose slot was closed may not,
// because the limits of its tenant are those of new work for it: its job has to be admitted again.
func (s *Slot) TryAcquire() bool {
	if s.release == nil && s.endCount != nil {
		s.release, _ = s.slots.TryAcquire(s.tenant)
	}
	return s.release != nil
}

// IsHeld reports whether the turn may start an agent.
func (s *Slot) IsHeld() bool { return s.release != nil }

// Close releases the slot. The turn counts as no work until Acquired is called.
func (s *Slot) Close() {
	if s.release != nil {
		s.release()
	}
	if s.endCount != nil {
		s.endCount()
	}
	s.release, s.endCount = nil, nil
}

// AcquireBlocking blocks until a permit for the turn is free and the tenant may run a further execution, or ctx ends. Unlike other methods it
// may be called by another goroutine. The turn's goroutine passes the result to Acquired, or calls it to release the permit.
func (s *Slot) AcquireBlocking(ctx context.Context) (release func(), err error) {
	for {
		if release, err = s.slots.AcquireBlocking(ctx, s.tenant); err != nil {
			return nil, err
		}
		if err = s.check(ctx, s.tenant); err == nil {
			return release, nil
		}
		release()
		s.renew(ctx)
		timer := time.NewTimer(tenantDelay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}

// Acquired makes a permit that AcquireBlocking returned the slot of the turn. The slot must be closed.
func (s *Slot) Acquired(release func()) { s.release = release }
