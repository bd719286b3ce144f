package fold

import (
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// TenantLimits is a row of tenant_limits.
type TenantLimits struct {
	Tenant  string
	Group   int16
	Limits  string // JSON of events.TenantLimits
	SetAt   time.Time
	Removed bool
}

// limitsOf returns the limits that an event sets, or nil if it removes them; about reports whether the event is about
// limits.
func limitsOf(e events.Event) (set *events.TenantLimits, about bool) {
	switch d := e.Data.(type) {
	case events.TenantLimitsSet:
		return &d.Limits, true
	case events.TenantLimitsRemoved:
		return nil, true
	}
	return nil, false
}

// foldLimits folds a commit about a tenant's limits.
func (f *folding) foldLimits(rec eventlog.Record) error {
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
			x = &entry[TenantLimits]{row: TenantLimits{Tenant: tenant, Group: f.model.group}}
			f.model.tenantLimits[tenant] = x
		}
		row := markChanged(&f.tenantLimits, x)
		row.SetAt, row.Limits, row.Removed = pgTime(e.Time), "{}", set == nil
		if set != nil {
			var err error
			if row.Limits, err = marshal(set); err != nil {
				return err
			}
		}
	}
	return nil
}
