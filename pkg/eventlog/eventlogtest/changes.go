package eventlogtest

import (
	"fmt"
	"maps"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// testChanged checks that Changed returns each changed subject with its last commit, in order and at most
// maxSubjects at a time.
func testChanged(t *testing.T, l eventlog.Log) {
	shard := l.Shards() - 1
	last := map[string]uint64{}
	for _, name := range []string{"one", "two", "three"} {
		heads := AppendCommits(t, l, SessionSubject(shard, l.Shards(), "changes "+name), "changes "+name, 3)
		head := heads[len(heads)-1]
		last[head.Subject.String()] = head.Seq
	}
	found := map[string]uint64{}
	at := eventlog.Position{Shard: shard}
	for pieces := 0; ; pieces++ {
		c, err := l.Changed(t.Context(), at, 2)
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Last) == 0 {
			if c.Through != at || pieces != 2 {
				t.Errorf("after %d pieces Changed returned %+v, want nothing after %s and two pieces", pieces, c, at)
			}
			break
		}
		if len(c.Last) > 2 || c.Through.Seq <= at.Seq || c.More != (pieces == 0) {
			t.Fatalf("Changed after %s returned %+v", at, c)
		}
		for subject, seq := range c.Last {
			found[subject] = seq
		}
		at = c.Through
	}
	for subject, seq := range last {
		if found[subject] != seq {
			t.Errorf("%s: the last sequence found is %d, want %d", subject, found[subject], seq)
		}
	}
	if len(found) != len(last) {
		t.Errorf("found %v, want %v", found, last)
	}
}

// testChangedAmong checks that ChangedAmong returns exactly those of the given subjects that changed after the position, each
// with its last sequence, and a Through after which only later changes are returned.
func testChangedAmong(t *testing.T, l eventlog.Log) {
	shard := l.Shards() - 1
	var subjects []events.Subject
	seqs := map[string]uint64{}
	for i := range 3 {
		name := fmt.Sprint("among ", i)
		s := SessionSubject(shard, l.Shards(), name)
		heads := AppendCommits(t, l, s, name, 2)
		seqs[s.String()] = heads[1].Seq
		subjects = append(subjects, s, events.RunSubject(s.Tenant, s.ID)) // the other aspect has no commits
	}
	AppendCommits(t, l, SessionSubject(shard, l.Shards(), "not asked for"), "not asked for", 1)
	changed := func(after eventlog.Position, want map[string]uint64) eventlog.Position {
		t.Helper()
		c, err := l.ChangedAmong(t.Context(), after, subjects)
		if err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(c.Last, want) || c.More || c.Through.Shard != shard {
			t.Errorf("ChangedAmong after %s returned %+v, want %v", after, c, want)
		}
		return c.Through
	}
	second := seqs[subjects[2].String()]
	end := changed(eventlog.Position{Shard: shard}, seqs)
	changed(eventlog.Position{Shard: shard, Seq: second}, map[string]uint64{subjects[4].String(): seqs[subjects[4].String()]})
	if again := changed(end, nil); again != end {
		t.Errorf("the end is %s, and %s if nothing changed", end, again)
	}
	head, err := l.Last(t.Context(), subjects[0], eventlog.LeaderOnly)
	if err != nil {
		t.Fatal(err)
	}
	if head, err = l.Append(t.Context(), head, Draft("among, later", "later")); err != nil {
		t.Fatal(err)
	}
	changed(end, map[string]uint64{subjects[0].String(): head.Seq})

	future := eventlog.Position{Shard: shard, Seq: head.Seq + 1000}
	if c := changed(future, nil); c != future {
		t.Errorf("after %s, which does not exist yet, the end is %s", future, c)
	}
	subjects = subjects[1:2]
	if c := changed(end, nil); c.Seq < end.Seq {
		t.Errorf("the end for a subject without commits is %s, before %s", c, end)
	}
	subjects = nil
	if c := changed(end, nil); c != end {
		t.Errorf("the end for no subjects is %s, want %s", c, end)
	}
}
