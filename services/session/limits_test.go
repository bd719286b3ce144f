package session_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session"
)

// TestTenantLimits_AreSetAndRemovedOnce tests that setting the same limits again, and removing limits that do not
// exist, adds nothing to the log.
func TestTenantLimits_AreSetAndRemovedOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
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

// TestTenantEvents_RefusesWork tests a tenant at its limit of events: new work is refused, and queued work fails at
// dispatch. Controls and deletions are accepted. With a higher limit, or on the next day, the tenant continues.
func TestTenantEvents_RefusesWork(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	setUsage := func(limits events.TenantLimits, day time.Time) {
		t.Helper()
		s.setTenantEntry(budget.Tenant{Limits: limits, Used: budget.DailyOutput{Day: day.UTC().Format(time.DateOnly), Logged: events.OutputSize{Events: 10, Bytes: 5000}}})
	}
	post := func(sid string) (string, *command.Error) {
		exe := id(events.KindExecution)
		return exe, s.send(command.TypePostMessage, sid, exe, command.PostMessage{Content: "hello"}).Error
	}
	// A day that the clock of this test does not reach.
	far := time.Now().AddDate(0, 0, 2)
	sid, idle := s.create(events.Options{}), s.create(events.Options{})
	var first, second string // posted under the last limits that allow it, so that neither is dispatched under higher ones
	for _, limits := range []events.TenantLimits{{EventsPerDay: 10}, {EventBytesPerDay: 4999}} {
		setUsage(events.TenantLimits{EventsPerDay: 11, EventBytesPerDay: 5001}, far)
		s.until("a message is accepted below the limit", func() bool { _, refused := post(idle); return refused == nil })
		if limits.EventBytesPerDay > 0 {
			first, second = s.post(sid), s.post(sid)
		}
		setUsage(limits, far)
		s.until("a message is refused at the limit", func() bool { _, refused := post(idle); return refused != nil })
		if _, refused := post(idle); refused == nil || refused.Code != "TENANT_EVENTS" || !strings.HasPrefix(refused.Detail, "tenant default has added ") {
			t.Errorf("a message with the limit %+v: %+v", limits, refused)
		}
	}
	for _, typ := range []command.Type{command.TypeCreateSession, command.TypeStartExecution} {
		if a := s.send(typ, id(events.KindSession), id(events.KindExecution), command.StartExecution{Post: command.PostMessage{Content: "hello"}}); a.Error == nil || a.Error.Code != "TENANT_EVENTS" {
			t.Errorf("%s: %+v", typ, a.Error)
		}
	}
	s.mustSend(command.TypeCancel, sid, first)
	list := s.awaitEnd(sid, second)
	// The reactor may have dispatched the first turn under either limit.
	if failed, is := list[len(list)-1].Data.(events.ExecutionFailed); !is || failed.Code != "TENANT_EVENTS" || !strings.HasPrefix(failed.Message, "tenant default has added ") {
		t.Errorf("the queued execution ended with %+v", list[len(list)-1].Data)
	}
	s.mustSend(command.TypeDeleteSession, idle, "")

	s.executors(1)
	for name, tell := range map[string]func(){
		"higher limit": func() { setUsage(events.TenantLimits{EventsPerDay: 11}, far) },
		"next day":     func() { setUsage(events.TenantLimits{EventsPerDay: 1}, time.Now().AddDate(0, 0, -1)) },
	} {
		setUsage(events.TenantLimits{EventsPerDay: 1}, far)
		s.until(name+": a message is refused first", func() bool { _, refused := post(sid); return refused != nil })
		tell()
		var exe string
		s.until(name+": a message is taken", func() bool {
			var refused *command.Error
			exe, refused = post(sid)
			return refused == nil
		})
		list := s.awaitEnd(sid, exe)
		if _, completed := list[len(list)-1].Data.(events.ExecutionCompleted); !completed {
			t.Errorf("%s: the turn ended with %+v", name, list[len(list)-1].Data)
		}
	}
}

// until blocks until check returns true.
func (s *stack) until(what string, check func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(within); !check(); time.Sleep(pause) {
		if time.Now().After(deadline) {
			s.t.Fatalf("timed out waiting until %s", what)
		}
	}
}
