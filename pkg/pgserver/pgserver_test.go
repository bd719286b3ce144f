package pgserver_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
)

func exec(t *testing.T, url, sql string) error {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(t.Context()) }()
	_, err = conn.Exec(t.Context(), sql)
	return err
}

func TestKeepsDataOverRestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	start := time.Now()
	srv := pgtest.Server(t, pgserver.Config{DataDir: dir, Fast: true})
	t.Logf("first start %s", time.Since(start))
	if err := exec(t, srv.URL(), "CREATE TABLE kept AS SELECT 1 AS n"); err != nil {
		t.Fatal(err)
	}
	if err := srv.Stop(); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	again := pgtest.Server(t, pgserver.Config{DataDir: dir, Fast: true})
	t.Logf("second start %s", time.Since(start))
	if err := exec(t, again.URL(), "SELECT n FROM kept"); err != nil {
		t.Fatal(err)
	}
}

func TestDatabaseOfOnesOwn(t *testing.T) {
	t.Parallel()
	a, b := pgtest.URL(t), pgtest.URL(t)
	if err := exec(t, a, "CREATE TABLE only_here (n int)"); err != nil {
		t.Fatal(err)
	}
	if err := exec(t, b, "SELECT * FROM only_here"); err == nil {
		t.Fatal("one test sees the table of another")
	}
}
