// Package maintenance does the periodic work of a turn: it applies file changes, takes snapshots, checks the sandbox's health, and
// reads the egress proxy's journal.
package maintenance

import (
	"context"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/metering"
)

// Config configures a Maintainer. Every field is required.
type Config struct {
	Beat     time.Duration // interval at which the egress proxy's journal is read
	Sandbox  sandbox.Provider
	Contents *contents.Mover // without a Store there are no file changes and no snapshots
	Proxy    *metering.Proxy // without Egress its journal is not read
	Now      func() time.Time
}

// A Maintainer does the periodic work of one turn, such as snapshots, health checks and reading the egress proxy's
// journal. It works in passes: at most one runs at a time, in its own goroutine. Only the turn's goroutine calls its
// methods.
type Maintainer struct {
	cfg   Config
	meter *metering.Meter
	done  chan Pass
	all   sync.WaitGroup

	running     bool
	syncedAt    time.Time
	healthAt    time.Time
	egressAt    time.Time
	registering chan struct{} // closed when the last pass has registered the sandbox, or did not have to
}

// New returns the Maintainer of a turn that begins. The caller must call Close.
func New(cfg Config, m *metering.Meter) *Maintainer {
	now := cfg.Now()
	return &Maintainer{cfg: cfg, meter: m, done: make(chan Pass, 1), syncedAt: now, healthAt: now}
}

// A Turn describes the running turn of a sandbox's session for a pass, as of the start of the pass.
type Turn struct {
	Session  *eventlog.SessionState // no append to its runs may be in flight
	Life     *session.State         // may be newer than that of Session
	Epoch    uint64
	Link     *link.Link
	Accepted bool // the runner has accepted the query
}

// A Pass is the result of one pass of a Maintainer over a sandbox.
type Pass struct {
	Facts []events.Payload // to be stored
	Lines []metering.Line  // of the egress proxy's journal, to be stored
	Err   error            // of the step that failed; a later pass tries it again

	registered *metering.Change
}

// Start starts a pass if some of its work is due. Done receives the result.
func (m *Maintainer) Start(ctx context.Context, t Turn) {
	if m.running {
		return
	}
	now, o := m.cfg.Now(), t.Life.Options
	due := func(last time.Time, ms uint32) bool {
		return ms > 0 && now.Sub(last) >= time.Duration(ms)*time.Millisecond
	}
	stores := m.cfg.Contents.Store != nil
	sync := stores && t.Accepted && (due(m.syncedAt, o.SyncIntervalMs) || t.Life.Syncs > t.Session.Run.Synced)
	change := stores && len(t.Life.ChangesAfter(t.Session.Run.Applied)) > 0
	health := due(m.healthAt, o.HealthIntervalMs)
	calls := m.cfg.Proxy.Egress != nil && now.Sub(m.egressAt) >= m.cfg.Beat
	if !sync && !change && !health && !calls {
		return
	}
	m.running, m.egressAt = true, now
	if health {
		m.healthAt = now
	}
	if sync {
		m.syncedAt = now
	}
	update := m.meter.Changed(t.Session.Run.Sandbox.ID)
	registering := make(chan struct{})
	m.registering = registering
	m.all.Go(func() {
		var p Pass
		if update != nil {
			if p.Err = m.meter.Send(ctx, update); p.Err == nil {
				p.registered = update
			}
		}
		close(registering)
		if calls && p.Err == nil {
			p.Lines, p.Err = m.cfg.Proxy.Lines(ctx, t.Session.Run)
		}
		if health && p.Err == nil {
			p.Facts = append(p.Facts, idle.Health(ctx, t.Session.Run.Sandbox, t.Link, t.Epoch)...)
		}
		if (sync || change) && p.Err == nil {
			var facts []events.Payload
			l := *t.Session
			l.Life = *t.Life
			facts, p.Err = m.syncContents(ctx, &l, sync)
			p.Facts = append(p.Facts, facts...)
		}
		m.done <- p
	})
}

// syncContents applies file changes and takes a snapshot if wanted. It updates l and returns the events that record them.
func (m *Maintainer) syncContents(ctx context.Context, l *eventlog.SessionState, snapshot bool) ([]events.Payload, error) {
	box, err := m.cfg.Sandbox.Attach(ctx, l.Run.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	var facts []events.Payload
	applied, err := m.cfg.Contents.Apply(ctx, l, box)
	if err != nil {
		return nil, err
	}
	if applied != nil {
		facts = append(facts, *applied)
		l.Run.Applied = applied.N
	}
	if !snapshot {
		return facts, nil
	}
	s, err := m.cfg.Contents.Snapshot(ctx, l, box, idle.SyncInterval)
	if err != nil {
		return facts, err
	}
	return append(facts, s), nil
}

// Done receives the result of the pass that runs, which the caller must pass to Finish.
func (m *Maintainer) Done() <-chan Pass { return m.done }

// Finish must be called with the result that Done has received. After it, another pass may start.
func (m *Maintainer) Finish(p Pass) {
	m.running = false
	if p.registered != nil {
		m.meter.SetRegistered(p.registered)
	}
}

// AwaitRegistration blocks while a pass registers the sandbox at the egress proxy; the proxy's timeout bounds it.
func (m *Maintainer) AwaitRegistration() {
	if m.registering != nil {
		<-m.registering
	}
}

// Close blocks until the pass that runs has ended, whose context the caller must have cancelled.
func (m *Maintainer) Close() { m.all.Wait() }
