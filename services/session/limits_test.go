package session_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session"
)

// TestTenantLimits_AreSetAndRemovedOnce: the same limits set again, and a removal of none, add nothing to the log.
func TestTenantLimits_AreSetAndRemovedOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.copy("one", session.Config{})
	set := func(l events.TenantLimits) command.Answer {
		return s.send(command.TypeSetLimits, "", "", command.SetLimits{Limits: l})
	}
	remove := func() command.Answer { return s.send(command.TypeRemoveLimits, "", "", nil) }
	if a := remove(); a.Error == nil || a.Error.Code != "LIMITS_NOT_FOUND" || a.Error.Field != "tenant" {
		t.Errorf("removed before any was set: %+v", a.Error)
	}
	for _, a := range []command.Answer{
		set(events.TenantLimits{Slots: 5}), set(events.TenantLimits{Slots: 5}), set(events.TenantLimits{Keys: 7, RequestsPerSecond: 0.5}), remove(), set(events.TenantLimits{Slots: 5}), remove(),
	} {
		if a.Error != nil || a.Position == "" {
			t.Fatalf("%+v", a)
		}
	}
	for field, a := range map[string]command.Answer{"limits": set(events.TenantLimits{}), "limits.requestsPerSecond": set(events.TenantLimits{RequestsPerSecond: -1})} {
		if a.Error == nil || a.Error.Code != "INVALID_REQUEST" || a.Error.Field != field {
			t.Errorf("%s: %+v", field, a.Error)
		}
	}
	if a := remove(); a.Error == nil || a.Error.Code != "LIMITS_NOT_FOUND" {
		t.Errorf("removed twice: %+v", a.Error)
	}
	var list []string
	for rec, err := range s.log.Read(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		must(t, err)
		for _, e := range rec.Events {
			body, err := json.Marshal(e.Data)
			must(t, err)
			list = append(list, string(e.Type())+" "+string(body))
		}
	}
	if got, want := strings.Join(list, "\n"), strings.Join([]string{
		`tenant_limits_set {"tenant":"default","limits":{"slots":5}}`, `tenant_limits_set {"tenant":"default","limits":{"requestsPerSecond":0.5,"keys":7}}`,
		`tenant_limits_removed {"tenant":"default"}`, `tenant_limits_set {"tenant":"default","limits":{"slots":5}}`, `tenant_limits_removed {"tenant":"default"}`,
	}, "\n"); got != want {
		t.Errorf("the log holds\n%s\nwant\n%s", got, want)
	}
}
