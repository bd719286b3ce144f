package stack

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// TestOpen_PrivatePostgresHasRoles tests that the services of a stack connect to its private Postgres as roles that are
// not superusers, even on a data folder whose read models a superuser created.
func TestOpen_PrivatePostgresHasRoles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	older := pgtest.StartServer(t, pgserver.Config{DataDir: filepath.Join(dir, "postgres")})
	if err := errors.Join(readmodel.Migrate(t.Context(), older.URL()), older.Stop()); err != nil {
		t.Fatal(err)
	}
	storage, err := OpenStorage(t.Context(), Config{DataDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := storage.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := readmodel.Migrate(t.Context(), storage.DatabaseURL); err != nil {
		t.Fatal(err)
	}
	for url, writes := range map[string]bool{storage.DatabaseURL: true, storage.GatewayDatabaseURL: false} {
		conn, err := readmodel.Connect(t.Context(), url, readmodel.Schema)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), "SELECT FROM sessions"); err != nil {
			t.Errorf("%s: %v", conn.Config().User, err)
		}
		if _, err := conn.Exec(t.Context(), "UPDATE sessions SET title = ''"); (err == nil) != writes {
			t.Errorf("%s writes: %v", conn.Config().User, err)
		}
		wantRefused(t, conn, "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'")
		if err := conn.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func wantRefused(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	var refused *pgconn.PgError
	if _, err := conn.Exec(t.Context(), sql); !errors.As(err, &refused) || refused.Code != "42501" {
		t.Errorf("%s: %s: got %v, want insufficient privilege", conn.Config().User, sql, err)
	}
}
