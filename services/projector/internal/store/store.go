package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/readmodel"
)

// groupLockClass is the first half of the key of each group's advisory lock in Postgres: the bytes of "spol". The second
// half is the number of the group.
const groupLockClass = 0x73706f6c

// closeTimeout is the maximum time that Store.Close waits for Postgres.
const closeTimeout = time.Second

// ErrCheckpointMoved is returned by a write if another projector or a rebuild has moved the group's checkpoint.
var ErrCheckpointMoved = errors.New("another writer moved the checkpoint")

// RowRefusedError is returned for rows that Postgres refuses because of their content, so that another attempt would fail
// too.
type RowRefusedError struct{ Err error }

func (e *RowRefusedError) Error() string { return "postgres refuses the rows: " + e.Err.Error() }

// Unwrap returns the error with which Postgres refused the rows.
func (e *RowRefusedError) Unwrap() error { return e.Err }

// Checkpoint is the position up to which a group has folded the log, and how far the end of the log was from that
// position.
type Checkpoint struct {
	Shard    int16
	Position int64  // stream sequence of the last folded commit; 0 for none
	CommitID string // "" if the commit could not be decoded
	LogTime  *time.Time
	LagMs    int64
	CaughtUp bool
}

// Store is one connection to the read models in Postgres. It must be used by one goroutine at a time.
type Store struct {
	conn   *pgx.Conn
	tables *readModelTables

	// BeforeEventsLookup is called before a statement that finds rows of events by their key, outside of any
	// transaction. A rebuild creates the key then. It may be nil.
	BeforeEventsLookup func(context.Context) error
	// Disposable is set for a rebuild: no transaction waits for the disk, because a crash of Postgres ends the rebuild, whose rows are then dropped.
	Disposable bool
}

// connectionSettings are the Postgres settings of each connection. The few statements all use primary keys, so Postgres
// plans them once, and never as scans, which are cheap only while a table is empty. A transaction without events does
// not wait for the disk: after a crash of Postgres, its rows and checkpoint are folded again together. See
// enableSynchronousCommit for transactions with events.
var connectionSettings = map[string]string{
	"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off", "jit": "off",
	"synchronous_commit": "off", "idle_in_transaction_session_timeout": "60s", "application_name": "spool-projector",
}

// Open connects to the Postgres at url and returns a Store of the read models in a schema.
func Open(ctx context.Context, url, schema string) (*Store, error) {
	conn, err := readmodel.Connect(ctx, url, schema)
	if err != nil {
		return nil, fmt.Errorf("connect to postgres: %w", err)
	}
	var b pgx.Batch
	for name, value := range connectionSettings {
		b.Queue("SELECT set_config($1, $2, false)", name, value)
	}
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		return nil, errors.Join(fmt.Errorf("set up connection: %w", err), conn.Close(ctx))
	}
	return &Store{conn: conn, tables: newTables()}, nil
}

// IsClosed reports whether the connection is closed, by Close or because it broke.
func (s *Store) IsClosed() bool { return s.conn.IsClosed() }

// BackendPID returns the process id of the Postgres backend that serves the connection; see GroupWrite.LockedBy.
func (s *Store) BackendPID() uint32 { return s.conn.PgConn().PID() }

// Close closes the connection, which releases its locks.
func (s *Store) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return s.conn.Close(ctx)
}

// PrepareGroups prepares the read models in a schema for the groups 0 to groups-1. It deletes checkpoints that a
// migration created for other groups, and the rows of another log that had more groups.
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
		s := Store{conn: conn}
		if err := s.ResetGroup(ctx, int(g)); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, "DELETE FROM checkpoints WHERE grp = $1", g); err != nil {
			return fmt.Errorf("remove the checkpoint of group %d: %w", g, err)
		}
	}
	return nil
}

// TryLockGroup tries to take a group's lock, and reports whether it succeeded. The connection holds the lock until
// UnlockGroup is called or the connection is closed. The lock is counted: each success needs a call of UnlockGroup.
func (s *Store) TryLockGroup(ctx context.Context, group int) (locked bool, err error) {
	err = s.conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1, $2)", groupLockClass, int32(group)).Scan(&locked) //nolint:gosec // there are at most 64 groups
	if err != nil {
		return false, fmt.Errorf("lock group %d: %w", group, err)
	}
	return locked, nil
}

// UnlockGroup releases a group's lock.
func (s *Store) UnlockGroup(ctx context.Context, group int) error {
	if _, err := s.conn.Exec(ctx, "SELECT pg_advisory_unlock($1, $2)", groupLockClass, int32(group)); err != nil { //nolint:gosec // there are at most 64 groups
		return fmt.Errorf("unlock group %d: %w", group, err)
	}
	return nil
}

// ReadCheckpoint reads a group's checkpoint from Postgres.
func (s *Store) ReadCheckpoint(ctx context.Context, group int) (c Checkpoint, err error) {
	err = s.conn.QueryRow(ctx, "SELECT shard, position, commit_id, log_time, lag_ms, caught_up FROM checkpoints WHERE grp = $1", group).
		Scan(&c.Shard, &c.Position, &c.CommitID, &c.LogTime, &c.LagMs, &c.CaughtUp)
	if err != nil {
		return c, fmt.Errorf("read checkpoint of group %d: %w", group, err)
	}
	return c, nil
}

// ResetGroup deletes all rows of a group and sets the group's checkpoint to the beginning of the log, so that the group is folded again. It first writes
// the checkpoint, which waits for an Apply in progress, so that the rows of that Apply are deleted too.
func (s *Store) ResetGroup(ctx context.Context, group int) error {
	var b pgx.Batch
	b.Queue(`UPDATE checkpoints SET position = 0, commit_id = '', log_time = NULL, lag_ms = 0, caught_up = false,
		updated_at = clock_timestamp() WHERE grp = $1`, group)
	for _, t := range []string{
		readmodel.TableExecutions, readmodel.TableBlocks, readmodel.TableEvents, readmodel.TableToolCalls, readmodel.TableConversations, readmodel.TableApprovals, readmodel.TableSandboxes,
		readmodel.TableFiles, readmodel.TableUsage, readmodel.TableSessionStates,
	} {
		b.Queue("DELETE FROM "+t+" r USING sessions s WHERE s.grp = $1 AND r.tenant = s.tenant AND r.session = s.id", group)
	}
	for _, t := range []string{readmodel.TableBlocks, readmodel.TableEvents} { // these rows of deleted sessions are kept until they are retired
		b.Queue("DELETE FROM "+t+" r USING deleted_sessions d WHERE d.grp = $1 AND r.tenant = d.tenant AND r.session = d.id", group)
	}
	for _, t := range []string{readmodel.TableSessions, readmodel.TableDeletedSessions, readmodel.TableKeys, readmodel.TableCatalogueEntries, readmodel.TableCatalogueVersions, readmodel.TablePoison,
		readmodel.TableTenantUsage, readmodel.TableTenantBudgets, readmodel.TableTenantLimits, readmodel.TableAudit} {
		b.Queue("DELETE FROM "+t+" WHERE grp = $1", group)
	}
	if err := s.conn.SendBatch(ctx, &b).Close(); err != nil {
		return fmt.Errorf("reset group %d: %w", group, err)
	}
	return nil
}
