package projector_test

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector"
)

func (w *world) rebuild() projector.RebuildReport {
	w.t.Helper()
	r, err := projector.Rebuild(w.t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log, Logger: logger(w.t)}, false)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func TestRebuild_UnderLoadEqualsTheProjection(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.migrate()
	w.start(func(c *projector.Config, _ *projector.Deps) { c.BatchCommits = 10 })
	var sessions []*session
	for range 10 {
		sessions = append(sessions, w.session(-1).create())
	}
	gone := w.session(-1).create()
	gone.turn(1)
	gone.append(&gone.life, "", events.SessionDeleted{})
	for _, s := range sessions {
		s.turn(0)
	}
	w.awaitProjected(sessions...)
	w.exec("UPDATE executions SET result = 'wrong'") // a rebuild corrects this
	stop := make(chan struct{})
	var load sync.WaitGroup
	load.Go(func() {
		for n := range 60 {
			for _, s := range sessions {
				select {
				case <-stop:
					return
				default:
					s.turn(n + 1)
				}
			}
		}
	})
	for range 2 {
		r := w.rebuild()
		t.Logf("folded %d commits in %s, live held for %s", r.Commits, r.Duration, r.Held)
		w.sameAsRebuilt() // while the projection continues
	}
	close(stop)
	load.Wait()
	x := sessions[0].post(1000)
	id := sessions[0].open(x, "text")
	w.awaitProjected(sessions...)
	before := w.dump()
	w.rebuild()
	if after := w.dump(); after != before {
		t.Error("a rebuild without new commits changes the rows")
	}
	sessions[0].complete(x, id, "complete after the rebuild")
	w.awaitProjected(sessions...)
	w.checkAgainstLog(sessions...)
	w.checkpointEqualsRows()
	if n := queryOne[int](w, "SELECT count(*) FROM information_schema.schemata WHERE schema_name LIKE 'spool\\_%'"); n != 0 {
		t.Errorf("%d schemas are left over", n)
	}
}

func TestRebuild_CompareFindsADifference(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	w.start()
	s := w.session(-1).create()
	s.turn(1)
	w.awaitProjected(s)
	w.sameAsRebuilt()
	for _, c := range []struct {
		plant, heal, table string
		columns            []string
	}{
		{"UPDATE executions SET result = 'other'", "UPDATE executions SET result = 'done'", "executions", []string{"result"}},
		{"UPDATE blocks SET status = 'pending', block = block || ' ' WHERE kind = 'tool_use'", "UPDATE blocks SET status = 'complete', block = trim(block)", "blocks", []string{"block", "status"}},
		{"INSERT INTO deleted_sessions VALUES ('t', 'ses_x', 1, now())", "DELETE FROM deleted_sessions", "deleted_sessions", nil},
		{"CREATE TABLE kept AS SELECT * FROM events WHERE seq = (SELECT max(seq) FROM events); DELETE FROM events WHERE seq = (SELECT max(seq) FROM events)", "INSERT INTO events SELECT * FROM kept; DROP TABLE kept", "events", nil},
		{"UPDATE checkpoints SET commit_id = 'cmt_x' WHERE position > 0", "", "checkpoints", []string{"position", "commit_id"}},
	} {
		if _, err := w.conn().Exec(t.Context(), c.plant); err != nil {
			t.Fatal(err)
		}
		_, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log}, true)
		var d *projector.DifferenceError
		if !errors.As(err, &d) || d.Table != c.table || !slices.Equal(d.Columns, c.columns) {
			t.Errorf("after %s: got %v (%+v)", c.plant, err, d)
		}
		if _, err := w.conn().Exec(t.Context(), c.heal); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRebuild_RefusesASecondOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	w.exec("SELECT 1")
	conn := w.conn()
	if _, err := conn.Exec(t.Context(), "SELECT pg_advisory_lock($1)", int64(0x73706f6f6c726562)); err != nil {
		t.Fatal(err)
	}
	if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log}, false); err == nil {
		t.Error("two rebuilds ran at once")
	}
}

// TestRebuild_KeepsRightsOfGatewayRole tests that the gateway's role can read the read models of a rebuild, except
// the hashes of keys.
func TestRebuild_KeepsRightsOfGatewayRole(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	w.start()
	s := w.session(-1).create()
	s.turn(1)
	w.awaitProjected(s)
	reads := func(sql string) (n int, err error) {
		conn, err := readmodel.Connect(t.Context(), w.db.Gateway, readmodel.Schema)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close(t.Context()) }()
		err = conn.QueryRow(t.Context(), sql).Scan(&n)
		return n, err
	}
	for range 2 {
		if n, err := reads("SELECT count(*) FROM sessions"); n != 1 || err != nil {
			t.Errorf("%d sessions, %v", n, err)
		}
		if _, err := reads("SELECT count(*) FROM accepted_key('none')"); err != nil {
			t.Error(err)
		}
		var refused *pgconn.PgError
		if _, err := reads("SELECT count(sha256) FROM keys"); !errors.As(err, &refused) || refused.Code != "42501" {
			t.Errorf("the hashes of keys: %v", err)
		}
		w.rebuild()
	}
}
