package worker

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// statusWithin bounds a question after an agent's memory.
const statusWithin = 2 * time.Second

// work notes an open stream as in use under an epoch.
func (w *Worker) work(a *agent, epoch uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a.resting, a.epoch = false, epoch
	w.agents[a.ref.Session] = a
}

// rest keeps the stream for the session's next turn. Until then the health of the
// sandbox is checked at the interval; 0 is never.
func (w *Worker) rest(a *agent, interval time.Duration) {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		a.link.Close()
		return
	}
	now := w.d.Now()
	a.resting, a.used, a.checked, a.checkEvery = true, now, now, interval
	w.agents[a.ref.Session] = a
	w.mu.Unlock()
}

// forget drops a stream that its owner closes.
func (w *Worker) forget(a *agent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.agents[a.ref.Session] == a {
		delete(w.agents, a.ref.Session)
	}
}

// wake takes the session's resting stream, nil if there is none.
func (w *Worker) wake(session string) *agent {
	w.mu.Lock()
	defer w.mu.Unlock()
	a := w.agents[session]
	if a == nil || !a.resting {
		return nil
	}
	delete(w.agents, session)
	return a
}

// shutdown ends the runner of a session over the stream that rests here, if one does.
func (w *Worker) shutdown(ctx context.Context, session string, epoch uint64) {
	a := w.wake(session)
	if a == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	if _, err := a.link.Call(ctx, runner.Command{Op: runner.OpShutdown, Epoch: epoch}); err != nil {
		w.d.Logger.Debug("the runner was not shut down over its stream", "session", session, "sandbox", a.sandbox, "error", err)
	}
	a.link.Close()
}

// Warm looks after the agents until ctx ends: streams that ended or have no
// agent behind them are closed, and when all agents together take more than the
// budget, those that rested longest are ended. Their sandboxes stay.
func (w *Worker) Warm(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.weigh(ctx)
		}
	}
}

func (w *Worker) weigh(ctx context.Context) {
	w.mu.Lock()
	var list []*agent
	for _, a := range w.agents {
		list = append(list, a)
	}
	w.mu.Unlock()
	for _, a := range list {
		w.measure(ctx, a)
	}
	w.checkResting(ctx)
	for _, a := range w.excess() {
		ctx, cancel := context.WithTimeout(ctx, statusWithin)
		if _, err := a.link.Call(ctx, runner.Command{Op: runner.OpKill, Epoch: w.epochOf(a)}); err != nil {
			w.d.Logger.Warn("a resting agent could not be ended", "session", a.ref.Session, "sandbox", a.sandbox, "error", err)
		}
		cancel()
		a.link.Close()
	}
}

// epochOf returns the epoch under which the stream was used last.
func (w *Worker) epochOf(a *agent) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return a.epoch
}

// checkResting asks after the sandboxes that rest here, each at its own interval:
// one that has gone meanwhile is said in the log, before anybody needs it.
func (w *Worker) checkResting(ctx context.Context) {
	now := w.d.Now()
	w.mu.Lock()
	var list []*agent
	for _, a := range w.agents {
		if a.resting && now.Sub(a.checked) >= a.checkEvery && a.checkEvery > 0 {
			a.checked = now
			list = append(list, a)
		}
	}
	w.mu.Unlock()
	for _, a := range list {
		if err := w.checkOne(ctx, a); err != nil && ctx.Err() == nil {
			w.d.Logger.Warn("the health of a sandbox could not be told", "session", a.ref.Session, "sandbox", a.sandbox, "error", err)
		}
	}
}

func (w *Worker) checkOne(ctx context.Context, a *agent) error {
	l, err := w.d.Sessions.Load(ctx, a.ref.Tenant, a.ref.Session, eventlog.Leader)
	if err != nil || l.Run.Sandbox.ID != a.sandbox || !l.Run.Over() {
		return err
	}
	news := w.health(ctx, l.Run.Sandbox, a.link, w.epochOf(a))
	if len(news) == 0 {
		return nil
	}
	if err := w.atRest(ctx, l, news...); err != nil && !errors.Is(err, errAgain) {
		return err
	}
	return nil
}

// measure asks for an agent's memory; a stream with nothing behind it is closed.
func (w *Worker) measure(ctx context.Context, a *agent) {
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	r, err := a.link.Call(ctx, runner.Command{Op: runner.OpStatus, Epoch: w.epochOf(a)})
	w.mu.Lock()
	if err == nil && r.Status != nil {
		a.memory = r.Status.MemoryBytes
	}
	empty := !a.alive() || err == nil && r.Status != nil && r.Status.AgentPID == 0 && r.Status.ExecutionID == ""
	drop := empty && a.resting && w.agents[a.ref.Session] == a
	if drop {
		delete(w.agents, a.ref.Session)
	}
	w.mu.Unlock()
	if !drop {
		return
	}
	if !a.alive() {
		if err := w.checkGone(ctx, a); err != nil && ctx.Err() == nil {
			w.d.Logger.Warn("whether a sandbox is gone could not be told", "session", a.ref.Session, "sandbox", a.sandbox, "error", err)
		}
	}
	a.link.Close()
}

// checkGone says in the log that a sandbox at rest has ended, if it has: its
// stream may also have ended because another executor has it now.
func (w *Worker) checkGone(ctx context.Context, a *agent) error {
	_, err := w.d.Sandbox.Attach(ctx, a.sandbox)
	if !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	for range maxRounds {
		l, err := w.d.Sessions.Load(ctx, a.ref.Tenant, a.ref.Session, eventlog.Leader)
		if err != nil || l.Run.Sandbox.ID != a.sandbox || !l.Run.Over() || l.Run.Sandbox.Unhealthy {
			return err
		}
		err = w.atRest(ctx, l, events.SandboxHealth{SandboxID: a.sandbox, Status: events.Unhealthy, Reason: "it has ended while it rested; the next message makes another, with the same workspace where that is left"})
		// Nobody looks at the stream again: a snapshot that was stored meanwhile must not be the reason why this is not said.
		if !errors.Is(err, errAgain) {
			return err
		}
	}
	return errAgain
}

// excess takes the agents out that have to end for the budget to hold, longest rested first.
func (w *Worker) excess() []*agent {
	w.mu.Lock()
	defer w.mu.Unlock()
	var sum uint64
	var resting []*agent
	for _, a := range w.agents {
		sum += a.memory
		if a.resting {
			resting = append(resting, a)
		}
	}
	slices.SortFunc(resting, func(a, b *agent) int { return a.used.Compare(b.used) })
	var out []*agent
	for _, a := range resting {
		if sum <= w.cfg.WarmMemory {
			break
		}
		sum -= min(sum, a.memory)
		delete(w.agents, a.ref.Session)
		out = append(out, a)
	}
	return out
}

// Close ends the streams to resting agents; the agents go on, for the next executor.
func (w *Worker) Close() {
	w.mu.Lock()
	w.closed = true
	var list []*agent
	for id, a := range w.agents {
		if a.resting {
			list = append(list, a)
			delete(w.agents, id)
		}
	}
	w.mu.Unlock()
	for _, a := range list {
		a.link.Close()
	}
}
