package pgtest

import (
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/pgserver"
)

// RestartableServer is a separate Postgres server that keeps its URL and its folder across restarts. Its methods must
// be called from the test's goroutine.
type RestartableServer struct {
	t    testing.TB
	cfg  pgserver.Config
	link string // link to the socket's folder, which changes at each start
	srv  *pgserver.Server
}

// RunRestartable starts a Postgres server and stops it when the test ends.
func RunRestartable(t testing.TB) *RestartableServer {
	t.Helper()
	return runRestartable(t, pgserver.Config{Fast: true})
}

// RunDurable is like RunRestartable, for tests that crash the server. A flushed commit survives Crash; the
// background WAL writer runs so rarely that a commit that did not wait for its flush is lost.
func RunDurable(t testing.TB) *RestartableServer {
	t.Helper()
	return runRestartable(t, pgserver.Config{Settings: map[string]string{"wal_writer_delay": "10s"}})
}

func runRestartable(t testing.TB, cfg pgserver.Config) *RestartableServer {
	t.Helper()
	cfg.DataDir = t.TempDir()
	r := &RestartableServer{t: t, cfg: cfg, link: filepath.Join(t.TempDir(), "postgres")}
	r.Start()
	t.Cleanup(func() { r.Stop() })
	return r
}

// Start starts the server again after Stop.
func (r *RestartableServer) Start() {
	r.t.Helper()
	r.srv = startUnmanaged(r.t, r.cfg)
	if err := os.Remove(r.link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.t.Fatal(err)
	}
	if err := os.Symlink(r.socketDir(), r.link); err != nil {
		r.t.Fatal(err)
	}
}

// Stop shuts the server down.
func (r *RestartableServer) Stop() {
	r.t.Helper()
	stopServer(r.t, r.srv)
}

// Crash kills all processes of the server. The next Start recovers the data from the write-ahead log.
func (r *RestartableServer) Crash() {
	r.t.Helper()
	if err := syscall.Kill(r.srv.PID(), syscall.SIGQUIT); err != nil {
		r.t.Fatalf("crash postgres: %v", err)
	}
	<-r.srv.Done()
	_ = r.srv.Stop() // returns that the server ended by itself
}

// URL returns the server's URL, which is the same after each restart.
func (r *RestartableServer) URL() string {
	return strings.Replace(r.srv.URL(), url.QueryEscape(r.socketDir()), url.QueryEscape(r.link), 1)
}

func (r *RestartableServer) socketDir() string {
	cfg, err := pgx.ParseConfig(r.srv.URL())
	if err != nil {
		r.t.Fatal(err)
	}
	return cfg.Host
}
