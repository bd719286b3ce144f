package pgserver_test

import (
	"net/url"
	"os"
	"path/filepath"
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
