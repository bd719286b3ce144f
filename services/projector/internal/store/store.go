package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// lockClass is the first half of the groups' advisory locks: the bytes of "spol". The second half is the group.
const lockClass = 0x73706f6c

// copyRows is the number of new rows above which COPY is cheaper than one round trip for all changes.
const copyRows = 500

// closeTimeout bounds how long closing the connection may take.
const closeTimeout = time.Second

// ErrMoved is returned if another projector or a rebuild has moved the checkpoint.
var ErrMoved = errors.New("another writer moved the checkpoint")

// RefusedError reports rows that Postgres refuses permanently.
type RefusedError struct{ Err error }

func (e *RefusedError) Error() string { return "postgres refuses the rows: " + e.Err.Error() }

// Unwrap returns Postgres's error.
func (e *RefusedError) Unwrap() error { return e.Err }

// Checkpoint is the position up to which a group is folded.
type Checkpoint struct {
	Shard    int16
	Position int64  // stream sequence of the last folded commit; 0 for none
	CommitID string // "" if the commit could not be decoded
	LogTime  *time.Time
	LagMs    int64
	CaughtUp bool
}

// Store is one connection, which holds the group's lock and writes its rows, so that losing the connection ends both.
// It must be used by one goroutine.
type Store struct {
	conn   *pgx.Conn
	tables *tables
	group  int16

	// BeforeEventsLookup is called before a statement that finds rows of events by their key, outside of any
	// transaction. A rebuild creates the key then. It may be nil.
	BeforeEventsLookup func(context.Context) error
	// Disposable means that transactions with events do not wait for the disk either, because a crash of Postgres
	// ends the rebuild and its rows are dropped.
	Disposable bool
}

// settings are the connection's settings. The few statements all use primary keys, so they are planned once, and
// never as scans that were cheap while a table was empty. A transaction without events does not wait for the disk:
// after a crash of Postgres, its rows and checkpoint are folded again together. See waitForDisk for transactions
// with events.
var settings = map[string]string{
	"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off", "jit": "off",
	"synchronous_commit": "off", "idle_in_transaction_session_timeout": "60s", "application_name": "spool-projector",
}

// Open connects to the read models in a schema, for one group.
func Open(ctx context.Context, url, schema string, group int) (*Store, error) {
	conn, err := readmodel.Connect(ctx, url, schema)
	if err != nil {
		return nil, fmt.Errorf("connect to postgres: %w", err)
	}
	var b pgx.Batch
	for name, value := range settings {
		b.Queue("SELECT set_config($1, $2, false)", name, value)
	}
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		return nil, errors.Join(fmt.Errorf("set up connection: %w", err), conn.Close(ctx))
	}
	return &Store{conn: conn, tables: newTables(), group: int16(group)}, nil
}

// Close closes the connection, which releases the lock.
func (s *Store) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return s.conn.Close(ctx)
}

// PrepareGroups makes the read models in a schema ready for groups 0 to groups-1. Checkpoints that a migration created
// for other groups are removed, and with them the rows of another log whose number of groups was larger.
func PrepareGroups(ctx context.Context, url, schema string, groups int) (err error) {
	conn, err := readmodel.Connect(ctx, url, schema)
	if err != nil {
		return fmt.Errorf("connect to postgres: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if _, err := conn.Exec(ctx, "INSERT INTO checkpoints (grp) SELECT generate_series(0, $1::int - 1) ON CONFLICT DO NOTHING", groups); err != nil {
		return fmt.Errorf("create checkpoints of %d groups: %w", groups, err)
	}
	rows, err := conn.Query(ctx, "SELECT grp FROM checkpoints WHERE grp >= $1", groups)
	if err != nil {
		return fmt.Errorf("read checkpoints: %w", err)
	}
	others, err := pgx.CollectRows(rows, pgx.RowTo[int16])
	if err != nil {
		return fmt.Errorf("read checkpoints: %w", err)
	}
	for _, g := range others {
		s := Store{conn: conn, group: g}
		if err := s.Reset(ctx); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, "DELETE FROM checkpoints WHERE grp = $1", g); err != nil {
			return fmt.Errorf("remove the checkpoint of group %d: %w", g, err)
		}
	}
	return nil
}

// TryLock tries to take the group's lock, which makes this connection the group's only writer, and reports whether it
// succeeded.
func (s *Store) TryLock(ctx context.Context) (locked bool, err error) {
	err = s.conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1, $2)", lockClass, int32(s.group)).Scan(&locked)
	if err != nil {
		return false, fmt.Errorf("lock group %d: %w", s.group, err)
	}
	return locked, nil
}

// Checkpoint reads the group's checkpoint.
func (s *Store) Checkpoint(ctx context.Context) (c Checkpoint, err error) {
	err = s.conn.QueryRow(ctx, "SELECT shard, position, commit_id, log_time, lag_ms, caught_up FROM checkpoints WHERE grp = $1", s.group).
		Scan(&c.Shard, &c.Position, &c.CommitID, &c.LogTime, &c.LagMs, &c.CaughtUp)
	if err != nil {
		return c, fmt.Errorf("read checkpoint of group %d: %w", s.group, err)
	}
	return c, nil
}

// Reset deletes the group's rows and sets its checkpoint before the first commit.
func (s *Store) Reset(ctx context.Context) error {
	var b pgx.Batch
	for _, t := range []string{
		readmodel.Executions, readmodel.Blocks, readmodel.Events, readmodel.ToolCalls, readmodel.Conversations, readmodel.Sandboxes,
		readmodel.Files, readmodel.Usage, readmodel.SessionStates,
	} {
		b.Queue("DELETE FROM "+t+" r USING sessions s WHERE s.grp = $1 AND r.tenant = s.tenant AND r.session = s.id", s.group)
	}
	for _, t := range []string{readmodel.Blocks, readmodel.Events} { // these rows of deleted sessions are kept until they are retired
		b.Queue("DELETE FROM "+t+" r USING deleted_sessions d WHERE d.grp = $1 AND r.tenant = d.tenant AND r.session = d.id", s.group)
	}
	for _, t := range []string{readmodel.Sessions, readmodel.DeletedSessions, readmodel.Keys, readmodel.CatalogueEntries, readmodel.CatalogueVersions, readmodel.Poison,
		readmodel.TenantUsage, readmodel.TenantBudgets, readmodel.TenantLimits, readmodel.Audit} {
		b.Queue("DELETE FROM "+t+" WHERE grp = $1", s.group)
	}
	b.Queue(`UPDATE checkpoints SET position = 0, commit_id = '', log_time = NULL, lag_ms = 0, caught_up = false,
		updated_at = clock_timestamp() WHERE grp = $1`, s.group)
	if err := s.conn.SendBatch(ctx, &b).Close(); err != nil {
		return fmt.Errorf("reset group %d: %w", s.group, err)
	}
	return nil
}

// advance queues the update of the checkpoint, which fences the transaction and must be its first statement.
func (s *Store) advance(b *pgx.Batch, previous int64, c Checkpoint) {
	b.Queue("SELECT advance($1, $2, $3, $4, $5, $6, $7, $8, NULL)",
		s.group, previous, c.Position, c.Shard, c.CommitID, c.LogTime, c.LagMs, c.CaughtUp)
}

// waitForDisk makes the commit of the transaction wait for the disk. Events are announced to clients after the commit, and
// a crash of Postgres must not put the read models behind a cursor that a client has received.
const waitForDisk = "SELECT set_config('synchronous_commit', 'on', true)"

// Apply writes changes and checkpoint in one transaction. It returns ErrMoved if the checkpoint is not at previous
// any more, and a *RefusedError for rows that cannot be stored.
func (s *Store) Apply(ctx context.Context, previous int64, next Checkpoint, c *fold.Changes) error {
	if len(c.Retired) > 0 {
		if err := s.beforeEventsLookup(ctx); err != nil {
			return err
		}
	}
	var b pgx.Batch
	s.advance(&b, previous, next)
	if len(c.Events) > 0 && !s.Disposable {
		b.Queue(waitForDisk)
	}
	s.deletions(&b, c)
	var err error
	if countNewRows(c) < copyRows {
		s.rows(&b, c)
		s.endExecutions(&b, c)
		// A batch without BEGIN is one transaction in one round trip.
		err = s.conn.SendBatch(ctx, &b).Close()
	} else {
		err = pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error { return s.bulk(ctx, tx, &b, c) })
	}
	return refusedError(err)
}

func (s *Store) beforeEventsLookup(ctx context.Context) error {
	if s.BeforeEventsLookup == nil {
		return nil
	}
	return s.BeforeEventsLookup(ctx)
}

// bulk is Apply for many rows.
func (s *Store) bulk(ctx context.Context, tx pgx.Tx, first *pgx.Batch, c *fold.Changes) error {
	if err := tx.SendBatch(ctx, first).Close(); err != nil {
		return err
	}
	t := s.tables
	var rest fold.Changes
	for _, err := range []error{
		copyNew(ctx, tx, t.sessions, c.Sessions, &rest.Sessions), copyNew(ctx, tx, t.executions, c.Executions, &rest.Executions),
		copyNew(ctx, tx, t.blocks, c.Blocks, &rest.Blocks), copyNew(ctx, tx, t.calls, c.Calls, &rest.Calls),
		copyNew(ctx, tx, t.conversations, c.Conversations, &rest.Conversations), copyNew(ctx, tx, t.sandboxes, c.Sandboxes, &rest.Sandboxes),
		copyNew(ctx, tx, t.files, c.Files, &rest.Files), copyNew(ctx, tx, t.usage, c.Usage, &rest.Usage),
		copyInto(ctx, tx, t.events, c.Events),
	} {
		if err != nil {
			return err
		}
	}
	rest.Deleted, rest.Poison, rest.Ended, rest.Keys = c.Deleted, c.Poison, c.Ended, c.Keys
	rest.Entries, rest.Versions, rest.Audit = c.Entries, c.Versions, c.Audit
	rest.States = c.States
	rest.TenantUsage, rest.TenantBudgets, rest.TenantLimits = c.TenantUsage, c.TenantBudgets, c.TenantLimits
	var last pgx.Batch
	s.rows(&last, &rest)
	s.endExecutions(&last, &rest)
	if last.Len() == 0 {
		return nil
	}
	return tx.SendBatch(ctx, &last).Close()
}

// copyNew copies a table's new rows and leaves the changed ones in rest. If there are few new rows, it leaves all of
// them in rest.
func copyNew[R any](ctx context.Context, tx pgx.Tx, t table[R], rows fold.Rows[R], rest *fold.Rows[R]) error {
	rest.Changed = rows.Changed
	if len(rows.New) < copyRows/5 {
		rest.New = rows.New
		return nil
	}
	return copyInto(ctx, tx, t, rows.New)
}

func copyInto[R any](ctx context.Context, tx pgx.Tx, t table[R], rows []*R) error {
	if len(rows) == 0 {
		return nil
	}
	_, err := tx.CopyFrom(ctx, pgx.Identifier{t.name}, t.names, t.copySource(rows))
	return err
}

func countNewRows(c *fold.Changes) int {
	return len(c.Events) + len(c.Blocks.New) + len(c.Executions.New) + len(c.Sessions.New) + len(c.Calls.New) + len(c.Files.New)
}

// deletions queues the deletion of rows.
func (s *Store) deletions(b *pgx.Batch, c *fold.Changes) {
	if len(c.Gone) > 0 {
		tenants, ids := splitKeys(c.Gone)
		for _, t := range []string{
			readmodel.Executions, readmodel.ToolCalls, readmodel.Conversations, readmodel.Sandboxes,
			readmodel.Files, readmodel.Usage, readmodel.SessionStates,
		} {
			b.Queue(deleteStatement(t), tenants, ids)
		}
		b.Queue("DELETE FROM sessions r USING unnest($1::text[], $2::text[]) AS k(tenant, id) WHERE r.tenant = k.tenant AND r.id = k.id", tenants, ids)
	}
	if len(c.AuditGone) > 0 {
		tenants, ids := splitKeys(c.AuditGone)
		b.Queue(`DELETE FROM audit r USING unnest($1::text[], $2::text[]) AS k(tenant, session)
			WHERE r.tenant = k.tenant AND r.subject = k.session AND r.types NOT LIKE '%session\_deleted'`, tenants, ids)
	}
	if len(c.Retired) > 0 {
		tenants, ids := splitKeys(c.Retired)
		b.Queue(deleteStatement(readmodel.Blocks), tenants, ids)
		b.Queue(deleteStatement(readmodel.Events), tenants, ids)
	}
}

// deleteStatement returns the statement that deletes the rows of sessions from a table.
func deleteStatement(table string) string {
	return "DELETE FROM " + table + " r USING unnest($1::text[], $2::text[]) AS k(tenant, session) WHERE r.tenant = k.tenant AND r.session = k.session"
}

// rows queues new and changed rows.
func (s *Store) rows(b *pgx.Batch, c *fold.Changes) {
	t := s.tables
	upsert(b, t.sessions, c.Sessions)
	upsert(b, t.executions, c.Executions)
	upsert(b, t.blocks, c.Blocks)
	upsert(b, t.calls, c.Calls)
	upsert(b, t.conversations, c.Conversations)
	upsert(b, t.sandboxes, c.Sandboxes)
	upsert(b, t.files, c.Files)
	upsert(b, t.usage, c.Usage)
	upsert(b, t.keys, c.Keys)
	upsert(b, t.entries, c.Entries)
	upsert(b, t.versions, c.Versions)
	upsert(b, t.tenantUsage, c.TenantUsage)
	upsert(b, t.tenantBudgets, c.TenantBudgets)
	upsert(b, t.tenantLimits, c.TenantLimits)
	if len(c.Events) > 0 {
		b.Queue(t.events.insert, t.events.args(c.Events)...)
	}
	if len(c.States) > 0 {
		b.Queue(t.states.upsert, t.states.args(c.States)...)
	}
	if len(c.Deleted) > 0 {
		b.Queue(t.deleted.upsert, t.deleted.args(c.Deleted)...)
	}
	if len(c.Audit) > 0 {
		// The row of a commit never changes. A different claim about it in another session's run_retired is ignored.
		b.Queue(t.audit.insert+" ON CONFLICT DO NOTHING", t.audit.args(c.Audit)...)
	}
	if len(c.Poison) > 0 {
		b.Queue(t.poison.upsert, t.poison.args(c.Poison)...)
	}
}

// endExecutions queues changes of rows that end with an execution and were not in memory.
func (s *Store) endExecutions(b *pgx.Batch, c *fold.Changes) {
	if len(c.Ended) == 0 {
		return
	}
	var tenants, sessions, ids []string
	var at []time.Time
	for _, e := range c.Ended {
		tenants, sessions, ids, at = append(tenants, e.Session.Tenant), append(sessions, e.Session.ID), append(ids, e.Execution), append(at, e.At)
	}
	for _, sql := range []string{
		"UPDATE tool_calls r SET status = 'error', ended_at = k.at FROM k WHERE r.tenant = k.tenant AND r.session = k.session AND r.execution = k.execution AND r.status = 'pending'",
		"UPDATE conversations r SET status = 'failed', ended_at = k.at FROM k WHERE r.tenant = k.tenant AND r.session = k.session AND r.execution = k.execution AND r.status = 'running'",
	} {
		b.Queue("WITH k AS (SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[]) AS k(tenant, session, execution, at)) "+sql, tenants, sessions, ids, at)
	}
}

func upsert[R any](b *pgx.Batch, t table[R], rows fold.Rows[R]) {
	if rows.Len() > 0 {
		all := append(append(make([]*R, 0, rows.Len()), rows.New...), rows.Changed...)
		b.Queue(t.upsert, t.args(all)...)
	}
}

// splitKeys returns the columns of keys, as arguments for unnest.
func splitKeys(list []fold.Key) (tenants, ids []string) {
	for _, k := range list {
		tenants, ids = append(tenants, k.Tenant), append(ids, k.ID)
	}
	return tenants, ids
}

// splitChildren returns the columns of children, as arguments for unnest.
func splitChildren(list []fold.Child) (tenants, sessions, ids []string) {
	for _, c := range list {
		tenants, sessions, ids = append(tenants, c.Session.Tenant), append(sessions, c.Session.ID), append(ids, c.ID)
	}
	return tenants, sessions, ids
}

// refusedError converts an error of a transaction: it returns a *RefusedError for errors that a retry cannot resolve, an
// error that wraps ErrMoved if the checkpoint was moved, and other errors unchanged.
func refusedError(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err
	}
	switch {
	case pg.Code == "SP001":
		return fmt.Errorf("%w: %s", ErrMoved, pg.Message)
	case IsRefusal(pg):
		return &RefusedError{err}
	}
	return err
}

// IsRefusal reports whether an error concerns the content of rows: a data exception, the violation of an integrity
// constraint, or an exceeded limit.
func IsRefusal(err *pgconn.PgError) bool {
	return len(err.Code) > 2 && slices.Contains([]string{"22", "23", "54"}, err.Code[:2])
}
