// Package session implements the service that owns the life of sessions. It carries out commands, publishes the jobs
// and sets the timers that the log makes due, dispatches the next message of a queue, and ends executions that no
// executor can end. It keeps its state only in NATS, so any number of copies may run.
package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/hostpath"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/lease"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/services/session/internal/command"
	"github.com/spoolhq/spool/services/session/internal/reactor"
	"github.com/spoolhq/spool/services/session/internal/signer"
	"github.com/spoolhq/spool/services/session/internal/usage"
)

// Config holds the settings of the session service. The zero value takes every default.
type Config struct {
	IdleTimeout    time.Duration `default:"15m" env:"SPOOL_IDLE_TIMEOUT" help:"How long a session may be idle before its sandbox is released, unless the session sets another time."`
	TurnLimit      time.Duration `default:"1h" env:"SPOOL_TURN_LIMIT" help:"How long one execution may take, unless the session sets another time."`
	SessionLimit   time.Duration `default:"24h" env:"SPOOL_SESSION_LIMIT" help:"How long a session lives, unless the session sets another time."`
	Providers      []string      `default:"local" env:"SPOOL_SANDBOX_PROVIDERS" help:"The sandbox providers that this installation offers, of local, docker and modal; the first is the default."`
	SyncInterval   time.Duration `default:"30s" env:"SPOOL_SYNC_INTERVAL" help:"Interval at which the workspace is stored while a turn runs, unless the session sets another one."`
	HealthInterval time.Duration `default:"30s" env:"SPOOL_HEALTH_INTERVAL" help:"Interval of the health checks of a sandbox, unless the session sets another one."`
	SandboxMaxAge  time.Duration `default:"24h" env:"SPOOL_SANDBOX_MAX_AGE" help:"Age at which a sandbox is replaced between two turns, unless the session sets another one."`
	CommandWorkers int           `default:"64" env:"SPOOL_COMMAND_WORKERS" help:"Number of commands that one copy carries out at once."`
	ReactorWorkers int           `default:"16" env:"SPOOL_REACTOR_WORKERS" help:"Number of commits of a shard that one copy handles at once."`
	HostPaths      []string      `name:"host-paths" default:"" env:"SPOOL_HOST_PATHS" help:"Folders of this machine in which, and below which, sessions with local sandboxes may work instead of a workspace of their own; / allows all. Empty or none allows no folder, except that empty allows all for spool up on loopback. Executors need the same value."`
	imagepolicy.ImageSettings
	storage.ReserveSettings
	lease.EngineTimeoutSettings

	MaxKeys int `default:"1000" env:"SPOOL_MAX_KEYS" help:"Largest number of API keys of a tenant, without revoked ones. Keys that expired more than a day ago are revoked to make room."`

	HeadsKey     string        `default:"" env:"SPOOL_HEADS_KEY" help:"Private key with which heads of the log are signed, 64 hexadecimal digits: an Ed25519 seed. Without it and without heads-key-file, heads are not signed."`
	HeadsKeyFile string        `default:"" env:"SPOOL_HEADS_KEY_FILE" help:"File that contains heads-key."`
	HeadsEvery   time.Duration `default:"1m" env:"SPOOL_HEADS_EVERY" help:"Interval at which the heads of changed subjects are signed. When an execution ends, the heads of its session are signed within seconds."`

	// Private lists folders of the installation itself. No session may work in them.
	Private []string `kong:"-"`

	images   imagepolicy.Policy // images that tenants may name
	headsKey heads.PrivateKey   // zero for none
}

// withDefaults returns the config with defaults for fields that are zero, or an error for the first setting that is
// invalid.
func (c Config) withDefaults() (Config, error) {
	settings.SetDefaults(&c)
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"idle-timeout", c.IdleTimeout}, {"turn-limit", c.TurnLimit}, {"session-limit", c.SessionLimit}, {"engine-gone", c.EngineGone}} {
		if d.value < time.Millisecond || d.value > command.MaxDuration {
			return c, fmt.Errorf("%s: %s is not between 1ms and %s", d.name, d.value, command.MaxDuration)
		}
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"sync-interval", c.SyncInterval}, {"health-interval", c.HealthInterval}, {"sandbox-max-age", c.SandboxMaxAge}} {
		if d.value < time.Second || d.value > 24*time.Hour {
			return c, fmt.Errorf("%s: %s is not between 1s and 24h", d.name, d.value)
		}
	}
	if c.HeadsEvery < time.Second || c.HeadsEvery > time.Hour {
		return c, fmt.Errorf("heads-every: %s is not between 1s and 1h", c.HeadsEvery)
	}
	var err error
	if c.headsKey, err = c.readHeadsKey(); err != nil {
		return c, err
	}
	if c.images, err = imagepolicy.Parse("sandbox-images", append([]string{c.SandboxImage}, c.SandboxImages...)); err != nil {
		return c, err
	}
	if err := storage.CheckReserve(c.StoreReserve); err != nil {
		return c, err
	}
	if c.HostPaths, err = hostpath.ParseRoots("host-paths", c.HostPaths); err != nil {
		return c, err
	}
	for _, p := range c.Providers {
		if p != "local" && p != "docker" && p != "modal" {
			return c, fmt.Errorf("providers: there is no sandbox provider %.64q; there are local, docker and modal", p)
		}
	}
	for _, n := range []struct {
		name  string
		value int
	}{{"command-workers", c.CommandWorkers}, {"reactor-workers", c.ReactorWorkers}} {
		if n.value < 1 || n.value > topology.ReactorMaxAckPending {
			return c, fmt.Errorf("%s: %d is not between 1 and %d", n.name, n.value, topology.ReactorMaxAckPending)
		}
	}
	if c.MaxKeys < 1 || c.MaxKeys > 10_000 {
		return c, fmt.Errorf("max-keys: %d is not between 1 and 10000", c.MaxKeys)
	}
	return c, nil
}

// Deps holds the dependencies of the session service. NATS, Log and Logger are required.
type Deps struct {
	NATS   *nats.Conn
	Log    eventlog.Log
	Logger *slog.Logger
	Now    func() time.Time // nil for Clock
	Clock  *bus.Clock       // of the streams; nil for one over this host's clock
	// Metrics registers the metrics of the service; nil if they are not collected.
	Metrics prometheus.Registerer
	Copy    string // the name of this replica in the actors of its commits; "" means eventlog.HostAndProcessID
}

// Service is one replica of the session service.
type Service struct {
	cfg     Config
	deps    Deps
	js      jetstream.JetStream
	router  *bus.Router
	leases  *lease.EngineWatcher
	budgets *budget.Watch
	room    *storage.Watch
	clock   *bus.Clock
	react   *reactor.Reactor
	usage   *usage.Aggregator
	signer  *signer.Signer // nil if no heads are signed
}

// New returns a replica of the session service. It sends nothing before Run.
func New(cfg Config, deps Deps) (*Service, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("session service: %w", err)
	}
	if deps.NATS == nil || deps.Log == nil || deps.Logger == nil {
		return nil, errors.New("session service: NATS, Log and Logger are required")
	}
	if deps.Copy == "" {
		if deps.Copy, err = eventlog.HostAndProcessID(); err != nil {
			return nil, fmt.Errorf("session service: %w", err)
		}
	}
	js, err := jetstream.New(deps.NATS)
	if err != nil {
		return nil, fmt.Errorf("session service: %w", err)
	}
	// Durations that are measured on this host alone use its clock.
	local := deps.Now
	if local == nil {
		local = time.Now
	}
	if deps.Clock == nil {
		deps.Clock = bus.NewClock(bus.ClockConfig{JetStream: js, Stream: topology.StreamCommands, Logger: deps.Logger})
	}
	if deps.Now == nil {
		deps.Now = deps.Clock.Now
	}
	counts := newMetrics(deps.Metrics)
	s := &Service{cfg: cfg, deps: deps, js: js, clock: deps.Clock}
	s.budgets = budget.NewWatch(js, deps.Logger)
	s.room = storage.NewWatch(storage.Config{JetStream: js, Reserve: cfg.StoreReserve, Logger: deps.Logger})
	s.usage = usage.New(usage.Config{Log: deps.Log, JetStream: js, Now: deps.Now, Logger: deps.Logger})
	if deps.Metrics != nil {
		deps.Metrics.MustRegister(s.room.Collectors()...)
		deps.Metrics.MustRegister(s.usage.Collectors()...)
	}
	s.leases = lease.NewWatcher(js, local, deps.Logger)
	if !cfg.headsKey.IsZero() {
		s.signer = signer.New(signer.Config{
			Key: cfg.headsKey, Log: deps.Log, JetStream: js, Now: deps.Now, Logger: deps.Logger, Every: cfg.HeadsEvery,
			Signed: counts.countSignedHeads, Failed: counts.unsigned.Inc,
		})
	}
	publisher, err := bus.NewPublisher(bus.PublisherConfig{JetStream: js, Deduplicate: true, Logger: deps.Logger})
	if err != nil {
		return nil, fmt.Errorf("session service: %w", err)
	}
	sessions := eventlog.Sessions{Log: deps.Log}
	s.react = reactor.New(reactor.Config{
		Sessions: sessions, JetStream: js, Publisher: publisher, Leases: s.leases, EngineGone: cfg.EngineGone, Budgets: s.budgets, Now: deps.Now, Logger: deps.Logger,
		Service: "session/" + deps.Copy, Reacted: counts.observeReactorLag, Published: counts.jobs.Inc, Ended: s.requestHeadsSigning,
		Forget: func(ctx context.Context, tenant, execution string) error {
			kv, err := secret.OpenBucket(ctx, js)
			if err != nil {
				return err
			}
			return secret.RemoveExecutionSecrets(ctx, kv, tenant, execution)
		},
	})
	if s.router, err = bus.NewRouter(bus.RouterConfig{DeadLetter: publisher, Clock: s.clock, Logger: deps.Logger}); err != nil {
		return nil, fmt.Errorf("session service: %w", err)
	}
	commands := command.New(command.Config{
		Sessions: sessions, Room: s.room, Budgets: s.budgets, NATS: deps.NATS, Now: deps.Now, Providers: cfg.Providers,
		LiveKeys: newAPIKeyChains(js, deps.Log).unrevokedKeys, MaxKeys: s.maxKeys,
		Images: cfg.images,
		Snapshots: func(ctx context.Context) (workspace.Store, error) {
			return natsstore.Open(ctx, js, topology.BucketWorkspaces)
		},
		HostPaths:   hostpath.Policy{Roots: cfg.HostPaths, Private: cfg.Private},
		IdleTimeout: cfg.IdleTimeout, TurnLimit: cfg.TurnLimit, SessionLimit: cfg.SessionLimit,
		SyncInterval: cfg.SyncInterval, HealthInterval: cfg.HealthInterval, SandboxMaxAge: cfg.SandboxMaxAge, Logger: deps.Logger, Service: "session/" + deps.Copy,
		Done: counts.observeCommand, Dead: &deadLetterStore{stream: bus.NewStreamHandle(js, topology.StreamDead), react: s.react},
	})
	if err := s.registerHandlers(commands); err != nil {
		return nil, fmt.Errorf("session service: %w", err)
	}
	return s, nil
}

// registerHandlers registers the handlers of commands, commits, timers and dead letters with the service's message
// router.
func (s *Service) registerHandlers(commands *command.Handler) error {
	add := func(name string, d topology.Durable, workers int, fn bus.HandlerFunc) error {
		cfg, topic, err := bus.ConfigForDurable(s.js, d)
		if err != nil {
			return err
		}
		cfg.Concurrency, cfg.NakDelay, cfg.Logger = workers, 200*time.Millisecond, s.deps.Logger
		sub, err := bus.NewSubscriber(cfg)
		if err != nil {
			return err
		}
		// Commits, timers and commands are redelivered without a limit, so that an outage of NATS does not lose one.
		return s.router.Handle(name, topic, sub, fn, bus.WithMaxDeliveries(-1))
	}
	if err := add("commands", topology.SessionCommandsConsumer(), s.cfg.CommandWorkers, commands.Handle); err != nil {
		return err
	}
	if err := add("timers", topology.TimersConsumer(), s.cfg.ReactorWorkers, s.react.HandleTimer); err != nil {
		return err
	}
	if err := add("dead-jobs", topology.DeadJobsConsumer(), s.cfg.ReactorWorkers, s.react.HandleDeadJob); err != nil {
		return err
	}
	for shard := range s.deps.Log.Shards() {
		if err := add(topology.ReactorDurable(shard), topology.ReactorConsumer(shard, s.deps.Log.Partitioning()), s.cfg.ReactorWorkers, s.react.HandleCommit); err != nil {
			return err
		}
	}
	return nil
}

// Ready returns a channel that is closed when the service has subscribed to all messages that it handles.
func (s *Service) Ready() <-chan struct{} { return s.router.Running() }

// Run runs the service until ctx ends, and blocks until the running handlers have returned.
func (s *Service) Run(ctx context.Context) error {
	if err := s.clock.Start(ctx); err != nil {
		return fmt.Errorf("session service: %w", err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.clock.Run(ctx) })
	g.Go(func() error { return s.leases.Run(ctx) })
	g.Go(func() error { return s.budgets.Run(ctx) })
	g.Go(func() error { return s.usage.Run(ctx) })
	g.Go(func() error { return s.room.Run(ctx) })
	if s.signer != nil {
		s.deps.Logger.Info("heads of the log are signed", "public-key", s.cfg.headsKey.Public().String())
		g.Go(func() error { return s.signer.Run(ctx) })
	}
	g.Go(func() error { return s.router.Run(ctx) })
	if err := g.Wait(); err != nil {
		return fmt.Errorf("session service: %w", err)
	}
	return nil
}
