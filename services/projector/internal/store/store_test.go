package store_test

import (
	"errors"
	"testing"

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
	rec := eventlog.Record{Subject: events.LifeOf("default", session)}
	for range n {
		rec.Events = append(rec.Events, events.Event{ID: "evt", Data: events.SessionIdle{}})
	}
	b := fold.Batch{Records: []eventlog.Record{rec}}
	m := fold.New(0, 10)
	if err := m.Put(m.Missing(b), fold.Present{}); err != nil {
		t.Fatal(err)
	}
	c, err := m.Fold(b)
	if err != nil {
		t.Fatal(err)
	}
	return &c
}

// TestApply_AStaleWriterWritesNothing tests that a write after another writer has moved the checkpoint changes
// nothing, with few and with many rows.
func TestApply_AStaleWriterWritesNothing(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	var both [2]*store.Store
	for i := range both {
		s, err := store.Open(t.Context(), url, readmodel.Schema, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		both[i] = s
	}
	for i, want := range []bool{true, false} {
		if locked, err := both[i].TryLock(t.Context()); err != nil || locked != want {
			t.Fatalf("connection %d: locked is %v, error %v", i, locked, err)
		}
	}
	if err := both[0].Apply(t.Context(), 0, store.Checkpoint{Position: 7, CommitID: "cmt_7"}, changes(t, "ses_first", 2)); err != nil {
		t.Fatal(err)
	}
	for session, n := range map[string]int{"ses_few": 2, "ses_many": 3000} {
		if err := both[1].Apply(t.Context(), 0, store.Checkpoint{Position: 9}, changes(t, session, n)); !errors.Is(err, store.ErrMoved) {
			t.Errorf("%d rows: got %v, want ErrMoved", n, err)
		}
	}
	conn, err := readmodel.Connect(t.Context(), url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	var rows, position int
	if err := conn.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM events), (SELECT position FROM checkpoints WHERE grp = 0)").Scan(&rows, &position); err != nil {
		t.Fatal(err)
	}
	if rows != 2 || position != 7 {
		t.Errorf("there are %d events and the checkpoint is %d, want 2 and 7", rows, position)
	}
}
