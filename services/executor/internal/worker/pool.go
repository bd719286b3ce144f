package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
)

// warmWithin bounds the start of a pooled sandbox's agent.
const warmWithin = time.Minute

// pool holds sandboxes whose agent is started already, by architecture. Their
// image and their agents' flags are the defaults: what differs misses the pool.
type pool struct {
	taken chan struct{} // signalled when the pool has room

	mu    sync.Mutex
	ready map[string][]*agent
	ids   map[string]bool // of all that are this pool's, also while they are made or given away
}

func newPool() *pool {
	return &pool{taken: make(chan struct{}, 1), ready: map[string][]*agent{}, ids: map[string]bool{}}
}

func (p *pool) owns(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ids[id]
}

func (p *pool) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.ids, id)
}

// expire takes those out that were made before a time.
func (p *pool) expire(architecture string, before time.Time) (old []*agent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready[architecture] = slices.DeleteFunc(p.ready[architecture], func(a *agent) bool {
		expired := a.used.Before(before)
		if expired {
			old = append(old, a)
		}
		return expired
	})
	return old
}

// take gives one that lives; nil if there is none. The dead are given back to be ended.
func (p *pool) take(architecture string) (a *agent, dead []*agent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.ready[architecture]
	for len(list) > 0 && a == nil {
		if list[0].alive() {
			a = list[0]
		} else {
			dead = append(dead, list[0])
		}
		list = list[1:]
	}
	p.ready[architecture] = list
	select {
	case p.taken <- struct{}{}:
	default:
	}
	return a, dead
}

// Pool keeps the warm pool filled until ctx ends; then what is left of it is ended.
func (w *Worker) Pool(ctx context.Context) {
	defer w.drain(context.WithoutCancel(ctx))
	if len(w.cfg.Pool) == 0 {
		<-ctx.Done()
		return
	}
	if _, ok := w.d.Sandbox.(sandbox.Adopter); !ok {
		w.d.Logger.Warn("sandboxes of this provider cannot be pooled: the pool stays empty", "provider", w.cfg.Provider)
		<-ctx.Done()
		return
	}
	tick := time.NewTicker(w.cfg.PoolEvery)
	defer tick.Stop()
	for {
		for architecture, want := range w.cfg.Pool {
			if err := w.fill(ctx, architecture, want); err != nil && ctx.Err() == nil {
				w.d.Logger.Warn("the pool could not be filled, trying again", "architecture", architecture, "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-w.pool.taken:
		}
	}
}

// fill makes what is missing, one after the other: sessions come first.
func (w *Worker) fill(ctx context.Context, architecture string, want int) error {
	if w.cfg.SandboxLife > 0 { // a session is to have most of a sandbox's life
		for _, a := range w.pool.expire(architecture, w.d.Now().Add(-w.cfg.SandboxLife/10)) {
			w.discard(ctx, a)
		}
	}
	for ctx.Err() == nil {
		w.pool.mu.Lock()
		have := len(w.pool.ready[architecture])
		w.pool.mu.Unlock()
		if have >= want {
			return nil
		}
		a, err := w.stock(ctx, architecture)
		if err != nil {
			return err
		}
		w.pool.mu.Lock()
		w.pool.ready[architecture] = append(w.pool.ready[architecture], a)
		w.pool.mu.Unlock()
	}
	return ctx.Err()
}

// stock makes one sandbox with its agent started.
func (w *Worker) stock(ctx context.Context, architecture string) (*agent, error) {
	id, err := w.mint(events.KindSandbox)
	if err != nil {
		return nil, err
	}
	w.pool.mu.Lock()
	w.pool.ids[id] = true
	w.pool.mu.Unlock()
	began := w.d.Now()
	a, err := w.brew(ctx, id, architecture)
	if err == nil {
		a.used = began
		return a, nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), warmWithin)
	defer cancel()
	err = errors.Join(err, w.sandboxes.Terminate(undo, id, true))
	w.pool.forget(id)
	return nil, err
}

func (w *Worker) brew(ctx context.Context, id, architecture string) (*agent, error) {
	spec := sandbox.Spec{ID: id, Labels: sandbox.Labels{Engine: w.cfg.Engine, Executor: w.cfg.Executor}}
	box, err := w.sandboxes.Create(ctx, &spec, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("make a sandbox for the pool: %w", err)
	}
	a, err := w.open(ctx, box, topology.SessionRef{}, runner.Attach{})
	if err != nil {
		return nil, err
	}
	launch := w.cfg.Agent(architecture, events.Options{})
	ctx, cancel := context.WithTimeout(ctx, warmWithin)
	defer cancel()
	_, err = a.link.Call(ctx, runner.Command{Op: runner.OpWarm, Query: &runner.Query{
		Architecture: architecture, Model: launch.Model, Env: launch.Env, Policy: runner.PolicyWorkspace,
	}})
	if err != nil {
		a.link.Close()
		return nil, fmt.Errorf("start an agent of %s for the pool: %w", architecture, err)
	}
	return a, nil
}

// pooled takes a sandbox from the pool for the session; nil if none fits.
func (t *turn) pooled(ctx context.Context) (*agent, error) {
	h, o := t.w, t.l.Life.Options
	adopter, ok := h.d.Sandbox.(sandbox.Adopter)
	if !ok || h.cfg.Pool[t.l.Life.Architecture] == 0 || o.Image != "" || len(t.resolved.Containers()) > 0 || len(o.Command) > 0 || t.l.Run.Lost.Workspace != "" {
		return nil, nil
	}
	began := h.d.Now()
	a, dead := h.pool.take(t.l.Life.Architecture)
	for _, d := range dead {
		h.discard(ctx, d)
	}
	if a == nil {
		return nil, nil
	}
	defer h.pool.forget(a.sandbox)
	a.ref, a.epoch = t.ref(), t.epoch
	labels := sandbox.Labels{Tenant: t.l.Tenant, Session: t.l.ID, Engine: h.cfg.Engine, Epoch: t.epoch}
	if err := adopter.Adopt(ctx, a.sandbox, labels); err != nil {
		t.log.Warn("a pooled sandbox could not be taken, another is made", "sandbox", a.sandbox, "error", err)
		h.discard(ctx, a)
		return nil, nil
	}
	err := t.say(ctx, events.SandboxReady{
		SandboxID: a.sandbox, Provider: h.cfg.Provider, Engine: h.cfg.Engine, Journal: a.journal, Pooled: true, Empty: !h.sandboxes.KeepsWorkspaces(),
		DurationMs: uint32(h.d.Now().Sub(began).Milliseconds()), //nolint:gosec // it was made before
	})
	if err != nil {
		a.link.Close() // the sweep ends it: the log does not know it
		return nil, err
	}
	t.w.metrics.pooled()
	return a, t.refresh(ctx)
}

// discard ends a pooled sandbox.
func (w *Worker) discard(ctx context.Context, a *agent) {
	a.link.Close()
	if err := w.sandboxes.Terminate(ctx, a.sandbox, true); err != nil {
		w.d.Logger.Warn("a pooled sandbox could not be ended; the sweep will try again", "sandbox", a.sandbox, "error", err)
	}
	w.pool.forget(a.sandbox)
}

// drain ends what is left in the pool.
func (w *Worker) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, warmWithin)
	defer cancel()
	w.pool.mu.Lock()
	var all []*agent
	for architecture, list := range w.pool.ready {
		all = append(all, list...)
		delete(w.pool.ready, architecture)
	}
	w.pool.mu.Unlock()
	for _, a := range all {
		w.discard(ctx, a)
	}
}

// sweepPooled ends a pooled sandbox whose pool is gone.
func (w *Worker) sweepPooled(ctx context.Context, info sandbox.Info) error {
	if info.Labels.Executor == w.cfg.Executor {
		if w.pool.owns(info.ID) {
			return nil
		}
	} else if lives, err := w.d.Leases.Lives(ctx, info.Labels.Executor); err != nil || lives {
		return err
	}
	w.d.Logger.Info("sweep: a pooled sandbox is nobody's", "sandbox", info.ID)
	return w.sandboxes.Terminate(ctx, info.ID, true)
}
