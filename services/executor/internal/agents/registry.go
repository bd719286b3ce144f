package agents

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
)

// HealthRecorder checks the sandboxes of resting agents, and records changes of their health in the log.
type HealthRecorder interface {
	// CheckHealth asks the runner for its status, and records a change of the sandbox's health.
	CheckHealth(ctx context.Context, a *Agent, epoch uint64) error
	// CheckGone records that the sandbox has ended if it has. The stream of the agent has ended, perhaps because another executor
	// has the agent now.
	CheckGone(ctx context.Context, a *Agent) error
}

// A Registry holds the agents that this executor has an open stream to: working agents, which execute a turn, and resting agents, which
// stay warm until the next turn of their session. It is safe for concurrent use.
type Registry struct {
	memory uint64 // bytes that all agents together may use before resting ones are ended
	now    func() time.Time
	logger *slog.Logger

	mu     sync.Mutex
	agents map[string]*Agent // by session
	closed bool
}

// NewRegistry returns an empty Registry. memory is the number of bytes of memory that all agents may use together.
func NewRegistry(memory uint64, now func() time.Time, logger *slog.Logger) *Registry {
	return &Registry{memory: memory, now: now, logger: logger, agents: map[string]*Agent{}}
}

// AddWorking adds an agent that works on a turn under an epoch.
func (r *Registry) AddWorking(a *Agent, epoch uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a.resting, a.epoch = false, epoch
	r.agents[a.Session.Session] = a
}

// AddResting adds an agent that rests until the next turn of its session. The health of its sandbox is checked at the interval
// checkEvery; 0 means never. After Close, AddResting closes the agent's stream instead.
func (r *Registry) AddResting(a *Agent, checkEvery time.Duration) {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		a.Link.Close()
		return
	}
	now := r.now()
	a.resting, a.used, a.checked, a.checkEvery = true, now, now, checkEvery
	r.agents[a.Session.Session] = a
	r.mu.Unlock()
}

// Remove removes an agent from the Registry. It does not close the agent's stream.
func (r *Registry) Remove(a *Agent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.agents[a.Session.Session] == a {
		delete(r.agents, a.Session.Session)
	}
}

// TakeResting removes the resting agent of a session from the Registry and returns it, or nil if the session has none.
func (r *Registry) TakeResting(session string) *Agent {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.agents[session]
	if a == nil || !a.resting {
		return nil
	}
	delete(r.agents, session)
	return a
}

// ShutdownRunner makes the runner of a session exit, by a command over the stream of the session's resting agent, and closes the stream. It
// does nothing if the session has no resting agent.
func (r *Registry) ShutdownRunner(ctx context.Context, session string, epoch uint64) {
	a := r.TakeResting(session)
	if a == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, StatusTimeout)
	defer cancel()
	if _, err := a.Link.Call(ctx, runner.Command{Op: runner.OpShutdown, Epoch: epoch}); err != nil {
		r.logger.Debug("the runner was not shut down over its stream", "session", session, "sandbox", a.Sandbox, "error", err)
	}
	a.Link.Close()
}

// CountAgents returns the number of resting agents, or of working agents if resting is false, and the bytes of memory that they used when
// they were last measured.
func (r *Registry) CountAgents(resting bool) (n int, bytes uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.agents {
		if a.resting == resting {
			n, bytes = n+1, bytes+a.memory
		}
	}
	return n, bytes
}

// Run maintains the agents until ctx ends: it measures their memory, closes streams that have ended or have no agent process behind
// them, checks the health of resting agents' sandboxes, and ends the agents that have rested for the longest while all agents
// together use too much memory. Their sandboxes stay.
func (r *Registry) Run(ctx context.Context, every time.Duration, health HealthRecorder) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.maintainAgents(ctx, health)
		}
	}
}

// maintainAgents does the work of Run once: it measures agents' memory, closes dead streams, checks health, and ends resting agents that
// use too much memory.
func (r *Registry) maintainAgents(ctx context.Context, health HealthRecorder) {
	for _, a := range r.listAgents(func(*Agent) bool { return true }) {
		r.measureMemory(ctx, a, health)
	}
	now := r.now()
	due := r.listAgents(func(a *Agent) bool {
		isDue := a.resting && now.Sub(a.checked) >= a.checkEvery && a.checkEvery > 0
		if isDue {
			a.checked = now
		}
		return isDue
	})
	for _, a := range due {
		if err := health.CheckHealth(ctx, a, r.epochOf(a)); err != nil && ctx.Err() == nil {
			r.logger.Warn("the health of a sandbox could not be checked", "session", a.Session.Session, "sandbox", a.Sandbox, "error", err)
		}
	}
	for _, a := range r.takeExcessAgents() {
		r.endAgent(ctx, a)
	}
}

// endAgent ends the process of a resting agent and closes the stream.
func (r *Registry) endAgent(ctx context.Context, a *Agent) {
	ctx, cancel := context.WithTimeout(ctx, StatusTimeout)
	defer cancel()
	if _, err := a.Link.Call(ctx, runner.Command{Op: runner.OpKill, Epoch: r.epochOf(a)}); err != nil {
		r.logger.Warn("a resting agent could not be ended", "session", a.Session.Session, "sandbox", a.Sandbox, "error", err)
	}
	a.Link.Close()
}

// listAgents returns the agents for which match returns true. It calls match with mu held.
func (r *Registry) listAgents(match func(*Agent) bool) []*Agent {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*Agent
	for _, a := range r.agents {
		if match(a) {
			out = append(out, a)
		}
	}
	return out
}

// epochOf returns the epoch under which an agent was used last.
func (r *Registry) epochOf(a *Agent) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return a.epoch
}

// measureMemory records how much memory an agent uses. If a resting agent has no process any more, measureMemory removes the agent and
// closes its stream.
func (r *Registry) measureMemory(ctx context.Context, a *Agent, health HealthRecorder) {
	ctx, cancel := context.WithTimeout(ctx, StatusTimeout)
	defer cancel()
	reply, err := a.Link.Call(ctx, runner.Command{Op: runner.OpStatus, Epoch: r.epochOf(a)})
	r.mu.Lock()
	if err == nil && reply.Status != nil {
		a.memory = reply.Status.MemoryBytes
	}
	empty := !a.IsAlive() || err == nil && reply.Status != nil && reply.Status.AgentPID == 0 && reply.Status.ExecutionID == ""
	remove := empty && a.resting && r.agents[a.Session.Session] == a
	if remove {
		delete(r.agents, a.Session.Session)
	}
	r.mu.Unlock()
	if !remove {
		return
	}
	if !a.IsAlive() {
		if err := health.CheckGone(ctx, a); err != nil && ctx.Err() == nil {
			r.logger.Warn("check whether a sandbox has ended", "session", a.Session.Session, "sandbox", a.Sandbox, "error", err)
		}
	}
	a.Link.Close()
}

// takeExcessAgents removes resting agents from the Registry, those that have rested for the longest first, until the remaining agents
// use no more memory than allowed. It returns the removed agents.
func (r *Registry) takeExcessAgents() []*Agent {
	r.mu.Lock()
	defer r.mu.Unlock()
	var sum uint64
	var resting []*Agent
	for _, a := range r.agents {
		sum += a.memory
		if a.resting {
			resting = append(resting, a)
		}
	}
	slices.SortFunc(resting, func(a, b *Agent) int { return a.used.Compare(b.used) })
	var out []*Agent
	for _, a := range resting {
		if sum <= r.memory {
			break
		}
		sum -= min(sum, a.memory)
		delete(r.agents, a.Session.Session)
		out = append(out, a)
	}
	return out
}

// Close closes the streams of all resting agents, and of agents that are added as resting later. The agents' processes continue to run,
// so that the next executor can use them.
func (r *Registry) Close() {
	r.mu.Lock()
	r.closed = true
	var list []*Agent
	for id, a := range r.agents {
		if a.resting {
			list = append(list, a)
			delete(r.agents, id)
		}
	}
	r.mu.Unlock()
	for _, a := range list {
		a.Link.Close()
	}
}
