package eventlogtest

import (
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
)

// changesFound checks that Changed returns each changed subject with its last commit, in order and at most
// maxSubjects at a time.
func changesFound(t *testing.T, l eventlog.Log) {
	shard := l.Shards() - 1
	last := map[string]uint64{}
	for _, name := range []string{"one", "two", "three"} {
		heads := Fill(t, l, Session(shard, l.Shards(), "changes "+name), "changes "+name, 3)
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
