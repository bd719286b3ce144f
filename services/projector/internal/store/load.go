package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// LoadRows returns those of the requested rows m that Postgres has. It needs one round trip.
func (s *Store) LoadRows(ctx context.Context, m fold.MissingRows) (p fold.FoundRows, err error) {
	if len(m.Histories) > 0 {
		if err := s.callBeforeEventsLookup(ctx); err != nil {
			return p, err
		}
	}
	var b pgx.Batch
	t := s.tables
	if len(m.Sessions) > 0 {
		tenants, ids := splitKeys(m.Sessions)
		queueLookup(&b, t.sessions, &p.Sessions, tenants, ids)
		queueLookup(&b, t.deleted, &p.Deleted, tenants, ids)
	}
	if len(m.Histories) > 0 {
		tenants, ids := splitKeys(m.Histories)
		states, kept := t.states, t.events
		b.Queue(selectLastStates, tenants, ids, history.StateVersion).Query(func(rows pgx.Rows) error { return scanRowsInto(states, rows, &p.States) })
		b.Queue(selectEventsSince, tenants, ids, history.StateVersion).Query(func(rows pgx.Rows) error { return scanRowsInto(kept, rows, &p.Events) })
	}
	if len(m.Keys) > 0 {
		tenants, ids := splitKeys(m.Keys)
		queueLookup(&b, t.keys, &p.Keys, tenants, ids)
	}
	if len(m.Entries) > 0 {
		tenants, ids := splitKeys(m.Entries)
		queueLookup(&b, t.entries, &p.Entries, tenants, ids)
	}
	if len(m.TenantUsage) > 0 {
		tenants, ids := splitKeys(m.TenantUsage)
		queueLookup(&b, t.tenantUsage, &p.TenantUsage, tenants, ids)
	}
	if len(m.TenantBudgets) > 0 {
		tenants, ids := splitKeys(m.TenantBudgets)
		queueLookup(&b, t.tenantBudgets, &p.TenantBudgets, tenants, ids)
	}
	if len(m.TenantLimits) > 0 {
		queueLookup(&b, t.tenantLimits, &p.TenantLimits, m.TenantLimits)
	}
	queueChildLookup(&b, t.versions, m.Versions, &p.Versions)
	queueChildLookup(&b, t.executions, m.Executions, &p.Executions)
	queueChildLookup(&b, t.blocks, m.Blocks, &p.Blocks)
	queueChildLookup(&b, t.calls, m.Calls, &p.Calls)
	queueChildLookup(&b, t.conversations, m.Conversations, &p.Conversations)
	queueChildLookup(&b, t.approvals, m.Approvals, &p.Approvals)
	queueChildLookup(&b, t.sandboxes, m.Sandboxes, &p.Sandboxes)
	queueChildLookup(&b, t.files, m.Files, &p.Files)
	queueChildLookup(&b, t.usage, m.Usage, &p.Usage)
	if err := s.conn.SendBatch(ctx, &b).Close(); err != nil {
		return p, fmt.Errorf("look up rows: %w", err)
	}
	return p, nil
}

const (
	// selectLastStates is the SQL query for the last saved state of each session, with the columns of the table
	// session_states.
	selectLastStates = `SELECT s.tenant, s.session, s.seq, s.version, s.state FROM unnest($1::text[], $2::text[]) AS k(tenant, session)
		CROSS JOIN LATERAL (SELECT * FROM session_states WHERE tenant = k.tenant AND session = k.session AND version = $3 ORDER BY seq DESC LIMIT 1) s`
	// selectEventsSince is the SQL query for the events of each session after its last saved state, with the columns of
	// the table events.
	selectEventsSince = `SELECT e.tenant, e.session, e.seq, e.type, e.event, e.at, e.conversation FROM unnest($1::text[], $2::text[]) AS k(tenant, session)
		LEFT JOIN LATERAL (SELECT seq FROM session_states WHERE tenant = k.tenant AND session = k.session AND version = $3 ORDER BY seq DESC LIMIT 1) s ON true
		CROSS JOIN LATERAL (SELECT * FROM events WHERE tenant = k.tenant AND session = k.session AND seq > coalesce(s.seq, 0) ORDER BY seq) e`
)

// queueChildLookup queues the SQL query for rows that belong to a session or a catalogue entry. found receives the rows
// when the batch b is sent.
func queueChildLookup[R any](b *pgx.Batch, t table[R], asked []fold.ChildKey, found *[]R) {
	if len(asked) > 0 {
		tenants, sessions, ids := splitChildKeys(asked)
		queueLookup(b, t, found, tenants, sessions, ids)
	}
}

// queueLookup queues the SQL query for rows by the columns of their primary keys. found receives the rows when the
// batch b is sent.
func queueLookup[R any](b *pgx.Batch, t table[R], found *[]R, keys ...[]string) {
	args := make([]any, len(keys))
	for i, k := range keys {
		args[i] = k
	}
	b.Queue(t.lookup, args...).Query(func(rows pgx.Rows) error { return scanRowsInto(t, rows, found) })
}

// scanRowsInto sets found to the decoded rows of a query result.
func scanRowsInto[R any](t table[R], rows pgx.Rows, found *[]R) (err error) {
	*found, err = t.scanRows(rows)
	return err
}
