// Package system runs all of Spool inside a benchmark, as `spool up` does: NATS that syncs every message and one copy of
// every service in this process, and Postgres in its own. Client talks to it as users' clients do.
package system

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/cmd/spool/stack"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/services/skills"
)

// Config configures a System. Only the field Dir is required.
type Config struct {
	Dir      string           // holds all data; Postgres, which may run as another user, must be able to enter it
	NATSURL  string           // a server without users in another process; "" starts one in this process, with all users
	Provider sandbox.Provider // nil for sandboxes that run Executor.Runner: local processes or, with Docker, containers
	Docker   bool             // sandboxes are containers, with an egress proxy in front of ModelURL; see CheckDocker
	ModelURL string           // the scripted model of all agents, without /v1; "" leaves Executor as it is
	Session  session.Config
	Executor executor.Config
	Metrics  prometheus.Registerer // metrics of the executor; nil for none

	Executors int            // number of executors, all with the configuration Executor; 0 means 1
	Gateway   gateway.Config // its addresses are set by the system
	// MoreGateways is the number of gateways beside the one of System.URL.
	MoreGateways int
}

// System is a running Spool, whose services run in this process.
type System struct {
	URL  string       // of the gateway
	More []string     // URLs of the other gateways
	NATS *nats.Conn   // with all permissions
	Log  eventlog.Log // with all permissions
	Pool *pgxpool.Pool

	cfg      Config
	engine   string // with Docker: the label of all containers and volumes of this system
	warnings warningHandler
	logger   *slog.Logger
	connect  func(user string) (*nats.Conn, eventlog.Log, error)
	closers  []func() error // called in reverse order
	gateway  *nats.Conn     // with the permissions of a gateway
	stopGate func()         // stops the gateway and blocks until it has stopped
	cancel   context.CancelFunc
	run      context.Context
	parts    sync.WaitGroup

	mu  sync.Mutex
	err error // of the first service that stopped by itself
}

// BuildCommand builds the program cmd/<command> of this repository into the folder dir and returns its path.
func BuildCommand(ctx context.Context, dir, command string) (string, error) {
	return buildPackage(ctx, dir, command, "github.com/spoolhq/spool/cmd/"+command)
}

// buildPackage builds the Go package source into the folder dir as a program named command, and returns its path.
func buildPackage(ctx context.Context, dir, command, source string) (string, error) {
	path := filepath.Join(dir, command)
	cmd := exec.CommandContext(ctx, "go", "build", "-o", path, source) //nolint:gosec // a package of this repository
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", command, err, out)
	}
	return path, nil
}

// Start starts NATS, Postgres and all services, and returns when all are ready. If it returns an error, nothing is
// running.
func Start(ctx context.Context, cfg Config) (*System, error) {
	s := &System{cfg: cfg, warnings: newWarningHandler()}
	s.logger = slog.New(s.warnings)
	s.run, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := s.start(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close stops the services, and then NATS and Postgres. The returned error includes that of Err.
func (s *System) Close() error {
	s.cancel()
	s.parts.Wait()
	errs := []error{s.Err()}
	for i := len(s.closers) - 1; i >= 0; i-- {
		errs = append(errs, s.closers[i]())
	}
	s.closers = nil
	return errors.Join(errs...)
}

// Err returns the error of the first service that ended before System.Close, or nil while all services run.
func (s *System) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// start starts NATS, Postgres and all services, and returns when all are ready.
func (s *System) start(ctx context.Context) error {
	url, err := s.startServers(ctx)
	if err != nil {
		return err
	}
	if err := readmodel.Migrate(ctx, url); err != nil {
		return err
	}
	if s.Pool, err = readmodel.Open(ctx, url); err != nil {
		return err
	}
	s.closers = append(s.closers, func() error { s.Pool.Close(); return nil })
	if err := s.configureSandboxes(ctx); err != nil {
		return err
	}
	if err := s.startServices(ctx, url); err != nil {
		return err
	}
	return readmodel.AwaitCaughtUp(ctx, s.Pool, s.Log.Partitioning())
}

// startServers starts Postgres, and NATS unless it runs in another process.
func (s *System) startServers(ctx context.Context) (databaseURL string, err error) {
	if s.cfg.NATSURL == "" {
		b, err := stack.OpenStorage(ctx, stack.Config{DataDir: filepath.Join(s.cfg.Dir, "data"), Logger: s.logger})
		if err != nil {
			return "", err
		}
		s.closers = append(s.closers, b.Close)
		s.NATS, s.Log, s.connect = b.NATS, b.Log, b.Connect
		return b.DatabaseURL, nil
	}
	pg, err := pgserver.Start(ctx, pgserver.Config{DataDir: filepath.Join(s.cfg.Dir, "postgres"), FetchURL: pgserver.FetchNever})
	if err != nil {
		return "", err
	}
	s.closers = append(s.closers, pg.Stop)
	s.connect = func(string) (*nats.Conn, eventlog.Log, error) { return connectWithoutUser(s.cfg.NATSURL) }
	if s.NATS, s.Log, err = s.connectAs(""); err != nil {
		return "", err
	}
	js, err := jetstream.New(s.NATS)
	if err != nil {
		return "", err
	}
	return pg.URL(), topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 1, Partitions: topology.DefaultPartitions})
}

// connectWithoutUser connects to a NATS server without users at url, and opens the log over the connection.
func connectWithoutUser(url string) (*nats.Conn, eventlog.Log, error) {
	nc, err := nats.Connect(url)
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: 1, Partitions: topology.DefaultPartitions})
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	return nc, log, nil
}

// connectAs connects to NATS as a user and opens the log over the connection. System.Close closes the connection.
func (s *System) connectAs(user string) (*nats.Conn, eventlog.Log, error) {
	nc, log, err := s.connect(user)
	if err != nil {
		return nil, nil, fmt.Errorf("connect as %s: %w", user, err)
	}
	s.closers = append(s.closers, func() error { nc.Close(); return nil })
	return nc, log, nil
}

// startService runs a service in a goroutine until System.Close, and blocks until the channel ready is closed. A nil
// channel means that the service does not report readiness.
func (s *System) startService(ctx context.Context, name string, ready <-chan struct{}, run func(context.Context) error) error {
	ended := make(chan struct{})
	s.parts.Go(func() {
		defer close(ended)
		if err := run(s.run); err != nil && s.run.Err() == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.err == nil {
				s.err = fmt.Errorf("%s stopped: %w", name, err)
			}
		}
	})
	if ready == nil {
		return nil
	}
	select {
	case <-ready:
		return nil
	case <-ended:
		return fmt.Errorf("start %s: it stopped before it was ready", name)
	case <-ctx.Done():
		return fmt.Errorf("start %s: %w", name, ctx.Err())
	}
}

// startServices starts all services, one after the other, and returns when they are ready.
func (s *System) startServices(ctx context.Context, databaseURL string) error {
	nc, log, err := s.connectAs(topology.UserSession)
	if err != nil {
		return err
	}
	life, err := session.New(s.cfg.Session, session.Deps{NATS: nc, Log: log, Logger: s.logger})
	if err != nil {
		return err
	}
	if err := s.startService(ctx, "the session service", life.Ready(), life.Run); err != nil {
		return err
	}
	if nc, log, err = s.connectAs(topology.UserProjector); err != nil {
		return err
	}
	rows, err := projector.New(projector.Config{DatabaseURL: databaseURL}, projector.Deps{NATS: nc, Log: log, Logger: s.logger})
	if err != nil {
		return err
	}
	if err := s.startService(ctx, "the projector", nil, rows.Run); err != nil {
		return err
	}
	if nc, log, err = s.connectAs(topology.UserSkills); err != nil {
		return err
	}
	library, err := skills.New(skills.Config{Scratch: s.cfg.Dir}, skills.Deps{NATS: nc, Log: log, Logger: s.logger})
	if err != nil {
		return err
	}
	if err := s.startService(ctx, "the skills service", library.Ready(), library.Run); err != nil {
		return err
	}
	for range max(1, s.cfg.Executors) {
		if err := s.startExecutor(ctx); err != nil {
			return err
		}
	}
	if s.gateway, _, err = s.connectAs(topology.UserGateway); err != nil {
		return err
	}
	if err := s.startGateway(ctx, "127.0.0.1:0"); err != nil {
		return err
	}
	for range s.cfg.MoreGateways {
		nc, _, err := s.connectAs(topology.UserGateway)
		if err != nil {
			return err
		}
		url, err := s.runGateway(ctx, s.run, nc, "127.0.0.1:0", func() {})
		if err != nil {
			return err
		}
		s.More = append(s.More, url)
	}
	return nil
}

// startExecutor starts one more executor and returns when it is ready.
func (s *System) startExecutor(ctx context.Context) error {
	nc, log, err := s.connectAs(topology.UserExecutor)
	if err != nil {
		return err
	}
	cfg := s.cfg.Executor
	cfg.DataDir, cfg.StopSandboxes = filepath.Join(s.cfg.Dir, "sandboxes"), true
	runs, err := executor.New(cfg, executor.Deps{NATS: nc, Log: log, Provider: s.cfg.Provider, Logger: s.logger, Metrics: s.cfg.Metrics})
	if err != nil {
		return err
	}
	return s.startService(ctx, "the executor", runs.Ready(), runs.Run)
}

// startGateway starts the gateway of System.URL at an address and returns when it is ready.
func (s *System) startGateway(ctx context.Context, address string) (err error) {
	running, stop := context.WithCancel(s.run)
	ended := make(chan struct{})
	s.stopGate = func() { stop(); <-ended }
	s.URL, err = s.runGateway(ctx, running, s.gateway, address, func() { close(ended) })
	return err
}

// runGateway starts a gateway that runs until the context running ends, and returns its URL. It calls ended when the
// gateway has ended.
func (s *System) runGateway(ctx, running context.Context, nc *nats.Conn, address string, ended func()) (url string, err error) {
	cfg := s.cfg.Gateway
	cfg.Listen, cfg.GRPCListen = address, "127.0.0.1:0"
	gate, err := gateway.New(cfg, gateway.Deps{NATS: nc, Pool: s.Pool, Partitions: s.Log.Partitioning(), Logger: s.logger})
	if err != nil {
		return "", err
	}
	err = s.startService(ctx, "the gateway", gate.Ready(), func(context.Context) error {
		defer ended()
		return gate.Run(running)
	})
	if err != nil {
		return "", err
	}
	return "http://" + gate.Addr().String(), nil
}

// RestartGateway stops the gateway of System.URL, which ends its clients' streams, and starts another one at the same
// address. It is not safe for concurrent use.
func (s *System) RestartGateway(ctx context.Context) error {
	s.stopGate()
	return s.startGateway(ctx, strings.TrimPrefix(s.URL, "http://"))
}
