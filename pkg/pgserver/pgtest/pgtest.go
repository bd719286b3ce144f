// Package pgtest provides a separate database for each test, on one real Postgres per test process.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/pgserver"
)

const (
	folderPrefix   = "spool-pgtest-"
	maxConnections = "300"
	dropTimeout    = 30 * time.Second
)

// sharedServer starts the Postgres server of this test process once. It is never stopped explicitly: the kernel ends it
// with the process.
var sharedServer = sync.OnceValues(startSharedServer)

var lastDatabaseNumber atomic.Int64

// NewDatabase creates an empty database, which is dropped when the test ends, and returns its URL. Tests do not share a
// database with separate schemas, because advisory locks are per database. The server does not sync, since no test
// survives a power loss. Without a Postgres binary the test is skipped with the reason, or fails if CI is set.
func NewDatabase(t testing.TB) string {
	t.Helper()
	srv, err := sharedServer()
	if errors.Is(err, pgserver.ErrNoBinary) && os.Getenv("CI") == "" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("test_%d", lastDatabaseNumber.Add(1))
	if err := execAsAdmin(t.Context(), srv, "CREATE DATABASE "+name); err != nil {
		t.Fatalf("create database %s: %v", name, err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), dropTimeout)
		defer cancel()
		if err := execAsAdmin(ctx, srv, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Errorf("drop database %s: %v", name, err)
		}
	})
	return srv.DatabaseURL(name)
}

// Conn returns a connection to a new database; it is closed when the test ends.
func Conn(t testing.TB) *pgx.Conn {
	t.Helper()
	url := NewDatabase(t)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatalf("connect to %s: %v", url, err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// StartServer starts a separate Postgres server, for tests that stop it; it is stopped when the test ends.
func StartServer(t testing.TB, cfg pgserver.Config) *pgserver.Server {
	t.Helper()
	srv := startUnmanaged(t, cfg)
	t.Cleanup(func() { stopServer(t, srv) })
	return srv
}

func stopServer(t testing.TB, srv *pgserver.Server) {
	t.Helper()
	if err := srv.Stop(); err != nil {
		t.Errorf("stop postgres: %v", err)
	}
}

// startUnmanaged starts a Postgres server that the caller must stop.
func startUnmanaged(t testing.TB, cfg pgserver.Config) *pgserver.Server {
	t.Helper()
	if cfg.DataDir == "" {
		cfg.DataDir = t.TempDir()
	}
	if cfg.FetchURL == "" {
		cfg.FetchURL = pgserver.FetchNever
	}
	srv, err := pgserver.Start(t.Context(), cfg)
	if errors.Is(err, pgserver.ErrNoBinary) && os.Getenv("CI") == "" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return srv
}

func startSharedServer() (*pgserver.Server, error) {
	removeOldFolders()
	dir, err := os.MkdirTemp("", folderPrefix+strconv.Itoa(os.Getpid())+"-")
	if err != nil {
		return nil, err
	}
	srv, err := pgserver.Start(context.Background(), pgserver.Config{
		DataDir:  dir,
		Fast:     true,
		FetchURL: pgserver.FetchNever,
		Settings: map[string]string{"max_connections": maxConnections, "shared_buffers": "32MB", "max_wal_size": "64MB", "autovacuum": "off"},
	})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return srv, nil
}

func execAsAdmin(ctx context.Context, srv *pgserver.Server, sql string) error {
	conn, err := pgx.Connect(ctx, srv.DatabaseURL("postgres"))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

// removeOldFolders removes the data folders of test processes that have ended. They cannot do so themselves, because
// the server outlives their last statement. A folder that cannot be examined or removed is left for the next test
// process.
func removeOldFolders() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), folderPrefix+"*")) // the only error is a malformed pattern
	for _, dir := range dirs {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), folderPrefix), "-")
		n, err := strconv.Atoi(pid)
		if err != nil || n == os.Getpid() || !errors.Is(syscall.Kill(n, 0), syscall.ESRCH) {
			continue
		}
		_ = pgserver.RemoveDataDir(dir)
	}
}
