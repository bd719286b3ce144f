package projector_test

import (
	"fmt"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector"
)

// TestTenantLimits_AreProjected tests that limits that are set, replaced and removed reach the read models, also if
// no projector ran at that time, and that a rebuild folds the same rows.
func TestTenantLimits_AreProjected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	stop := w.start()
	holds := func(want events.TenantLimits) {
		t.Helper()
		eventually(t, fmt.Sprintf("the read models hold %+v", want), func() error {
			have, err := w.tenantUsage("default", testTime)
			if err == nil && have.Limits != want {
				err = fmt.Errorf("the limits are %+v", have.Limits)
			}
			return err
		})
	}
	subject := events.LimitsSubject("default")
	s := &session{w: w, tenant: "default", id: subject.ID, life: eventlog.Head{Subject: subject}}
	set := func(l events.TenantLimits) {
		s.append(&s.life, "", events.TenantLimitsSet{Tenant: "default", Limits: l})
	}
	set(events.TenantLimits{Slots: 3})
	holds(events.TenantLimits{Slots: 3})
	set(events.TenantLimits{Keys: 5, RequestsPerSecond: 0.5, EventBytesPerDay: 1 << 40})
	holds(events.TenantLimits{Keys: 5, RequestsPerSecond: 0.5, EventBytesPerDay: 1 << 40})
	if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log}, true); err != nil {
		t.Error(err)
	}
	stop()
	s.append(&s.life, "", events.TenantLimitsRemoved{Tenant: "default"})
	w.start()
	holds(events.TenantLimits{})
}
