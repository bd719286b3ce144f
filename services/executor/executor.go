// Package executor is the service that runs agents: it takes jobs, claims
// executions, creates their sandboxes, copies the runners' journals to the log
// and keeps agents warm between turns. Any number of executors may run; when one
// stops or crashes, another one continues its work.
package executor

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/frames"
	"github.com/spoolhq/spool/services/executor/internal/lease"
	"github.com/spoolhq/spool/services/executor/internal/metering"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/skills"
	"github.com/spoolhq/spool/services/executor/internal/waits"
	"github.com/spoolhq/spool/services/executor/internal/worker"
	"github.com/spoolhq/spool/services/executor/internal/workspaces"
)

// Deps are the dependencies of an Executor.
type Deps struct {
	NATS     *nats.Conn // the connection that Log uses too
	Log      eventlog.Log
	Provider sandbox.Provider // nil: the provider that Config.Sandbox names. Another one has workspaces and an egress proxy only if Workspaces and Egress are set
	Logger   *slog.Logger
	Now      func() time.Time // nil for Clock
	Clock    *bus.Clock       // clock of the streams; nil for one based on this host's clock

	Metrics prometheus.Registerer // nil: no metrics

	Workspaces contents.Store        // used with Provider; nil: none
	Egress     metering.EgressClient // used with Provider; nil: none
	Skills     references.Skills     // used with Provider; nil: none
	Secrets    references.Secrets    // nil: the keys of Config
}

// An Executor is one instance of the executor service.
type Executor struct {
	cfg     Config
	id      string
	deps    Deps
	js      jetstream.JetStream
	leases  *lease.Keeper
	budgets *budget.Watch
	room    *storage.Watch
	waits   *waits.Recorder
	frames  *frames.Publisher
	worker  *worker.Worker
	store   *workspaces.Store // nil if Deps has one
	egress  egressClient      // the zero value if Deps has one, or if there is no egress proxy
	own     sandbox.Provider  // closed at the end; nil if Deps has one
	jobs    *jobReceiver

	publisher *bus.Publisher // of dead letters, and of jobs for another engine
	ready     chan struct{}

	skills  *skills.Installer // nil if Deps has them
	secrets *secretOpener     // nil if there is no key
}

// New returns an Executor. It creates the data folder if it needs one, and sends nothing to NATS or to the engine.
func New(cfg Config, deps Deps) (*Executor, error) {
	e, err := newExecutor(cfg, deps)
	if err != nil {
		return nil, fmt.Errorf("executor: %w", err)
	}
	return e, nil
}

// newExecutor returns an Executor as New does. New adds a prefix to its errors.
func newExecutor(cfg Config, deps Deps) (*Executor, error) {
	if deps.NATS == nil || deps.Log == nil || deps.Logger == nil {
		return nil, errors.New("NATS, Log and Logger are required")
	}
	js, err := jetstream.New(deps.NATS)
	if err != nil {
		return nil, err
	}
	if deps.Clock == nil {
		deps.Clock = bus.NewClock(bus.ClockConfig{JetStream: js, Stream: topology.StreamJobs, Logger: deps.Logger})
	}
	if deps.Now == nil {
		deps.Now = deps.Clock.Now
	}
	cfg, err = cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if deps.Provider == nil && cfg.Sandbox == ProviderLocal || cfg.Engine == "" {
		if cfg, err = cfg.withDataFolder(); err != nil {
			return nil, err
		}
	}
	if err := topology.CheckToken("engine", cfg.Engine); err != nil {
		return nil, err
	}
	e := &Executor{js: js, ready: make(chan struct{})}
	if deps.Provider == nil {
		e.store = workspaces.New(cfg.SnapshotVersion, deps.Logger)
		deps.Workspaces = e.store
		if cfg, err = cfg.withRunnerPath(); err != nil {
			return nil, err
		}
		if deps.Provider, err = cfg.newProvider(deps.Logger); err != nil {
			return nil, err
		}
		e.own = deps.Provider
		if e.egress, err = cfg.egressClient(e.own); err != nil {
			return nil, err
		}
		if p, ok := e.own.(skills.Provider); ok {
			e.skills = skills.New(p)
			deps.Skills = e.skills
		}
		if e.egress.api != nil {
			deps.Egress = e.egress
		}
	}
	pool, err := cfg.poolSizes()
	if err != nil {
		return nil, err
	}
	if e.secrets, err = cfg.newSecretOpener(); err != nil {
		return nil, err
	}
	if e.secrets != nil {
		deps.Secrets = e.secrets
	}
	id, err := events.NewID(events.KindExecutor, deps.Now(), rand.Reader)
	if err != nil {
		return nil, err
	}
	deps.Logger = deps.Logger.With("executor", id)
	e.cfg, e.id, e.deps = cfg, id, deps
	e.budgets = budget.NewWatch(e.js, deps.Logger)
	e.room = storage.NewWatch(storage.Config{JetStream: e.js, Reserve: cfg.StoreReserve, Logger: deps.Logger})
	e.waits = waits.New(waits.Config{Bucket: waiting.NewBucket(e.js), Now: deps.Now, Logger: deps.Logger})
	if e.store != nil {
		e.store.CheckRoom(e.room)
	}
	e.leases = lease.New(e.js, topology.Lease{Executor: id, Provider: cfg.Sandbox, Engine: cfg.Engine, Slots: cfg.Slots, Address: cfg.Address}, e.diskLimit, deps.Logger)
	if e.publisher, err = bus.NewPublisher(bus.PublisherConfig{JetStream: e.js, Deduplicate: true, Logger: deps.Logger}); err != nil {
		return nil, err
	}
	e.frames = frames.New(frames.Config{NATS: deps.NATS, Executor: id, Partitions: deps.Log.Partitioning(), Interval: textFrameInterval, Logger: deps.Logger})
	e.worker = worker.New(worker.Config{
		Executor: id, Provider: cfg.Sandbox, Engine: cfg.Engine, Slots: cfg.Slots, Reserved: max(cfg.Reserved, 0), TenantSlots: cfg.TenantSlots, TenantSandboxes: cfg.TenantSandboxes, WarmMemory: uint64(max(cfg.WarmMemory, 0)), //nolint:gosec // not negative
		Window: cfg.CommitWindow, Beat: cfg.Beat, KillAfter: cfg.KillAfter, MaxAttempts: uint32(cfg.MaxAttempts), //nolint:gosec // at most 100
		Output: cfg.outputLimits(), SessionOutput: cfg.sessionOutputLimits(), Pace: cfg.outputPace(),
		EngineGone: cfg.EngineGone, Agent: cfg.agentLaunch, Pool: pool, PoolEvery: cfg.PoolEvery, Registries: cfg.installRegistries(), Rate: cfg.sandboxRate(), SandboxLife: cfg.sandboxLife(),
	}, worker.Deps{
		Workspaces: deps.Workspaces, Egress: deps.Egress, Skills: deps.Skills, Secrets: deps.Secrets, Budgets: e.budgets, Room: e.room, Waits: e.waits, Metrics: deps.Metrics,
		Sessions: eventlog.Sessions{Log: deps.Log}, Sandbox: deps.Provider, Leases: e.leases,
		Jobs: e.publisher, Deltas: e.frames, Logger: deps.Logger, Now: deps.Now,
	})
	if deps.Metrics != nil && e.diskLimiter() != nil {
		registerDiskLimit(deps.Metrics, e.diskLimit)
	}
	e.leases.SetCounter(e.worker.RunningByTenant)
	if e.jobs, err = newJobReceiver(e); err != nil {
		return nil, err
	}
	return e, nil
}

// newEngineName returns a new random name for an engine.
func newEngineName() string { return strings.ToLower(rand.Text()[:16]) }

// ID returns the id of this executor, which is new with each New.
func (e *Executor) ID() string { return e.id }

// Ready returns a channel that is closed when the executor begins to receive jobs.
func (e *Executor) Ready() <-chan struct{} { return e.ready }

// WorkspacesDir returns the path of the folder that contains the workspaces of local sandboxes, one folder for each session.
func (e *Executor) WorkspacesDir() string { return filepath.Join(e.cfg.DataDir, "workspaces") }

// Run handles jobs until ctx ends, and then hands its running executions over: their agents continue to run, and another executor follows
// them. Sandboxes keep running, unless Config.StopSandboxes is set and no other executor of the engine is alive. Before it returns, Run
// deletes the executor's lease.
func (e *Executor) Run(ctx context.Context) error {
	if err := e.openDependencies(ctx); err != nil {
		return fmt.Errorf("executor: %w", err)
	}
	control, err := e.deps.NATS.Subscribe(topology.ExecutorCtlSubject(e.id), e.handleControl)
	if err != nil {
		return fmt.Errorf("executor: subscribe to %s: %w", topology.ExecutorCtlSubject(e.id), err)
	}
	files, err := e.serveLiveFiles()
	if err != nil {
		return fmt.Errorf("executor: %w", errors.Join(err, control.Unsubscribe()))
	}
	closeFrames, err := e.frames.Open()
	if err != nil {
		return fmt.Errorf("executor: %w", errors.Join(err, files.Close(), control.Unsubscribe()))
	}
	// The lease outlives the jobs: no executor may take over an execution while it is being handed over.
	leased, release := context.WithCancel(context.WithoutCancel(ctx))
	defer release()
	work, stop := context.WithCancel(ctx)
	defer stop()
	var keep, all errgroup.Group
	keep.Go(func() error {
		defer stop() // without a lease the executor may not run executions
		return e.leases.Run(leased)
	})
	all.Go(func() error { return e.deps.Clock.Run(work) })
	all.Go(func() error { return e.budgets.Run(work) })
	all.Go(func() error { return e.room.Run(work) })
	all.Go(func() error { e.waits.Run(work); return nil })
	all.Go(func() error { e.worker.WatchControls(work); return nil })
	all.Go(func() error { e.worker.RunAgents(work, e.cfg.WarmEvery); return nil })
	all.Go(func() error { e.worker.RunSweeps(work, e.cfg.SweepEvery); return nil })
	all.Go(func() error { e.worker.RunPool(work); return nil })
	all.Go(func() error { e.jobs.adoptEngines(work); return nil })
	all.Go(func() error {
		defer stop()
		return e.jobs.run(work, e.ready)
	})
	err = errors.Join(all.Wait(), files.Close())
	e.worker.Close()
	err = errors.Join(err, closeFrames())
	release()
	err = errors.Join(err, keep.Wait())
	if e.cfg.StopSandboxes {
		err = errors.Join(err, e.stopSandboxes(context.WithoutCancel(ctx)))
	}
	err = errors.Join(err, e.closeConnections())
	if uerr := control.Unsubscribe(); uerr != nil && !e.deps.NATS.IsClosed() {
		err = errors.Join(err, uerr)
	}
	if err != nil {
		return fmt.Errorf("executor: %w", err)
	}
	return nil
}

const (
	// openTimeout is the time limit of one attempt to open the executor's NATS buckets, and openRetryPause is the pause between two attempts.
	openTimeout    = 2 * time.Second
	openRetryPause = 200 * time.Millisecond
)

// openDependencies blocks until NATS and the executor's buckets are ready. Then it starts the egress proxy, makes the provider choose how
// to enforce disk limits, checks the settings of Modal and writes the executor's lease.
func (e *Executor) openDependencies(ctx context.Context) error {
	if err := e.deps.Clock.Start(ctx); err != nil {
		return err
	}
	if err := e.retryOpen(ctx, e.openBuckets); err != nil {
		return err
	}
	if err := e.egress.open(ctx, e.deps.Logger); err != nil {
		return err
	}
	if err := e.chooseDiskLimit(ctx); err != nil {
		return err
	}
	if err := e.verifyModal(ctx); err != nil {
		return err
	}
	return e.retryOpen(ctx, e.leases.Open)
}

// retryOpen calls open until it returns nil, because NATS may be down or its buckets may not exist yet. It returns an error when ctx ends
// or the connection to NATS is closed.
func (e *Executor) retryOpen(ctx context.Context, open func(context.Context) error) error {
	for logged := false; ; logged = true {
		try, cancel := context.WithTimeout(ctx, openTimeout)
		err := open(try)
		cancel()
		if err == nil || e.deps.NATS.IsClosed() {
			return err
		}
		if !logged {
			e.deps.Logger.Warn("waiting for NATS and its buckets", "reason", err)
		}
		if retry.Pause(ctx, openRetryPause) != nil {
			return errors.Join(ctx.Err(), err)
		}
	}
}

// openBuckets opens the NATS buckets with workspaces, skills and secrets.
func (e *Executor) openBuckets(ctx context.Context) error {
	if e.store != nil {
		if err := e.store.Open(ctx, e.js); err != nil {
			return err
		}
	}
	if e.skills != nil {
		if err := e.skills.Open(ctx, e.js); err != nil {
			return err
		}
	}
	return e.secrets.openBucket(ctx, e.js)
}

// closeConnections closes the connections to the engine and to the egress proxy.
func (e *Executor) closeConnections() error {
	e.egress.close()
	if c, ok := e.own.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// stopSandboxesTimeout is the time limit of stopSandboxes.
const stopSandboxesTimeout = time.Minute

// textFrameInterval is the minimum time between two published frames with text in flight of one partition.
const textFrameInterval = 10 * time.Millisecond

// stopSandboxes takes a snapshot of every sandbox on the engine and terminates the sandbox. It does nothing if another executor of the
// engine has a lease.
func (e *Executor) stopSandboxes(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopSandboxesTimeout)
	defer cancel()
	// This executor's lease is released already: of several that stop at once, the last one finds no other.
	if others, err := e.leases.HasOtherExecutor(ctx); err != nil || others {
		return err
	}
	if err := e.worker.StopSandboxes(ctx); err != nil {
		return fmt.Errorf("end the sandboxes of the engine: some may still run, until the next start or until their own time limit: %w", err)
	}
	return nil
}

// handleControl handles a message on the executor's subject topology.Ctl. Without a reply subject the message is a hint that a session has
// a new event. With a reply subject it asks what this executor does for a session.
func (e *Executor) handleControl(msg *nats.Msg) {
	ref, err := topology.DecodeSessionRef(msg.Data)
	if err != nil {
		e.deps.Logger.Warn("a message on ctl cannot be read", "error", err)
		return
	}
	if msg.Reply == "" {
		e.worker.WakeTurn(ref.Session)
		return
	}
	raw, err := json.Marshal(e.worker.Answer(ref.Session))
	if err == nil {
		err = msg.Respond(raw)
	}
	if err != nil {
		e.deps.Logger.Warn("a question on ctl cannot be answered", "error", err)
	}
}
