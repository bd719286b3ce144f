package reads

import (
	"context"
	"encoding/json"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// Limits returns the limits that are set for a tenant (all 0 if none are), and how much of them the tenant uses, for
// limits that the read models count.
func (s *Store) Limits(ctx context.Context, tenant string, now time.Time) (own, used *spoolv1.TenantLimits, err error) {
	day, _ := events.PeriodDay.Bounds(now)
	r, err := s.queries.Limits(ctx, queries.LimitsParams{Tenant: tenant, Today: day, StoredRows: s.storedRows})
	if err != nil {
		return nil, nil, err
	}
	var l events.TenantLimits
	if err := json.Unmarshal([]byte(r.Own), &l); err != nil {
		return nil, nil, readProblem(err)
	}
	return tenantLimitsMessage(l), &spoolv1.TenantLimits{
		Slots: uint32(r.Slots), Sandboxes: uint32(r.Sandboxes), Sessions: uint32(r.Sessions), Keys: uint32(r.Keys),
		EventsPerDay: r.Events, EventBytesPerDay: r.EventBytes, StorageBytes: r.StoredBytes,
	}, nil
}

// CountSessions counts a tenant's sessions, up to limit, and returns which of the ids are, or were, sessions of the
// tenant.
func (s *Store) CountSessions(ctx context.Context, tenant string, ids []string, limit int) (n int, known []string, err error) {
	r, err := s.queries.CountSessions(ctx, queries.CountSessionsParams{Tenant: tenant, Ids: ids, Most: int32(limit)})
	return int(r.Sessions), r.Known, err
}

// tenantLimitsMessage converts a tenant's limits to an API message.
func tenantLimitsMessage(l events.TenantLimits) *spoolv1.TenantLimits {
	return &spoolv1.TenantLimits{
		Slots: l.Slots, Sandboxes: l.Sandboxes, Sessions: l.Sessions, Streams: l.Streams, RequestsPerSecond: l.RequestsPerSecond, RequestBurst: l.RequestBurst,
		Keys: l.Keys, EventsPerDay: float64(l.EventsPerDay), EventBytesPerDay: float64(l.EventBytesPerDay), StorageBytes: float64(l.StorageBytes),
	}
}
