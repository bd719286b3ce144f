package projector_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/topology"
)

// oneOfEachGroup creates a session in each group.
func (w *world) oneOfEachGroup() (list []*session) {
	for g := range w.log.Partitioning().GroupCount() {
		list = append(list, w.session(g).create())
	}
	return list
}

// turns appends n turns to each session, to all of them at the same time.
func turns(sessions []*session, first, n int) {
	var all sync.WaitGroup
	for _, s := range sessions {
		all.Go(func() {
			for i := range n {
				s.turn(first + i)
			}
		})
	}
	all.Wait()
}

// countStarts counts how often each group is started by any replica.
func (w *world) countStarts() (starts func(group int) int) {
	w.t.Helper()
	var mu sync.Mutex
	counts := map[string]int{}
	sub, err := w.nc.Subscribe(topology.ProjectorStartSubject, func(m *nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		counts[string(m.Data)]++
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = sub.Unsubscribe() })
	return func(group int) int {
		mu.Lock()
		defer mu.Unlock()
		return counts[fmt.Sprintf(`{"group":%d}`, group)]
	}
}

// awaitLocked waits until a replica leads each group and has read the log to its end.
func (w *world) awaitLocked() {
	w.t.Helper()
	groups := w.log.Partitioning().GroupCount()
	eventually(w.t, "all groups are led and caught up", func() error {
		n := queryOne[int](w, "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE locktype = 'advisory' AND granted AND d.datname = current_database()")
		caughtUp := queryOne[int](w, "SELECT count(*) FROM checkpoints WHERE caught_up")
		if n != groups || caughtUp != groups {
			return fmt.Errorf("%d groups are led, %d are caught up, want %d", n, caughtUp, groups)
		}
		return nil
	})
}

// TestTransactions_AreSharedByGroups tests that the groups of a process are written by the same transactions under
// load, and with few connections.
func TestTransactions_AreSharedByGroups(t *testing.T) {
	t.Parallel()
	for _, partitions := range []events.Partitioning{8, 64} {
		t.Run(fmt.Sprint(int(partitions), " partitions"), func(t *testing.T) {
			w := newWorldWith(t, topology.Layout{Shards: 1, Partitions: partitions}, natsserver.Config{Relaxed: true})
			w.migrate()
			w.start()
			w.awaitLocked()
			sessions := w.oneOfEachGroup()
			var load sync.WaitGroup
			load.Go(func() { turns(sessions, 0, 10) })
			eventually(t, "a transaction of several groups", func() error {
				if n := queryOne[int](w, "SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM checkpoints WHERE position > 0 GROUP BY xmin::text) t"); n < 2 {
					return fmt.Errorf("the largest one has %d", n)
				}
				return nil
			})
			load.Wait()
			w.awaitProjected(sessions...)
			if n := queryOne[int](w, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'spool-projector' AND datname = current_database()"); n >= int(partitions) {
				t.Errorf("the projector has %d connections for %d groups", n, partitions)
			}
			w.checkAgainstLog(sessions...)
			w.checkpointEqualsRows()
			w.sameAsRebuilt()
		})
	}
}

// TestRun_ReplicasThatFightForGroupsLoseNothing tests that the groups can change between two replicas at any time.
func TestRun_ReplicasThatFightForGroupsLoseNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	w.start()
	w.start()
	sessions := w.oneOfEachGroup()
	var load sync.WaitGroup
	load.Go(func() { turns(sessions, 0, 40) })
	// Each time the connection that holds a lock is ended, its replica loses all its groups, and the other one may take
	// them.
	for range 15 {
		w.exec(`SELECT pg_terminate_backend(pid) FROM (SELECT DISTINCT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database
			WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()) t WHERE pid <> pg_backend_pid()`)
		time.Sleep(40 * time.Millisecond)
	}
	load.Wait()
	w.awaitProjected(sessions...)
	w.checkAgainstLog(sessions...)
	w.checkpointEqualsRows()
	w.sameAsRebuilt()
}

// TestRun_AMovedCheckpointRestartsOnlyItsGroup tests that the other groups of the transaction go on if another writer
// has moved the checkpoint of one.
func TestRun_AMovedCheckpointRestartsOnlyItsGroup(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	starts := w.countStarts()
	w.start()
	w.awaitLocked()
	sessions := w.oneOfEachGroup()
	w.awaitProjected(sessions...)
	w.exec("UPDATE checkpoints SET position = -1 WHERE grp = 3") // the mark of a rebuild; the group is folded again
	turns(sessions, 0, 5)
	w.awaitProjected(sessions...)
	w.checkAgainstLog(sessions...)
	w.sameAsRebuilt()
	for g := range sessions {
		want := 1
		if g == 3 {
			want = 2
		}
		if n := starts(g); n != want {
			t.Errorf("group %d was started %d times, want %d", g, n, want)
		}
	}
}

// TestRefusedRows_DoNotBlockOtherGroups tests that, of the groups of a transaction, only the one with refused rows is
// divided, and that no group starts again.
func TestRefusedRows_DoNotBlockOtherGroups(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	w.exec("ALTER TABLE executions ADD CONSTRAINT of_a_test CHECK (code <> 'BOOM')")
	starts := w.countStarts()
	w.start()
	w.awaitLocked()
	sessions := w.oneOfEachGroup()
	var load sync.WaitGroup
	for n := range 3 {
		load.Go(func() { turns(append(append([]*session{}, sessions[:5]...), sessions[6:]...), 10*n, 10) })
		x := sessions[5].post(n)
		sessions[5].append(&sessions[5].run, x, events.ExecutionFailed{Code: "BOOM", Message: "m"})
		load.Wait()
	}
	w.awaitProjected(sessions...)
	w.checkAgainstLog(sessions...)
	w.checkpointEqualsRows()
	if got := queryOne[string](w, "SELECT string_agg(grp||' '||split_part(reason, ':', 1), ', ') FROM poison"); got != "5 postgres refuses the rows, 5 postgres refuses the rows, 5 postgres refuses the rows" {
		t.Errorf("poison is %q", got)
	}
	for g := range sessions {
		if n := starts(g); n != 1 {
			t.Errorf("group %d was started %d times, want once", g, n)
		}
	}
}

// TestRun_PostgresKilledUnderLoadLosesNothing tests that a crash of Postgres in the middle of shared transactions loses
// and repeats nothing.
func TestRun_PostgresKilledUnderLoadLosesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	pg := pgtest.RunDurable(t)
	w.url = pg.URL()
	w.start()
	w.start()
	sessions := w.oneOfEachGroup()
	w.awaitProjected(sessions...)
	for n := range 3 {
		var load sync.WaitGroup
		load.Go(func() { turns(sessions, 10*n, 10) })
		time.Sleep(50 * time.Millisecond)
		pg.Crash()
		load.Wait()
		pg.Start()
	}
	w.awaitProjected(sessions...)
	w.checkAgainstLog(sessions...)
	w.checkpointEqualsRows()
	w.sameAsRebuilt()
}
