package readmodel_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// TestCheck_ReportsTheLastMigration tests that read models that lack only the last migration are out of date.
func TestCheck_ReportsTheLastMigration(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	pool, err := readmodel.Open(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "DELETE FROM goose_db_version WHERE version_id = (SELECT max(version_id) FROM goose_db_version)"); err != nil {
		t.Fatal(err)
	}
	if err := readmodel.CheckMigrated(t.Context(), pool); !errors.Is(err, readmodel.ErrNotMigrated) {
		t.Errorf("got %v, want ErrNotMigrated", err)
	}
}

func TestMigrate_ManyCallersAtOnce(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	pool, err := readmodel.Open(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := readmodel.CheckMigrated(t.Context(), pool); !errors.Is(err, readmodel.ErrNotMigrated) {
		t.Fatalf("before migration: got %v, want ErrNotMigrated", err)
	}
	errs := make([]error, 4)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = readmodel.Migrate(t.Context(), url) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if err := readmodel.CheckMigrated(t.Context(), pool); err != nil {
		t.Fatalf("after migration: %v", err)
	}
	for _, table := range []string{
		readmodel.TableSessions, readmodel.TableDeletedSessions, readmodel.TableExecutions, readmodel.TableBlocks, readmodel.TableEvents,
		readmodel.TableToolCalls, readmodel.TableConversations, readmodel.TableApprovals, readmodel.TableSandboxes, readmodel.TableKeys, readmodel.TablePoison, readmodel.TableCatalogueEntries, readmodel.TableCatalogueVersions,
	} {
		if n := count(t, t.Context(), url, table); n != 0 {
			t.Errorf("%s has %d rows, want none", table, n)
		}
	}
	if n := count(t, t.Context(), url, readmodel.TableCheckpoints); n != 8 {
		t.Errorf("checkpoints has %d rows, want one for each group", n)
	}
}

// TestOpen_PoolFollowsARenamedSchema tests that a pool with prepared statements reads the schema that a rebuild has put in
// place.
func TestOpen_PoolFollowsARenamedSchema(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	if err := errors.Join(readmodel.Migrate(t.Context(), url), readmodel.MigrateSchema(t.Context(), url, "shadow")); err != nil {
		t.Fatal(err)
	}
	pool, err := readmodel.Open(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	read := func() (position int64) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), "SELECT position FROM checkpoints WHERE grp = $1", 3).Scan(&position); err != nil {
			t.Fatal(err)
		}
		return position
	}
	if got := read(); got != 0 {
		t.Fatalf("position is %d, want 0", got)
	}
	if _, err := pool.Exec(t.Context(), "UPDATE shadow.checkpoints SET position = 7"); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "BEGIN; ALTER SCHEMA spool RENAME TO old; ALTER SCHEMA shadow RENAME TO spool; COMMIT"); err != nil {
		t.Fatal(err)
	}
	if got := read(); got != 7 {
		t.Errorf("after the swap position is %d, want 7", got)
	}
}

func count(t *testing.T, ctx context.Context, url, table string) (n int) {
	t.Helper()
	conn, err := readmodel.Connect(ctx, url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx) //nolint:errcheck // the test has ended
	if err := conn.QueryRow(ctx, "SELECT count(*) FROM "+table).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
