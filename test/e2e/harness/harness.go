// Package harness runs the whole of Spool inside a test: real NATS with its users, real Postgres, several copies of
// every service, the real runner in local sandboxes, and the scripted model server. Tests use the API like clients.
package harness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/services/session/janitor"
)

// Options configure a Cluster. The zero value means one copy of each service, and mockllm's default script for the
// model.
type Options struct {
	Gateways, Sessions, Projectors, Executors int
	Script                                    string // script of the model server, as YAML
	Session                                   session.Config
	Executor                                  executor.Config
	Gateway                                   gateway.Config
	MaxStore                                  int64  // limit of the NATS store in bytes; 0 means the size of the disk; not supported with Outages
	DataDir                                   string // data folder of NATS; "" means a temporary one; not supported with Outages
	Outages                                   bool   // separate NATS and Postgres servers that a test can stop; without NATS users
	// Docker runs sandboxes in containers of the machine's engine, with the egress proxy. See NeedDocker.
	Docker bool
	// Modal runs sandboxes on cmd/mockmodal, with the egress proxy, which they reach by TLS. Executors are separate
	// processes. It needs Outages, because these processes have no NATS user. See NeedDocker.
	Modal bool
	// KeepLogs stores the logs of the services for Cluster.WrittenData and Cluster.LogRecords.
	KeepLogs bool
	// EgressOpen lists hosts and ports of MCP servers that may be on this machine.
	EgressOpen string
	// EgressRoutes are further routes of the egress proxy: base URL by name.
	EgressRoutes map[string]string
	// NVIDIAAlone makes the model server stand for NVIDIA's API, without any other provider. With Docker only the
	// egress proxy has the key, as in compose.
	NVIDIAAlone bool
	// Path is the PATH in sandboxes; "" means the PATH of the test. It is set for the whole process when the
	// executors start, so such a test must not be parallel.
	Path string
	// ModelURL returns the URL at which agents in local sandboxes, or the egress proxy, reach the model server. Its
	// argument is the server's own URL. nil means the server's own URL.
	ModelURL func(url string) string
	// ModelKey is the key of both model providers in local sandboxes; "" means "mock". The egress proxy has ModelAPIKey.
	ModelKey string
}

// Cluster is a running Spool for an end-to-end test, whose services run in the test's process.
type Cluster struct {
	T         testing.TB
	Servers   *Servers
	Outage    *Outage // with Options.Outages
	Model     *server.Server
	Gateways  []*gateway.Gateway
	opts      Options
	dir       string
	said      *logBuffer
	egressDir string     // with Options.Docker or Modal
	Modal     *MockModal // with Options.Modal
	executors []*nats.Conn
	programs  []*ExecutorProcess

	stops    map[string][]func() // of the copies of each service, by its user of NATS
	modelURL string              // URL at which agents, or the egress proxy, reach the model server
}

// buildRunner builds the runner once for all tests of a process, and returns the path of the program.
var buildRunner = sync.OnceValues(func() (string, error) {
	return buildProgram("github.com/spoolhq/spool/cmd/runner", "runner")
})

// New starts a cluster, which is stopped when the test ends.
func New(t testing.TB, opts Options) *Cluster {
	t.Helper()
	runner, err := buildRunner()
	requireNoError(t, err)
	for _, n := range []*int{&opts.Gateways, &opts.Sessions, &opts.Projectors, &opts.Executors} {
		*n = max(*n, 1)
	}
	c := &Cluster{T: t, opts: opts, dir: t.TempDir(), said: &logBuffer{}, stops: map[string][]func(){}}
	t.Cleanup(c.checkNoProcesses)
	c.opts.DataDir = cmp.Or(opts.DataDir, filepath.Join(c.dir, "data"))
	c.startServers()
	c.Model = StartModel(c.T, opts.Script)
	requireNoError(t, readmodel.Migrate(t.Context(), c.Servers.DatabaseURL))
	c.opts.Executor.Runner = runner
	c.opts.Executor.DataDir = filepath.Join(c.dir, "sandboxes")
	key := cmp.Or(opts.ModelKey, "mock")
	if c.modelURL = c.Model.URL(); opts.ModelURL != nil {
		c.modelURL = opts.ModelURL(c.modelURL)
	}
	c.opts.Executor.AnthropicBaseURL, c.opts.Executor.AnthropicKey = c.modelURL, key
	c.opts.Executor.OpenAIBaseURL, c.opts.Executor.OpenAIKey = c.modelURL+"/v1", key
	if e := &c.opts.Executor; opts.NVIDIAAlone {
		e.AnthropicBaseURL, e.AnthropicKey, e.OpenAIBaseURL, e.OpenAIKey = "", "", "", ""
		if e.ModelProviders = []string{"nvidia"}; !opts.Docker {
			e.NVIDIABaseURL, e.NVIDIAKey = c.Model.URL()+"/v1", "mock"
		}
	}
	if opts.Docker {
		c.startDocker()
	}
	if opts.Modal {
		c.startModal()
	}
	for i := range opts.Sessions {
		c.StartSessionService(fmt.Sprint("s", i))
	}
	for range opts.Projectors {
		c.StartProjector()
	}
	c.StartSkills()
	c.setSecretsKeys()
	for range opts.Executors {
		if opts.Modal {
			c.StartExecutorProcess()
		} else {
			c.StartExecutor()
		}
	}
	pool, err := readmodel.Open(t.Context(), c.Servers.DatabaseURL)
	requireNoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), WaitTimeout)
	requireNoError(t, readmodel.AwaitCaughtUp(ctx, pool, c.Servers.Log.Partitioning()))
	cancel()
	pool.Close()
	for range opts.Gateways {
		c.StartGateway()
	}
	t.Cleanup(c.VerifyLog)
	return c
}

// requireNoError ends the test at once if err is not nil.
func requireNoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// assertNoError marks the test as failed if err is not nil, and lets it continue.
func assertNoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// StartModel starts a scripted model server that runs until the test ends. "" stands for the built-in script.
func StartModel(t testing.TB, text string) *server.Server {
	t.Helper()
	script, err := server.DefaultScript()
	if text != "" {
		script, err = server.ParseScript("script.yaml", []byte(text))
	}
	requireNoError(t, err)
	model, err := server.New(server.Config{Listen: "127.0.0.1:0", Script: script, Logger: slog.New(slog.DiscardHandler)})
	requireNoError(t, err)
	requireNoError(t, model.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- model.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		assertNoError(t, <-done)
	})
	return model
}

// startService runs the function part, which is a service, in a goroutine until the test ends, and blocks until the
// channel ready is closed. stop stops the service earlier, blocks until it has ended, and closes its connection nc.
func (c *Cluster) startService(nc *nats.Conn, ready <-chan struct{}, part func(context.Context) error) (stop func()) {
	c.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- part(ctx) }()
	stop = sync.OnceFunc(func() {
		killed := nc != nil && nc.IsClosed()
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) && !killed {
			c.T.Errorf("a service ended with: %v", err)
		}
		if nc != nil {
			nc.Close()
		}
	})
	c.T.Cleanup(stop)
	if ready != nil {
		select {
		case <-ready:
		case err := <-done:
			done <- err
			c.T.Fatalf("a service did not start: %v", err)
		case <-time.After(WaitTimeout):
			c.T.Fatalf("a service was not ready within %s", WaitTimeout)
		}
	}
	return stop
}

// connectNATS opens a NATS connection as a user, and the log over this connection.
func (c *Cluster) connectNATS(user string) (*nats.Conn, eventlog.Log) {
	c.T.Helper()
	nc, log, err := c.Servers.Connect(user)
	requireNoError(c.T, err)
	return nc, log
}

// serviceLogger returns the logger of the service with the name part. With Options.KeepLogs, LogRecords returns its
// records.
func (c *Cluster) serviceLogger(part string) *slog.Logger {
	log := natstest.Logger(c.T)
	if c.opts.KeepLogs {
		log = slog.New(slog.NewMultiHandler(log.Handler(), slog.NewJSONHandler(c.said, &slog.HandlerOptions{Level: slog.LevelDebug})))
	}
	return log.With("part", part)
}

// StartSessionService starts one more copy of the session service. stop stops it.
func (c *Cluster) StartSessionService(name string) (stop func()) {
	nc, log := c.connectNATS(topology.UserSession)
	svc, err := session.New(c.opts.Session, session.Deps{NATS: nc, Log: log, Logger: c.serviceLogger(name), Copy: name})
	requireNoError(c.T, err)
	return c.registerStop(topology.UserSession, c.startService(nc, svc.Ready(), svc.Run))
}

// StartProjector starts one more projector. stop stops it.
func (c *Cluster) StartProjector() (stop func()) {
	nc, log := c.connectNATS(topology.UserProjector)
	svc, err := projector.New(projector.Config{DatabaseURL: c.Servers.DatabaseURL}, projector.Deps{NATS: nc, Log: log, Logger: c.serviceLogger("projector")})
	requireNoError(c.T, err)
	return c.registerStop(topology.UserProjector, c.startService(nc, nil, svc.Run))
}

// StopProjectors stops every projector. The read models do not change after that.
func (c *Cluster) StopProjectors() { c.stopService(topology.UserProjector) }

// StopSessions stops every copy of the session service.
func (c *Cluster) StopSessions() { c.stopService(topology.UserSession) }

// StopExecutors stops every executor. Each hands its executions over, and leaves its sandboxes.
func (c *Cluster) StopExecutors() { c.stopService(topology.UserExecutor) }

// StopGateways stops every gateway. The gateway that is started next is number 0.
func (c *Cluster) StopGateways() {
	c.stopService(topology.UserGateway)
	c.Gateways = nil
}

// registerStop adds stop to the functions that stopService calls for a service, and returns a function that calls stop.
func (c *Cluster) registerStop(service string, stop func()) func() {
	c.stops[service] = append(c.stops[service], stop)
	return stop
}

// stopService stops every copy of a service.
func (c *Cluster) stopService(service string) {
	for _, stop := range c.stops[service] {
		stop()
	}
	delete(c.stops, service)
}

// NewJanitor returns a janitor that is not running. The test calls its method RunPass.
func (c *Cluster) NewJanitor(cfg janitor.Config) *janitor.Janitor {
	c.T.Helper()
	nc, log := c.connectNATS(topology.UserJanitor)
	c.T.Cleanup(nc.Close)
	cfg.DatabaseURL = c.Servers.DatabaseURL
	j, err := janitor.New(cfg, janitor.Deps{NATS: nc, Log: log, Logger: c.serviceLogger("janitor")})
	requireNoError(c.T, err)
	return j
}

// NATSStore returns the folder in which NATS stores its streams.
func (c *Cluster) NATSStore() string { return filepath.Join(c.opts.DataDir, "nats") }

// StartExecutor starts one more executor on the same engine. stop stops it.
func (c *Cluster) StartExecutor() (stop func()) {
	if c.opts.Path != "" {
		c.T.Setenv("PATH", c.opts.Path)
	}
	nc, log := c.connectNATS(topology.UserExecutor)
	c.executors = append(c.executors, nc)
	svc, err := executor.New(c.opts.Executor, executor.Deps{NATS: nc, Log: log, Logger: c.serviceLogger("executor")})
	requireNoError(c.T, err)
	return c.registerStop(topology.UserExecutor, c.startService(nc, svc.Ready(), svc.Run))
}

// KillExecutor closes the NATS connection of the i-th executor, as if its process had been killed: it does not hand
// over its sessions, and its lease expires.
func (c *Cluster) KillExecutor(i int) { c.executors[i].Close() }

// StartGateway starts one more gateway on a free port. stop stops it.
func (c *Cluster) StartGateway() (stop func()) {
	nc, _ := c.connectNATS(topology.UserGateway)
	pool, err := readmodel.Open(c.T.Context(), c.Servers.GatewayDatabaseURL)
	requireNoError(c.T, err)
	c.T.Cleanup(pool.Close)
	cfg := c.opts.Gateway
	cfg.Listen, cfg.GRPCListen = "127.0.0.1:0", "127.0.0.1:0"
	svc, err := gateway.New(cfg, gateway.Deps{NATS: nc, Pool: pool, Partitions: c.Servers.Log.Partitioning(), Logger: c.serviceLogger("gateway")})
	requireNoError(c.T, err)
	stop = c.registerStop(topology.UserGateway, c.startService(nc, svc.Ready(), svc.Run))
	c.Gateways = append(c.Gateways, svc)
	return stop
}

// GRPCAddress returns the address at which gateway i serves gRPC.
func (c *Cluster) GRPCAddress(i int) string { return c.Gateways[i].GRPCAddr().String() }

// URL returns the URL of gateway i.
func (c *Cluster) URL(i int) string { return "http://" + c.Gateways[i].Addr().String() }
