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

// Stack is an installation of Spool on this machine whose services run in this process.
type Stack struct {
	cfg     Config
	storage *Storage
	gate    *gateway.Gateway
	cancel  context.CancelFunc
	group   *errgroup.Group
	conns   []*nats.Conn
	pool    *pgxpool.Pool
	key     string         // the local key
	proxy   *egressProcess // the egress proxy; nil with local sandboxes
	done    chan struct{}
	err     error
}

// Start starts all servers and services, and returns when each is ready. After an error nothing keeps running.
func Start(ctx context.Context, cfg Config) (_ *Stack, err error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	storage, err := OpenStorage(ctx, cfg)
	if err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	group, run := errgroup.WithContext(run)
	s := &Stack{cfg: cfg, storage: storage, cancel: cancel, group: group, done: make(chan struct{})}
	err = s.startServices(ctx, run)
	go s.stopAfterFirstEnd()
	if err != nil {
		s.cancel()
		<-s.done // err already has the reason
		return nil, err
	}
	return s, nil
}

// URL returns the address of the gateway.
func (s *Stack) URL() string { return s.gate.URL() }

// LocalKey returns the key with which the user of this machine calls the gateway.
func (s *Stack) LocalKey() string { return s.key }

// GRPCAddr returns the gRPC address of the gateway.
func (s *Stack) GRPCAddr() string { return s.gate.GRPCAddr().String() }

// Done returns a channel that is closed when the stack has ended, by Close or by itself.
func (s *Stack) Done() <-chan struct{} { return s.done }

// Err blocks until the stack has ended, and returns why. It returns nil after Close.
func (s *Stack) Err() error {
	<-s.done
	return s.err
}

// Close stops all services, then the servers, and waits for their end.
func (s *Stack) Close() error {
	s.cancel()
	return s.Err()
}

// stopAfterFirstEnd waits until a service ends, and then stops everything else.
func (s *Stack) stopAfterFirstEnd() {
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
	s.err = errors.Join(err, s.storage.Close())
	close(s.done)
}

// startServices starts the services. The context run ends when the first service ends.
func (s *Stack) startServices(ctx, run context.Context) error {
	if err := s.startMockModel(run); err != nil {
		return err
	}
	if err := s.startEgress(ctx, run); err != nil {
		return err
	}
	if err := s.setSecretsKeys(); err != nil {
		return err
	}
	if err := s.setHeadsKey(); err != nil {
		return err
	}
	var err error
	if s.key, err = loadLocalKey(s.cfg.DataDir); err != nil {
		return err
	}
	if err := readmodel.Migrate(ctx, s.storage.DatabaseURL); err != nil {
		return err
	}
	pool, err := readmodel.Open(ctx, s.storage.GatewayDatabaseURL)
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
		nc, log, err := s.storage.Connect(part.user)
		if err != nil {
			return fmt.Errorf("%s: %w", part.user, err)
		}
		s.conns = append(s.conns, nc)
		if err := part.start(ctx, run, nc, log); err != nil {
			return err
		}
	}
	if err := readmodel.AwaitCaughtUp(ctx, pool, s.storage.partitions); err != nil {
		return err
	}
	return s.storage.writeConnectionFile(s)
}

// serviceLogger returns the logger of a service.
func (s *Stack) serviceLogger(service string) *slog.Logger {
	return s.cfg.Logger.With("service", service)
}

// waitUntilReady blocks until ready is closed. It returns an error if the stack or ctx ends first.
func (s *Stack) waitUntilReady(ctx, run context.Context, part string, ready <-chan struct{}) error {
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
	svc, err := session.New(s.cfg.Session, session.Deps{NATS: nc, Log: log, Logger: s.serviceLogger("session")})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return s.waitUntilReady(ctx, run, "session", svc.Ready())
}

func (s *Stack) startProjector(_, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	s.cfg.Projector.DatabaseURL = s.storage.DatabaseURL
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
	svc, err := skills.New(s.cfg.Skills, skills.Deps{NATS: nc, Log: log, Logger: s.serviceLogger("skills")})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return s.waitUntilReady(ctx, run, "skills", svc.Ready())
}

func (s *Stack) startExecutor(ctx, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	// A regular end of the stack leaves nothing behind. After a crash the sandboxes still exist, and the next start
	// follows them.
	s.cfg.Executor.StopSandboxes = true
	if s.cfg.Executor.DataDir == "" {
		s.cfg.Executor.DataDir = s.cfg.DataDir
	}
	svc, err := executor.New(s.cfg.Executor, executor.Deps{NATS: nc, Log: log, Logger: s.serviceLogger("executor")})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return s.waitUntilReady(ctx, run, "executor", svc.Ready())
}

func (s *Stack) startGateway(ctx, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	svc, err := gateway.New(s.cfg.Gateway, gateway.Deps{NATS: nc, Pool: s.pool, LocalKey: s.key, Partitions: log.Partitioning(), Logger: s.serviceLogger("gateway")})
	if err != nil {
		return err
	}
	s.gate = svc
	s.group.Go(func() error { return svc.Run(run) })
	return s.waitUntilReady(ctx, run, "gateway", svc.Ready())
}

func (s *Stack) startJanitor(_, run context.Context, nc *nats.Conn, log eventlog.Log) error {
	s.cfg.Janitor.DatabaseURL = s.storage.DatabaseURL
	svc, err := janitor.New(s.cfg.Janitor, janitor.Deps{NATS: nc, Log: log, Logger: s.serviceLogger("janitor")})
	if err != nil {
		return err
	}
	s.group.Go(func() error { return svc.Run(run) })
	return nil
}

// mockModelKey is the API key that agents send to the scripted model server, which accepts any key.
const mockModelKey = "mock"

// startMockModel starts the scripted model server if the configuration asks for it, and configures the executor's
// agents to use it.
func (s *Stack) startMockModel(run context.Context) error {
	if !s.cfg.MockLLM {
		return nil
	}
	script, err := server.DefaultScript()
	if s.cfg.MockScript != "" {
		script, err = server.LoadScript(s.cfg.MockScript)
	}
	if err != nil {
		return fmt.Errorf("mock-llm: %w", err)
	}
	m, err := server.New(server.Config{Listen: "127.0.0.1:0", Script: script, Logger: s.serviceLogger("mockllm")})
	if err != nil {
		return fmt.Errorf("mock-llm: %w", err)
	}
	if err := m.Listen(); err != nil {
		return fmt.Errorf("mock-llm: %w", err)
	}
	s.group.Go(func() error { return m.Run(run) })
	s.cfg.Executor.AnthropicBaseURL, s.cfg.Executor.AnthropicKey = m.URL(), mockModelKey
	s.cfg.Executor.OpenAIBaseURL, s.cfg.Executor.OpenAIKey = m.URL()+"/v1", mockModelKey
	s.cfg.Executor.NVIDIAKey = ""
	return nil
}

// Storage is the part of a stack that stores data: NATS, Postgres and the log of a data folder. `spool verify` and
// `spool rebuild` open it without services if no stack runs.
type Storage struct {
	DatabaseURL        string       // URL of the database; it has the projector's role if Postgres is private
	GatewayDatabaseURL string       // URL of the same database with the gateway's role
	Log                eventlog.Log // opened with the permissions of user admin
	NATS               *nats.Conn   // opened with the permissions of user admin

	cfg        Config
	lock       *folderLock
	logKeys    string // the keys with which all writers of the log sign commits
	signing    topology.SigningSettings
	partitions events.Partitioning
	nats       *natsserver.Server
	postgres   *pgserver.Server // nil if the user's own Postgres is used
}

// OpenStorage locks the data folder, starts NATS and Postgres on it and opens the log.
func OpenStorage(ctx context.Context, cfg Config) (_ *Storage, err error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	b := &Storage{cfg: cfg, DatabaseURL: cfg.DatabaseURL, GatewayDatabaseURL: cfg.DatabaseURL}
	if b.lock, err = acquireLock(cfg.DataDir); err != nil {
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

// NATSURL returns the URL of the NATS server on loopback, which requires a password.
func (b *Storage) NATSURL() string { return b.nats.ClientURL() }

// Close stops NATS and Postgres, and unlocks the data folder.
func (b *Storage) Close() error {
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

// startPostgres starts the private Postgres and creates the roles in it, unless the user has named a database.
func (b *Storage) startPostgres(ctx context.Context) error {
	if b.DatabaseURL != "" {
		return nil
	}
	pg, err := pgserver.Start(ctx, pgserver.Config{DataDir: filepath.Join(b.cfg.DataDir, "postgres"), RequirePassword: true, Logger: b.cfg.Logger})
	if err != nil {
		return err
	}
	b.postgres, b.DatabaseURL, b.GatewayDatabaseURL = pg, pg.RoleURL(readmodel.ProjectorRole), pg.RoleURL(readmodel.GatewayRole)
	return readmodel.CreateRoles(ctx, pg.URL(), readmodel.Passwords{Projector: pg.Password(), Gateway: pg.Password()})
}

// startNATS starts the NATS server. The server also listens on loopback, with a port and a password that only the
// connection file contains, so that `spool verify` and `spool rebuild` can connect.
func (b *Storage) startNATS(ctx context.Context) error {
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
	return b.provisionStreams(try, js)
}

// provisionStreams creates or updates the streams of NATS, and loads the keys that sign the log.
func (b *Storage) provisionStreams(ctx context.Context, js jetstream.JetStream) error {
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
	if b.logKeys, lost, err = loadLogKeys(b.cfg.DataDir, len(signing.Keys) > 0); err != nil {
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

// Connect opens a connection to NATS with the permissions of a user, and the log on this connection.
func (b *Storage) Connect(user string) (*nats.Conn, eventlog.Log, error) {
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

// writeConnectionFile writes the file with which other processes on this machine find the running stack s.
func (b *Storage) writeConnectionFile(s *Stack) error {
	u, err := url.Parse(b.nats.ClientURL())
	if err != nil {
		return fmt.Errorf("address of NATS: %w", err)
	}
	u.User = url.UserPassword(topology.UserAdmin, b.nats.Password(topology.UserAdmin))
	return writeConnection(b.cfg.DataDir, Connection{
		PID: os.Getpid(), URL: s.URL(), GRPCAddr: s.GRPCAddr(), LocalKey: s.key, NATSURL: u.String(), DatabaseURL: b.DatabaseURL, LogKeys: b.logKeys,
	})
}
