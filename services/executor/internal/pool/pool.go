// Package pool keeps sandboxes ready in which the agent process has already been started.
package pool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/agents"
)

// startTimeout is the time limit for the start of an agent in the pool, and for the end of a sandbox.
const startTimeout = time.Minute

// Sandboxes creates and terminates sandboxes on this executor's engine.
type Sandboxes interface {
	Create(ctx context.Context, spec *sandbox.Spec, allow []string, routes *[]string) (sandbox.Sandbox, error)
	Terminate(ctx context.Context, id string, wipe bool) error
}

// RunnerDialer opens streams to the runners of sandboxes.
type RunnerDialer interface {
	Open(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, attach runner.Attach) (*agents.Agent, error)
}

// Config configures a Pool of warm sandboxes. Every field is required, but Sizes may be empty.
type Config struct {
	Executor  string         // id of this executor
	Provider  string         // name of the sandbox provider, for messages
	Engine    string         // engine of the sandboxes
	Sizes     map[string]int // sandboxes to keep ready, by architecture
	Every     time.Duration  // interval at which the pool is filled
	MaxAge    time.Duration  // age at which a sandbox in the pool is replaced; 0 is never
	Adoptable bool           // the provider can give a sandbox to a session
	Sandboxes Sandboxes
	Agents    RunnerDialer
	Query     func(architecture string) *runner.Query                  // returns the query with which the agent is started
	NewID     func() (string, error)                                   // returns the id of a new sandbox
	IsAlive   func(ctx context.Context, executor string) (bool, error) // reports whether an executor has a lease
	Now       func() time.Time
	Logger    *slog.Logger
}

// A Pool keeps warm sandboxes that belong to no session yet, by architecture. They have the default image and their agents the
// default flags, so a session that needs others cannot use them. It is safe for concurrent use.
type Pool struct {
	cfg   Config
	taken chan struct{} // signalled when the pool has room

	mu    sync.Mutex
	ready map[string][]pooledSandbox
	ids   map[string]bool // ids of the pool's sandboxes, including those that are being created or handed over
}

// A pooledSandbox is a sandbox in the pool whose agent process was started.
type pooledSandbox struct {
	agent   *agents.Agent
	created time.Time
}

// New returns an empty Pool.
func New(cfg Config) *Pool {
	return &Pool{cfg: cfg, taken: make(chan struct{}, 1), ready: map[string][]pooledSandbox{}, ids: map[string]bool{}}
}

// TargetSize returns the configured number of sandboxes in the pool for an architecture.
func (p *Pool) TargetSize(architecture string) int { return p.cfg.Sizes[architecture] }

// ReadyCount returns the number of sandboxes of an architecture that are ready now.
func (p *Pool) ReadyCount(architecture string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ready[architecture])
}

// Run keeps the pool filled until ctx ends, and then terminates the remaining sandboxes.
func (p *Pool) Run(ctx context.Context) {
	defer p.terminateAll(context.WithoutCancel(ctx))
	if len(p.cfg.Sizes) == 0 {
		<-ctx.Done()
		return
	}
	if !p.cfg.Adoptable {
		p.cfg.Logger.Warn("sandboxes of this provider cannot be pooled: the pool stays empty", "provider", p.cfg.Provider)
		<-ctx.Done()
		return
	}
	tick := time.NewTicker(p.cfg.Every)
	defer tick.Stop()
	for {
		for architecture, size := range p.cfg.Sizes {
			if err := p.fillUp(ctx, architecture, size); err != nil && ctx.Err() == nil {
				p.cfg.Logger.Warn("the pool could not be filled, trying again", "architecture", architecture, "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.taken:
		}
	}
}

// fillUp creates the missing sandboxes of an architecture, one after the other, because the sandboxes of sessions have priority.
func (p *Pool) fillUp(ctx context.Context, architecture string, size int) error {
	if p.cfg.MaxAge > 0 {
		for _, a := range p.takeExpired(architecture, p.cfg.Now().Add(-p.cfg.MaxAge)) {
			p.DiscardSandbox(ctx, a)
		}
	}
	for ctx.Err() == nil {
		if p.ReadyCount(architecture) >= size {
			return nil
		}
		began := p.cfg.Now()
		a, err := p.createWarm(ctx, architecture)
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.ready[architecture] = append(p.ready[architecture], pooledSandbox{a, began})
		p.mu.Unlock()
	}
	return ctx.Err()
}

// takeExpired removes the sandboxes that were created before the time before from the pool, and returns their agents.
func (p *Pool) takeExpired(architecture string, before time.Time) (old []*agents.Agent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready[architecture] = slices.DeleteFunc(p.ready[architecture], func(e pooledSandbox) bool {
		expired := e.created.Before(before)
		if expired {
			old = append(old, e.agent)
		}
		return expired
	})
	return old
}

// createWarm creates a sandbox and starts its agent.
func (p *Pool) createWarm(ctx context.Context, architecture string) (*agents.Agent, error) {
	id, err := p.newID()
	if err != nil {
		return nil, err
	}
	a, err := p.startAgent(ctx, id, architecture)
	if err == nil {
		return a, nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
	defer cancel()
	err = errors.Join(err, p.cfg.Sandboxes.Terminate(undo, id, true))
	p.ForgetSandbox(id)
	return nil, err
}

// newID returns an id for a new sandbox of the pool. The caller must call ForgetSandbox when the sandbox was terminated or belongs to a
// session.
func (p *Pool) newID() (string, error) {
	id, err := p.cfg.NewID()
	if err != nil {
		return "", err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ids[id] = true
	return id, nil
}

// startAgent starts the agent in a new sandbox.
func (p *Pool) startAgent(ctx context.Context, id, architecture string) (*agents.Agent, error) {
	spec := sandbox.Spec{ID: id, Labels: p.pooledLabels()}
	box, err := p.cfg.Sandboxes.Create(ctx, &spec, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("create a sandbox for the pool: %w", err)
	}
	a, err := p.cfg.Agents.Open(ctx, box, topology.SessionRef{}, runner.Attach{})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if _, err = a.Link.Call(ctx, runner.Command{Op: runner.OpWarm, Query: p.cfg.Query(architecture)}); err != nil {
		a.Link.Close()
		return nil, fmt.Errorf("start an agent of %s for the pool: %w", architecture, err)
	}
	return a, nil
}

// pooledLabels returns the labels of a sandbox that belongs to no session.
func (p *Pool) pooledLabels() sandbox.Labels {
	return sandbox.Labels{Engine: p.cfg.Engine, Executor: p.cfg.Executor}
}

// TakeSandbox removes a sandbox of an architecture from the pool and returns its agent, or nil if the pool has none. It terminates
// sandboxes whose agent is not alive. The caller must call ForgetSandbox when the sandbox belongs to a session, or DiscardSandbox to
// terminate it.
func (p *Pool) TakeSandbox(ctx context.Context, architecture string) *agents.Agent {
	a, dead := p.takeAlive(architecture)
	for _, d := range dead {
		p.DiscardSandbox(ctx, d)
	}
	return a
}

// takeAlive removes the first living agent of an architecture from the pool and returns it, and the dead agents that it removed
// before it.
func (p *Pool) takeAlive(architecture string) (a *agents.Agent, dead []*agents.Agent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.ready[architecture]
	for len(list) > 0 && a == nil {
		if next := list[0].agent; next.IsAlive() {
			a = next
		} else {
			dead = append(dead, next)
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

// ForgetSandbox removes a sandbox from the ids that the pool owns, which SweepSandbox does not terminate.
func (p *Pool) ForgetSandbox(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.ids, id)
}

// DiscardSandbox terminates a sandbox that was taken from the pool, and closes the stream to its agent.
func (p *Pool) DiscardSandbox(ctx context.Context, a *agents.Agent) {
	a.Link.Close()
	if err := p.cfg.Sandboxes.Terminate(ctx, a.Sandbox, true); err != nil {
		p.cfg.Logger.Warn("a pooled sandbox could not be ended; the sweep will try again", "sandbox", a.Sandbox, "error", err)
	}
	p.ForgetSandbox(a.Sandbox)
}

// terminateAll terminates the sandboxes that remain in the pool.
func (p *Pool) terminateAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	p.mu.Lock()
	var all []pooledSandbox
	for architecture, list := range p.ready {
		all = append(all, list...)
		delete(p.ready, architecture)
	}
	p.mu.Unlock()
	for _, e := range all {
		p.DiscardSandbox(ctx, e.agent)
	}
}

// SweepSandbox terminates a sandbox that belongs to no session, if the executor that created it is gone or does not own it any more.
func (p *Pool) SweepSandbox(ctx context.Context, info sandbox.Info) error {
	if info.Labels.Executor == p.cfg.Executor {
		if p.isListed(info.ID) {
			return nil
		}
	} else if alive, err := p.cfg.IsAlive(ctx, info.Labels.Executor); err != nil || alive {
		return err
	}
	p.cfg.Logger.Info("sweep: a pooled sandbox has no executor", "sandbox", info.ID)
	return p.cfg.Sandboxes.Terminate(ctx, info.ID, true)
}

// isListed reports whether the pool owns the sandbox id.
func (p *Pool) isListed(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ids[id]
}

// RunInBuildSandbox creates a sandbox for building a dependency layer, calls work, and terminates the sandbox. The sandbox may
// reach the hosts in allow and the given routes of the egress proxy. If this executor dies, SweepSandbox of another executor
// terminates the sandbox.
func (p *Pool) RunInBuildSandbox(ctx context.Context, spec sandbox.Spec, allow []string, routes *[]string, work func(context.Context, sandbox.Sandbox) error) (err error) {
	if spec.ID, err = p.newID(); err != nil {
		return err
	}
	spec.Labels = p.pooledLabels()
	defer p.ForgetSandbox(spec.ID)
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
		defer cancel()
		if terr := p.cfg.Sandboxes.Terminate(undo, spec.ID, true); terr != nil {
			// A process in it may still write to the layer.
			err = errors.Join(err, fmt.Errorf("end the sandbox of an installation: %w", terr))
		}
		err = redactToken(err, spec.EgressToken)
	}()
	box, err := p.cfg.Sandboxes.Create(ctx, &spec, allow, routes)
	if err != nil {
		return err
	}
	return work(ctx, box)
}

// redactToken replaces a sandbox's egress token in an error by stars, because a script in the sandbox may have printed the token.
func redactToken(err error, token string) error {
	var typed *sandbox.Error
	if token == "" || !errors.As(err, &typed) || !strings.Contains(typed.Message, token) {
		return err
	}
	return &sandbox.Error{Code: typed.Code, Message: strings.ReplaceAll(typed.Message, token, "***")}
}
