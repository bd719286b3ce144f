package readmodel_test

import (
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
)

// attacks are statements that require a right that neither role has. A superuser can run them.
var attacks = map[string]string{
	"runs a program":            `COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'`,
	"reads from a program":      `COPY poison FROM PROGRAM 'true'`,
	"reads a file":              `SELECT pg_read_file('PG_VERSION')`,
	"copies a file":             `COPY poison FROM '/dev/null'`,
	"lists files":               `SELECT pg_ls_dir('.')`,
	"reads hashes of passwords": `SELECT * FROM pg_shadow`,
	"reads pg_authid":           `SELECT rolpassword FROM pg_authid`,
	"makes a role":              `CREATE ROLE spool_intruder`,
	"makes itself a superuser":  `ALTER ROLE ` + readmodel.GatewayRole + ` SUPERUSER`,
	"changes another database":  `ALTER DATABASE postgres SET work_mem = '4MB'`,
	"may run programs":          `GRANT pg_execute_server_program TO ` + readmodel.GatewayRole,
	"changes a setting":         `SET log_statement = 'none'`,
	"writes a large object":     `SELECT lo_from_bytea(0, 'x')`,
	"writes to the WAL":         `SELECT pg_logical_emit_message(false, 'x', 'y')`,
	"makes a temporary table":   `CREATE TEMP TABLE t (line text)`,
	"writes in schema public":   `CREATE TABLE public.t (line text)`,
	"writes in pg_catalog":      `UPDATE pg_catalog.pg_proc SET proname = proname WHERE false`,
	"becomes another role":      `SET ROLE spool`,
	"makes a function in C":     `CREATE FUNCTION public.f() RETURNS int LANGUAGE internal AS 'int4pl'`,
}

// readerAttacks are statements that the projector's role may run and the gateway's may not.
var readerAttacks = map[string]string{
	"reads the hashes of keys": `SELECT sha256 FROM keys`,
	"reads all of keys":        `SELECT * FROM keys`,
	"finds a key by its hash":  `SELECT id FROM keys WHERE sha256 = 'x'`,
	"sorts keys by their hash": `SELECT id FROM keys ORDER BY sha256`,
	"reads poison":             `SELECT * FROM poison`,
	"inserts a key":            `INSERT INTO keys (tenant, id, grp, name, prefix, sha256, created_at) VALUES ('t', 'k', 0, '', '', 'x', now())`,
	"brings a key back":        `UPDATE keys SET revoked_at = NULL`,
	"changes a session":        `UPDATE sessions SET tenant = 'mine'`,
	"removes events":           `DELETE FROM events`,
	"locks a row":              `SELECT * FROM checkpoints FOR UPDATE`,
	"locks a table":            `BEGIN; LOCK TABLE sessions IN ACCESS EXCLUSIVE MODE`,
	"truncates":                `TRUNCATE sessions`,
	"moves a checkpoint":       `SELECT advance(0::smallint, 0, 7, 0::smallint, 'x', now(), 0, true, now())`,
	"makes a table":            `CREATE TABLE t (line text)`,
	"makes a schema":           `CREATE SCHEMA mine`,
	"changes a table":          `ALTER TABLE sessions ADD COLUMN mine text`,
	"removes a schema":         `DROP SCHEMA spool CASCADE`,
	"changes the function":     `ALTER FUNCTION accepted_key RESET ALL`,
	"replaces the function":    `CREATE OR REPLACE FUNCTION accepted_key(hash text) RETURNS TABLE (tenant text, id text, role text, agents text) LANGUAGE sql AS 'SELECT ''t'', ''k'', ''admin'', ''''  '`,
	"accepts every key":        `CREATE OR REPLACE FUNCTION key_refusal(owner text, key text) RETURNS text LANGUAGE sql AS 'SELECT '''' '`,
	"takes an expiry away":     `UPDATE keys SET expires_at = NULL`,
	"raises the role of a key": `UPDATE keys SET role = 'admin', agents = ''`,
	"takes the projector's":    `SELECT pg_advisory_lock(1, 2)`,
	"takes a migration's lock": `SELECT pg_try_advisory_xact_lock(1)`,
	"becomes the projector":    `SET ROLE ` + readmodel.ProjectorRole,
}

// migrated returns a database with the roles, the read models and one key.
func migrated(t *testing.T) readmodeltest.RoleURLs {
	t.Helper()
	db := readmodeltest.NewDatabase(t)
	if err := readmodel.Migrate(t.Context(), db.Projector); err != nil {
		t.Fatal(err)
	}
	runStatement(t, db.Projector, `INSERT INTO keys (tenant, id, grp, name, prefix, sha256, created_at, revoked_at) VALUES
		('t', 'key_1', 0, 'one', 'spool_sk_1', 'hash-1', now(), NULL), ('t', 'key_2', 0, 'two', 'spool_sk_2', 'hash-2', now(), now())`, "")
	return db
}

// runStatement runs a statement in its own transaction. It expects an error that contains refusal, or success for "".
func runStatement(t *testing.T, url, sql, refusal string) {
	t.Helper()
	conn, err := readmodel.Connect(t.Context(), url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	_, err = conn.PgConn().Exec(t.Context(), sql).ReadAll()
	var refused *pgconn.PgError
	switch {
	case refusal == "" && err != nil:
		t.Errorf("%s: %v", sql, err)
	case refusal != "" && (!errors.As(err, &refused) || refused.Code != refusal):
		t.Errorf("%s: got %v, want SQLSTATE %s", sql, err, refusal)
	}
}

const insufficientPrivilege = "42501"

func TestRoles_RefuseAttacks(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for name, sql := range attacks {
		t.Run(name, func(t *testing.T) {
			runStatement(t, db.Projector, sql, insufficientPrivilege)
			runStatement(t, db.Gateway, sql, insufficientPrivilege)
			runStatement(t, db.Superuser, "BEGIN; "+sql+"; ROLLBACK", "") // the statement is valid
		})
	}
	for name, sql := range readerAttacks {
		t.Run(name, func(t *testing.T) { runStatement(t, db.Gateway, sql, insufficientPrivilege) })
	}
}

// TestRoles_ReachOneDatabase tests that the gateway's role can connect to no other database of the server.
func TestRoles_ReachOneDatabase(t *testing.T) {
	t.Parallel()
	db := readmodeltest.NewDatabase(t)
	for _, url := range []string{db.Gateway, db.Projector} {
		cfg, err := pgx.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"postgres", "template1"} {
			cfg.Database = name
			if conn, err := pgx.ConnectConfig(t.Context(), cfg); err == nil {
				t.Errorf("%s connects to database %s", cfg.User, name)
				_ = conn.Close(t.Context())
			}
		}
	}
}

// TestRoles_GatewayChecksKeys tests that the gateway's role finds the key of a hash unless it was revoked, and can
// read the other columns.
func TestRoles_GatewayChecksKeys(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	conn, err := readmodel.Connect(t.Context(), db.Gateway, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	for hash, want := range map[string]string{"hash-1": "t/key_1", "hash-2": "", "other": "", "%": ""} {
		var got string
		err := conn.QueryRow(t.Context(), "SELECT coalesce(string_agg(tenant || '/' || id, ','), '') FROM accepted_key($1)", hash).Scan(&got)
		if err != nil || got != want {
			t.Errorf("%s: got %q, %v, want %q", hash, got, err, want)
		}
	}
	var names string
	if err := conn.QueryRow(t.Context(), "SELECT string_agg(name, ' ' ORDER BY id) FROM keys WHERE tenant = 't'").Scan(&names); err != nil || names != "one two" {
		t.Errorf("names of keys: %q, %v", names, err)
	}
}

// TestAcceptedKey_IgnoresSearchPathOfCaller tests that neither a table of the caller nor the caller's search path
// replaces the table keys.
func TestAcceptedKey_IgnoresSearchPathOfCaller(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	runStatement(t, db.Projector, `CREATE SCHEMA trap; CREATE TABLE trap.keys AS SELECT 't' AS tenant, 'key_trap' AS id, 'hash-trap' AS sha256, NULL::timestamptz AS revoked_at;
		GRANT USAGE ON SCHEMA trap TO `+readmodel.GatewayRole, "")
	conn, err := readmodel.Connect(t.Context(), db.Gateway, "trap")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	for hash, want := range map[string]int{"hash-trap": 0, "hash-1": 1} {
		var n int
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM spool.accepted_key($1)", hash).Scan(&n); err != nil || n != want {
			t.Errorf("%s: %d keys, %v, want %d", hash, n, err, want)
		}
	}
}

// TestCreateRoles_TakesOverReadModelsOfASuperuser tests that the projector's role owns read models that a superuser
// created, as in older versions, including those that a rebuild left, and can migrate and remove them.
func TestCreateRoles_TakesOverReadModelsOfASuperuser(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	for _, schema := range []string{readmodel.Schema, readmodel.ShadowSchema, readmodel.RetiredSchema} {
		if err := readmodel.MigrateSchema(t.Context(), url, schema); err != nil {
			t.Fatal(err)
		}
	}
	db := readmodeltest.CreateRoles(t, url)
	again := readmodeltest.CreateRoles(t, url)
	if again != db {
		t.Fatal("the addresses changed")
	}
	for _, sql := range []string{
		"ALTER TABLE sessions ADD COLUMN later text", "ANALYZE sessions", "DROP FUNCTION accepted_key", "DROP TABLE goose_db_version",
		"DROP SCHEMA spool_shadow CASCADE", "DROP SCHEMA spool_retired CASCADE", "ALTER SCHEMA spool RENAME TO spool_retired",
	} {
		runStatement(t, db.Projector, sql, "")
	}
}

// TestMigrate_GrantsToGatewayRoleMadeLater tests that a migration grants access if the gateway's role was created
// after the read models.
func TestMigrate_GrantsToGatewayRoleMadeLater(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	db := readmodeltest.CreateRoles(t, url)
	if err := readmodel.Migrate(t.Context(), db.Projector); err != nil {
		t.Fatal(err)
	}
	pool, err := readmodel.Open(t.Context(), db.Gateway)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := readmodel.CheckMigrated(t.Context(), pool); err != nil {
		t.Error(err)
	}
	runStatement(t, db.Gateway, "SELECT * FROM accepted_key('x')", "")
}

func TestCreateRoles_ByManyAtOnce(t *testing.T) {
	t.Parallel()
	urls := []string{pgtest.NewDatabase(t), pgtest.NewDatabase(t), pgtest.NewDatabase(t)}
	errs := make([]error, 2*len(urls))
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = readmodel.CreateRoles(t.Context(), urls[i%len(urls)], readmodel.Passwords{}) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

func TestCreateRoles_RefusesOtherRoles(t *testing.T) {
	t.Parallel()
	db := readmodeltest.NewDatabase(t)
	if err := readmodel.CreateRoles(t.Context(), db.Projector, readmodel.Passwords{}); !errors.Is(err, readmodel.ErrNotSuperuser) {
		t.Errorf("got %v, want ErrNotSuperuser", err)
	}
}

// TestMigrate_GrantsToGatewayBesideAnotherOwner tests the statements in docs/security.md, which create the gateway's
// role in a database whose read models belong to another role.
func TestMigrate_GrantsToGatewayBesideAnotherOwner(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(doc), "```sql\n")
	block, _, ok := strings.Cut(rest, "```")
	if !ok {
		t.Fatal("docs/security.md has no SQL")
	}
	srv := pgtest.StartServer(t, pgserver.Config{Fast: true})
	runStatement(t, srv.URL(), "CREATE ROLE owner LOGIN; GRANT CREATE ON DATABASE spool TO owner", "")
	owner, gateway := readmodeltest.URLForRole(t, srv.URL(), "owner"), readmodeltest.URLForRole(t, srv.URL(), readmodel.GatewayRole)
	if err := readmodel.Migrate(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	runStatement(t, srv.URL(), block, "")
	if err := readmodel.Migrate(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	runStatement(t, gateway, "SELECT count(*) FROM sessions; SELECT * FROM accepted_key('x')", "")
	for name, sql := range readerAttacks {
		if strings.Contains(sql, "advisory") || strings.Contains(sql, readmodel.ProjectorRole) {
			continue // only CreateRoles revokes or creates this
		}
		t.Run(name, func(t *testing.T) { runStatement(t, gateway, sql, insufficientPrivilege) })
	}
}
