package jslog_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
)

// TestReadUndecoded_ResolvesToTheRecordsOfRead tests both steps together, with events in the log and in the object
// store, and with a message that is no commit.
func TestReadUndecoded_ResolvesToTheRecordsOfRead(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	l, js, _ := stream(t)
	eventlogtest.AppendCommits(t, l, eventlogtest.SessionSubject(0, 1, "small"), "small", 3)
	if _, err := l.Append(ctx, eventlog.Head{Subject: eventlogtest.SessionSubject(0, 1, "large")}, eventlogtest.Draft("large", strings.Repeat("x", 300_000))); err != nil {
		t.Fatal(err)
	}
	var want []eventlog.Record
	for rec, err := range l.Read(ctx, eventlog.Position{}, eventlog.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, rec)
	}
	var got []eventlog.Record
	for rec, err := range l.ReadUndecoded(ctx, eventlog.Position{}, eventlog.Filter{}) {
		if err != nil || rec.Events != nil {
			t.Fatalf("%s: %d events, error %v", rec.Position, len(rec.Events), err)
		}
		if rec, err = l.ResolveEvents(ctx, rec); err != nil {
			t.Fatal(err)
		}
		got = append(got, rec)
	}
	if len(got) != 4 || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}

	s := eventlogtest.SessionSubject(0, 1, "foreign")
	if _, err := js.Publish(ctx, s.String(), []byte("not a commit")); err != nil {
		t.Fatal(err)
	}
	var last error
	for _, err := range l.ReadUndecoded(ctx, eventlog.Position{}, eventlog.Filter{}) {
		last = err
	}
	if last == nil {
		t.Error("a message that is no commit was read without an error")
	}
}
