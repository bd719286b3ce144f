package reads

import (
	"context"
	"encoding/json"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// Limits returns a tenant's own limits (all 0 if it has none), and its use of the limits that the read models count.
func (s *Store) Limits(ctx context.Context, tenant string, now time.Time) (own, used *spoolv1.TenantLimits, err error) {
	var text string
	used = &spoolv1.TenantLimits{}
	day, _ := events.PeriodDay.Span(now)
	_, err = s.one(ctx, []any{&text, &used.Slots, &used.Sandboxes, &used.Sessions, &used.Keys, &used.EventsPerDay, &used.EventBytesPerDay, &used.StorageBytes}, `SELECT
			coalesce((SELECT limits FROM tenant_limits WHERE tenant = $1 AND NOT removed), '{}'),
			(SELECT count(*) FROM executions WHERE tenant = $1 AND phase IN ('starting', 'running')),
			(SELECT count(*) FROM sandboxes WHERE tenant = $1 AND status IN ('creating', 'ready')),
			(SELECT count(*) FROM sessions WHERE tenant = $1),
			(SELECT count(*) FROM keys WHERE tenant = $1 AND revoked_at IS NULL),
			(SELECT coalesce(sum(events), 0)::float8 FROM tenant_usage WHERE tenant = $1 AND day >= $2),
			(SELECT coalesce(sum(event_bytes), 0)::float8 FROM tenant_usage WHERE tenant = $1 AND day >= $2),
			(SELECT greatest(0, coalesce(sum(stored_bytes), 0))::float8 FROM tenant_usage WHERE tenant = $1 AND id = ANY ($3))`, tenant, day, storedRows)
	if err != nil {
		return nil, nil, err
	}
	var l events.TenantLimits
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return nil, nil, unavailable(err)
	}
	return tenantLimits(l), used, nil
}

// CountSessions counts a tenant's sessions, up to most, and returns which of the ids are, or were, sessions of the
// tenant.
func (s *Store) CountSessions(ctx context.Context, tenant string, ids []string, most int) (n int, known []string, err error) {
	_, err = s.one(ctx, []any{&n, &known}, `SELECT
			(SELECT count(*) FROM (SELECT FROM sessions WHERE tenant = $1 LIMIT $3) AS counted),
			ARRAY(SELECT id FROM sessions WHERE tenant = $1 AND id = ANY ($2) UNION SELECT id FROM deleted_sessions WHERE tenant = $1 AND id = ANY ($2))`,
		tenant, ids, most)
	return n, known, err
}

// tenantLimits converts limits to an API message.
func tenantLimits(l events.TenantLimits) *spoolv1.TenantLimits {
	return &spoolv1.TenantLimits{
		Slots: l.Slots, Sandboxes: l.Sandboxes, Sessions: l.Sessions, Streams: l.Streams, RequestsPerSecond: l.RequestsPerSecond, RequestBurst: l.RequestBurst,
		Keys: l.Keys, EventsPerDay: float64(l.EventsPerDay), EventBytesPerDay: float64(l.EventBytesPerDay), StorageBytes: float64(l.StorageBytes),
	}
}
