// Package skills implements the service that owns skills. It checks each pushed ZIP, stores it once, under its
// SHA-256, and writes the versions and tags of each skill to the log. It keeps its state only in NATS, so any number
// of copies may run.
//
// A push is uploading while its ZIP is being stored in the bucket, ready when its event is in the log, and failed when
// it is answered with an error. A failed push leaves only its upload. The janitor removes uploads, also those without
// a push: services have no right to delete.
package skills

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/services/skills/internal/command"
)

const (
	// commandTimeout is the time limit of one command, within which the largest ZIP can be read, unpacked and stored.
	commandTimeout = 5 * time.Minute
	// bucketRetryPause is the pause before the service tries again to open the bucket skills, which may not exist yet.
	bucketRetryPause = 500 * time.Millisecond
)

// Config holds the settings of the skills service. The zero value takes every default.
type Config struct {
	Workers int    `default:"4" env:"SPOOL_SKILL_WORKERS" help:"Number of skills that one copy checks at once."`
	Scratch string `env:"SPOOL_SKILL_SCRATCH" help:"Folder that holds ZIPs while they are checked, up to 100 MiB each; empty means the system's folder for temporary files."`
}

// withDefaults returns the config with defaults for fields that are zero, or an error for the first setting that is invalid.
func (c Config) withDefaults() (Config, error) {
	settings.SetDefaults(&c)
	if c.Workers < 1 || c.Workers > topology.SkillsMaxAckPending {
		return c, fmt.Errorf("workers: %d is not between 1 and %d", c.Workers, topology.SkillsMaxAckPending)
	}
	if c.Scratch == "" {
		c.Scratch = os.TempDir()
	}
	if info, err := os.Stat(c.Scratch); err != nil || !info.IsDir() {
		return c, fmt.Errorf("scratch: %.200q is not a folder that can be used", c.Scratch)
	}
	return c, nil
}

// Deps holds the dependencies of the skills service. NATS, Log and Logger are required.
type Deps struct {
	NATS   *nats.Conn
	Log    eventlog.Log
	Logger *slog.Logger
	Now    func() time.Time // nil for the clock
	// Metrics registers the metrics of the service; nil if they are not collected.
	Metrics prometheus.Registerer
}

// Service is one copy of the skills service.
type Service struct {
	cfg     Config
	deps    Deps
	js      jetstream.JetStream
	clock   *bus.Clock
	router  *bus.Router
	handler *command.Handler
}

// New returns a copy of the service. It sends nothing before Run.
func New(cfg Config, deps Deps) (*Service, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("skills service: %w", err)
	}
	if deps.NATS == nil || deps.Log == nil || deps.Logger == nil {
		return nil, errors.New("skills service: NATS, Log and Logger are required")
	}
	js, err := jetstream.New(deps.NATS)
	if err != nil {
		return nil, fmt.Errorf("skills service: %w", err)
	}
	clock := bus.NewClock(bus.ClockConfig{JetStream: js, Stream: topology.StreamCommands, Logger: deps.Logger})
	if deps.Now == nil {
		deps.Now = clock.Now
	}
	s := &Service{cfg: cfg, deps: deps, js: js, clock: clock}
	own, err := eventlog.HostAndProcessID()
	if err != nil {
		return nil, fmt.Errorf("skills service: %w", err)
	}
	if err := s.addHandler("skills/"+own, newMetrics(deps.Metrics)); err != nil {
		return nil, fmt.Errorf("skills service: %w", err)
	}
	return s, nil
}

// addHandler creates the service's message router and registers its one handler, that of commands. name is the writer
// that the log names.
func (s *Service) addHandler(name string, counts *metrics) error {
	publisher, err := bus.NewPublisher(bus.PublisherConfig{JetStream: s.js, Deduplicate: true, Logger: s.deps.Logger})
	if err != nil {
		return err
	}
	if s.router, err = bus.NewRouter(bus.RouterConfig{DeadLetter: publisher, Clock: s.clock, Logger: s.deps.Logger}); err != nil {
		return err
	}
	cfg, topic, err := bus.ConfigForDurable(s.js, topology.SkillsCommandsConsumer())
	if err != nil {
		return err
	}
	cfg.Concurrency, cfg.NakDelay, cfg.Logger = s.cfg.Workers, 200*time.Millisecond, s.deps.Logger
	sub, err := bus.NewSubscriber(cfg)
	if err != nil {
		return err
	}
	s.handler = command.New(command.Config{
		Entries: eventlog.Catalogue{Log: s.deps.Log}, NATS: s.deps.NATS, Now: s.deps.Now, Logger: s.deps.Logger,
		Service: name, Scratch: s.cfg.Scratch, Done: counts.observeCommand, Kept: counts.kept.Inc,
	})
	// A command is redelivered without a limit, so that an outage of NATS does not lose it; its deadline ends it.
	return s.router.Handle("commands", topic, sub, s.handler.Handle, bus.WithTimeout(commandTimeout), bus.WithMaxDeliveries(-1))
}

// Ready returns a channel that is closed when the service handles commands.
func (s *Service) Ready() <-chan struct{} { return s.router.Running() }

// Run runs the service until ctx ends, and blocks until the running handlers have returned.
func (s *Service) Run(ctx context.Context) error {
	store, err := s.awaitBucket(ctx)
	if err != nil {
		return err
	}
	if store == nil {
		return nil // ctx has ended
	}
	s.handler.SetStore(store)
	if err := s.clock.Start(ctx); err != nil {
		return fmt.Errorf("skills service: %w", err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.clock.Run(ctx) })
	g.Go(func() error { return s.router.Run(ctx) })
	if err := g.Wait(); err != nil {
		return fmt.Errorf("skills service: %w", err)
	}
	return nil
}

// awaitBucket blocks until the object bucket skills exists, which is created after the log, and returns it. It returns
// nil if ctx ends before that.
func (s *Service) awaitBucket(ctx context.Context) (*natsstore.Store, error) {
	for said := false; ; said = true {
		try, cancel := context.WithTimeout(ctx, 2*time.Second)
		store, err := natsstore.Open(try, s.js, topology.BucketSkills)
		cancel()
		if err == nil {
			return store, nil
		}
		if s.deps.NATS.IsClosed() {
			return nil, fmt.Errorf("skills service: %w", err)
		}
		if !said {
			s.deps.Logger.Info("waiting for the bucket of skills", "reason", err.Error())
		}
		if retry.Pause(ctx, bucketRetryPause) != nil {
			return nil, nil
		}
	}
}
