// Package worker runs the turns of sessions, each from its claim to its end. A turn claims an execution (claim.go), makes the session's
// sandbox ready and opens a stream to its runner (attach.go), copies the runner's journal to the log while it obeys controls and limits
// (follow.go), and stores the terminal event (end.go). After an attempt that died it may begin again (retry.go).
//
// What is not specific to one step is in the packages next to this one, which New connects. None of them imports this package:
//
//   - jobs and admission decide when a turn runs, handling and permits what runs at once;
//   - runlog holds the state of a claimed execution and appends to its log, commits stores the journal in the background, openblocks
//     completes blocks at an end;
//   - references resolves what the execution refers to, provision makes its sandbox ready from sandboxes, agents, pool and contents;
//   - metering charges the execution to its budgets, stopping and retries decide how it is stopped and repeated;
//   - maintenance works on the sandbox during a turn, idle between two turns.
package worker

import (
	"context"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/admission"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/controls"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/jobs"
	"github.com/spoolhq/spool/services/executor/internal/maintenance"
	"github.com/spoolhq/spool/services/executor/internal/metering"
	"github.com/spoolhq/spool/services/executor/internal/metrics"
	"github.com/spoolhq/spool/services/executor/internal/openblocks"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/pool"
	"github.com/spoolhq/spool/services/executor/internal/provision"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// Config configures a Worker. Every field is required except Rate, SandboxLife and Registries.
type Config struct {
	Executor string // xtr_…
	Provider string // name of the sandbox provider
	Engine   string // the engine on which this executor creates sandboxes

	Slots           int           // maximum number of concurrent executions
	Reserved        int           // number of further executions, for tenants that run none here
	TenantSlots     int           // maximum number of concurrent executions of a tenant without a limit of its own, over all executors; 0 is no limit
	TenantSandboxes int           // maximum number of sandboxes of a tenant without a limit of its own; 0 is no limit
	WarmMemory      uint64        // memory of all agents in bytes above which resting agents are ended
	Window          time.Duration // minimum time from a stored commit to the next one
	Beat            time.Duration // interval at which controls and limits are read
	KillAfter       time.Duration // time from the interrupt of a turn to its kill, and from the kill to the end of the sandbox
	MaxAttempts     uint32        // maximum number of starts of one execution
	EngineGone      time.Duration // time without a lease after which the sandboxes of an engine are given up

	Output        events.OutputSize // maximum output of an agent in one execution
	SessionOutput events.OutputSize // maximum output of agents in all executions of a session
	Pace          runner.OutputRate // maximum rate of an agent's output

	Pool      map[string]int // sandboxes kept ready, by architecture
	PoolEvery time.Duration  // interval at which the pool is filled

	Rate        run.SandboxRate // price of sandboxes; zero if they have none
	SandboxLife time.Duration   // age at which the provider ends a sandbox; 0 is never

	Registries provision.Registries // hosts that a sandbox may reach while dependencies are installed

	// Agent returns the model of an agent's process, and the settings by which the process reaches the model.
	Agent func(architecture string, o events.Options) AgentLaunch
}

// AgentLaunch describes how an agent's process is started: its command, its model, and the settings by which the process reaches the model.
type AgentLaunch struct {
	Model   string            // the session's, unless it names none
	Env     map[string]string // of the process
	Command []string          // of architecture acp: the session's, with the arguments of its model settings
	Set     bool              // model settings name the model in Env or Command; see runner.Query.ModelSet
}

// Leases returns which executors are alive and what they do, according to their leases and answers.
type Leases interface {
	admission.Leases
	idle.Leases
	// Lives reports whether an executor has a lease.
	HasLease(ctx context.Context, executor string) (bool, error)
}

// DeltaStream publishes the text in flight of blocks, and reads it again.
type DeltaStream interface {
	openblocks.DeltaReader
	// Publish sends a delta without waiting. A lost delta is no loss: the complete block has the text.
	Publish(tenant, session string, d events.Delta) error
	// Position returns a sequence of DELTAS that precedes all later deltas; 0 if none is known.
	Position() uint64
}

// Deps are the dependencies of a Worker. Metrics, Workspaces, Egress, Skills, Secrets, Budgets and Room may be nil.
type Deps struct {
	Metrics    prometheus.Registerer // nil: no metrics
	Workspaces contents.Store        // nil: no snapshots and no file changes
	Egress     metering.EgressClient // nil: sandboxes have the network of their provider
	Skills     references.Skills     // nil: executions with skills fail
	Secrets    references.Secrets    // nil: executions with secrets fail
	Budgets    admission.Budgets     // nil: no tenant has a budget
	Room       *storage.Watch        // nil: the store of NATS is never full
	Waits      admission.WaitRecorder

	Sessions eventlog.Sessions
	Sandbox  sandbox.Provider
	Leases   Leases
	Deltas   DeltaStream
	Jobs     message.Publisher // of jobs that are for another engine; deduplicates by message id
	Logger   *slog.Logger
	Now      func() time.Time
}

// A Worker runs executions. It is safe for concurrent use.
type Worker struct {
	cfg     Config
	deps    Deps
	metrics *metrics.Metrics

	handling    *handling.SessionSet
	references  *references.Resolver
	sandboxes   *sandboxes.Manager
	proxy       *metering.Proxy
	contents    *contents.Manager
	runlog      *runlog.Writer
	controls    *controls.Watcher
	openBlocks  *openblocks.Reader
	dialer      *agents.Dialer
	agents      *agents.Registry
	pool        *pool.Pool
	idle        *idle.Keeper
	jobs        *jobs.Handler
	admission   *admission.Controller
	provisioner *provision.Provisioner
	maintenance maintenance.Config
	idlePermits *permits.Limiter // limits concurrent work on idle sandboxes, such as snapshots
}

// New returns a Worker.
func New(cfg Config, d Deps) *Worker {
	w := &Worker{
		metrics: metrics.New(), cfg: cfg, deps: d,
		handling: handling.NewSessionSet(), idlePermits: permits.New(max(2, cfg.Slots/2), 0, nil),
	}
	w.proxy = &metering.Proxy{Egress: d.Egress, Engine: cfg.Engine, Now: d.Now, Logger: d.Logger}
	w.sandboxes = &sandboxes.Manager{Provider: d.Sandbox, Patience: cfg.EngineGone, Logger: d.Logger, Created: w.metrics.CountCreation}
	if d.Egress != nil {
		w.sandboxes.Egress = w.proxy
	}
	w.runlog = &runlog.Writer{Sessions: d.Sessions, Executor: cfg.Executor, Rate: cfg.Rate, Now: d.Now, Stored: w.metrics.CountEnds}
	w.controls = controls.New(controls.Config{Log: d.Sessions.Log, Every: cfg.Beat, Logger: d.Logger})
	w.openBlocks = &openblocks.Reader{Sessions: d.Sessions, Deltas: d.Deltas, Now: d.Now, Logger: d.Logger}
	w.contents = &contents.Manager{Store: d.Workspaces, Sessions: d.Sessions, Now: d.Now, Measured: w.metrics.CountSnapshot}
	w.dialer = &agents.Dialer{Sandboxes: d.Sandbox, Provider: cfg.Provider, Engine: cfg.Engine, Patience: cfg.EngineGone, Logger: d.Logger}
	w.agents = agents.NewRegistry(cfg.WarmMemory, d.Now, d.Logger)
	_, adoptable := d.Sandbox.(sandbox.Adopter)
	w.pool = pool.New(pool.Config{
		Executor: cfg.Executor, Provider: cfg.Provider, Engine: cfg.Engine, Sizes: cfg.Pool, Every: cfg.PoolEvery, MaxAge: cfg.SandboxLife / 10, Adoptable: adoptable,
		Sandboxes: w.sandboxes, Agents: w.dialer, Query: w.warmQuery, NewID: func() (string, error) { return w.runlog.NewID(events.KindSandbox) },
		IsAlive: func(ctx context.Context, executor string) (bool, error) { return d.Leases.HasLease(ctx, executor) }, Now: d.Now, Logger: d.Logger,
	})
	_, containers := d.Sandbox.(sandbox.ServerHost)
	w.references = &references.Resolver{Log: d.Sessions.Log, Provider: cfg.Provider, Containers: containers, Skills: d.Skills, Secrets: d.Secrets, Logger: d.Logger}
	w.idle = idle.New(idle.Config{
		Executor: cfg.Executor, ProviderName: cfg.Provider, Engine: cfg.Engine, Abandoned: cfg.EngineGone, SandboxLife: cfg.SandboxLife, Beat: cfg.Beat,
		Provider: d.Sandbox, Store: d.Workspaces, Sessions: d.Sessions, Leases: d.Leases, Permits: w.idlePermits, Handling: w.handling, Runs: w.runlog, Contents: w.contents,
		Sandboxes: w.sandboxes, Dialer: w.dialer, Agents: w.agents, Pool: w.pool, EgressEvents: w.proxy.UnstoredEvents, Logger: d.Logger, Now: d.Now,
	})
	w.jobs = &jobs.Handler{
		Executor: cfg.Executor, Sessions: d.Sessions, Handling: w.handling, Runs: w.runlog, Turns: w, Idle: w.idle, Jobs: d.Jobs, Logger: d.Logger,
	}
	w.admission = admission.New(admission.Config{
		Executor: cfg.Executor, Provider: cfg.Provider, Engine: cfg.Engine, Slots: cfg.Slots, Reserved: cfg.Reserved, TenantSlots: cfg.TenantSlots, TenantSandboxes: cfg.TenantSandboxes,
		Sessions: d.Sessions, Leases: d.Leases, Budgets: d.Budgets, Room: d.Room, Idle: w.idle, Waits: d.Waits, Sandbox: d.Sandbox, Dialer: w.dialer, Logger: d.Logger, Now: d.Now,
	})
	w.maintenance = maintenance.Config{Beat: cfg.Beat, Sandbox: d.Sandbox, Contents: w.contents, Proxy: w.proxy, Now: d.Now}
	w.provisioner = provision.New(provision.Config{
		ProviderName: cfg.Provider, Engine: cfg.Engine, Beat: cfg.Beat, Registries: cfg.Registries, Proxied: d.Egress != nil, MaxSandboxes: w.admission.MaxSandboxes,
		Provider: d.Sandbox, Sandboxes: w.sandboxes, Dialer: w.dialer, Agents: w.agents, Pool: w.pool, Idle: w.idle, Contents: w.contents, OpenBlocks: w.openBlocks, Waits: d.Waits, NewWait: w.admission.NewSandboxWait,
		NewID: func() (string, error) { return w.runlog.NewID(events.KindSandbox) }, Pooled: w.metrics.CountPooled, Now: d.Now,
	})
	if d.Metrics != nil {
		w.metrics.Register(d.Metrics, metrics.Sources{Slots: cfg.Slots, Executions: w.handling.CountExecutions, Agents: w.agents.CountAgents, Pool: cfg.Pool, Ready: w.pool.ReadyCount})
	}
	return w
}

// warmQuery returns the query with which the runner of a sandbox in the warm pool starts its agent process.
func (w *Worker) warmQuery(architecture string) *runner.Query {
	launch := w.cfg.Agent(architecture, events.Options{})
	return &runner.Query{Architecture: architecture, Model: launch.Model, Env: launch.Env}
}

// Handle does the work that is due for the session that a job names. It is a handler of package bus: an error makes the bus deliver the job
// again.
func (w *Worker) Handle(ctx context.Context, msg *message.Message) error {
	return w.jobs.Handle(ctx, msg)
}

// RunningByTenant returns the number of executions that this executor runs, by tenant.
func (w *Worker) RunningByTenant() map[string]int { return w.admission.RunningByTenant() }

// WakeTurn makes the turn of the session id read the session's new events at once. It does nothing if the turn does not run in this
// executor.
func (w *Worker) WakeTurn(id string) { w.handling.WakeHandler(id) }

// Answer returns what this executor does for the session id, as the answer to another executor that has work for the session. If this
// executor works on the session's idle sandbox, it checks whether it has to stop that work.
func (w *Worker) Answer(id string) topology.CtlResponse { return w.handling.Answer(id) }

// WatchControls looks for new controls of running executions in the log until ctx ends, because hints about controls may be lost.
func (w *Worker) WatchControls(ctx context.Context) { w.controls.Run(ctx) }

// RunAgents maintains the resting agents until ctx ends.
func (w *Worker) RunAgents(ctx context.Context, every time.Duration) {
	w.agents.Run(ctx, every, w.idle)
}

// Close closes the streams to resting agents. The agents continue to run, so that the next executor can use them.
func (w *Worker) Close() { w.agents.Close() }

// RunPool keeps the warm pool filled until ctx ends, and then terminates the remaining sandboxes in it.
func (w *Worker) RunPool(ctx context.Context) { w.pool.Run(ctx) }

// RunSweeps calls the sweep of sandboxes and workspaces at once, and then at an interval until ctx ends.
func (w *Worker) RunSweeps(ctx context.Context, every time.Duration) { w.idle.Run(ctx, every) }

// StopSandboxes takes a snapshot of every sandbox of the engine and ends the sandbox. Close must be called first.
func (w *Worker) StopSandboxes(ctx context.Context) error { return w.idle.StopSandboxes(ctx) }
