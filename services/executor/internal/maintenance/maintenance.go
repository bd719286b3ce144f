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
	Contents *contents.Manager // without a Store there are no file changes and no snapshots
	Proxy    *metering.Proxy   // without Egress its journal is not read
	Now      func() time.Time
}

// A Maintainer does the periodic work of one turn, such as snapshots, health checks and reading the egress proxy's journal. It
// does the work in passes: at most one pass runs at a time, in its own goroutine. Only the turn's goroutine calls the Maintainer's
// methods.
type Maintainer struct {
	cfg   Config
	meter *metering.Meter
	done  chan PassResult
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
	return &Maintainer{cfg: cfg, meter: m, done: make(chan PassResult, 1), syncedAt: now, healthAt: now}
}

// A TurnState describes the running turn at the start of a pass of maintenance.
type TurnState struct {
	Session  *eventlog.SessionState // no append to its runs may be in flight
	Life     *session.State         // may be newer than that of Session
	Epoch    uint64
	Link     *link.Link
	Accepted bool // the runner has accepted the query
}

// A PassResult has the results of one pass of maintenance.
type PassResult struct {
	Facts []events.Payload       // to be stored
	Lines []metering.JournalLine // of the egress proxy's journal, to be stored
	Err   error                  // of the step that failed; a later pass tries it again

	registered *metering.RegistrationChange
}

// StartPass starts a pass if some of its work is due. Done receives the result.
func (m *Maintainer) StartPass(ctx context.Context, t TurnState) {
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
	update := m.meter.PendingChange(t.Session.Run.Sandbox.ID)
	registering := make(chan struct{})
	m.registering = registering
	m.all.Go(func() {
		var p PassResult
		if update != nil {
			if p.Err = m.meter.SendChange(ctx, update); p.Err == nil {
				p.registered = update
			}
		}
		close(registering)
		if calls && p.Err == nil {
			p.Lines, p.Err = m.cfg.Proxy.UnstoredLines(ctx, t.Session.Run)
		}
		if health && p.Err == nil {
			p.Facts = append(p.Facts, idle.HealthEvents(ctx, t.Session.Run.Sandbox, t.Link, t.Epoch)...)
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

// syncContents applies the requested file changes to the workspace, and takes a snapshot if snapshot is true. It updates l and
// returns the events that record both.
func (m *Maintainer) syncContents(ctx context.Context, l *eventlog.SessionState, snapshot bool) ([]events.Payload, error) {
	box, err := m.cfg.Sandbox.Attach(ctx, l.Run.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	var facts []events.Payload
	applied, err := m.cfg.Contents.ApplyFileChanges(ctx, l, box)
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
	s, err := m.cfg.Contents.TakeSnapshot(ctx, l, box, idle.SyncReasonInterval)
	if err != nil {
		return facts, err
	}
	return append(facts, s), nil
}

// Done returns a channel that receives the result of the running pass. The caller must pass the result to FinishPass.
func (m *Maintainer) Done() <-chan PassResult { return m.done }

// FinishPass must be called with the result that Done has received. Afterwards another pass may start.
func (m *Maintainer) FinishPass(p PassResult) {
	m.running = false
	if p.registered != nil {
		m.meter.SetRegistered(p.registered)
	}
}

// AwaitRegistration blocks while a pass registers the sandbox with the egress proxy. The timeout of that request limits the wait.
func (m *Maintainer) AwaitRegistration() {
	if m.registering != nil {
		<-m.registering
	}
}

// Close blocks until the running pass has ended. The caller must have cancelled the pass's context.
func (m *Maintainer) Close() { m.all.Wait() }
