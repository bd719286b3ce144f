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

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Schema is the Postgres schema that holds the read models. Connections of
// Open and Connect find the tables without it. A rebuild puts another schema
// in its place between two statements, so a read that needs more than one
// statement must not run them in one repeatable-read transaction.
const Schema = "spool"

// The schemas of a rebuild.
const (
	ShadowSchema  = Schema + "_shadow"  // is folded into, and then renamed to Schema
	RetiredSchema = Schema + "_retired" // was Schema before
)

// The tables, with the contents that migrations/ describes.
const (
	Checkpoints     = "checkpoints"
	Sessions        = "sessions"
	DeletedSessions = "deleted_sessions"
	Executions      = "executions"
	Blocks          = "blocks"
	Events          = "events"
	TextInFlight    = "text_in_flight"
	ToolCalls       = "tool_calls"
	Conversations   = "conversations"
	Sandboxes       = "sandboxes"
	Files           = "files"
	Usage           = "usage"
	Keys            = "keys"
	Poison          = "poison"

	CatalogueEntries  = "catalogue_entries"
	CatalogueVersions = "catalogue_versions"

	TenantUsage   = "tenant_usage"
	TenantBudgets = "tenant_budgets"
	TenantLimits  = "tenant_limits"

	Audit = "audit"

	SessionStates = "session_states"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrateLock is the advisory lock under which schemas are migrated: the bytes of "spoolmig".
const migrateLock = 0x73706f6f6c6d6967

// versionTable is goose's, with the migrations that a schema has.
const versionTable = "goose_db_version"

// undefinedTable is Postgres's code for a table that is not there.
const undefinedTable = "42P01"

// ErrNotMigrated is a database whose read models are missing or older than this program.
var ErrNotMigrated = errors.New("the read models are not installed or out of date: start the projector, which migrates them")

// Group is the projector group, and so the row of checkpoints, that a session's rows come by.
func Group(session string) int { return topology.GroupOf(events.Partition(session)) }

// Migrate creates the schema of the read models, or brings it up to date, and
// lets GatewayRole read it, if the server has that role. It is idempotent, and
// several callers may run it at once.
func Migrate(ctx context.Context, url string) error { return MigrateSchema(ctx, url, Schema) }

// MigrateSchema is Migrate for a schema of another name, which a rebuild folds into.
func MigrateSchema(ctx context.Context, url, schema string) (err error) {
	cfg, err := connConfig(url, schema)
	if err != nil {
		return err
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("migrate the read models: %w", err)
	}
	// Closing the connection gives the lock back.
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", int64(migrateLock)); err != nil {
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
	if err := grantGateway(ctx, conn, schema); err != nil {
		return fmt.Errorf("migrate schema %s: grant to %s: %w", schema, GatewayRole, err)
	}
	return nil
}

// Open makes a pool whose connections find the read models' tables by name. It
// does not connect yet; settings of the pool may stand in the URL (pool_max_conns).
func Open(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	settle(cfg.ConnConfig, Schema)
	return pgxpool.NewWithConfig(ctx, cfg)
}

// Connect makes one connection that finds the tables of a schema by name.
func Connect(ctx context.Context, url, schema string) (*pgx.Conn, error) {
	cfg, err := connConfig(url, schema)
	if err != nil {
		return nil, err
	}
	return pgx.ConnectConfig(ctx, cfg)
}

// Check reports ErrNotMigrated unless the schema is there and as new as this program.
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	need, err := latestMigration()
	if err != nil {
		return err
	}
	var have int64
	err = pool.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM "+versionTable+" WHERE is_applied").Scan(&have)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == undefinedTable {
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

func connConfig(url, schema string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	settle(cfg, schema)
	return cfg, nil
}

// settle makes a dead peer known in seconds, on both sides: a projector's lock must not outlive its machine by hours.
func settle(cfg *pgx.ConnConfig, schema string) {
	cfg.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	cfg.RuntimeParams["tcp_keepalives_idle"] = "5"
	cfg.RuntimeParams["tcp_keepalives_interval"] = "2"
	cfg.RuntimeParams["tcp_keepalives_count"] = "3"
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 5 * time.Second
	}
}
