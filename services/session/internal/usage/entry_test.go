package usage

import (
	"maps"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// TestEntry_WindowsOfBudgets tests what counts on a day, in a month and in total, for days in the past and in the
// future.
func TestEntry_WindowsOfBudgets(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 6, 1, 0, 30, 0, 0, time.UTC)
	var e tenantEntry
	add := func(shard string, seq uint64, at time.Time, s events.Subject, data events.Payload, turns int64) {
		rec := eventlog.Record{Subject: s, Position: eventlog.Position{Seq: seq}, Events: []events.Event{{Time: at, Data: data}}}
		used := map[string]budget.Usage{}
		if turns > 0 {
			used[at.Format(time.DateOnly)] = budget.Usage{Turns: turns, Events: 1}
		}
		e.applyCommit(shard, rec, used, keptWindowAt(at))
	}
	life := events.LifeSubject("a", "s")
	for i, p := range events.Periods() {
		add("0", uint64(i+1), now, events.BudgetSubject("a", p), events.TenantBudgetSet{Tenant: "a", Period: p, Budget: events.Budget{Turns: 9}}, 0)
	}
	add("1", 1, now, events.LimitsSubject("a"), events.TenantLimitsSet{Tenant: "a", Limits: events.TenantLimits{EventsPerDay: 5}}, 0)
	add("0", 4, now.AddDate(0, 0, -60), life, events.Log{}, 1)
	add("0", 5, now.Add(-time.Hour), life, events.Log{}, 2)
	add("0", 6, now, life, events.Log{}, 4)
	add("1", 2, now.Add(24*time.Hour), life, events.Log{}, 8) // from a host whose clock is ahead
	add("1", 2, now, life, events.Log{}, 100)                 // a redelivered commit
	add("9", 1, now, life, events.Log{}, 1000)                // from a stream that no longer exists
	check := func(at time.Time, day, month, total uint32, logged uint64) {
		t.Helper()
		e.computeFigures([]string{"0", "1"}, []uint64{6, 2}, at)
		for i, want := range []uint32{day, month, total} {
			if len(e.Budgets) != 3 || e.Budgets[i].Period != events.Periods()[i] || e.Budgets[i].Spent.Turns != want {
				t.Errorf("at %s: budgets %+v, want %d turns of the %s", at, e.Budgets, want, events.Periods()[i])
			}
		}
		if !maps.Equal(e.Counted, budget.Positions{0: 6, 1: 2}) {
			t.Errorf("at %s: counted up to %v", at, e.Counted)
		}
		if e.Limits.EventsPerDay != 5 || e.Used.Logged.Events != logged {
			t.Errorf("at %s: limits %+v, used %+v, want %d events", at, e.Limits, e.Used, logged)
		}
	}
	check(now, 12, 12, 15, 2)
	check(now.AddDate(0, 0, 1), 8, 12, 15, 1)
	check(now.AddDate(0, 0, 2), 0, 12, 15, 0)
	check(now.AddDate(0, 1, 0), 0, 0, 15, 0)
	if s := e.Shards["0"]; len(s.Days) != 0 || len(s.Months) != 2 {
		t.Errorf("kept %v and %v", s.Days, s.Months)
	}
}
