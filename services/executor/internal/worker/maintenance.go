package worker

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/metering"
)

// maintenance runs the periodic work of a turn: file changes, snapshots, health checks, and reading the egress proxy's journal. At most one pass
// runs at a time, in its own goroutine.
type maintenance struct {
	done chan pass

	running      bool
	syncedAt     time.Time
	healthAt     time.Time
	egressAt     time.Time
	pauseRefused bool
	registering  chan struct{} // closed when the last pass has registered the sandbox, or did not have to
}

// awaitRegistration blocks while a pass registers the sandbox at the egress proxy; the proxy's timeout bounds it.
func (a *maintenance) awaitRegistration() {
	if a.registering != nil {
		<-a.registering
	}
}

// A pass is the result of one pass.
type pass struct {
	facts      []events.Payload
	lines      []metering.Line
	synced     bool
	registered *metering.Change // that the egress proxy has now; nil if there was none
	err        error
}

func newMaintenance(now time.Time) maintenance {
	return maintenance{done: make(chan pass, 1), syncedAt: now, healthAt: now}
}

// start starts a pass if some of its work is due.
func (a *maintenance) start(f *follower) {
	if a.running || f.appending || f.ended != nil {
		return
	}
	now, h := f.w.deps.Now(), f.w
	l := f.Session // no append is running
	l.Life = f.life
	due := func(last time.Time, ms uint32) bool {
		return ms > 0 && now.Sub(last) >= time.Duration(ms)*time.Millisecond
	}
	stores := h.deps.Workspaces != nil
	sync := stores && f.accepted && (due(a.syncedAt, l.Life.Options.SyncIntervalMs) || l.Life.Syncs > l.Run.Synced)
	put := stores && len(l.Life.After(l.Run.Applied)) > 0
	health := due(a.healthAt, l.Life.Options.HealthIntervalMs)
	calls := h.deps.Egress != nil && now.Sub(a.egressAt) >= h.cfg.Beat
	if !sync && !put && !health && !calls {
		return
	}
	a.running, a.egressAt = true, now
	if health {
		a.healthAt = now
	}
	if sync {
		a.syncedAt = now
	}
	lnk, meter, change := f.agent.Link, f.meter, f.meter.Changed(f.agent.Sandbox)
	registering := make(chan struct{})
	a.registering = registering
	f.waiting.Go(func() {
		r := pass{synced: sync}
		if change != nil {
			if r.err = meter.Send(f.ctx, change); r.err == nil {
				r.registered = change
			}
		}
		close(registering)
		if calls && r.err == nil {
			r.lines, r.err = h.proxy.Lines(f.ctx, l.Run)
		}
		if health && r.err == nil {
			r.facts = append(r.facts, idle.Health(f.ctx, l.Run.Sandbox, lnk, f.Epoch)...)
		}
		if (sync || put) && r.err == nil {
			var facts []events.Payload
			facts, r.err = h.syncContents(f.ctx, l, sync)
			r.facts = append(r.facts, facts...)
		}
		a.done <- r
	})
}

// finish records the result of a pass.
func (a *maintenance) finish(ctx context.Context, f *follower, r pass) error {
	a.running = false
	if r.registered != nil {
		f.meter.SetRegistered(r.registered)
	}
	if r.err != nil && ctx.Err() == nil {
		f.Log.Warn("the maintenance of the workspace, or of the egress proxy's journal, failed; trying again", "error", r.err)
	}
	list := append(f.NewEvents(r.facts...), f.meter.Events(r.lines)...)
	if len(list) == 0 {
		return nil
	}
	if err := f.flush(ctx); err != nil {
		return err
	}
	_ = f.checkBudgets(list) // updateLife logs the error
	if err := f.Append(ctx, list); err != nil {
		return err
	}
	if len(r.lines) > 0 {
		f.w.proxy.Acknowledge(ctx, f.Session.Run)
	}
	if f.meter.Forgot(r.lines) {
		f.Log.Warn("the egress proxy has restarted without the agent's MCP servers: they are registered again")
		return f.w.sandboxes.Retry(ctx, f.agent.Sandbox, func() error { return f.meter.Register(ctx, f.agent.Sandbox) })
	}
	return nil
}

// syncContents applies file changes and takes a snapshot if wanted. It returns the events that record them.
func (w *Worker) syncContents(ctx context.Context, l eventlog.Loaded, sync bool) ([]events.Payload, error) {
	box, err := w.deps.Sandbox.Attach(ctx, l.Run.Sandbox.ID)
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

// flushFacts stores the pending events, and then facts about the execution.
func (f *follower) flushFacts(ctx context.Context, facts ...events.Payload) error {
	if err := f.flush(ctx); err != nil {
		return err
	}
	return f.AppendFacts(ctx, facts...)
}
