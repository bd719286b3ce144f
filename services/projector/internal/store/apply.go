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

// minRowsForCopy is the number of new rows from which Apply writes them with COPY. For fewer rows, one round trip for
// all changes is cheaper.
const minRowsForCopy = 500

// GroupWrite holds what a transaction writes for one projector group: the changed rows and the group's checkpoint.
type GroupWrite struct {
	Group    int
	Previous int64 // position of the checkpoint on which the changes are based
	Next     Checkpoint
	Changes  *fold.Changes
	// LockedBy is the backend that must hold the group's lock when the write begins, see Store.BackendPID. 0 means that
	// the writer is known to hold the lock, or needs none.
	LockedBy uint32
}

// IsBulk reports whether the write has so many new rows that Apply uses COPY. The caller should not pass such a write
// to ApplyTogether, which never uses COPY.
func (w GroupWrite) IsBulk() bool {
	c := w.Changes
	return len(c.Events)+len(c.Blocks.New)+len(c.Executions.New)+len(c.Sessions.New)+len(c.Calls.New)+len(c.Files.New) >= minRowsForCopy
}

// queueCheckpoint queues the statement that moves the group's checkpoint from w.Previous to w.Next. It must be the first
// statement of the transaction: it fails if another writer has moved the checkpoint. If w.LockedBy does not hold the
// group's lock, it fails in the same way, because the statement then expects a position below -1, which no checkpoint
// has.
func (s *Store) queueCheckpoint(b *pgx.Batch, w GroupWrite) {
	b.Queue(`SELECT advance($1::smallint, CASE WHEN $2::int = 0 OR EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted
		AND pid = $2 AND classid = $3::oid AND objid = $1::smallint::int::oid AND objsubid = 2) THEN $4::bigint ELSE -2 END, $5, $6, $7, $8, $9, $10, NULL)`,
		int16(w.Group), int32(w.LockedBy), uint32(groupLockClass), w.Previous, //nolint:gosec // there are at most 64 groups, and a process id is an int32
		w.Next.Position, w.Next.Shard, w.Next.CommitID, w.Next.LogTime, w.Next.LagMs, w.Next.CaughtUp)
}

// enableSynchronousCommit is the SQL statement that makes the commit of the transaction wait for the disk. Events are
// announced to clients after the commit, and a crash of Postgres must not put the read models behind a cursor that a
// client has received.
const enableSynchronousCommit = "SELECT set_config('synchronous_commit', 'on', true)"

// needsSynchronousCommit reports whether the transaction that writes w must wait for the disk, because it writes
// events.
func (s *Store) needsSynchronousCommit(w GroupWrite) bool {
	return len(w.Changes.Events) > 0 && !s.Disposable
}

// Apply writes the changed rows and the checkpoint of a group in one transaction. It returns ErrCheckpointMoved if
// another writer has moved the checkpoint or the group's lock is lost, and a *RowRefusedError if Postgres refuses a
// row.
func (s *Store) Apply(ctx context.Context, w GroupWrite) error {
	if len(w.Changes.Retired) > 0 {
		if err := s.callBeforeEventsLookup(ctx); err != nil {
			return err
		}
	}
	var b pgx.Batch
	s.queueCheckpoint(&b, w)
	if s.needsSynchronousCommit(w) {
		b.Queue(enableSynchronousCommit)
	}
	s.queueDeletions(&b, w.Changes)
	if w.IsBulk() {
		return classifyError(pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error { return s.writeBulk(ctx, tx, &b, w.Changes) }))
	}
	s.queueUpserts(&b, w.Changes)
	s.queueExecutionEnds(&b, w.Changes)
	// A batch without BEGIN is one transaction in one round trip.
	return classifyError(s.conn.SendBatch(ctx, &b).Close())
}

// ApplyTogether writes the changes and checkpoints of several groups, in ascending order of the groups, in one transaction and one round trip.
// After an error nothing is written; if the connection is closed, it is not known whether everything or nothing is. failed is the index of
// the write that failed, with an error like that of Apply, or -1 if the error concerns all writes.
func (s *Store) ApplyTogether(ctx context.Context, list []GroupWrite) (failed int, err error) {
	if len(list) > 1 {
		err := s.applyMerged(ctx, list)
		if err == nil || s.conn.IsClosed() {
			return -1, err
		}
	}
	// Find the write that failed.
	return s.applySeparately(ctx, list)
}

// applyMerged writes the rows and checkpoints of several groups, with one statement for each table.
func (s *Store) applyMerged(ctx context.Context, list []GroupWrite) error {
	var b pgx.Batch
	args := make([]any, 0, 8)
	for _, column := range []func(GroupWrite) any{
		func(w GroupWrite) any { return w.Group }, func(w GroupWrite) any { return w.Previous }, func(w GroupWrite) any { return w.Next.Position }, func(w GroupWrite) any { return w.Next.Shard },
		func(w GroupWrite) any { return w.Next.CommitID }, func(w GroupWrite) any { return w.Next.LogTime }, func(w GroupWrite) any { return w.Next.LagMs }, func(w GroupWrite) any { return w.Next.CaughtUp },
	} {
		values := make([]any, len(list))
		for i, w := range list {
			values[i] = column(w)
		}
		args = append(args, values)
	}
	// The checkpoints are locked first, and in the same order by every transaction, so that two of them cannot wait for
	// each other.
	b.Queue(`SELECT advance(g, previous, next, shard, commit_id, log_time, lag, caught_up, NULL)
		FROM unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::smallint[], $5::text[], $6::timestamptz[], $7::bigint[], $8::boolean[])
		AS k(g, previous, next, shard, commit_id, log_time, lag, caught_up)`, args...)
	if slices.ContainsFunc(list, s.needsSynchronousCommit) {
		b.Queue(enableSynchronousCommit)
	}
	all := mergeChanges(list)
	s.queueDeletions(&b, all)
	s.queueUpserts(&b, all)
	s.queueExecutionEnds(&b, all)
	return s.conn.SendBatch(ctx, &b).Close()
}

// applySeparately writes the rows and checkpoints of several groups in one transaction, with separate statements for
// each group, so that it can return which write failed. Its results are those of ApplyTogether.
func (s *Store) applySeparately(ctx context.Context, list []GroupWrite) (failed int, err error) {
	var b pgx.Batch
	var owners []int // by statement: the index of its write
	for i, w := range list {
		s.queueCheckpoint(&b, w)
		owners = append(owners, i)
	}
	for i, w := range list {
		if s.needsSynchronousCommit(w) {
			b.Queue(enableSynchronousCommit)
		}
		s.queueDeletions(&b, w.Changes)
		s.queueUpserts(&b, w.Changes)
		s.queueExecutionEnds(&b, w.Changes)
		for len(owners) < b.Len() {
			owners = append(owners, i)
		}
	}
	results := s.conn.SendBatch(ctx, &b)
	for _, i := range owners {
		if _, err := results.Exec(); err != nil {
			_ = results.Close() // returns the same error
			if s.conn.IsClosed() {
				return -1, err
			}
			return i, classifyError(err)
		}
	}
	return -1, classifyError(results.Close())
}

// mergeChanges returns the changes of all writes as one. No two groups change the same row.
func mergeChanges(list []GroupWrite) *fold.Changes {
	var all fold.Changes
	for _, w := range list {
		c := w.Changes
		all.Gone, all.Retired, all.AuditGone = append(all.Gone, c.Gone...), append(all.Retired, c.Retired...), append(all.AuditGone, c.AuditGone...)
		all.Events, all.Deleted, all.Poison = append(all.Events, c.Events...), append(all.Deleted, c.Deleted...), append(all.Poison, c.Poison...)
		all.Audit, all.States, all.Ended = append(all.Audit, c.Audit...), append(all.States, c.States...), append(all.Ended, c.Ended...)
		appendRows(&all.Sessions, c.Sessions)
		appendRows(&all.Executions, c.Executions)
		appendRows(&all.Blocks, c.Blocks)
		appendRows(&all.Calls, c.Calls)
		appendRows(&all.Conversations, c.Conversations)
		appendRows(&all.Approvals, c.Approvals)
		appendRows(&all.Sandboxes, c.Sandboxes)
		appendRows(&all.Files, c.Files)
		appendRows(&all.Usage, c.Usage)
		appendRows(&all.Keys, c.Keys)
		appendRows(&all.Entries, c.Entries)
		appendRows(&all.Versions, c.Versions)
		appendRows(&all.TenantUsage, c.TenantUsage)
		appendRows(&all.TenantBudgets, c.TenantBudgets)
		appendRows(&all.TenantLimits, c.TenantLimits)
	}
	return &all
}

// appendRows appends the new and the changed rows to those of to.
func appendRows[R any](to *fold.ChangedRows[R], rows fold.ChangedRows[R]) {
	to.New, to.Changed = append(to.New, rows.New...), append(to.Changed, rows.Changed...)
}

// callBeforeEventsLookup calls the function Store.BeforeEventsLookup, if it is set.
func (s *Store) callBeforeEventsLookup(ctx context.Context) error {
	if s.BeforeEventsLookup == nil {
		return nil
	}
	return s.BeforeEventsLookup(ctx)
}

// writeBulk writes changes with many new rows in the transaction tx: it sends the statements in first, copies the new
// rows with COPY, and then sends the other statements.
func (s *Store) writeBulk(ctx context.Context, tx pgx.Tx, first *pgx.Batch, c *fold.Changes) error {
	if err := tx.SendBatch(ctx, first).Close(); err != nil {
		return err
	}
	t := s.tables
	var rest fold.Changes
	for _, err := range []error{
		copyNewRows(ctx, tx, t.sessions, c.Sessions, &rest.Sessions), copyNewRows(ctx, tx, t.executions, c.Executions, &rest.Executions),
		copyNewRows(ctx, tx, t.blocks, c.Blocks, &rest.Blocks), copyNewRows(ctx, tx, t.calls, c.Calls, &rest.Calls),
		copyNewRows(ctx, tx, t.conversations, c.Conversations, &rest.Conversations), copyNewRows(ctx, tx, t.approvals, c.Approvals, &rest.Approvals),
		copyNewRows(ctx, tx, t.sandboxes, c.Sandboxes, &rest.Sandboxes),
		copyNewRows(ctx, tx, t.files, c.Files, &rest.Files), copyNewRows(ctx, tx, t.usage, c.Usage, &rest.Usage),
		copyRowsInto(ctx, tx, t.events, c.Events),
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
	s.queueUpserts(&last, &rest)
	s.queueExecutionEnds(&last, &rest)
	if last.Len() == 0 {
		return nil
	}
	return tx.SendBatch(ctx, &last).Close()
}

// copyNewRows inserts the new rows of a table with COPY if they are many. It sets rest to the rows that the caller must
// still write.
func copyNewRows[R any](ctx context.Context, tx pgx.Tx, t table[R], rows fold.ChangedRows[R], rest *fold.ChangedRows[R]) error {
	rest.Changed = rows.Changed
	if len(rows.New) < minRowsForCopy/5 {
		rest.New = rows.New
		return nil
	}
	return copyRowsInto(ctx, tx, t, rows.New)
}

// copyRowsInto inserts rows into the Postgres table t with COPY.
func copyRowsInto[R any](ctx context.Context, tx pgx.Tx, t table[R], rows []*R) error {
	if len(rows) == 0 {
		return nil
	}
	_, err := tx.CopyFrom(ctx, pgx.Identifier{t.name}, t.names, t.copySource(rows))
	return err
}

// queueDeletions queues the statements that delete the rows of deleted and retired sessions: those in c.Gone,
// c.AuditGone and c.Retired.
func (s *Store) queueDeletions(b *pgx.Batch, c *fold.Changes) {
	if len(c.Gone) > 0 {
		tenants, ids := splitKeys(c.Gone)
		for _, t := range []string{
			readmodel.TableExecutions, readmodel.TableToolCalls, readmodel.TableConversations, readmodel.TableApprovals, readmodel.TableSandboxes,
			readmodel.TableFiles, readmodel.TableUsage, readmodel.TableSessionStates,
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
		b.Queue(deleteStatement(readmodel.TableBlocks), tenants, ids)
		b.Queue(deleteStatement(readmodel.TableEvents), tenants, ids)
	}
}

// deleteStatement returns the SQL statement that deletes all rows of given sessions from a table.
func deleteStatement(table string) string {
	return "DELETE FROM " + table + " r USING unnest($1::text[], $2::text[]) AS k(tenant, session) WHERE r.tenant = k.tenant AND r.session = k.session"
}

// queueUpserts queues the statements that write the new and the changed rows of all tables.
func (s *Store) queueUpserts(b *pgx.Batch, c *fold.Changes) {
	t := s.tables
	queueUpsert(b, t.sessions, c.Sessions)
	queueUpsert(b, t.executions, c.Executions)
	queueUpsert(b, t.blocks, c.Blocks)
	queueUpsert(b, t.calls, c.Calls)
	queueUpsert(b, t.conversations, c.Conversations)
	queueUpsert(b, t.approvals, c.Approvals)
	queueUpsert(b, t.sandboxes, c.Sandboxes)
	queueUpsert(b, t.files, c.Files)
	queueUpsert(b, t.usage, c.Usage)
	queueUpsert(b, t.keys, c.Keys)
	queueUpsert(b, t.entries, c.Entries)
	queueUpsert(b, t.versions, c.Versions)
	queueUpsert(b, t.tenantUsage, c.TenantUsage)
	queueUpsert(b, t.tenantBudgets, c.TenantBudgets)
	queueUpsert(b, t.tenantLimits, c.TenantLimits)
	if len(c.Events) > 0 {
		b.Queue(t.events.insert, t.events.columnArrays(c.Events)...)
	}
	if len(c.States) > 0 {
		b.Queue(t.states.upsert, t.states.columnArrays(c.States)...)
	}
	if len(c.Deleted) > 0 {
		b.Queue(t.deleted.upsert, t.deleted.columnArrays(c.Deleted)...)
	}
	if len(c.Audit) > 0 {
		// The row of a commit never changes. A different claim about it in another session's run_retired is ignored.
		b.Queue(t.audit.insert+" ON CONFLICT DO NOTHING", t.audit.columnArrays(c.Audit)...)
	}
	if len(c.Poison) > 0 {
		b.Queue(t.poison.upsert, t.poison.columnArrays(c.Poison)...)
	}
}

// queueExecutionEnds queues the statements that end the open calls, sub-agents and approval requests of the ended
// executions in c.Ended, because some of their rows may not have been in memory.
func (s *Store) queueExecutionEnds(b *pgx.Batch, c *fold.Changes) {
	if len(c.Ended) == 0 {
		return
	}
	var tenants, sessions, ids []string
	var at []time.Time
	var seqs []int64
	for _, e := range c.Ended {
		tenants, sessions, ids, at = append(tenants, e.Session.Tenant), append(sessions, e.Session.ID), append(ids, e.Execution), append(at, e.At)
		seqs = append(seqs, e.Seq)
	}
	for _, sql := range []string{
		"UPDATE tool_calls r SET status = 'error', ended_at = k.at FROM k WHERE r.tenant = k.tenant AND r.session = k.session AND r.execution = k.execution AND r.status = 'pending'",
		"UPDATE conversations r SET status = 'failed', ended_at = k.at FROM k WHERE r.tenant = k.tenant AND r.session = k.session AND r.execution = k.execution AND r.status = 'running'",
		"UPDATE approvals r SET status = 'retracted', cause = '" + fold.CauseExecutionEnded + "', ended_seq = k.seq, ended_at = k.at FROM k WHERE r.tenant = k.tenant AND r.session = k.session AND r.execution = k.execution AND r.ended_seq = 0",
	} {
		b.Queue("WITH k AS (SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::int8[]) AS k(tenant, session, execution, at, seq)) "+sql, tenants, sessions, ids, at, seqs)
	}
}

// queueUpsert queues the statement that writes the new and changed rows of a table, if there are any.
func queueUpsert[R any](b *pgx.Batch, t table[R], rows fold.ChangedRows[R]) {
	if rows.Len() > 0 {
		all := append(append(make([]*R, 0, rows.Len()), rows.New...), rows.Changed...)
		b.Queue(t.upsert, t.columnArrays(all)...)
	}
}

// splitKeys returns the tenants and the ids of keys as two arrays, the arguments of an SQL statement.
func splitKeys(list []fold.RowKey) (tenants, ids []string) {
	for _, k := range list {
		tenants, ids = append(tenants, k.Tenant), append(ids, k.ID)
	}
	return tenants, ids
}

// splitChildKeys returns the tenants, the sessions and the ids of keys as three arrays, the arguments of an SQL
// statement.
func splitChildKeys(list []fold.ChildKey) (tenants, sessions, ids []string) {
	for _, c := range list {
		tenants, sessions, ids = append(tenants, c.Session.Tenant), append(sessions, c.Session.ID), append(ids, c.ID)
	}
	return tenants, sessions, ids
}

// classifyError converts an error of a transaction: it returns a *RowRefusedError for errors that a retry cannot resolve, an
// error that wraps ErrCheckpointMoved if the checkpoint was moved, and other errors unchanged.
func classifyError(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err
	}
	switch {
	case pg.Code == "SP001":
		return fmt.Errorf("%w: %s", ErrCheckpointMoved, pg.Message)
	case IsRowRefusal(pg):
		return &RowRefusedError{err}
	}
	return err
}

// IsRowRefusal reports whether an error concerns the content of rows: a data exception, the violation of an integrity
// constraint, or an exceeded limit.
func IsRowRefusal(err *pgconn.PgError) bool {
	return len(err.Code) > 2 && slices.Contains([]string{"22", "23", "54"}, err.Code[:2])
}
