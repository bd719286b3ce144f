// Package stack implements `spool up`: every service in one process, with its own NATS server and Postgres, on one
// data folder.
package stack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/services/session/janitor"
	"github.com/spoolhq/spool/services/skills"
)

// Config configures a Stack. DataDir is required.
type Config struct {
	DataDir     string        // folder of all persistent data
	DatabaseURL string        // the user's own Postgres; "" for a private one
	MaxStore    int64         // disk limit of the NATS streams in bytes; 0 means their present size plus three quarters of the free disk
	TextAge     time.Duration // how long text in flight is stored; 0 means 24 hours
	MockLLM     bool          // use a scripted model server instead of real models
	MockScript  string        // script of the model server; "" for the built-in one
	Gateway     gateway.Config
	Session     session.Config
	Executor    executor.Config
	Projector   projector.Config
	Skills      skills.Config
	Janitor     janitor.Config
	Logger      *slog.Logger // nil discards
}

// Stack is a running installation of Spool on this machine, which Start has started.
type Stack struct {
	cfg    Config
	base   *Base
	gate   *gateway.Gateway
	cancel context.CancelFunc
	group  *errgroup.Group
	conns  []*nats.Conn
	pool   *pgxpool.Pool
	proxy  *proxy // nil with local sandboxes
	done   chan struct{}
	err    error
}

// Start starts all parts and returns when each is ready. If it fails, nothing keeps running.
func Start(ctx context.Context, cfg Config) (_ *Stack, err error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	base, err := Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	group, run := errgroup.WithContext(run)
	s := &Stack{cfg: cfg, base: base, cancel: cancel, group: group, done: make(chan struct{})}
	err = s.start(ctx, run)
	go s.wait()
	if err != nil {
		s.cancel()
		<-s.done // err already has the reason
		return nil, err
	}
	return s, nil
}

// URL returns the address of the gateway.
func (s *Stack) URL() string { return s.gate.URL() }

// GRPCAddr returns the gRPC address of the gateway.
func (s *Stack) GRPCAddr() string { return s.gate.GRPCAddr().String() }

// Done returns a channel that is closed when the stack has ended, by Close or by itself.
func (s *Stack) Done() <-chan struct{} { return s.done }

// Err returns why the stack ended, after Done; nil after Close.
func (s *Stack) Err() error {
	<-s.done
	return s.err
}

// Close stops every part, the servers last, and waits for them. Agents continue to work in their sandboxes; the
// next start follows them.
func (s *Stack) Close() error {
	s.cancel()
	return s.Err()
}

// wait stops everything after the first part has ended.
func (s *Stack) wait() {
	err := s.group.Wait()
	s.cancel()
	if s.pool != nil {
		s.pool.Close()
	}
	for _, nc := range s.conns {
		nc.Close()
	}
	if s.proxy != nil {
		err = errors.Join(err, s.proxy.stop())
	}
	s.err = errors.Join(err, s.base.Close())
	close(s.done)
}

// start starts the services; run ends when the first of them ends.
func (s *Stack) start(ctx, run context.Context) error {
	if err := s.startMockModel(run); err != nil {
		return err
	}
	if err := s.startEgress(ctx, run); err != nil {
		return err
	}
	if err := s.setSecretsKeys(); err != nil {
		return err
	}
	if err := s.headsKey(); err != nil {
		return err
	}
	if err := readmodel.Migrate(ctx, s.base.DatabaseURL); err != nil {
		return err
	}
	pool, err := readmodel.Open(ctx, s.base.GatewayDatabaseURL)
	if err != nil {
		return err
	}
	s.pool = pool
	for _, part := range []struct {
		user  string
		start func(ctx, run context.Context, nc *nats.Conn, log eventlog.Log) error
	}{
		{topology.UserSession, s.startSession},
		{topology.UserProjector, s.startProjector},
		{topology.UserSkills, s.startSkills},
		{topology.UserExecutor, s.startExecutor},
		{topology.UserGateway, s.startGateway},
		{topology.UserJanitor, s.startJanitor},
	} {
		nc, log, err := s.base.Connect(part.user)
		if err != nil {
			return fmt.Errorf("%s: %w", part.user, err)
		}
		s.conns = append(s.conns, nc)
		if err := part.start(ctx, run, nc, log); err != nil {
			return err
		}
	}
	if err := readmodel.AwaitCaughtUp(ctx, pool, s.base.partitions); err != nil {
		return err
	}
	return s.base.announce(s.URL(), s.GRPCAddr())
}

func (s *Stack) logger(service string) *slog.Logger { return s.cfg.Logger.With("service", service) }

// await returns when a part is ready, or the reason why the stack ended first.
func (s *Stack) await(ctx, run context.Context, part string, ready <-chan struct{}) error {
	select {
	case <-ready:
		return nil
	case <-run.Done():
		return fmt.Errorf("%s did not start: %w", part, s.group.Wait())
	case <-ctx.Done():
		return fmt.Errorf("%s did not start: %w", part, ctx.Err())
	}
}

func (s *Stack) startSession(ctx, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	svc, err := session.New(s.cfg.Session, session.Deps{NATS: nc, Log: log, Logger: s.logger("session")})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return s.await(ctx, run, "session", svc.Ready())
}

func (s *Stack) startProjector(_, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	s.cfg.Projector.DatabaseURL = s.base.DatabaseURL
	svc, err := projector.New(s.cfg.Projector, projector.Deps{NATS: nc, Log: log, Logger: s.cfg.Logger})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return nil
}

func (s *Stack) startSkills(ctx, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	if s.cfg.Skills.Scratch == "" {
		s.cfg.Skills.Scratch = s.cfg.DataDir
	}
	svc, err := skills.New(s.cfg.Skills, skills.Deps{NATS: nc, Log: log, Logger: s.logger("skills")})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return s.await(ctx, run, "skills", svc.Ready())
}

func (s *Stack) startExecutor(ctx, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	// A regular end of the stack leaves nothing behind. After a crash the sandboxes still exist, and the next start
	// follows them.
	s.cfg.Executor.StopSandboxes = true
	if s.cfg.Executor.DataDir == "" {
		s.cfg.Executor.DataDir = s.cfg.DataDir
	}
	svc, err := executor.New(s.cfg.Executor, executor.Deps{NATS: nc, Log: log, Logger: s.logger("executor")})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return s.await(ctx, run, "executor", svc.Ready())
}

func (s *Stack) startGateway(ctx, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	svc, err := gateway.New(s.cfg.Gateway, gateway.Deps{NATS: nc, Pool: s.pool, Partitions: log.Partitioning(), Logger: s.logger("gateway")})
	if err != nil {
		return err
	}
	s.gate = svc
	s.group.Go(func() error { return svc.Run(run) })
	return s.await(ctx, run, "gateway", svc.Ready())
}

func (s *Stack) startJanitor(_, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	s.cfg.Janitor.DatabaseURL = s.base.DatabaseURL
	svc, err := janitor.New(s.cfg.Janitor, janitor.Deps{NATS: nc, Log: log, Logger: s.logger("janitor")})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return nil
}

// mockKey is the key that agents send to the scripted model server, which accepts any key.
const mockKey = "mock"

// startMockModel starts the scripted model server and configures the executor's agents to use it.
func (s *Stack) startMockModel(run context.Context) error {
	if !s.cfg.MockLLM {
		return nil
	}
	script, err := server.Default()
	if s.cfg.MockScript != "" {
		script, err = server.LoadFile(s.cfg.MockScript)
	}
	if err != nil {
		return fmt.Errorf("mock-llm: %w", err)
	}
	m, err := server.New(server.Config{Listen: "127.0.0.1:0", Script: script, Logger: s.logger("mockllm")})
	if err != nil {
		return fmt.Errorf("mock-llm: %w", err)
	}
	if err := m.Listen(); err != nil {
		return fmt.Errorf("mock-llm: %w", err)
	}
	s.group.Go(func() error { return m.Run(run) })
	s.cfg.Executor.AnthropicBaseURL, s.cfg.Executor.AnthropicKey = m.URL(), mockKey
	s.cfg.Executor.OpenAIBaseURL, s.cfg.Executor.OpenAIKey = m.URL()+"/v1", mockKey
	s.cfg.Executor.NVIDIAKey = ""
	return nil
}

// Base is the part of a stack without services: the servers and the log of a data folder. `spool verify` and `spool
// rebuild` use it if no stack runs.
type Base struct {
	DatabaseURL        string       // with the projector's role if Postgres is private
	GatewayDatabaseURL string       // of the same database, with the gateway's role
	Log                eventlog.Log // as admin
	NATS               *nats.Conn   // as admin

	cfg        Config
	lock       *lock
	logKeys    string // the keys of all roles
	signing    topology.SigningSettings
	partitions events.Partitioning
	nats       *natsserver.Server
	postgres   *pgserver.Server // nil if the user's own Postgres is used
}

// Open locks the data folder and starts NATS and Postgres on it.
func Open(ctx context.Context, cfg Config) (_ *Base, err error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	b := &Base{cfg: cfg, DatabaseURL: cfg.DatabaseURL, GatewayDatabaseURL: cfg.DatabaseURL}
	if b.lock, err = acquire(cfg.DataDir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	var group errgroup.Group
	group.Go(func() error { return b.startPostgres(ctx) })
	group.Go(func() error { return b.startNATS(ctx) })
	if err = group.Wait(); err != nil {
		return nil, err
	}
	b.NATS, b.Log, err = b.Connect(topology.UserAdmin)
	return b, err
}

// NATSURL returns the loopback address of NATS, which requires a password.
func (b *Base) NATSURL() string { return b.nats.ClientURL() }

// Close stops the servers and unlocks the folder.
func (b *Base) Close() error {
	var errs []error
	if b.NATS != nil {
		b.NATS.Close()
	}
	if b.postgres != nil {
		errs = append(errs, b.postgres.Stop())
	}
	if b.nats != nil {
		b.nats.Shutdown()
	}
	return errors.Join(append(errs, b.lock.release())...)
}

func (b *Base) startPostgres(ctx context.Context) error {
	if b.DatabaseURL != "" {
		return nil
	}
	pg, err := pgserver.Start(ctx, pgserver.Config{DataDir: filepath.Join(b.cfg.DataDir, "postgres"), Logger: b.cfg.Logger})
	if err != nil {
		return err
	}
	b.postgres, b.DatabaseURL, b.GatewayDatabaseURL = pg, pg.RoleURL(readmodel.ProjectorRole), pg.RoleURL(readmodel.GatewayRole)
	return readmodel.CreateRoles(ctx, pg.URL(), readmodel.Passwords{})
}

// startNATS starts the NATS server. The server also listens on loopback, with a port and a password that only the
// connection file contains, so that `spool verify` and `spool rebuild` can connect.
func (b *Base) startNATS(ctx context.Context) error {
	srv, err := natsserver.Start(natsserver.Config{
		StoreDir: filepath.Join(b.cfg.DataDir, "nats"), Port: natsserver.RandomPort, Accounts: true, MaxStore: b.cfg.MaxStore, Logger: b.cfg.Logger,
	})
	if err != nil {
		return err
	}
	b.nats = srv
	nc, err := srv.ConnectAs(topology.UserAdmin)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("jetstream: %w", err)
	}
	try, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return b.provision(try, js)
}

// provision creates the streams and sets up the signing of the log.
func (b *Base) provision(ctx context.Context, js jetstream.JetStream) error {
	layout, err := topology.ReadLayout(ctx, js) // of the log's only stream, which is created first
	var signing topology.SigningSettings
	var create topology.ProvisionConfig
	switch {
	case errors.Is(err, topology.ErrNotInstalled):
		create.Partitions = topology.DefaultPartitions
	case err != nil:
		return err
	default:
		if signing, err = topology.ReadSigning(ctx, js, layout.Shards); err != nil {
			return err
		}
	}
	var lost bool
	if b.logKeys, lost, err = logKeys(b.cfg.DataDir, len(signing.Keys) > 0); err != nil {
		return err
	}
	keys, err := eventlog.ParseKeys(b.logKeys, "")
	if err != nil {
		return err
	}
	create.KeyIDs, create.KeysLost = keys.KeyIDs(), lost
	create.DeltasAge = b.cfg.TextAge
	if err := topology.Provision(ctx, js, create); err != nil {
		return err
	}
	if layout, err = topology.ReadLayout(ctx, js); err != nil {
		return err
	}
	b.partitions = layout.Partitions
	b.signing, err = jslog.CheckSigning(ctx, js, 1, keys, jslog.RoleVerifier)
	return err
}

// Connect opens a connection with a user's permissions, and the log on it.
func (b *Base) Connect(user string) (*nats.Conn, eventlog.Log, error) {
	nc, err := b.nats.ConnectAs(user, nats.Name("spool-"+user))
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, nil, fmt.Errorf("jetstream: %w", err)
	}
	role := user
	if user == topology.UserAdmin {
		role = topology.UserJanitor // the command line only writes as the janitor
	}
	keys, err := eventlog.ParseKeys(b.logKeys, role)
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: 1, Partitions: b.partitions, Keys: keys, Signing: b.signing, Logger: b.cfg.Logger})
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	return nc, log, nil
}

// announce writes the connection file when the stack is ready.
func (b *Base) announce(gatewayURL, grpcAddr string) error {
	u, err := url.Parse(b.nats.ClientURL())
	if err != nil {
		return fmt.Errorf("address of NATS: %w", err)
	}
	u.User = url.UserPassword(topology.UserAdmin, b.nats.Password(topology.UserAdmin))
	return writeConnection(b.cfg.DataDir, Connection{
		PID: os.Getpid(), URL: gatewayURL, GRPCAddr: grpcAddr, NATSURL: u.String(), DatabaseURL: b.DatabaseURL, LogKeys: b.logKeys,
	})
}
