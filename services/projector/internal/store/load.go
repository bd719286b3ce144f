package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// Load returns those of the rows of m that Postgres has. It needs one round trip.
func (s *Store) Load(ctx context.Context, m fold.Missing) (p fold.Present, err error) {
	if len(m.Histories) > 0 {
		if err := s.beforeEventsLookup(ctx); err != nil {
			return p, err
		}
	}
	var b pgx.Batch
	t := s.tables
	if len(m.Sessions) > 0 {
		tenants, ids := splitKeys(m.Sessions)
		fetch(&b, t.sessions, &p.Sessions, tenants, ids)
		fetch(&b, t.deleted, &p.Deleted, tenants, ids)
	}
	if len(m.Histories) > 0 {
		tenants, ids := splitKeys(m.Histories)
		states, kept := t.states, t.events
		b.Queue(selectLastStates, tenants, ids, history.StateVersion).Query(func(rows pgx.Rows) error { return scanInto(states, rows, &p.States) })
		b.Queue(selectEventsSince, tenants, ids, history.StateVersion).Query(func(rows pgx.Rows) error { return scanInto(kept, rows, &p.Events) })
	}
	if len(m.Keys) > 0 {
		tenants, ids := splitKeys(m.Keys)
		fetch(&b, t.keys, &p.Keys, tenants, ids)
	}
	if len(m.Entries) > 0 {
		tenants, ids := splitKeys(m.Entries)
		fetch(&b, t.entries, &p.Entries, tenants, ids)
	}
	if len(m.TenantUsage) > 0 {
		tenants, ids := splitKeys(m.TenantUsage)
		fetch(&b, t.tenantUsage, &p.TenantUsage, tenants, ids)
	}
	if len(m.TenantBudgets) > 0 {
		tenants, ids := splitKeys(m.TenantBudgets)
		fetch(&b, t.tenantBudgets, &p.TenantBudgets, tenants, ids)
	}
	if len(m.TenantLimits) > 0 {
		fetch(&b, t.tenantLimits, &p.TenantLimits, m.TenantLimits)
	}
	children(&b, t.versions, m.Versions, &p.Versions)
	children(&b, t.executions, m.Executions, &p.Executions)
	children(&b, t.blocks, m.Blocks, &p.Blocks)
	children(&b, t.calls, m.Calls, &p.Calls)
	children(&b, t.conversations, m.Conversations, &p.Conversations)
	children(&b, t.approvals, m.Approvals, &p.Approvals)
	children(&b, t.sandboxes, m.Sandboxes, &p.Sandboxes)
	children(&b, t.files, m.Files, &p.Files)
	children(&b, t.usage, m.Usage, &p.Usage)
	if err := s.conn.SendBatch(ctx, &b).Close(); err != nil {
		return p, fmt.Errorf("look up rows: %w", err)
	}
	return p, nil
}

// selectLastStates selects the last saved state of each session, with the columns of states. selectEventsSince selects
// the events after that state, with the columns of events.
const (
	selectLastStates = `SELECT s.tenant, s.session, s.seq, s.version, s.state FROM unnest($1::text[], $2::text[]) AS k(tenant, session)
		CROSS JOIN LATERAL (SELECT * FROM session_states WHERE tenant = k.tenant AND session = k.session AND version = $3 ORDER BY seq DESC LIMIT 1) s`
	selectEventsSince = `SELECT e.tenant, e.session, e.seq, e.type, e.event FROM unnest($1::text[], $2::text[]) AS k(tenant, session)
		LEFT JOIN LATERAL (SELECT seq FROM session_states WHERE tenant = k.tenant AND session = k.session AND version = $3 ORDER BY seq DESC LIMIT 1) s ON true
		CROSS JOIN LATERAL (SELECT * FROM events WHERE tenant = k.tenant AND session = k.session AND seq > coalesce(s.seq, 0) ORDER BY seq) e`
)

// children queues the look-up of rows that belong to a session or an entry; found receives them when the batch is sent.
func children[R any](b *pgx.Batch, t table[R], asked []fold.Child, found *[]R) {
	if len(asked) > 0 {
		tenants, sessions, ids := splitChildren(asked)
		fetch(b, t, found, tenants, sessions, ids)
	}
}

// fetch queues the look-up of rows by the columns of their primary keys; found receives them when the batch is sent.
func fetch[R any](b *pgx.Batch, t table[R], found *[]R, keys ...[]string) {
	args := make([]any, len(keys))
	for i, k := range keys {
		args[i] = k
	}
	b.Queue(t.lookup, args...).Query(func(rows pgx.Rows) error { return scanInto(t, rows, found) })
}

// scanInto sets found to the rows of a result.
func scanInto[R any](t table[R], rows pgx.Rows, found *[]R) (err error) {
	*found, err = t.scan(rows)
	return err
}
