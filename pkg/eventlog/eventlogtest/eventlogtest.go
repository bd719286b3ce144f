// Package eventlogtest is the conformance suite for implementations of the event log.
package eventlogtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Tenant is the tenant of everything that the suite writes.
const Tenant = "default"

// stepTimeout is the time limit for every step that must succeed.
const stepTimeout = 30 * time.Second

// Exercise runs the tests that every implementation of eventlog.Log must pass. open returns a log that no other test
// writes to. A log with several shards exercises more cases.
func Exercise(t *testing.T, open func(t *testing.T) eventlog.Log) {
	t.Helper()
	for name, test := range map[string]func(*testing.T, eventlog.Log){
		"append and load":              testAppendAndLoad,
		"stale head conflicts":         testStaleHead,
		"retry is settled":             testRepeatedAppend,
		"concurrent writers":           testConcurrentWriters,
		"bad drafts are refused":       testInvalidDrafts,
		"read one commit":              testCommitAt,
		"read in order":                testReadOrder,
		"read is filtered":             testReadFilters,
		"changes are found":            testChanged,
		"changes among subjects":       testChangedAmong,
		"bad filters are refused":      testInvalidFilters,
		"tail waits for more":          testTailWaits,
		"tail is filtered":             testTailFilter,
		"session numbers":              testSessionNumbers,
		"large data":                   testLargeData,
		"too large":                    testTooLargeCommit,
		"unknown types are kept":       testUnknownTypes,
		"a reader may stop":            testEarlyStop,
		"an ended context is an error": testEndedContext,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

// ID returns an id that is derived from a name.
func ID(kind events.IDKind, name string) string { return events.DeriveID(kind, "eventlogtest", name) }

// Draft returns a commit with one message_accepted event.
func Draft(name, content string) events.Draft {
	return events.Draft{
		ID:     ID(events.KindCommit, name),
		Actor:  events.Actor{Kind: "service", ID: "test"},
		Events: []events.Event{Message(name, content)},
		State:  map[string]string{"after": name},
	}
}

// Message returns a message_accepted event of an execution of its own.
func Message(name, content string) events.Event {
	return events.Event{
		ID: ID(events.KindEvent, name), Time: time.Unix(1_750_000_000, 0).UTC(), ExecutionID: ID(events.KindExecution, name),
		ConversationID: events.MainConversation, Source: events.FromServer,
		Data: events.MessageAccepted{BlockID: ID(events.KindBlock, name), Content: content},
	}
}

// SessionSubject returns the life subject of a session in the given shard.
func SessionSubject(shard, shards int, name string) events.Subject {
	for i := 0; ; i++ {
		s := events.LifeSubject(Tenant, ID(events.KindSession, fmt.Sprint(name, i)))
		if s.Partition()%shards == shard {
			return s
		}
	}
}

// AppendCommits appends n commits to a subject and returns the head after each.
func AppendCommits(t *testing.T, l eventlog.Log, s events.Subject, name string, n int) []eventlog.Head {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
	defer cancel()
	head, err := l.Last(ctx, s, eventlog.LeaderOnly)
	if err != nil {
		t.Fatal(err)
	}
	var heads []eventlog.Head
	for i := range n {
		head, err = l.Append(ctx, head, Draft(fmt.Sprint(name, i), fmt.Sprint(name, " ", i)))
		if err != nil {
			t.Fatalf("append %d to %s: %v", i, s, err)
		}
		heads = append(heads, head)
	}
	return heads
}

// testAppendAndLoad checks that commits are chained by their hashes, and that Last returns the last one with every freshness.
func testAppendAndLoad(t *testing.T, l eventlog.Log) {
	ctx := t.Context()
	s := SessionSubject(l.Shards()-1, l.Shards(), "load")
	for _, f := range []eventlog.Freshness{eventlog.AnyReplica, eventlog.LeaderOnly} {
		head, err := l.Last(ctx, s, f)
		if err != nil || head.Seq != 0 || head.Hash != "" || head.Subject != s {
			t.Fatalf("the head of an empty subject is %+v, %v", head, err)
		}
	}
	heads := AppendCommits(t, l, s, "load", 3)
	prev := ""
	for i, h := range heads {
		if h.Subject != s || h.Commit.Prev != prev || h.Hash != h.Commit.ComputeHash(s) || h.Commit.Hash != h.Hash {
			t.Errorf("commit %d is not chained: %+v", i, h)
		}
		if i > 0 && h.Seq <= heads[i-1].Seq {
			t.Errorf("commit %d has sequence %d after %d", i, h.Seq, heads[i-1].Seq)
		}
		prev = h.Hash
	}
	for _, f := range []eventlog.Freshness{eventlog.AnyReplica, eventlog.LeaderOnly} {
		got, err := l.Last(ctx, s, f)
		if err != nil {
			t.Fatal(err)
		}
		requireSameHead(t, got, heads[2])
		var state map[string]string
		if err := json.Unmarshal(got.Commit.State, &state); err != nil || state["after"] != "load2" {
			t.Errorf("state is %s, %v", got.Commit.State, err)
		}
	}
	// The other aspect is a separate subject.
	other, err := l.Last(ctx, events.RunSubject(s.Tenant, s.ID), eventlog.LeaderOnly)
	if err != nil || other.Seq != 0 {
		t.Errorf("the run of the session has the head %+v, %v", other, err)
	}
}

// requireSameHead fails the test unless two heads have the same position, hash and commit.
func requireSameHead(t *testing.T, got, want eventlog.Head) {
	t.Helper()
	a, err1 := got.Commit.Encode()
	b, err2 := want.Commit.Encode()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if got.Subject != want.Subject || got.Seq != want.Seq || got.Hash != want.Hash || !bytes.Equal(a, b) {
		t.Errorf("head is %+v, want %+v", got, want)
	}
}

// testStaleHead checks that Append returns a *ConflictError for every head that is not the subject's last commit.
func testStaleHead(t *testing.T, l eventlog.Log) {
	ctx := t.Context()
	s := SessionSubject(0, l.Shards(), "stale")
	heads := AppendCommits(t, l, s, "stale", 2)
	for what, head := range map[string]eventlog.Head{
		"an older head":              heads[0],
		"no head":                    {Subject: s},
		"a head that never was":      {Subject: s, Seq: heads[1].Seq + 100, Hash: heads[1].Hash},
		"another session's sequence": {Subject: SessionSubject(0, l.Shards(), "stale other"), Seq: heads[1].Seq, Hash: heads[1].Hash},
	} {
		_, err := l.Append(ctx, head, Draft("new", "new"))
		var conflict *eventlog.ConflictError
		if !errors.As(err, &conflict) {
			t.Errorf("append to %s: %v, want a conflict", what, err)
			continue
		}
		if conflict.Subject != head.Subject || conflict.Expected != head.Seq {
			t.Errorf("append to %s: the conflict is %+v", what, conflict)
		}
	}
	got, err := l.Last(ctx, s, eventlog.LeaderOnly)
	if err != nil {
		t.Fatal(err)
	}
	requireSameHead(t, got, heads[1])
}

// testRepeatedAppend repeats appends as a writer does that never received the acknowledgement, and checks that no
// commit is stored twice.
func testRepeatedAppend(t *testing.T, l eventlog.Log) {
	ctx := t.Context()
	s := SessionSubject(0, l.Shards(), "retry")
	first, err := l.Append(ctx, eventlog.Head{Subject: s}, Draft("a", "a"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := l.Append(ctx, eventlog.Head{Subject: s}, Draft("a", "a"))
	if err != nil {
		t.Fatalf("the same commit again: %v", err)
	}
	requireSameHead(t, again, first)
	// Another writer has appended since. The retry must still find its commit at the original position.
	second, err := l.Append(ctx, first, Draft("b", "b"))
	if err != nil {
		t.Fatal(err)
	}
	again, err = l.Append(ctx, eventlog.Head{Subject: s}, Draft("a", "a"))
	if err != nil {
		t.Fatalf("the same commit, once another came after it: %v", err)
	}
	requireSameHead(t, again, first)
	// A retry must not mistake a later commit for its own.
	var conflict *eventlog.ConflictError
	if _, err := l.Append(ctx, eventlog.Head{Subject: s}, Draft("b", "b")); !errors.As(err, &conflict) {
		t.Errorf("a later commit under the first guard: %v, want a conflict", err)
	}
	if n := countCommits(t, l, s); n != 2 {
		t.Errorf("%d commits are stored, want 2", n)
	}
	got, err := l.Last(ctx, s, eventlog.LeaderOnly)
	if err != nil {
		t.Fatal(err)
	}
	requireSameHead(t, got, second)
}

// countCommits returns the number of commits of a subject.
func countCommits(t *testing.T, l eventlog.Log, s events.Subject) int {
	t.Helper()
	return len(readAll(t, l, eventlog.Position{Shard: s.Partition() % l.Shards()}, eventlog.Filter{Subject: s}))
}

// readAll returns all commits after a position that match a filter.
func readAll(t *testing.T, l eventlog.Log, after eventlog.Position, f eventlog.Filter) []eventlog.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
	defer cancel()
	var list []eventlog.Record
	for rec, err := range l.Read(ctx, after, f) {
		if err != nil {
			t.Fatalf("read after %s: %v", after, err)
		}
		list = append(list, rec)
	}
	return list
}

// testConcurrentWriters checks that of several writers that append after the same head of a subject, exactly one wins.
func testConcurrentWriters(t *testing.T, l eventlog.Log) {
	ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
	defer cancel()
	const writers, each = 8, 5
	s := SessionSubject(0, l.Shards(), "concurrent")
	var conflicts atomic.Int64
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := 0; i < each; {
				head, err := l.Last(ctx, s, eventlog.AnyReplica)
				if err != nil {
					t.Error(err)
					return
				}
				var conflict *eventlog.ConflictError
				switch _, err = l.Append(ctx, head, Draft(fmt.Sprint("w", w, "-", i), "x")); {
				case err == nil:
					i++
				case errors.As(err, &conflict):
					conflicts.Add(1)
				default:
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	list := readAll(t, l, eventlog.Position{}, eventlog.Filter{Subject: s})
	if len(list) != writers*each {
		t.Fatalf("%d commits are stored, want %d (%d conflicts)", len(list), writers*each, conflicts.Load())
	}
	prev, seen := "", map[string]bool{}
	for _, rec := range list {
		if rec.Commit.Prev != prev || seen[rec.Commit.ID] {
			t.Fatalf("the chain breaks at %s: prev %s, want %s", rec.Position, rec.Commit.Prev, prev)
		}
		prev, seen[rec.Commit.ID] = rec.Commit.Hash, true
	}
}

// testInvalidDrafts checks that Append refuses an invalid subject, id or event, with an error that names it.
func testInvalidDrafts(t *testing.T, l eventlog.Log) {
	s := SessionSubject(0, l.Shards(), "bad")
	ok := Draft("ok", "ok")
	noEvents, badID := ok, ok
	noEvents.Events = nil
	badID.ID = "cmt_*"
	for what, try := range map[string]struct {
		head  eventlog.Head
		draft events.Draft
		says  string
	}{
		"no events":             {eventlog.Head{Subject: s}, noEvents, "no events"},
		"a bad commit id":       {eventlog.Head{Subject: s}, badID, "commit id"},
		"a wildcard tenant":     {eventlog.Head{Subject: events.LifeSubject("*", s.ID)}, ok, "tenant"},
		"a bad session id":      {eventlog.Head{Subject: events.LifeSubject(Tenant, "ses_>")}, ok, "sessionId"},
		"no aspect":             {eventlog.Head{Subject: events.Subject{Tenant: Tenant, ID: s.ID}}, ok, "aspect"},
		"a head without a hash": {eventlog.Head{Subject: s, Seq: 3}, ok, "sequence and a hash"},
	} {
		_, err := l.Append(t.Context(), try.head, try.draft)
		if err == nil || !strings.Contains(err.Error(), try.says) {
			t.Errorf("%s: %v, want an error about %q", what, err, try.says)
		}
	}
	if _, err := l.Last(t.Context(), events.LifeSubject(Tenant, "ses_*"), eventlog.AnyReplica); err == nil {
		t.Error("the head of a wildcard was read")
	}
	if n := countCommits(t, l, s); n != 0 {
		t.Errorf("%d bad commits were stored", n)
	}
}

// testCommitAt checks that CommitAt returns one commit, and ErrNotFound for a position without one.
func testCommitAt(t *testing.T, l eventlog.Log) {
	s := SessionSubject(l.Shards()-1, l.Shards(), "one")
	h := AppendCommits(t, l, s, "one", 2)[1]
	p := eventlog.Position{Shard: s.Partition() % l.Shards(), Seq: h.Seq}
	rec, err := l.CommitAt(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if rec.Subject != s || rec.Position != p || rec.Time.IsZero() || rec.Commit.Hash != h.Hash || len(rec.Events) != 1 {
		t.Errorf("the record is %+v", rec)
	}
	if got := rec.Events[0].Data.(events.MessageAccepted).Content; got != "one 1" {
		t.Errorf("its message is %q", got)
	}
	for _, bad := range []eventlog.Position{{Shard: p.Shard, Seq: p.Seq + 1000}, {Shard: p.Shard}, {Shard: l.Shards(), Seq: 1}, {Shard: -1, Seq: 1}} {
		if _, err := l.CommitAt(t.Context(), bad); !errors.Is(err, eventlog.ErrNotFound) {
			t.Errorf("read %s: %v, want ErrNotFound", bad, err)
		}
	}
}

// testReadOrder checks that Read yields every commit of a shard once and in order.
func testReadOrder(t *testing.T, l eventlog.Log) {
	if got := readAll(t, l, eventlog.Position{}, eventlog.Filter{}); len(got) != 0 {
		t.Fatalf("an empty log has %d commits", len(got))
	}
	a, b := SessionSubject(0, l.Shards(), "a"), SessionSubject(0, l.Shards(), "b")
	AppendCommits(t, l, a, "a", 3)
	AppendCommits(t, l, b, "b", 2)
	AppendCommits(t, l, events.RunSubject(a.Tenant, a.ID), "ar", 2)
	all := readAll(t, l, eventlog.Position{}, eventlog.Filter{})
	var got []string
	for i, rec := range all {
		got = append(got, rec.Events[0].Data.(events.MessageAccepted).Content)
		if i > 0 && rec.Position.Seq <= all[i-1].Position.Seq {
			t.Errorf("%s comes after %s", rec.Position, all[i-1].Position)
		}
	}
	if want := []string{"a 0", "a 1", "a 2", "b 0", "b 1", "ar 0", "ar 1"}; !slices.Equal(got, want) {
		t.Errorf("read %q, want %q", got, want)
	}
	for i, rec := range all {
		if rest := readAll(t, l, rec.Position, eventlog.Filter{}); len(rest) != len(all)-i-1 {
			t.Errorf("after %s come %d commits, want %d", rec.Position, len(rest), len(all)-i-1)
		}
	}
}

// testReadFilters checks that Read yields only what a filter of a subject, a session or partitions matches.
func testReadFilters(t *testing.T, l eventlog.Log) {
	a, b := SessionSubject(0, l.Shards(), "a"), SessionSubject(0, l.Shards(), "b")
	for i := 0; l.Partitioning().PartitionOf(b.ID) == l.Partitioning().PartitionOf(a.ID); i++ {
		b = SessionSubject(0, l.Shards(), fmt.Sprint("b", i))
	}
	run := events.RunSubject(a.Tenant, a.ID)
	AppendCommits(t, l, a, "life", 2)
	AppendCommits(t, l, run, "run", 3)
	AppendCommits(t, l, b, "other", 4)
	for _, try := range []struct {
		what   string
		filter eventlog.Filter
		want   int
	}{
		{"one aspect", eventlog.Filter{Subject: a}, 2},
		{"the other aspect", eventlog.Filter{Subject: run}, 3},
		{"a session", eventlog.Filter{Subject: events.Subject{Tenant: a.Tenant, ID: a.ID}}, 5},
		{"a session of another tenant", eventlog.Filter{Subject: events.Subject{Tenant: "else", ID: a.ID}}, 0},
		{"a partition", eventlog.Filter{Partitions: []int{l.Partitioning().PartitionOf(b.ID)}}, 4},
		{"two partitions", eventlog.Filter{Partitions: []int{l.Partitioning().PartitionOf(a.ID), l.Partitioning().PartitionOf(b.ID)}}, 9},
		{"a session in its partition", eventlog.Filter{Partitions: []int{l.Partitioning().PartitionOf(a.ID)}, Subject: a}, 2},
		{"everything", eventlog.Filter{}, 9},
	} {
		list := readAll(t, l, eventlog.Position{}, try.filter)
		if len(list) != try.want {
			t.Errorf("%s has %d commits, want %d", try.what, len(list), try.want)
		}
		for _, rec := range list {
			if !try.filter.Match(l.Partitioning(), rec.Subject) {
				t.Errorf("%s let %s through", try.what, rec.Subject)
			}
		}
	}
}

// testInvalidFilters checks that reads with a filter that cannot match, or of a shard that does not exist, return an error.
func testInvalidFilters(t *testing.T, l eventlog.Log) {
	s := SessionSubject(0, l.Shards(), "filters")
	elsewhere := (l.Partitioning().PartitionOf(s.ID) + l.Shards()) % l.Partitioning().PartitionCount() // in the same shard
	type try struct {
		after  eventlog.Position
		filter eventlog.Filter
	}
	tries := []try{
		{eventlog.Position{Shard: l.Shards()}, eventlog.Filter{}},
		{eventlog.Position{Shard: -1}, eventlog.Filter{}},
		{eventlog.Position{}, eventlog.Filter{Partitions: []int{l.Partitioning().PartitionCount()}}},
		{eventlog.Position{}, eventlog.Filter{Partitions: []int{}}},
		{eventlog.Position{}, eventlog.Filter{Subject: events.LifeSubject("*", s.ID)}},
		{eventlog.Position{}, eventlog.Filter{Subject: s, Partitions: []int{elsewhere}}},
	}
	if l.Shards() > 1 {
		tries = append(tries, try{eventlog.Position{Shard: 1}, eventlog.Filter{Partitions: []int{0}}}, try{eventlog.Position{Shard: 1}, eventlog.Filter{Subject: s}})
	}
	for _, try := range tries {
		for what, read := range map[string]func(context.Context, eventlog.Position, eventlog.Filter) func(func(eventlog.Record, error) bool){
			"read": func(ctx context.Context, p eventlog.Position, f eventlog.Filter) func(func(eventlog.Record, error) bool) {
				return l.Read(ctx, p, f)
			},
			"tail": func(ctx context.Context, p eventlog.Position, f eventlog.Filter) func(func(eventlog.Record, error) bool) {
				return l.Tail(ctx, p, f)
			},
		} {
			var got error
			for _, err := range read(t.Context(), try.after, try.filter) {
				got = err
			}
			if got == nil {
				t.Errorf("%s of %+v was accepted", what, try)
			}
		}
	}
}
