package readmodel_test

import (
	"database/sql"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// TestMigrate_FillsTitlesOfOlderSessions tests that sessions and executions that an older version projected get the
// same titles and queries as in a new fold.
func TestMigrate_FillsTitlesOfOlderSessions(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	conn, err := readmodel.Connect(t.Context(), url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	db := stdlib.OpenDB(*conn.Config())
	defer db.Close()
	migrateDown(t, db, 5)
	for _, statement := range []string{
		`INSERT INTO sessions (tenant, id, grp, status, agent, agent_version, architecture, provider, options, created_at, updated_at, tip, tip_position)
			SELECT 't', 'ses_' || n, 0, 'open', 'default', '1', 'spool', 'local', '{}', now(), now(), 1, '0-1' FROM generate_series(1, 5) n`,
		`INSERT INTO executions (tenant, session, id, ord, phase, queued_at, first_seq) SELECT 't', 'ses_' || n, 'exe_' || n, 0, 'completed', now(), 1 FROM generate_series(1, 4) n`,
		`INSERT INTO executions (tenant, session, id, ord, phase, queued_at, first_seq) VALUES ('t', 'ses_1', 'exe_second', 1, 'completed', now(), 9)`,
		`INSERT INTO blocks SELECT 't', 'ses_' || n, 'blk_' || n, 'exe_' || n, 'main', 'user_message', 'complete', 0, 1, 1, (ARRAY[
			'{"content":"first"}', '{"parts":[{"type":"image","data":"AA=="},{"type":"text","text":""},{"type":"text","text":"of a part"}]}',
			'{"content":"a\u0000b \\u0000 \\\u0000"}', '{"content":"' || repeat('é', 1200) || '"}'])[n] FROM generate_series(1, 4) n`,
		`INSERT INTO blocks VALUES ('t', 'ses_1', 'blk_second', 'exe_second', 'main', 'user_message', 'complete', 1, 9, 9, '{"content":"second"}'),
			('t', 'ses_1', 'blk_later', 'exe_1', 'main', 'user_message', 'complete', 1, 20, 20, '{"content":"later"}'),
			('t', 'ses_1', 'blk_other', 'exe_1', 'main', 'assistant_text', 'complete', 0, 0, 0, 'no JSON')`,
	} {
		if _, err := db.ExecContext(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]struct {
		title  string
		length int
	}{"ses_1": {"first", 5}, "ses_2": {"of a part", 9}, "ses_3": {"a\uFFFDb \\u0000 \\\uFFFD", 13}, "ses_4": {"", 1000}, "ses_5": {"", 0}} {
		var title, query string
		var length int
		err := db.QueryRowContext(t.Context(), `SELECT title, length(title), coalesce((SELECT query FROM executions WHERE session = s.id AND ord = 0), '')
			FROM sessions s WHERE id = $1`, id).Scan(&title, &length, &query)
		if err != nil || length != want.length || want.title != "" && title != want.title || query != title {
			t.Errorf("%s: title %q of %d characters, query %q, %v; want %q of %d", id, title, length, query, err, want.title, want.length)
		}
	}
}

// migrateDown reverts migrations down to a version.
func migrateDown(t *testing.T, db *sql.DB, version int64) {
	t.Helper()
	provider, err := goose.NewProvider(goose.DialectPostgres, db, readmodel.Migrations())
	if err == nil {
		_, err = provider.DownTo(t.Context(), version)
	}
	if err != nil && !errors.Is(err, goose.ErrNoNextVersion) {
		t.Fatal(err)
	}
}

// TestMigrate_FoldsAgainBeforeItIsReady tests that groups that a migration causes to be folded again are not caught
// up until the fold is complete.
func TestMigrate_FoldsAgainBeforeItIsReady(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	conn, err := readmodel.Connect(t.Context(), url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	db := stdlib.OpenDB(*conn.Config())
	defer db.Close()
	migrateDown(t, db, 6)
	if _, err := db.ExecContext(t.Context(), "UPDATE checkpoints SET position = 7, caught_up = true"); err != nil {
		t.Fatal(err)
	}
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	var groups, ready int
	if err := db.QueryRowContext(t.Context(), "SELECT count(*), count(*) FILTER (WHERE caught_up) FROM checkpoints").Scan(&groups, &ready); err != nil || groups == 0 || ready != 0 {
		t.Errorf("%d of %d groups count as caught up, %v", ready, groups, err)
	}
}
