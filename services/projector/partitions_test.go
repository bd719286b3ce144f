package projector_test

import (
	"fmt"
	"testing"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
)

// filterCounts returns the number of filters of each consumer of the log, by stream, as the server has them.
func (w *world) filterCounts(shards int) map[string][]int {
	w.t.Helper()
	out := map[string][]int{}
	for shard := range shards {
		name := topology.EventsStreamName(shard)
		stream, err := w.js.Stream(w.t.Context(), name)
		if err != nil {
			w.t.Fatal(err)
		}
		list := stream.ListConsumers(w.t.Context())
		for info := range list.Info() {
			n := len(info.Config.FilterSubjects)
			if info.Config.FilterSubject != "" {
				n++
			}
			out[name] = append(out[name], n)
		}
		if err := list.Err(); err != nil {
			w.t.Fatal(err)
		}
	}
	return out
}

// expectConsumers waits until each group has one consumer of the log with the given number of filters.
func (w *world) expectConsumers(layout topology.Layout, filters int) {
	w.t.Helper()
	groups := layout.Partitions.GroupCount()
	eventually(w.t, "consumers", func() error {
		found := w.filterCounts(layout.Shards)
		tails := 0
		for name, counts := range found {
			for _, n := range counts {
				switch {
				case n == filters:
					tails++
				case n > filters:
					return fmt.Errorf("a consumer of %s has %d filters", name, n)
				}
			}
		}
		if tails != groups {
			return fmt.Errorf("%d consumers of the log have %d filters, want %d", tails, filters, groups)
		}
		return nil
	})
}

func TestRun_ReadsEachPartitionWithOneFilter(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		layout  topology.Layout
		filters int
	}{
		{topology.Layout{Shards: 1, Partitions: 1}, 1},
		{topology.Layout{Shards: 4, Partitions: 8}, 1},
		{topology.Layout{Shards: 1, Partitions: 64}, 1},
		{topology.Layout{Shards: 2}, 8}, // installed by an earlier build
	} {
		t.Run(c.layout.String(), func(t *testing.T) {
			w := newWorldWith(t, c.layout, natsserver.Config{Relaxed: true})
			first := w.start()
			w.expectConsumers(c.layout, c.filters)
			var sessions []*session
			for range 100 {
				s := w.session(-1).create()
				s.turn(1)
				sessions = append(sessions, s)
			}
			w.awaitProjected(sessions...)
			// Another projector takes the groups over and goes on.
			w.start()
			first()
			for _, s := range sessions {
				s.turn(2)
			}
			w.awaitProjected(sessions...)
			var events int
			for _, s := range sessions {
				events += s.n
			}
			if n := queryOne[int](w, "SELECT count(*) FROM events"); n != events {
				t.Errorf("%d events are projected, want %d", n, events)
			}
			if n := queryOne[int](w, "SELECT count(*) FROM checkpoints"); n != c.layout.Partitions.GroupCount() {
				t.Errorf("there are %d checkpoints, want %d", n, c.layout.Partitions.GroupCount())
			}
			for _, compare := range []bool{true, false, true} {
				if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log, Logger: logger(t)}, compare); err != nil {
					t.Fatalf("rebuild, compare %v: %v", compare, err)
				}
			}
			for _, s := range sessions[:10] {
				s.turn(3)
			}
			w.awaitProjected(sessions...)
		})
	}
}

func TestRun_ProjectsAThousandSessions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	var sessions []*session
	events := 0
	for range 1000 {
		s := w.session(-1).create()
		s.turn(1)
		sessions, events = append(sessions, s), events+s.n
	}
	w.awaitProjected(sessions[len(sessions)-1])
	eventually(t, "all events", func() error {
		if n := queryOne[int](w, "SELECT count(*) FROM events"); n != events {
			return fmt.Errorf("%d events are projected, want %d", n, events)
		}
		return nil
	})
}

// The read models may have been filled from a log with more groups.
func TestRun_RemovesTheRowsOfGroupsThatTheLogDoesNotHave(t *testing.T) {
	t.Parallel()
	w := newWorldWith(t, topology.Layout{Shards: 1, Partitions: 64}, natsserver.Config{Relaxed: true})
	stop := w.start()
	old := w.session(63).create()
	w.awaitProjected(old)
	stop()
	other := newWorldWith(t, topology.Layout{Shards: 1, Partitions: 2}, natsserver.Config{Relaxed: true})
	other.url, other.db = w.url, w.db
	fresh := other.session(1).create()
	other.start()
	other.awaitProjected(fresh)
	if n := queryOne[int](other, "SELECT count(*) FROM sessions"); n != 1 {
		t.Errorf("there are %d sessions, want 1", n)
	}
	if n := queryOne[int](other, "SELECT count(*) FROM checkpoints"); n != 2 {
		t.Errorf("there are %d checkpoints, want 2", n)
	}
}
