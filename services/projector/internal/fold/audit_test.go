package fold_test

import (
	"slices"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// TestFold_AuditIsEqualAfterRemoval tests that the audit rows are equal whether a fold read a deleted session before
// its content was removed, afterwards, or in between. Statements of run_retired about commits of other subjects, or
// about later commits, have no effect.
func TestFold_AuditIsEqualAfterRemoval(t *testing.T) {
	t.Parallel()
	life, run := events.LifeSubject("default", "ses_1"), events.RunSubject("default", "ses_1")
	at := time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.UTC)
	seq := uint64(0)
	rec := func(s events.Subject, actor events.Actor, data ...events.Payload) eventlog.Record {
		seq++
		r := eventlog.Record{Subject: s, Position: eventlog.Position{Shard: 1, Seq: seq}, Time: at.Add(time.Duration(seq) * time.Second), Commit: events.Commit{V: 2, Actor: actor}}
		for _, d := range data {
			r.Events = append(r.Events, events.Event{ID: "evt", Time: at, ExecutionID: "exe_1", Data: d})
		}
		return r
	}
	key := func(user string) events.Actor {
		return events.Actor{Kind: "key", ID: "key_1", Key: "key_1", User: user, Service: "session/a", Address: "192.0.2.1"}
	}
	service := events.Actor{Kind: "service", ID: "session/a", Service: "session/a"}
	other := rec(events.LifeSubject("default", "ses_2"), key("other"), events.SessionCreated{})
	before := []eventlog.Record{
		rec(life, events.Actor{Kind: "key", ID: "key_1"}, events.SessionCreated{}), // a commit of version 1
		rec(life, key("ann"), events.MessageAccepted{}, events.ExecutionDispatched{}, events.MessageAccepted{}),
		rec(run, events.Actor{Kind: "executor", ID: "xtr_1", Service: "executor/xtr_1"}, events.ExecutionClaimed{}),
		rec(life, service, events.ExecutionWithdrawn{}),
	}
	deletion := rec(life, key("bob\x00"), events.SessionDeleted{})
	var kept []events.AuditEntry
	for _, r := range before {
		if a, ok := eventlog.AuditEntryOf(r); ok {
			kept = append(kept, a)
		}
	}
	forged := kept[0]
	forged.Seq = other.Position.Seq
	ahead := kept[0]
	ahead.Seq = 1000
	retirement := rec(run, events.Actor{Kind: "service", ID: "janitor", Service: "janitor"}, events.RunRetired{Audit: append([]events.AuditEntry{forged, ahead}, kept...)})

	want := newMemory(t)
	all := slices.Concat([]eventlog.Record{other}, before, []eventlog.Record{deletion, retirement})
	want.fold(fold.New(1, 1000), fold.CommitBatch{Records: all})
	if len(want.audit) != 4 {
		t.Errorf("the audit has %s", show(want.audit))
	}
	if r := want.audit["default 1 1"]; r.Subject != "ses_2" || r.User != "other" {
		t.Errorf("the row of another session changed to %+v", r)
	}
	if r := want.audit["default 1 2"]; r.Key != "key_1" || r.User != "" || r.Types != "session_created" || !r.At.Equal(at.Add(2*time.Second).Truncate(time.Microsecond)) {
		t.Errorf("audit of a commit of version 1: %+v", r)
	}
	if r := want.audit["default 1 3"]; r.User != "ann" || r.Types != "message_accepted,execution_dispatched" || r.Execution != "exe_1" || r.Address != "192.0.2.1" {
		t.Errorf("audit of a message: %+v", r)
	}
	if r := want.audit["default 1 6"]; r.User != "bob\uFFFD" || r.Types != "session_deleted" {
		t.Errorf("audit of the deletion: %+v", r)
	}
	for name, list := range map[string][][]eventlog.Record{
		"one by one":        {all[:1], all[1:2], all[2:3], all[3:4], all[4:5], all[5:6], all[6:]},
		"the end by itself": {all[:6], all[6:]},
		"after the removal": {{other, deletion, retirement}},
		"a part of it left": {{other, before[1]}, {deletion, retirement}},
	} {
		m, model := newMemory(t), fold.New(1, 1)
		for _, part := range list {
			m.fold(model, fold.CommitBatch{Records: part})
		}
		if show(m.audit) != show(want.audit) {
			t.Errorf("%s: the audit has\n%s\nwant\n%s", name, show(m.audit), show(want.audit))
		}
	}
}
