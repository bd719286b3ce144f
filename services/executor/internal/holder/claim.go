package holder

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/lease"
)

// execute takes the active execution over, or on, and runs it to its end.
func (h *Holder) execute(ctx context.Context, l eventlog.Loaded, b *busy) error {
	if err := h.early(l); err != nil {
		return err
	}
	if err := h.mayClaim(ctx, l); err != nil {
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
	release, err := h.slot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	execution := l.Life.Active.ExecutionID
	d, err := run.Decide(l.Run, run.Claim{Meta: h.meta(), ExecutionID: execution, Turn: l.Life.Active.Turn, Executor: h.cfg.Executor})
	if err != nil {
		return nil, errAgain
	}
	h.runs(b, execution)
	defer h.runs(b, "")
	if err := h.first(ctx, &l, d); err != nil {
		return nil, err
	}
	if l.Run.Ended(execution) {
		return nil, nil // claimed too often without progress: failed by the claim
	}
	t := newTurn(h, l, b)
	t.log.Info("execution claimed", "sandbox", l.Run.Sandbox.ID)
	return t, t.run(ctx)
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
	running, err := h.d.Leases.Running(ctx, l.Run.Holder, topology.SessionRef{Tenant: l.Tenant, Session: l.ID})
	switch {
	case errors.Is(err, lease.ErrNoLease):
		return nil
	case err != nil:
		return bus.Later(fmt.Errorf("is %s still held? %w", l.Run.Execution, err), heldDelay)
	case running == l.Run.Execution:
		return bus.Later(fmt.Errorf("%s is held by %s", running, l.Run.Holder), heldDelay)
	}
	return nil
}

// slot waits a little for a free slot, so that many waiting jobs do not go round and round.
func (h *Holder) slot(ctx context.Context) (release func(), err error) {
	free := func() { <-h.slots }
	select {
	case h.slots <- struct{}{}:
		return free, nil
	default:
	}
	patience := time.NewTimer(slotPatience)
	defer patience.Stop()
	select {
	case h.slots <- struct{}{}:
		return free, nil
	case <-patience.C:
		return nil, errFull
	case <-bus.Draining(ctx):
		return nil, errHandover
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
