package pgserver_test

import (
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
)

// withoutPassword returns the URL of a database without the password.
func withoutPassword(t *testing.T, database string) string {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(u.User.Username())
	return u.String()
}

// TestRequirePassword_RefusesConnectionsWithoutIt tests a data folder of an earlier version, whose server trusted all
// connections: it keeps its data, requires the same password after each start, and the earlier version can start it again.
func TestRequirePassword_RefusesConnectionsWithoutIt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	earlier := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	if err := exec(t, earlier.URL(), "CREATE TABLE kept AS SELECT 1 AS n"); err != nil {
		t.Fatal(err)
	}
	if err := earlier.Stop(); err != nil {
		t.Fatal(err)
	}
	var password string
	for range 2 {
		srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true, RequirePassword: true})
		if err := exec(t, srv.URL(), "SELECT n FROM kept"); err != nil {
			t.Error(err)
		}
		if err := exec(t, withoutPassword(t, srv.URL()), "SELECT 1"); err == nil {
			t.Error("a connection without the password was accepted")
		}
		if password != "" && password != srv.Password() {
			t.Error("the next start has another password")
		}
		password = srv.Password()
		if info, err := os.Stat(filepath.Join(dir, "password")); err != nil || info.Mode().Perm() != 0o600 || password == "" {
			t.Errorf("the file with the password: %v, %v", info, err)
		}
		if err := srv.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	again := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	if err := exec(t, withoutPassword(t, again.URL()), "SELECT n FROM kept"); err != nil {
		t.Errorf("the earlier version: %v", err)
	}
}

// TestRequirePassword_EmptyFileIsNoPassword tests the file with the password that a crash of the machine left empty: without a password, the
// server would trust all connections.
func TestRequirePassword_EmptyFileIsNoPassword(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true, RequirePassword: true})
	before := srv.Password()
	if err := srv.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "password"), []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	srv = pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true, RequirePassword: true})
	if err := exec(t, withoutPassword(t, srv.URL()), "SELECT 1"); err == nil {
		t.Error("a connection without the password was accepted")
	}
	if srv.Password() == "" || srv.Password() == before {
		t.Errorf("the password is %q, before it was %q", srv.Password(), before)
	}
	if err := exec(t, srv.URL(), "SELECT 1"); err != nil {
		t.Error(err)
	}
}

// TestRequirePassword_PostgresReadsItsRules tests that the account of Postgres owns the file with the rules: root may have the umask 077.
func TestRequirePassword_PostgresReadsItsRules(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true, RequirePassword: true})
	owner := func(name string) uint32 {
		info, err := os.Stat(filepath.Join(dir, "cluster", name))
		if err != nil {
			t.Fatal(err)
		}
		return info.Sys().(*syscall.Stat_t).Uid
	}
	if rules, cluster := owner("pg_hba.password.conf"), owner("PG_VERSION"); rules != cluster {
		t.Errorf("user %d owns the file, and user %d the cluster", rules, cluster)
	}
}
