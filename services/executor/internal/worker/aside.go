package worker

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
	"github.com/spoolhq/spool/services/executor/internal/idle"
)

// aside is what is looked after beside a turn: file changes, snapshots, the
// sandbox's health, and what the egress proxy tells. One round at a time runs beside the loop.
type aside struct {
	done chan round

	running    bool
	syncedAt   time.Time
	healthAt   time.Time
	callsAt    time.Time
	complained bool
	granting   chan struct{} // closed when the last round has registered the sandbox, where it had to
}

// awaitGrant blocks while a round registers the sandbox at the egress proxy, which is bounded by the time that the proxy has to answer.
func (a *aside) awaitGrant() {
	if a.granting != nil {
		<-a.granting
	}
}

// round is what one look found.
type round struct {
	facts   []events.Payload
	calls   []EgressLine
	synced  bool
	granted *budgets.Limits // registered at the egress proxy; nil if there was no need
	err     error
}

func newAside(now time.Time) aside {
	return aside{done: make(chan round, 1), syncedAt: now, healthAt: now}
}

// begin starts a round when something of it is due.
func (a *aside) begin(f *follower) {
	if a.running || f.appending || f.ended != nil {
		return
	}
	now, h := f.w.d.Now(), f.w
	l := f.l // nobody appends
	l.Life = f.life
	due := func(last time.Time, ms uint32) bool {
		return ms > 0 && now.Sub(last) >= time.Duration(ms)*time.Millisecond
	}
	stores := h.d.Workspaces != nil
	sync := stores && f.accepted && (due(a.syncedAt, l.Life.Options.SyncIntervalMs) || l.Life.Syncs > l.Run.Synced)
	put := stores && len(l.Life.After(l.Run.Applied)) > 0
	health := due(a.healthAt, l.Life.Options.HealthIntervalMs)
	calls := h.d.Egress != nil && now.Sub(a.callsAt) >= h.cfg.Beat
	if !sync && !put && !health && !calls {
		return
	}
	a.running, a.callsAt = true, now
	if health {
		a.healthAt = now
	}
	if sync {
		a.syncedAt = now
	}
	lnk, grant, limits := f.agent.Link, f.changedGrant(), f.limits
	granting := make(chan struct{})
	a.granting = granting
	f.waiting.Go(func() {
		r := round{synced: sync}
		if grant != nil {
			if _, r.err = h.d.Egress.Register(f.base, *grant); r.err == nil {
				r.granted = &limits
			}
		}
		close(granting)
		if calls && r.err == nil {
			r.calls, r.err = h.d.Egress.Lines(f.base, l.Run.Sandbox.ID, l.Run.Egress, false)
		}
		if health && r.err == nil {
			r.facts = append(r.facts, idle.Health(f.base, l.Run.Sandbox, lnk, f.epoch)...)
		}
		if (sync || put) && r.err == nil {
			var facts []events.Payload
			facts, r.err = h.store(f.base, l, sync)
			r.facts = append(r.facts, facts...)
		}
		a.done <- r
	})
}

// take records what a round found.
func (a *aside) take(ctx context.Context, f *follower, r round) error {
	a.running = false
	if r.granted != nil {
		f.granted = *r.granted
	}
	if r.err != nil && ctx.Err() == nil {
		f.log.Warn("the workspace, or the egress proxy's journal, could not be looked after; tried again soon", "error", r.err)
	}
	list := append(f.facts(r.facts), f.w.callEvents(f.l.Run, f.execution, r.calls)...)
	if len(list) == 0 {
		return nil
	}
	if err := f.settle(ctx); err != nil {
		return err
	}
	f.checkBudgets(list)
	if err := f.record(ctx, list); err != nil {
		return err
	}
	if len(r.calls) > 0 {
		f.w.acknowledge(ctx, f.l.Run)
	}
	if f.forgotten(r.calls) {
		f.log.Warn("the egress proxy has forgotten the agent's MCP servers: it began anew; they are registered again")
		return f.grant(ctx)
	}
	return nil
}

// store puts file changes in and takes a snapshot, if wanted.
func (w *Worker) store(ctx context.Context, l eventlog.Loaded, sync bool) ([]events.Payload, error) {
	box, err := w.d.Sandbox.Attach(ctx, l.Run.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	var facts []events.Payload
	done, err := w.contents.Apply(ctx, l, box)
	if err != nil {
		return nil, err
	}
	if done != nil {
		facts = append(facts, *done)
		l.Run.Applied = done.N
	}
	if !sync {
		return facts, nil
	}
	s, err := w.contents.Snapshot(ctx, l, box, idle.SyncInterval)
	if err != nil {
		return facts, err
	}
	return append(facts, s), nil
}

// note records facts in the middle of a turn.
func (f *follower) note(ctx context.Context, facts ...events.Payload) error {
	if err := f.settle(ctx); err != nil {
		return err
	}
	return f.say(ctx, facts...)
}
