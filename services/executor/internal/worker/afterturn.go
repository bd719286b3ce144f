package worker

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// afterTurn takes the snapshot that ends a turn, unless the session has
// something new to do: then the next turn's end does.
func (w *Worker) afterTurn(ctx context.Context, t *turn, b *handling.Session) error {
	if w.d.Workspaces == nil || t.l.Run.Sandbox.ID == "" || t.l.Run.Sandbox.Engine != w.cfg.Engine {
		return nil
	}
	work, stop := w.interruptible(ctx, t.ref(), b, delayedBySnapshot)
	defer stop()
	// The turn's own place among the deliveries is released already: nobody waits for this one.
	release, err := w.upkeep.AcquireBlocking(work, t.l.Tenant)
	if err != nil {
		return nil
	}
	defer release()
	facts, err := w.turnEnd(work, t)
	if err == nil {
		err = w.firstOf(ctx, t, facts)
	}
	if err != nil && ctx.Err() == nil && work.Err() == nil && !errors.Is(err, runlog.ErrChanged) {
		t.log.Warn("no snapshot at the end of the turn; the next one will", "sandbox", t.l.Run.Sandbox.ID, "error", err)
	}
	return nil
}

// interruptible returns a context for work on a sandbox in which nothing runs. It ends before ctx when this executor
// stops, and when the session has come into a state that must not wait for that work. The caller must call stop at the end of it.
func (w *Worker) interruptible(ctx context.Context, ref topology.SessionRef, b *handling.Session, wanted func(eventlog.Loaded) bool) (work context.Context, stop func()) {
	work, cancel := context.WithCancel(ctx)
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		defer cancel()
		var again <-chan time.Time
		for {
			select {
			case <-b.Changed():
			case <-again:
			case <-bus.Draining(ctx):
				return
			case <-over:
				return
			}
			again = nil
			// Most often it is word of the turn's own last events, late.
			switch l, err := w.d.Sessions.Load(work, ref.Tenant, ref.Session, eventlog.Leader); {
			case err != nil:
				again = time.After(w.cfg.Beat)
			case wanted(l):
				return
			}
		}
	}()
	return work, func() {
		close(over)
		cancel()
		<-ended
	}
}

// delayedBySnapshot reports whether something is due to a session that a snapshot must not delay.
func delayedBySnapshot(l eventlog.Loaded) bool {
	switch l.Due() {
	case run.Execute, run.Refuse, run.Release:
		return true
	}
	return false
}

// delayedByRelease reports whether something is due to a session that the snapshot before a release must not delay: a turn,
// or the end of the session, which wants no snapshot.
func delayedByRelease(l eventlog.Loaded) bool {
	switch l.Due() {
	case run.Execute, run.Refuse:
		return true
	case run.Release:
		return l.Life.Status == session.Deleted
	}
	return false
}

func (w *Worker) turnEnd(ctx context.Context, t *turn) ([]events.Payload, error) {
	box, err := w.d.Sandbox.Attach(ctx, t.l.Run.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	s, err := w.contents.Snapshot(ctx, t.l, box, syncTurn)
	return []events.Payload{s}, err
}

// firstOf records facts after a turn under the turn's own epoch.
func (w *Worker) firstOf(ctx context.Context, t *turn, facts []events.Payload) error {
	d, err := w.runlog.Decide(t.l.Run, run.Record{Epoch: t.epoch, Events: w.runlog.Events("", facts...)})
	if err != nil {
		return err
	}
	return w.runlog.Append(ctx, &t.l, d)
}
