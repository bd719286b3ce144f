package fold

import (
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// TenantLimits is a row of the table tenant_limits.
type TenantLimits struct {
	Tenant  string
	Group   int16
	Limits  string // JSON of events.TenantLimits
	SetAt   time.Time
	Removed bool
}

// limitsOf returns the limits of a tenant that an event sets, or nil if the event removes them. about is false for an
// event that is not about limits.
func limitsOf(e events.Event) (set *events.TenantLimits, about bool) {
	switch d := e.Data.(type) {
	case events.TenantLimitsSet:
		return &d.Limits, true
	case events.TenantLimitsRemoved:
		return nil, true
	}
	return nil, false
}

// foldLimits folds a commit that sets or removes a tenant's limits into the row of the limits.
func (f *batchFold) foldLimits(rec eventlog.Record) error {
	if f.bare {
		return nil
	}
	tenant := rec.Subject.Tenant
	for _, e := range rec.Events {
		set, about := limitsOf(e)
		if !about {
			continue
		}
		x := f.model.tenantLimits[tenant]
		if x == nil {
			x = &cachedRow[TenantLimits]{row: TenantLimits{Tenant: tenant, Group: f.model.group}}
			f.model.tenantLimits[tenant] = x
		}
		row := markChanged(&f.tenantLimits, x)
		row.SetAt, row.Limits, row.Removed = postgresTime(e.Time), "{}", set == nil
		if set != nil {
			var err error
			if row.Limits, err = marshalUnescaped(set); err != nil {
				return err
			}
		}
	}
	return nil
}
