package projector_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
)

// outputInLog returns what the sessions of a tenant have appended to the log, including deletions, as events.OutputSizeOf
// counts it.
func (w *world) outputInLog(tenant string) (sum events.OutputSize) {
	w.t.Helper()
	for rec, err := range w.log.Read(w.t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		if err != nil {
			w.t.Fatal(err)
		}
		if rec.Subject.Tenant != tenant || rec.Subject.Aspect.IsCatalogue() {
			continue
		}
		for _, e := range rec.Events {
			sum = sum.Plus(events.OutputSizeOf(e))
		}
	}
	return sum
}

// awaitOutput waits until the read models hold what a tenant has added to the log on the day of testTime.
func (w *world) awaitOutput(tenant string, want events.OutputSize) budget.Tenant {
	w.t.Helper()
	var have budget.Tenant
	eventually(w.t, "the read models hold what "+tenant+" has added to the log", func() (err error) {
		have, err = w.tenantUsage(tenant, testTime)
		if err == nil && have.Used.Logged != want {
			err = fmt.Errorf("the output is %+v, want %+v", have.Used.Logged, want)
		}
		return err
	})
	return have
}

// TestTenantEvents_AreCountedByDay tests that the read models count what the sessions of a tenant add to the log. The
// count stays when a session is deleted and erased, and a rebuild counts the same before and after the removal.
func TestTenantEvents_AreCountedByDay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start(func(_ *projector.Config, d *projector.Deps) { d.Now = func() time.Time { return testTime } })
	kept, gone, other := w.session(1).create(), w.session(6).create(), w.session(2)
	other.tenant = "other"
	other.life.Subject, other.run.Subject = events.LifeSubject("other", other.id), events.RunSubject("other", other.id)
	other.create().turn(1)
	kept.turn(1)
	gone.turn(1)
	subject := events.LimitsSubject("default")
	limits := &session{w: w, tenant: "default", id: subject.ID, life: eventlog.Head{Subject: subject}}
	limits.append(&limits.life, "", events.TenantLimitsSet{Tenant: "default", Limits: events.TenantLimits{EventsPerDay: 1, EventBytesPerDay: 1 << 40}})
	eventually(t, "the read models hold the limits", func() error { // which another group folds
		have, err := w.tenantUsage("default", testTime)
		if err == nil && have.Limits.EventsPerDay != 1 {
			err = fmt.Errorf("there is %+v", have.Limits)
		}
		return err
	})
	now := w.awaitOutput("default", w.outputInLog("default"))
	if why := now.ExceededEventLimit("default", testTime); why == "" {
		t.Errorf("the limit of one event is not exceeded by %+v", now)
	}
	if why := now.ExceededEventLimit("default", testTime.AddDate(0, 0, 1)); why != "" {
		t.Errorf("on the next day: %s", why)
	}
	kept.turn(2)
	before := w.outputInLog("default")
	w.awaitOutput("default", before)

	gone.append(&gone.life, "", events.SessionDeleted{})
	all := w.outputInLog("default")
	w.awaitOutput("default", all)
	w.awaitProjected(gone)
	w.sameAsRebuilt()
	var shares map[string]struct{ Events, EventBytes uint64 }
	text := queryOne[string](w, "SELECT spent FROM deleted_sessions WHERE id = $1", gone.id)
	if err := json.Unmarshal([]byte(text), &shares); err != nil {
		t.Fatal(err)
	}
	day := testTime.Format(time.DateOnly)
	took := events.OutputSize{Events: shares[day].Events, Bytes: shares[day].EventBytes}
	var erase []uint64
	for rec, err := range w.log.Read(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		if rec.Subject.ID == gone.id && rec.Position.Seq != gone.life.Seq {
			erase = append(erase, rec.Position.Seq)
		}
	}
	spent := events.BudgetUsage{Turns: 1, Tokens: 30, CostUSD: 0.25, TimeMs: 1234}
	gone.append(&gone.run, "", events.RunRetired{Usage: []events.DayUsage{{Day: day, Spent: spent, Logged: took}}})
	stream, err := w.js.Stream(t.Context(), topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range erase {
		if err := stream.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	w.awaitProjected(gone)
	w.sameAsRebuilt()
	left := w.outputInLog("default")
	kept.turn(3)
	added := w.outputInLog("default")
	w.awaitOutput("default", events.OutputSize{Events: all.Events + added.Events - left.Events, Bytes: all.Bytes + added.Bytes - left.Bytes})
}
