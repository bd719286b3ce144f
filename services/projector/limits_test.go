package projector_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
)

// TestTenantLimits_AreToldToServices tests that limits that are set, replaced and removed are written to the bucket,
// also if no projector was running, and that a rebuild folds the same rows.
func TestTenantLimits_AreToldToServices(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	stop := w.start()
	kv, err := w.js.KeyValue(t.Context(), topology.BucketBudgets)
	if err != nil {
		t.Fatal(err)
	}
	told := func(want events.TenantLimits, exists bool) {
		t.Helper()
		eventually(t, fmt.Sprintf("the bucket tells of %+v", want), func() error {
			entry, err := kv.Get(t.Context(), "default")
			if !exists && errors.Is(err, jetstream.ErrKeyNotFound) {
				return nil
			}
			if err != nil {
				return err
			}
			var have budget.Tenant
			if err := json.Unmarshal(entry.Value(), &have); err != nil {
				return err
			}
			if !exists || have.Limits != want {
				return fmt.Errorf("the bucket has %+v", have)
			}
			return nil
		})
	}
	subject := events.LimitsOf("default")
	s := &session{w: w, tenant: "default", id: subject.ID, life: eventlog.Head{Subject: subject}}
	set := func(l events.TenantLimits) {
		s.append(&s.life, "", events.TenantLimitsSet{Tenant: "default", Limits: l})
	}
	set(events.TenantLimits{Slots: 3})
	told(events.TenantLimits{Slots: 3}, true)
	set(events.TenantLimits{Keys: 5, RequestsPerSecond: 0.5, EventBytesPerDay: 1 << 40})
	told(events.TenantLimits{Keys: 5, RequestsPerSecond: 0.5, EventBytesPerDay: 1 << 40}, true)
	if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log}, true); err != nil {
		t.Error(err)
	}
	stop()
	s.append(&s.life, "", events.TenantLimitsRemoved{Tenant: "default"})
	w.start()
	told(events.TenantLimits{}, false)
}
