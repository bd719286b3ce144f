package readmodel

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
)

// Schema is the Postgres schema of the read models. Connections of Open and Connect find its tables without the
// schema's name. A rebuild may replace the schema between two statements, so a repeatable-read transaction must have
// only one statement.
const Schema = "spool"

// The schemas of a rebuild.
const (
	ShadowSchema  = Schema + "_shadow"  // the new read models, renamed to Schema at the end
	RetiredSchema = Schema + "_retired" // the former Schema
)

// The tables. migrations/ describes their contents.
const (
	TableCheckpoints     = "checkpoints"
	TableSessions        = "sessions"
	TableDeletedSessions = "deleted_sessions"
	TableExecutions      = "executions"
	TableBlocks          = "blocks"
	TableEvents          = "events"
	TableToolCalls       = "tool_calls"
	TableConversations   = "conversations"
	TableApprovals       = "approvals"
	TableSandboxes       = "sandboxes"
	TableFiles           = "files"
	TableUsage           = "usage"
	TableKeys            = "keys"
	TablePoison          = "poison"

	TableCatalogueEntries  = "catalogue_entries"
	TableCatalogueVersions = "catalogue_versions"

	TableTenantUsage   = "tenant_usage"
	TableTenantBudgets = "tenant_budgets"
	TableTenantLimits  = "tenant_limits"

	TableAudit = "audit"

	TableSessionStates = "session_states"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrationLock is the id of the Postgres advisory lock that is held during migrations: the bytes of "spoolmig".
const migrationLock = 0x73706f6f6c6d6967

// versionTable is the table in which goose records the migrations that a schema has.
const versionTable = "goose_db_version"

// undefinedTableCode is Postgres's error code for a table that does not exist.
const undefinedTableCode = "42P01"

// ErrNotMigrated is returned if the read models are missing or older than this program.
var ErrNotMigrated = errors.New("the read models are not installed or out of date: start the projector, which migrates them")

// Migrate creates or updates the schema of the read models, and grants GatewayRole read access if the server has that
// role. It is idempotent, and several callers may run it at the same time.
func Migrate(ctx context.Context, url string) error { return MigrateSchema(ctx, url, Schema) }

// MigrateSchema is like Migrate for a schema with another name, into which `spool rebuild` folds the log.
func MigrateSchema(ctx context.Context, url, schema string) (err error) {
	cfg, err := parseConnConfig(url, schema)
	if err != nil {
		return err
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("migrate the read models: %w", err)
	}
	// Closing the connection releases the lock.
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", int64(migrationLock)); err != nil {
		return fmt.Errorf("migrate the read models: wait for other migrations: %w", err)
	}
	if _, err := conn.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+pgx.Identifier{schema}.Sanitize()); err != nil {
		return fmt.Errorf("create schema %s: %w", schema, err)
	}
	db := stdlib.OpenDB(*cfg)
	defer func() { err = errors.Join(err, db.Close()) }()
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files)
	if err != nil {
		return fmt.Errorf("migrate schema %s: %w", schema, err)
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("migrate schema %s: %w", schema, err)
	}
	if err := grantGatewayRead(ctx, conn, schema); err != nil {
		return fmt.Errorf("migrate schema %s: grant to %s: %w", schema, GatewayRole, err)
	}
	return nil
}

// Open creates a connection pool whose connections find the tables of the read models by name. It does not connect yet.
// The URL may contain settings of the pool, such as pool_max_conns.
func Open(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	setTimeouts(cfg.ConnConfig, Schema)
	return pgxpool.NewWithConfig(ctx, cfg)
}

// Connect opens one connection that finds the tables of a schema by name.
func Connect(ctx context.Context, url, schema string) (*pgx.Conn, error) {
	cfg, err := parseConnConfig(url, schema)
	if err != nil {
		return nil, err
	}
	return pgx.ConnectConfig(ctx, cfg)
}

// CheckMigrated returns ErrNotMigrated unless the schema of the read models exists and has all migrations of this
// program.
func CheckMigrated(ctx context.Context, pool *pgxpool.Pool) error {
	need, err := latestMigration()
	if err != nil {
		return err
	}
	var have int64
	err = pool.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM "+versionTable+" WHERE is_applied").Scan(&have)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == undefinedTableCode {
		return ErrNotMigrated
	}
	if err != nil {
		return fmt.Errorf("look for the read models: %w", err)
	}
	if have < need {
		return ErrNotMigrated
	}
	return nil
}

// latestMigration returns the number of the last migration. Numbers may have gaps.
func latestMigration() (int64, error) {
	list, err := fs.ReadDir(migrations, "migrations") // sorted by name
	if err != nil {
		return 0, err
	}
	return goose.NumericComponent(list[len(list)-1].Name())
}

func parseConnConfig(url, schema string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	setTimeouts(cfg, schema)
	return cfg, nil
}

// setTimeouts sets timeouts of a Postgres connection so that both sides detect a dead peer in seconds. Otherwise a
// projector's lock could outlive its machine by hours.
func setTimeouts(cfg *pgx.ConnConfig, schema string) {
	cfg.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	cfg.RuntimeParams["tcp_keepalives_idle"] = "5"
	cfg.RuntimeParams["tcp_keepalives_interval"] = "2"
	cfg.RuntimeParams["tcp_keepalives_count"] = "3"
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 5 * time.Second
	}
}
