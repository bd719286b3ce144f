package holder

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
)

// afterTurn takes the snapshot that ends a turn, unless the session has
// something new to do: then the next turn's end does.
func (h *Holder) afterTurn(ctx context.Context, t *turn, b *busy) error {
	if h.d.Workspaces == nil || t.l.Run.Sandbox.ID == "" || t.l.Run.Sandbox.Engine != h.cfg.Engine {
		return nil
	}
	work, cancel := context.WithCancel(ctx)
	defer cancel()
	over := make(chan struct{})
	defer close(over)
	go func() {
		defer cancel()
		var again <-chan time.Time
		for {
			select {
			case <-b.poke:
			case <-again:
			case <-bus.Draining(ctx):
				return
			case <-over:
				return
			}
			again = nil
			// Most often it is word of the turn's own last events, late.
			switch wanted, err := h.wanted(work, t); {
			case wanted:
				return
			case err != nil:
				again = time.After(h.cfg.Beat)
			}
		}
	}()
	facts, err := h.turnEnd(work, t)
	if err == nil {
		err = h.firstOf(ctx, t, facts)
	}
	if err != nil && ctx.Err() == nil && work.Err() == nil && !errors.Is(err, errAgain) {
		t.log.Warn("no snapshot at the end of the turn; the next one will", "sandbox", t.l.Run.Sandbox.ID, "error", err)
	}
	return nil
}

// wanted tells whether something waits for the end of a turn's snapshot.
func (h *Holder) wanted(ctx context.Context, t *turn) (bool, error) {
	l, err := h.d.Sessions.Load(ctx, t.l.Tenant, t.l.ID, eventlog.Leader)
	if err != nil {
		return false, err
	}
	switch l.Due() {
	case run.Execute, run.Refuse, run.Release:
		return true, nil
	}
	return false, nil
}

func (h *Holder) turnEnd(ctx context.Context, t *turn) ([]events.Payload, error) {
	box, err := h.d.Sandbox.Attach(ctx, t.l.Run.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	s, err := h.snapshot(ctx, t.l, box, syncTurn)
	return []events.Payload{s}, err
}

// firstOf records facts after a turn under the turn's own epoch.
func (h *Holder) firstOf(ctx context.Context, t *turn, facts []events.Payload) error {
	m := events.NewMint(h.meta())
	for _, f := range facts {
		m.Add("", f)
	}
	d, err := run.Decide(t.l.Run, run.Record{Epoch: t.epoch, Events: m.Events()})
	if err != nil {
		return err
	}
	return h.first(ctx, &t.l, d)
}
