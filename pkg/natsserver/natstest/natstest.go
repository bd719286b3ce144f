// Package natstest runs real NATS servers in the process of a test.
package natstest

import (
	"log/slog"
	"net"
	"strconv"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver"
)

// Run starts a NATS server without a TCP listener in a temporary folder and stops it when the test ends. It syncs
// writes like the server of `spool up`, so that the order of write and acknowledgement is the same.
func Run(t testing.TB) *natsserver.Server {
	t.Helper()
	return RunConfig(t, natsserver.Config{})
}

// RunConfig is like Run, but starts the NATS server with the given configuration. An empty StoreDir means a temporary
// folder.
func RunConfig(t testing.TB, cfg natsserver.Config) *natsserver.Server {
	t.Helper()
	if cfg.StoreDir == "" {
		cfg.StoreDir = t.TempDir()
	}
	if cfg.Logger == nil {
		cfg.Logger = Logger(t)
	}
	srv, err := natsserver.Start(cfg)
	if err != nil {
		t.Fatalf("start nats: %v", err)
	}
	t.Cleanup(srv.Shutdown)
	return srv
}

// Conn opens a connection to srv that is closed when the test ends, before the server stops.
func Conn(t testing.TB, srv *natsserver.Server, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := srv.Connect(opts...)
	if err != nil {
		t.Fatalf("connect to nats: %v", err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// RestartableServer is a NATS server that keeps its port and its folder across restarts. Its methods must not be called
// concurrently.
type RestartableServer struct {
	t   testing.TB
	cfg natsserver.Config
	srv *natsserver.Server
}

// RunRestartable starts a server on a free port of the loopback interface and stops it when the test ends.
func RunRestartable(t testing.TB) *RestartableServer {
	t.Helper()
	r := &RestartableServer{t: t, cfg: natsserver.Config{StoreDir: t.TempDir(), Port: natsserver.RandomPort, Logger: Logger(t)}}
	r.Start()
	r.cfg.Port = r.srv.Port()
	t.Cleanup(r.Stop)
	return r
}

// Start starts the server again after Stop. It does nothing while the server runs.
func (r *RestartableServer) Start() {
	r.t.Helper()
	if r.srv != nil {
		return
	}
	srv, err := natsserver.Start(r.cfg)
	if err != nil {
		r.t.Fatalf("start nats: %v", err)
	}
	r.srv = srv
}

// Stop stops the server and waits for its end. It does nothing while the server is stopped.
func (r *RestartableServer) Stop() {
	if r.srv == nil {
		return
	}
	r.srv.Shutdown()
	r.srv = nil
}

// Server returns the running server, or nil while it is stopped.
func (r *RestartableServer) Server() *natsserver.Server { return r.srv }

// URL returns the server's URL, which is the same after each restart.
func (r *RestartableServer) URL() string {
	return "nats://" + net.JoinHostPort(natsserver.DefaultHost, strconv.Itoa(r.cfg.Port))
}

// Conn opens a TCP connection that survives restarts and is closed when the test ends.
func (r *RestartableServer) Conn(opts ...nats.Option) *nats.Conn {
	r.t.Helper()
	nc, err := nats.Connect(r.URL(), append(bus.ConnOptions(r.cfg.Logger), opts...)...)
	if err != nil {
		r.t.Fatalf("connect to nats: %v", err)
	}
	r.t.Cleanup(nc.Close)
	return nc
}

// Logger returns a logger that writes warnings and errors to the test's log until the test ends, and nothing
// afterwards, when t.Log would panic.
func Logger(t testing.TB) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(w.close)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

type testWriter struct {
	mu     sync.Mutex
	t      testing.TB
	closed bool
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.t.Log(string(p))
	}
	return len(p), nil
}

func (w *testWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
}
