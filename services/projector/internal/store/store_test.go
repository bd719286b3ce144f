package store_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector/internal/fold"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

// changes returns the changes of n events of a new session.
func changes(t *testing.T, session string, n int) *fold.Changes {
	t.Helper()
	rec := eventlog.Record{Subject: events.LifeSubject("default", session)}
	for range n {
		rec.Events = append(rec.Events, events.Event{ID: "evt", Data: events.SessionIdle{}})
	}
	b := fold.CommitBatch{Records: []eventlog.Record{rec}}
	m := fold.New(0, 10)
	if err := m.PutRows(m.MissingRows(b), fold.FoundRows{}); err != nil {
		t.Fatal(err)
	}
	c, err := m.Fold(b)
	if err != nil {
		t.Fatal(err)
	}
	return &c
}

// few and many are numbers of events that Apply writes in one round trip and with COPY.
const few, many = 2, 3000

func database(t *testing.T) (url string) {
	t.Helper()
	url = pgtest.NewDatabase(t)
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	return url
}

func open(t *testing.T, url string) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func lock(t *testing.T, s *store.Store, group int, want bool) {
	t.Helper()
	if locked, err := s.TryLockGroup(t.Context(), group); err != nil || locked != want {
		t.Fatalf("group %d: locked is %v, error %v", group, locked, err)
	}
}

// query returns the only value of a query.
func query[T any](t *testing.T, url, sql string) (v T) {
	t.Helper()
	conn, err := readmodel.Connect(t.Context(), url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context()) //nolint:errcheck // only reads
	rows, err := conn.Query(t.Context(), sql)
	if err != nil {
		t.Fatal(err)
	}
	if v, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[T]); err != nil {
		t.Fatal(err)
	}
	return v
}

func eventually(t *testing.T, check func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !check(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen within 30 s")
		}
	}
}

// state returns the number of events and the positions of the first checkpoints.
func state(t *testing.T, url string, groups int) string {
	t.Helper()
	return query[string](t, url, fmt.Sprintf(`SELECT (SELECT count(*) FROM events)||' events'||string_agg(' '||position, '' ORDER BY grp) FROM checkpoints WHERE grp < %d`, groups))
}

// TestApply_AStaleWriterWritesNothing tests that a write after another writer has moved the checkpoint changes
// nothing, with few and with many rows.
func TestApply_AStaleWriterWritesNothing(t *testing.T) {
	t.Parallel()
	url := database(t)
	both := []*store.Store{open(t, url), open(t, url)}
	lock(t, both[0], 0, true)
	lock(t, both[1], 0, false)
	if err := both[0].Apply(t.Context(), store.GroupWrite{Next: store.Checkpoint{Position: 7, CommitID: "cmt_7"}, Changes: changes(t, "ses_first", few)}); err != nil {
		t.Fatal(err)
	}
	for session, n := range map[string]int{"ses_few": few, "ses_many": many} {
		w := store.GroupWrite{Next: store.Checkpoint{Position: 9}, Changes: changes(t, session, n)}
		if err := both[1].Apply(t.Context(), w); !errors.Is(err, store.ErrCheckpointMoved) {
			t.Errorf("%d rows: got %v, want ErrCheckpointMoved", n, err)
		}
		if failed, err := both[1].ApplyTogether(t.Context(), []store.GroupWrite{w}); failed != 0 || !errors.Is(err, store.ErrCheckpointMoved) {
			t.Errorf("%d rows together: got %d, %v, want 0 and ErrCheckpointMoved", n, failed, err)
		}
	}
	if got := state(t, url, 1); got != "2 events 7" {
		t.Errorf("there are %s", got)
	}
}

// TestApply_WritesOnlyWhileTheLockIsHeld tests that a write on another connection than that of the lock changes nothing
// once the lock is lost.
func TestApply_WritesOnlyWhileTheLockIsHeld(t *testing.T) {
	t.Parallel()
	url := database(t)
	holder, writer := open(t, url), open(t, url)
	lock(t, holder, 3, true)
	lock(t, holder, 4, true)
	write := func(session string, n int, group int, previous, next int64) error {
		return writer.Apply(t.Context(), store.GroupWrite{Group: group, Previous: previous, Next: store.Checkpoint{Position: next}, Changes: changes(t, session, n), LockedBy: holder.BackendPID()})
	}
	if err := errors.Join(write("ses_a", few, 3, 0, 1), write("ses_b", many, 3, 1, 2), write("ses_c", few, 4, 0, 1)); err != nil {
		t.Fatal(err)
	}
	if err := holder.UnlockGroup(t.Context(), 3); err != nil {
		t.Fatal(err)
	}
	for session, n := range map[string]int{"ses_few": few, "ses_many": many} {
		if err := write(session, n, 3, 2, 3); !errors.Is(err, store.ErrCheckpointMoved) {
			t.Errorf("%d rows: got %v, want ErrCheckpointMoved", n, err)
		}
	}
	if err := write("ses_d", few, 4, 1, 2); err != nil {
		t.Errorf("a group whose lock is held: %v", err)
	}
	if err := holder.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool {
		return query[int](t, url, "SELECT count(*)::int FROM pg_locks WHERE locktype = 'advisory' AND objid = 4 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())") == 0
	})
	if err := write("ses_e", few, 4, 2, 3); !errors.Is(err, store.ErrCheckpointMoved) {
		t.Errorf("after the connection was closed: got %v, want ErrCheckpointMoved", err)
	}
	if got, want := state(t, url, 5), fmt.Sprintf("%d events 0 0 0 2 2", 3*few+many); got != want {
		t.Errorf("there are %s, want %s", got, want)
	}
}

// TestApplyTogether_IsOneTransaction tests that one transaction writes all groups or none, and that an error names the
// write that caused it.
func TestApplyTogether_IsOneTransaction(t *testing.T) {
	t.Parallel()
	url := database(t)
	s := open(t, url)
	round := func(n int64, name string) (list []store.GroupWrite) {
		for g := range 8 {
			list = append(list, store.GroupWrite{Group: g, Previous: n, Next: store.Checkpoint{Position: n + 1}, Changes: changes(t, fmt.Sprintf("ses_%s_%d", name, g), few)})
		}
		return list
	}
	if failed, err := s.ApplyTogether(t.Context(), round(0, "a")); failed != -1 || err != nil {
		t.Fatal(failed, err)
	}
	const first = "16 events 1 1 1 1 1 1 1 1"
	if got := state(t, url, 8); got != first {
		t.Errorf("there are %s, want %s", got, first)
	}
	if n := query[int](t, url, "SELECT count(DISTINCT xmin::text)::int FROM checkpoints WHERE grp < 8"); n != 1 {
		t.Errorf("%d transactions wrote the checkpoints, want 1", n)
	}

	list := round(1, "b")
	list[5].Changes.Events[0].Type = "\x00" // which Postgres does not store
	var refused *store.RowRefusedError
	if failed, err := s.ApplyTogether(t.Context(), list); failed != 5 || !errors.As(err, &refused) {
		t.Errorf("refused rows: got %d, %v, want 5 and a RowRefusedError", failed, err)
	}
	list = round(1, "c")
	list[2].Previous = 0
	if failed, err := s.ApplyTogether(t.Context(), list); failed != 2 || !errors.Is(err, store.ErrCheckpointMoved) {
		t.Errorf("a moved checkpoint: got %d, %v, want 2 and ErrCheckpointMoved", failed, err)
	}
	if got := state(t, url, 8); got != first {
		t.Errorf("after failures there are %s, want %s", got, first)
	}
	if failed, err := s.ApplyTogether(t.Context(), round(1, "d")); failed != -1 || err != nil {
		t.Errorf("after failures: got %d, %v", failed, err)
	}

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if failed, err := s.ApplyTogether(t.Context(), round(2, "e")); failed != -1 || err == nil {
		t.Errorf("on a closed connection: got %d, %v, want -1 and an error", failed, err)
	}
}

// TestReset_WaitsForAWriteThatBegan tests that a reset leaves no rows of a write that a former leader of the group has
// begun.
func TestReset_WaitsForAWriteThatBegan(t *testing.T) {
	t.Parallel()
	url := database(t)
	conn, err := readmodel.Connect(t.Context(), url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context()) //nolint:errcheck // the test has ended
	err = pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "UPDATE checkpoints SET position = 5 WHERE grp = 1; INSERT INTO deleted_sessions (tenant, id, grp, deleted_at) VALUES ('default', 'ses_late', 1, now())"); err != nil {
			return err
		}
		s := open(t, url)
		done := make(chan error, 1)
		go func() { done <- s.ResetGroup(t.Context(), 1) }()
		eventually(t, func() bool {
			return query[int](t, url, "SELECT count(*)::int FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT l.granted AND a.datname = current_database()") > 0
		})
		if err := tx.Commit(t.Context()); err != nil {
			return err
		}
		return <-done
	})
	if err != nil && !errors.Is(err, pgx.ErrTxClosed) {
		t.Fatal(err)
	}
	if got := query[string](t, url, "SELECT (SELECT count(*) FROM deleted_sessions)||' '||position FROM checkpoints WHERE grp = 1"); got != "0 0" {
		t.Errorf("tombstones and position after the reset: %s, want 0 0", got)
	}
}
