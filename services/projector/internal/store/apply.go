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

// copyRows is the number of new rows in a write from which Apply uses COPY for them. For fewer rows, one round trip for
// all changes is cheaper.
const copyRows = 500

// Write is what a transaction writes for one group: the changed rows and the group's checkpoint.
type Write struct {
	Group    int
	Previous int64 // position of the checkpoint on which the changes are based
	Next     Checkpoint
	Changes  *fold.Changes
	// LockedBy is the backend that must hold the group's lock when the write begins, see Store.Backend. 0 means that
	// the writer is known to hold the lock, or needs none.
	LockedBy uint32
}

// Bulk reports whether the write has so many new rows that Apply uses COPY. Such a write should not be passed to
// ApplyTogether, which never uses COPY.
func (w Write) Bulk() bool {
	c := w.Changes
	return len(c.Events)+len(c.Blocks.New)+len(c.Executions.New)+len(c.Sessions.New)+len(c.Calls.New)+len(c.Files.New) >= copyRows
}

// advance queues the statement that moves the group's checkpoint from w.Previous to w.Next. It must be the first
// statement of the transaction: it fails if another writer has moved the checkpoint. If w.LockedBy does not hold the
// group's lock, it fails in the same way, because the statement then expects a position below -1, which no checkpoint
// has.
func (s *Store) advance(b *pgx.Batch, w Write) {
	b.Queue(`SELECT advance($1::smallint, CASE WHEN $2::int = 0 OR EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted
		AND pid = $2 AND classid = $3::oid AND objid = $1::smallint::int::oid AND objsubid = 2) THEN $4::bigint ELSE -2 END, $5, $6, $7, $8, $9, $10, NULL)`,
		int16(w.Group), int32(w.LockedBy), uint32(lockClass), w.Previous, //nolint:gosec // there are at most 64 groups, and a process id is an int32
		w.Next.Position, w.Next.Shard, w.Next.CommitID, w.Next.LogTime, w.Next.LagMs, w.Next.CaughtUp)
}

// waitForDisk makes the commit of the transaction wait for the disk. Events are announced to clients after the commit, and
// a crash of Postgres must not put the read models behind a cursor that a client has received.
const waitForDisk = "SELECT set_config('synchronous_commit', 'on', true)"

// waitsForDisk reports whether the transaction of a write has to wait for the disk.
func (s *Store) waitsForDisk(w Write) bool { return len(w.Changes.Events) > 0 && !s.Disposable }

// Apply writes changes and checkpoint of a group in one transaction. It returns ErrMoved if the checkpoint is not at
// the previous position any more or the lock is lost, and a *RefusedError for rows that cannot be stored.
func (s *Store) Apply(ctx context.Context, w Write) error {
	if len(w.Changes.Retired) > 0 {
		if err := s.beforeEventsLookup(ctx); err != nil {
			return err
		}
	}
	var b pgx.Batch
	s.advance(&b, w)
	if s.waitsForDisk(w) {
		b.Queue(waitForDisk)
	}
	s.deletions(&b, w.Changes)
	if w.Bulk() {
		return refusedError(pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error { return s.bulk(ctx, tx, &b, w.Changes) }))
	}
	s.rows(&b, w.Changes)
	s.endExecutions(&b, w.Changes)
	// A batch without BEGIN is one transaction in one round trip.
	return refusedError(s.conn.SendBatch(ctx, &b).Close())
}

// ApplyTogether writes the changes and checkpoints of several groups, in ascending order of the groups, in one transaction and one round trip.
// After an error nothing is written; if the connection is closed, it is not known whether everything or nothing is. failed is the index of
// the write that failed, with an error like that of Apply, or -1 if the error concerns all writes.
func (s *Store) ApplyTogether(ctx context.Context, list []Write) (failed int, err error) {
	if len(list) > 1 {
		err := s.applyMerged(ctx, list)
		if err == nil || s.conn.IsClosed() {
			return -1, err
		}
	}
	// Find the write that failed.
	return s.applyInOrder(ctx, list)
}

// applyMerged writes the rows of all groups with one statement for each table.
func (s *Store) applyMerged(ctx context.Context, list []Write) error {
	var b pgx.Batch
	args := make([]any, 0, 8)
	for _, column := range []func(Write) any{
		func(w Write) any { return w.Group }, func(w Write) any { return w.Previous }, func(w Write) any { return w.Next.Position }, func(w Write) any { return w.Next.Shard },
		func(w Write) any { return w.Next.CommitID }, func(w Write) any { return w.Next.LogTime }, func(w Write) any { return w.Next.LagMs }, func(w Write) any { return w.Next.CaughtUp },
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
	if slices.ContainsFunc(list, s.waitsForDisk) {
		b.Queue(waitForDisk)
	}
	all := merge(list)
	s.deletions(&b, all)
	s.rows(&b, all)
	s.endExecutions(&b, all)
	return s.conn.SendBatch(ctx, &b).Close()
}

// applyInOrder writes the groups in one transaction with separate statements, so that it can tell which write failed. Its results are those of
// ApplyTogether.
func (s *Store) applyInOrder(ctx context.Context, list []Write) (failed int, err error) {
	var b pgx.Batch
	var owners []int // by statement: the index of its write
	for i, w := range list {
		s.advance(&b, w)
		owners = append(owners, i)
	}
	for i, w := range list {
		if s.waitsForDisk(w) {
			b.Queue(waitForDisk)
		}
		s.deletions(&b, w.Changes)
		s.rows(&b, w.Changes)
		s.endExecutions(&b, w.Changes)
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
			return i, refusedError(err)
		}
	}
	return -1, refusedError(results.Close())
}

// merge returns the changes of all writes. No two groups change the same row.
func merge(list []Write) *fold.Changes {
	var all fold.Changes
	for _, w := range list {
		c := w.Changes
		all.Gone, all.Retired, all.AuditGone = append(all.Gone, c.Gone...), append(all.Retired, c.Retired...), append(all.AuditGone, c.AuditGone...)
		all.Events, all.Deleted, all.Poison = append(all.Events, c.Events...), append(all.Deleted, c.Deleted...), append(all.Poison, c.Poison...)
		all.Audit, all.States, all.Ended = append(all.Audit, c.Audit...), append(all.States, c.States...), append(all.Ended, c.Ended...)
		addRows(&all.Sessions, c.Sessions)
		addRows(&all.Executions, c.Executions)
		addRows(&all.Blocks, c.Blocks)
		addRows(&all.Calls, c.Calls)
		addRows(&all.Conversations, c.Conversations)
		addRows(&all.Approvals, c.Approvals)
		addRows(&all.Sandboxes, c.Sandboxes)
		addRows(&all.Files, c.Files)
		addRows(&all.Usage, c.Usage)
		addRows(&all.Keys, c.Keys)
		addRows(&all.Entries, c.Entries)
		addRows(&all.Versions, c.Versions)
		addRows(&all.TenantUsage, c.TenantUsage)
		addRows(&all.TenantBudgets, c.TenantBudgets)
		addRows(&all.TenantLimits, c.TenantLimits)
	}
	return &all
}

// addRows appends rows to to.
func addRows[R any](to *fold.Rows[R], rows fold.Rows[R]) {
	to.New, to.Changed = append(to.New, rows.New...), append(to.Changed, rows.Changed...)
}

// beforeEventsLookup calls BeforeEventsLookup, if it is set.
func (s *Store) beforeEventsLookup(ctx context.Context) error {
	if s.BeforeEventsLookup == nil {
		return nil
	}
	return s.BeforeEventsLookup(ctx)
}

// bulk writes changes with many new rows in the transaction tx: it sends the statements first, copies the new rows with COPY, and then sends the rest.
func (s *Store) bulk(ctx context.Context, tx pgx.Tx, first *pgx.Batch, c *fold.Changes) error {
	if err := tx.SendBatch(ctx, first).Close(); err != nil {
		return err
	}
	t := s.tables
	var rest fold.Changes
	for _, err := range []error{
		copyNew(ctx, tx, t.sessions, c.Sessions, &rest.Sessions), copyNew(ctx, tx, t.executions, c.Executions, &rest.Executions),
		copyNew(ctx, tx, t.blocks, c.Blocks, &rest.Blocks), copyNew(ctx, tx, t.calls, c.Calls, &rest.Calls),
		copyNew(ctx, tx, t.conversations, c.Conversations, &rest.Conversations), copyNew(ctx, tx, t.approvals, c.Approvals, &rest.Approvals),
		copyNew(ctx, tx, t.sandboxes, c.Sandboxes, &rest.Sandboxes),
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

// copyNew writes a table's new rows with COPY, and sets rest to the rows that are still to be written: the changed ones, and the new ones if they
// are few.
func copyNew[R any](ctx context.Context, tx pgx.Tx, t table[R], rows fold.Rows[R], rest *fold.Rows[R]) error {
	rest.Changed = rows.Changed
	if len(rows.New) < copyRows/5 {
		rest.New = rows.New
		return nil
	}
	return copyInto(ctx, tx, t, rows.New)
}

// copyInto writes rows to a table with COPY.
func copyInto[R any](ctx context.Context, tx pgx.Tx, t table[R], rows []*R) error {
	if len(rows) == 0 {
		return nil
	}
	_, err := tx.CopyFrom(ctx, pgx.Identifier{t.name}, t.names, t.copySource(rows))
	return err
}

// deletions queues the statements that delete the rows of c.Gone, c.AuditGone and c.Retired.
func (s *Store) deletions(b *pgx.Batch, c *fold.Changes) {
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

// deleteStatement returns the statement that deletes the rows of sessions from a table.
func deleteStatement(table string) string {
	return "DELETE FROM " + table + " r USING unnest($1::text[], $2::text[]) AS k(tenant, session) WHERE r.tenant = k.tenant AND r.session = k.session"
}

// rows queues the statements that write new and changed rows.
func (s *Store) rows(b *pgx.Batch, c *fold.Changes) {
	t := s.tables
	upsert(b, t.sessions, c.Sessions)
	upsert(b, t.executions, c.Executions)
	upsert(b, t.blocks, c.Blocks)
	upsert(b, t.calls, c.Calls)
	upsert(b, t.conversations, c.Conversations)
	upsert(b, t.approvals, c.Approvals)
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

// endExecutions queues the statements that end the open calls, sub-agents and approval requests of c.Ended, because some of their rows may not have been in memory.
func (s *Store) endExecutions(b *pgx.Batch, c *fold.Changes) {
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

// upsert queues the statement that writes the new and changed rows of a table, if there are any.
func upsert[R any](b *pgx.Batch, t table[R], rows fold.Rows[R]) {
	if rows.Len() > 0 {
		all := append(append(make([]*R, 0, rows.Len()), rows.New...), rows.Changed...)
		b.Queue(t.upsert, t.args(all)...)
	}
}

// splitKeys returns the tenants and the ids of keys, as arguments of a statement that unnests them.
func splitKeys(list []fold.Key) (tenants, ids []string) {
	for _, k := range list {
		tenants, ids = append(tenants, k.Tenant), append(ids, k.ID)
	}
	return tenants, ids
}

// splitChildren returns the tenants, the sessions and the ids of children, as arguments of a statement that unnests them.
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
