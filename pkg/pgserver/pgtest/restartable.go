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

// Restartable is a server of the test's own that keeps its address and its
// folder over a restart. Its methods are for the test's goroutine.
type Restartable struct {
	t    testing.TB
	cfg  pgserver.Config
	link string // in place of the socket's folder, which is another after each start
	srv  *pgserver.Server
}

// RunRestartable starts a server, and stops it when the test ends.
func RunRestartable(t testing.TB) *Restartable {
	t.Helper()
	return runRestartable(t, pgserver.Config{Fast: true})
}

// RunDurable is RunRestartable for tests that crash the server. A commit that was flushed survives Crash; the background writer
// of the WAL runs so rarely that a commit which did not wait for its flush is lost.
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

// Start runs the server again after Stop.
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

// Crash ends the server at once, as a kill of all its processes does: it recovers from its WAL at the next Start.
func (r *Restartable) Crash() {
	r.t.Helper()
	if err := syscall.Kill(r.srv.PID(), syscall.SIGQUIT); err != nil {
		r.t.Fatalf("crash postgres: %v", err)
	}
	<-r.srv.Done()
	_ = r.srv.Stop() // reports that the server ended by itself
}

// URL is the address, the same after each restart.
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
