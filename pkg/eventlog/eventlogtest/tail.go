package eventlogtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// StartTail calls Log.Tail in a goroutine and sends the records to the returned channel, which is closed at the end.
// The test fails if Tail yields an error.
func StartTail(ctx context.Context, t *testing.T, l eventlog.Log, after eventlog.Position, f eventlog.Filter) <-chan eventlog.Record {
	t.Helper()
	out := make(chan eventlog.Record)
	go func() {
		defer close(out)
		for rec, err := range l.Tail(ctx, after, f) {
			if err != nil {
				t.Errorf("tail: %v", err)
				return
			}
			select {
			case out <- rec:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

// ExpectCommit receives the next record of the channel that StartTail returned, and checks that it is the commit of the
// head.
func ExpectCommit(ctx context.Context, t *testing.T, tail <-chan eventlog.Record, want eventlog.Head) eventlog.Record {
	t.Helper()
	select {
	case rec, ok := <-tail:
		if !ok {
			t.Fatalf("the tail ended before sequence %d", want.Seq)
		}
		if rec.Subject != want.Subject || rec.Position.Seq != want.Seq || rec.Commit.Hash != want.Hash {
			t.Fatalf("the tail yields %s of %s, want %d of %s", rec.Position, rec.Subject, want.Seq, want.Subject)
		}
		return rec
	case <-ctx.Done():
		t.Fatalf("sequence %d did not come: %v", want.Seq, context.Cause(ctx))
	}
	panic("unreachable")
}

// testTailWaits checks that Tail yields the commits that exist, and then new ones, from any position.
func testTailWaits(t *testing.T, l eventlog.Log) {
	ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
	defer cancel()
	s := SessionSubject(l.Shards()-1, l.Shards(), "tail")
	shard := eventlog.Position{Shard: s.Partition() % l.Shards()}
	before := AppendCommits(t, l, s, "before", 3)
	tail := StartTail(ctx, t, l, shard, eventlog.Filter{})
	for _, h := range before {
		ExpectCommit(ctx, t, tail, h)
	}
	for _, h := range AppendCommits(t, l, s, "after", 3) {
		rec := ExpectCommit(ctx, t, tail, h)
		shard = rec.Position
	}
	// A second tail resumes at the position of the first one.
	second, stop := context.WithCancel(ctx)
	resumed := StartTail(second, t, l, shard, eventlog.Filter{})
	h := AppendCommits(t, l, s, "last", 1)[0]
	ExpectCommit(ctx, t, tail, h)
	ExpectCommit(ctx, t, resumed, h)
	stop()
	select {
	case rec, ok := <-resumed:
		if ok {
			t.Errorf("after its end the tail yields %s", rec.Position)
		}
	case <-ctx.Done():
		t.Error("the tail does not end with its context")
	}
}

// testTailFilter checks that Tail yields only what its filter matches.
func testTailFilter(t *testing.T, l eventlog.Log) {
	ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
	defer cancel()
	a, b := SessionSubject(0, l.Shards(), "a"), SessionSubject(0, l.Shards(), "b")
	for i := 0; l.Partitioning().PartitionOf(b.ID) == l.Partitioning().PartitionOf(a.ID); i++ {
		b = SessionSubject(0, l.Shards(), fmt.Sprint("b", i))
	}
	both := StartTail(ctx, t, l, eventlog.Position{}, eventlog.Filter{Subject: events.Subject{Tenant: a.Tenant, ID: a.ID}})
	part := StartTail(ctx, t, l, eventlog.Position{}, eventlog.Filter{Partitions: []int{l.Partitioning().PartitionOf(b.ID)}})
	for i := range 3 {
		life := AppendCommits(t, l, a, fmt.Sprint("life", i), 1)[0]
		other := AppendCommits(t, l, b, fmt.Sprint("other", i), 1)[0]
		run := AppendCommits(t, l, events.RunSubject(a.Tenant, a.ID), fmt.Sprint("run", i), 1)[0]
		ExpectCommit(ctx, t, both, life)
		ExpectCommit(ctx, t, both, run)
		ExpectCommit(ctx, t, part, other)
	}
}

// testSessionNumbers checks that SessionEvents numbers the events of both subjects of a session without a gap.
func testSessionNumbers(t *testing.T, l eventlog.Log) {
	ctx := t.Context()
	s := SessionSubject(l.Shards()-1, l.Shards(), "numbers")
	two := Draft("two", "1")
	two.Events = append(two.Events, Message("two-b", "2"))
	if _, err := l.Append(ctx, eventlog.Head{Subject: s}, two); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(ctx, eventlog.Head{Subject: events.RunSubject(s.Tenant, s.ID)}, Draft("three", "3")); err != nil {
		t.Fatal(err)
	}
	AppendCommits(t, l, SessionSubject(s.Partition()%l.Shards(), l.Shards(), "another"), "another", 1)
	AppendCommits(t, l, s, "four", 1)
	var got []string
	for n, err := range eventlog.SessionEvents(ctx, l, s.Tenant, s.ID) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%d %s %s", n.Seq, n.Aspect, n.Event.Data.(events.MessageAccepted).Content))
	}
	if want := []string{"1 life 1", "2 life 2", "3 run 3", "4 life four 0"}; !slices.Equal(got, want) {
		t.Errorf("the session's events are %q, want %q", got, want)
	}
}

// testLargeData checks that large data is moved out of the commit, and read back unchanged.
func testLargeData(t *testing.T, l eventlog.Log) {
	ctx := t.Context()
	s := SessionSubject(0, l.Shards(), "large")
	text := strings.Repeat("<large & wide> ", 30_000) // 450 KB of characters that JSON usually escapes
	d := Draft("large", text)
	d.Events = append(d.Events, Message("small", "small"), Message("large again", text), Message("large too", text+"!"))
	head, err := l.Append(ctx, eventlog.Head{Subject: s}, d)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(head.Commit.Events); n > 10_000 {
		t.Errorf("the commit holds %d bytes of events", n)
	}
	if head.Hash != head.Commit.ComputeHash(s) {
		t.Error("the hash is not of the stored bytes")
	}
	next, err := l.Append(ctx, head, Draft("after", "after"))
	if err != nil {
		t.Fatal(err)
	}
	at, err := l.CommitAt(ctx, eventlog.Position{Shard: s.Partition() % l.Shards(), Seq: head.Seq})
	if err != nil {
		t.Fatal(err)
	}
	list := readAll(t, l, eventlog.Position{}, eventlog.Filter{})
	if len(list) != 2 || list[1].Position.Seq != next.Seq {
		t.Fatalf("the log has %d commits, want 2", len(list))
	}
	for what, rec := range map[string]eventlog.Record{"at": at, "read": list[0]} {
		var got []string
		for _, e := range rec.Events {
			m, ok := e.Data.(events.MessageAccepted)
			if !ok {
				t.Fatalf("%s: the data is %T", what, e.Data)
			}
			got = append(got, m.Content)
		}
		if !slices.Equal(got, []string{text, "small", text, text + "!"}) {
			t.Errorf("%s: the messages are not what was appended", what)
		}
		if !bytes.Equal(rec.Commit.Events, head.Commit.Events) {
			t.Errorf("%s: the commit is not as it was stored", what)
		}
	}
}

// testTooLargeCommit checks that Append returns ErrTooLarge, and stores nothing, for a commit that exceeds the limit.
func testTooLargeCommit(t *testing.T, l eventlog.Log) {
	ctx := t.Context()
	s := SessionSubject(0, l.Shards(), "too large")
	d := Draft("many", "")
	for i := range 5 {
		d.Events = append(d.Events, Message(fmt.Sprint("m", i), strings.Repeat("x", 200_000)))
	}
	if _, err := l.Append(ctx, eventlog.Head{Subject: s}, d); !errors.Is(err, eventlog.ErrTooLarge) {
		t.Fatalf("append 1 MB: %v, want ErrTooLarge", err)
	}
	state := Draft("state", "")
	state.State = strings.Repeat("x", events.MaxCommitBytes)
	if _, err := l.Append(ctx, eventlog.Head{Subject: s}, state); !errors.Is(err, eventlog.ErrTooLarge) {
		t.Fatalf("append a state of 900 KB: %v, want ErrTooLarge", err)
	}
	if n := countCommits(t, l, s); n != 0 {
		t.Errorf("%d commits were stored", n)
	}
	parts, err := events.SplitEvents(d.Events, events.MaxCommitBytes-10_000)
	if err != nil || len(parts) != 2 {
		t.Fatalf("split into %d parts, %v", len(parts), err)
	}
	head := eventlog.Head{Subject: s}
	for i, part := range parts {
		if head, err = l.Append(ctx, head, events.Draft{ID: ID(events.KindCommit, fmt.Sprint("part", i)), Actor: d.Actor, Events: part}); err != nil {
			t.Fatalf("part %d: %v", i, err)
		}
	}
}

// testUnknownTypes checks that an event of an unknown type is read back with the same bytes.
func testUnknownTypes(t *testing.T, l eventlog.Log) {
	ctx := t.Context()
	s := SessionSubject(0, l.Shards(), "unknown")
	raw := json.RawMessage(`{"z":1,"a":[1.50,"<é>"],"nested":{"b":null}}`)
	d := Draft("unknown", "")
	d.Events[0].Data = events.OpaquePayload{Name: "from_the_future", Raw: raw}
	if _, err := l.Append(ctx, eventlog.Head{Subject: s}, d); err != nil {
		t.Fatal(err)
	}
	list := readAll(t, l, eventlog.Position{}, eventlog.Filter{})
	o, ok := list[0].Events[0].Data.(events.OpaquePayload)
	if !ok || o.Name != "from_the_future" || !bytes.Equal(o.Raw, raw) {
		t.Errorf("the unknown event is %#v", list[0].Events[0].Data)
	}
}

// testEarlyStop checks that a caller may end Read and Tail early.
func testEarlyStop(t *testing.T, l eventlog.Log) {
	s := SessionSubject(0, l.Shards(), "stops")
	AppendCommits(t, l, s, "stops", 5)
	n := 0
	for range l.Read(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		if n++; n == 2 {
			break
		}
	}
	for range l.Tail(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		if n++; n == 4 {
			break
		}
	}
	if n != 4 {
		t.Errorf("%d commits were read", n)
	}
}

// testEndedContext checks that calls with an ended context return an error that wraps ErrUnavailable.
func testEndedContext(t *testing.T, l eventlog.Log) {
	s := SessionSubject(0, l.Shards(), "ended")
	AppendCommits(t, l, s, "ended", 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Append(ctx, eventlog.Head{Subject: SessionSubject(0, l.Shards(), "ended too")}, Draft("x", "x")); !errors.Is(err, eventlog.ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("append: %v", err)
	}
	if _, err := l.Last(ctx, s, eventlog.AnyReplica); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("last: %v", err)
	}
	if _, err := l.CommitAt(ctx, eventlog.Position{Seq: 1}); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("at: %v", err)
	}
	var got error
	for _, err := range l.Read(ctx, eventlog.Position{}, eventlog.Filter{}) {
		got = err
	}
	if !errors.Is(got, eventlog.ErrUnavailable) {
		t.Errorf("read: %v", got)
	}
	for rec, err := range l.Tail(ctx, eventlog.Position{}, eventlog.Filter{}) {
		t.Errorf("tail: %v, %v", rec.Position, err)
	}
}
