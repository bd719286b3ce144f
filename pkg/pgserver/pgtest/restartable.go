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

// Restartable is a separate server that keeps its address and its folder across restarts. Its methods must be
// called from the test's goroutine.
type Restartable struct {
	t    testing.TB
	cfg  pgserver.Config
	link string // link to the socket's folder, which changes at each start
	srv  *pgserver.Server
}

// RunRestartable starts a server and stops it when the test ends.
func RunRestartable(t testing.TB) *Restartable {
	t.Helper()
	return runRestartable(t, pgserver.Config{Fast: true})
}

// RunDurable is like RunRestartable, for tests that crash the server. A flushed commit survives Crash; the
// background WAL writer runs so rarely that a commit that did not wait for its flush is lost.
func RunDurable(t testing.TB) *Restartable {
	t.Helper()
	return runRestartable(t, pgserver.Config{Settings: map[string]string{"wal_writer_delay": "10s"}})
}

func runRestartable(t testing.TB, cfg pgserver.Config) *Restartable {
	t.Helper()
	cfg.DataDir = t.TempDir()
	r := &Restartable{t: t, cfg: cfg, link: filepath.Join(t.TempDir(), "postgres")}
	r.Start()
	t.Cleanup(func() { r.Stop() })
	return r
}

// Start starts the server again after Stop.
func (r *Restartable) Start() {
	r.t.Helper()
	r.srv = boot(r.t, r.cfg)
	if err := os.Remove(r.link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.t.Fatal(err)
	}
	if err := os.Symlink(r.socket(), r.link); err != nil {
		r.t.Fatal(err)
	}
}

// Stop shuts the server down.
func (r *Restartable) Stop() {
	r.t.Helper()
	stop(r.t, r.srv)
}

// Crash kills all processes of the server. The next Start recovers from the WAL.
func (r *Restartable) Crash() {
	r.t.Helper()
	if err := syscall.Kill(r.srv.PID(), syscall.SIGQUIT); err != nil {
		r.t.Fatalf("crash postgres: %v", err)
	}
	<-r.srv.Done()
	_ = r.srv.Stop() // returns that the server ended by itself
}

// URL returns the address, which is the same after each restart.
func (r *Restartable) URL() string {
	return strings.Replace(r.srv.URL(), url.QueryEscape(r.socket()), url.QueryEscape(r.link), 1)
}

func (r *Restartable) socket() string {
	cfg, err := pgx.ParseConfig(r.srv.URL())
	if err != nil {
		r.t.Fatal(err)
	}
	return cfg.Host
}
