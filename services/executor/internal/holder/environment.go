package holder

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/link"
)

// Egress is the way out of sandboxes without a network.
type Egress interface {
	// Register lets a sandbox out under a policy; a later one replaces the former,
	// an empty token keeps it. ErrUnknownSandbox and link.ErrFenced are its special errors.
	Register(ctx context.Context, g Grant) error
	// Release shuts the way out; one that is unknown is no error.
	Release(ctx context.Context, sandbox string) error
	// Open is how many requests to models are under way.
	Open(ctx context.Context, sandbox string) (int, error)
	// Lines gives what the proxy journaled about a sandbox after a line.
	Lines(ctx context.Context, sandbox string, after run.Line) ([]EgressLine, error)
	// Ack lets the proxy forget lines that are in the log.
	Ack(ctx context.Context, sandbox string, upTo run.Line) error
}

// ErrUnknownSandbox is a sandbox whose token the proxy does not know, and that it was not told.
var ErrUnknownSandbox = errors.New("the egress proxy does not know the sandbox")

// Grant is what a sandbox may do at the egress proxy, and for whom.
type Grant struct {
	Sandbox   string
	Token     string
	Tenant    string
	Session   string
	Execution string
	Epoch     uint64
	Allow     []string
}

// EgressLine is a line of the proxy's journal.
type EgressLine struct {
	Execution string
	Time      time.Time
	Data      events.Payload // EgressDenied or ModelCalled
}

// errPaused is an execution that stands still: it keeps neither slot nor job.
var errPaused = errors.New("the execution is paused")

// unavailable tells whether an error is an engine that is away, or its egress proxy.
func unavailable(err error) bool {
	var typed *sandbox.Error
	return errors.As(err, &typed) && (typed.Code == sandbox.CodeEngineUnavailable || typed.Code == sandbox.CodeEgressUnavailable)
}

// awayPause is the wait between two tries to reach what is away.
const awayPause = time.Second

// patiently tries again while the engine or its proxy is away, for as long as engines are waited for.
func (h *Holder) patiently(ctx context.Context, sandbox string, try func() error) error {
	began := time.Now()
	for {
		err := try()
		if err == nil || !unavailable(err) || time.Since(began) > h.cfg.EngineGone {
			return err
		}
		h.d.Logger.Warn("the engine or its egress proxy is away, trying again", "sandbox", sandbox, "error", err)
		select {
		case <-time.After(awayPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// hopeless tells whether trying again will not help, and the code of why.
func hopeless(err error) (code string, final bool) {
	var typed *sandbox.Error
	switch {
	case errors.As(err, &typed):
		return typed.Code, !unavailable(err)
	case errors.Is(err, sandbox.ErrNotFound):
		return "SNAPSHOT_FAILED", true
	}
	return "", false
}

// grant registers the sandbox of the turn at the egress proxy.
func (t *turn) grant(ctx context.Context) error {
	if t.h.d.Egress == nil {
		return nil
	}
	err := t.h.patiently(ctx, t.agent.sandbox, func() error {
		return t.h.d.Egress.Register(ctx, Grant{
			Sandbox: t.agent.sandbox, Tenant: t.l.Tenant, Session: t.l.ID, Execution: t.execution, Epoch: t.epoch, Allow: t.l.Life.Options.Egress,
		})
	})
	switch {
	case unavailable(err):
		return &sandboxError{id: t.agent.sandbox, err: err, stays: true}
	case errors.Is(err, ErrUnknownSandbox):
		return fmt.Errorf("%w: %w", errLost, err)
	case errors.Is(err, link.ErrFenced):
		return fmt.Errorf("%w: %w", run.ErrFenced, err)
	case err != nil:
		return fmt.Errorf("register %s at the egress proxy: %w", t.agent.sandbox, err)
	}
	return nil
}

// prepare fills a new workspace from the last snapshot, and puts in what file changes say.
func (t *turn) prepare(ctx context.Context) error {
	sb := t.l.Run.Sandbox
	restore := sb.Empty && t.l.Run.Snapshot.ID != ""
	if t.h.d.Workspaces == nil || !restore && len(t.l.Life.After(t.l.Run.Applied)) == 0 {
		return nil
	}
	box, err := t.h.d.Sandbox.Attach(ctx, sb.ID)
	if err != nil {
		return fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	if restore {
		ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
		defer cancel()
		began := t.h.d.Now()
		files, err := t.h.d.Workspaces.Restore(ctx, box, t.ref(), t.l.Run.Snapshot.ID)
		if err != nil {
			return t.broken(ctx, sb.ID, fmt.Errorf("restore snapshot %s: %w", t.l.Run.Snapshot.ID, err))
		}
		if err := t.say(ctx, events.WorkspaceRestored{
			SandboxID: sb.ID, Snapshot: t.l.Run.Snapshot.ID, Files: files,
			DurationMs: uint32(t.h.d.Now().Sub(began).Milliseconds()), //nolint:gosec // bounded by snapshotWithin
		}); err != nil {
			return err
		}
	}
	done, err := t.h.apply(ctx, t.l, box)
	if err != nil || done == nil {
		return err
	}
	return t.say(ctx, *done)
}

// retire replaces a sandbox that is too old, between two turns.
func (t *turn) retire(ctx context.Context) error {
	sb, limit := t.l.Run.Sandbox, t.l.Life.Options.SandboxMaxAgeMs
	old := limit > 0 && !sb.ReadyAt.IsZero() && t.h.d.Now().Sub(sb.ReadyAt) > time.Duration(limit)*time.Millisecond
	if !old || t.l.Run.Attempt > 0 || sb.Engine != t.h.cfg.Engine {
		return nil
	}
	synced, err := t.h.last(ctx, t.l, syncMaxAge)
	if err != nil {
		return err
	}
	var facts []events.Payload
	if synced != nil {
		facts = append(facts, *synced)
	}
	if err := t.say(ctx, append(facts, events.SandboxTerminated{SandboxID: sb.ID, Reason: syncMaxAge, Kept: synced == nil})...); err != nil {
		return err
	}
	t.h.shutdown(ctx, t.l.ID, t.epoch)
	if err := t.h.terminate(ctx, sb.ID, synced != nil && !t.h.keeps()); err != nil {
		t.log.Error("a sandbox was retired but could not be ended; the sweep will try again", "sandbox", sb.ID, "error", err)
	}
	return nil
}

// resume lets an execution that stood still go on.
func (t *turn) resume(ctx context.Context) error {
	if t.l.Run.Phase == run.Paused {
		sb := t.l.Run.Sandbox
		var facts []events.Payload
		if sb.Paused && sb.Engine == t.h.cfg.Engine {
			err := t.h.unpause(ctx, sb.ID)
			if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
				return err
			}
			facts = append(facts, events.SandboxResumed{SandboxID: sb.ID})
		}
		stood := max(0, t.h.d.Now().Sub(t.l.Run.PausedAt).Milliseconds())
		if err := t.say(ctx, append(facts, events.ExecutionResumed{PausedMs: uint32(stood)})...); err != nil { //nolint:gosec // no pause lasts 49 days: sessions end before
			return err
		}
	}
	t.paused = time.Duration(t.l.Run.PausedMs) * time.Millisecond //nolint:gosec // as above
	return nil
}

func (h *Holder) unpause(ctx context.Context, id string) error {
	p, ok := h.d.Sandbox.(sandbox.Pauser)
	if !ok {
		return nil
	}
	if err := p.Resume(ctx, id); err != nil {
		return fmt.Errorf("resume sandbox %s: %w", id, err)
	}
	return nil
}

// pause makes the execution stand still, if that is wanted and no request to a
// model is open, which would time out meanwhile.
func (f *follower) pause(ctx context.Context) error {
	if !f.life.PausedNow(f.execution) || f.ended != nil || f.asked && !f.accepted {
		return nil
	}
	p, ok := f.h.d.Sandbox.(sandbox.Pauser)
	if !ok {
		if f.aside.complained {
			return nil
		}
		f.aside.complained = true
		return f.note(ctx, events.Error{Code: "PAUSE_UNSUPPORTED", Message: "sandboxes of provider " + f.h.cfg.Provider + " cannot be paused; the execution goes on"})
	}
	id := f.l.Run.Sandbox.ID
	if f.h.d.Egress != nil {
		n, err := f.h.d.Egress.Open(ctx, id)
		if err != nil || n > 0 {
			return nil // looked at again soon
		}
	}
	if err := f.settle(ctx); err != nil {
		return err
	}
	f.drop()
	if err := p.Pause(ctx, id); err != nil {
		return fmt.Errorf("pause sandbox %s: %w", id, err)
	}
	if err := f.say(ctx, events.SandboxPaused{SandboxID: id}, events.ExecutionPaused{}); err != nil {
		return err
	}
	return errPaused
}

// note records facts in the middle of a turn.
func (f *follower) note(ctx context.Context, facts ...events.Payload) error {
	if err := f.settle(ctx); err != nil {
		return err
	}
	return f.say(ctx, facts...)
}

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
		for {
			select {
			case <-b.poke:
				// Most often it is word of the turn's own last events, late.
				if h.wanted(work, t) {
					return
				}
			case <-bus.Draining(ctx):
				return
			case <-over:
				return
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
func (h *Holder) wanted(ctx context.Context, t *turn) bool {
	l, err := h.d.Sessions.Load(ctx, t.l.Tenant, t.l.ID, eventlog.Leader)
	if err != nil {
		return false // the round after the snapshot asks again
	}
	switch l.Due() {
	case run.Execute, run.Refuse, run.Release:
		return true
	}
	return false
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

// aside is what is looked after beside a turn: file changes, snapshots, the
// sandbox's health, and what the egress proxy tells. One round at a time runs beside the loop.
type aside struct {
	done chan round

	running    bool
	syncedAt   time.Time
	healthAt   time.Time
	callsAt    time.Time
	complained bool
}

// round is what one look found.
type round struct {
	facts  []events.Payload
	calls  []EgressLine
	synced bool
	err    error
}

func newAside(now time.Time) aside {
	return aside{done: make(chan round, 1), syncedAt: now, healthAt: now}
}

// begin starts a round when something of it is due.
func (a *aside) begin(f *follower) {
	if a.running || f.appending || f.ended != nil {
		return
	}
	now, h := f.h.d.Now(), f.h
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
	lnk := f.agent.link
	f.waiting.Go(func() {
		r := round{synced: sync}
		if calls {
			r.calls, r.err = h.d.Egress.Lines(f.base, l.Run.Sandbox.ID, l.Run.Egress)
		}
		if health && r.err == nil {
			r.facts = append(r.facts, h.health(f.base, l.Run.Sandbox, lnk, f.epoch)...)
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
	if r.err != nil && ctx.Err() == nil {
		f.log.Warn("the workspace, or the egress proxy's journal, could not be looked after; tried again soon", "error", r.err)
	}
	list := append(f.facts(r.facts), f.h.callEvents(f.execution, r.calls)...)
	if len(list) == 0 {
		return nil
	}
	if err := f.settle(ctx); err != nil {
		return err
	}
	if err := f.record(ctx, list); err != nil {
		return err
	}
	if len(r.calls) > 0 {
		f.h.acknowledge(ctx, f.l.Run)
	}
	return nil
}

// acknowledge lets the proxy forget what the log holds; it is told again later if this fails.
func (h *Holder) acknowledge(ctx context.Context, r run.State) {
	if h.d.Egress == nil || r.Egress.Journal == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	if err := h.d.Egress.Ack(ctx, r.Sandbox.ID, r.Egress); err != nil {
		h.d.Logger.Debug("the egress proxy's journal could not be acknowledged", "sandbox", r.Sandbox.ID, "error", err)
	}
}

// late gives what the proxy told after the last turn, before the sandbox is given up.
func (h *Holder) late(ctx context.Context, r run.State) []events.Event {
	if h.d.Egress == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	lines, err := h.d.Egress.Lines(ctx, r.Sandbox.ID, r.Egress)
	if err != nil {
		h.d.Logger.Warn("what the egress proxy told last of a sandbox is lost", "sandbox", r.Sandbox.ID, "error", err)
	}
	return h.callEvents("", lines)
}

// store puts file changes in and takes a snapshot, if wanted.
func (h *Holder) store(ctx context.Context, l eventlog.Loaded, sync bool) ([]events.Payload, error) {
	box, err := h.d.Sandbox.Attach(ctx, l.Run.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	var facts []events.Payload
	done, err := h.apply(ctx, l, box)
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
	s, err := h.snapshot(ctx, l, box, syncInterval)
	if err != nil {
		return facts, err
	}
	return append(facts, s), nil
}

// calls asks the egress proxy once more at the end of a turn, so that what the
// turn took is in the log before its end.
func (f *follower) calls(ctx context.Context) []events.Event {
	if f.h.d.Egress == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	lines, err := f.h.d.Egress.Lines(ctx, f.l.Run.Sandbox.ID, f.l.Run.Egress)
	if err != nil {
		f.log.Warn("the egress proxy's journal could not be read at the end of the turn; the next turn will", "error", err)
	}
	d, err := run.Decide(f.l.Run, run.Record{Epoch: f.epoch, Events: f.h.callEvents(f.execution, lines)})
	if err != nil {
		return nil // fenced: the end says so too
	}
	return d.Events
}

// callEvents are the proxy's lines as events, with ids that are the same whoever reads them.
func (h *Holder) callEvents(execution string, lines []EgressLine) []events.Event {
	var out []events.Event
	for _, l := range lines {
		e := events.Event{Time: l.Time.UTC(), Source: events.FromServer, ConversationID: events.MainConversation, Data: l.Data}
		if l.Execution == execution {
			e.ExecutionID = execution
		}
		switch d := l.Data.(type) {
		case events.EgressDenied:
			e.ID = events.Derive(events.KindEvent, d.Journal, fmt.Sprint(d.Line))
		case events.ModelCalled:
			e.ID = events.Derive(events.KindEvent, d.Journal, fmt.Sprint(d.Line))
		default:
			continue
		}
		out = append(out, e)
	}
	return out
}

// asker sends a command to a runner and waits for its reply.
type asker interface {
	Call(ctx context.Context, c runner.Command) (runner.Reply, error)
}

// health asks after a sandbox, and gives an event if that is news.
func (h *Holder) health(ctx context.Context, sb run.Sandbox, link asker, epoch uint64) []events.Payload {
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	news := events.SandboxHealth{SandboxID: sb.ID, Status: events.Healthy}
	r, err := link.Call(ctx, runner.Command{Op: runner.OpStatus, Epoch: epoch})
	if err != nil {
		news.Status, news.Reason = events.Unhealthy, err.Error()
	} else if r.Status != nil {
		news.MemoryBytes, news.DiskBytes = r.Status.MemoryBytes, r.Status.DiskBytes
	}
	if (news.Status == events.Unhealthy) == sb.Unhealthy {
		return nil
	}
	return []events.Payload{news}
}
