package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector/internal/fold"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

// TestSettingBuffers_LimitReadAheadAndRows tests that a group reads ahead up to BufferBytes, and that its model keeps about PresentRows
// rows.
func TestSettingBuffers_LimitReadAheadAndRows(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1 << 10, 1 << 20} {
		log, err := memlog.New(memlog.Config{})
		if err != nil {
			t.Fatal(err)
		}
		p := &Projector{cfg: Config{DatabaseURL: pgtest.NewDatabase(t), BufferBytes: size, PresentRows: size >> 10}, deps: Deps{Log: log, Now: time.Now}}
		g := newGroupProjection(p, 0, slog.New(slog.DiscardHandler))
		over, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		pushed := 0
		for err = nil; err == nil && pushed < 100; pushed++ {
			err = g.records.push(over, queuedCommit{}, size/4)
		}
		if pushed != 5 || !errors.Is(err, context.DeadlineExceeded) { // the fifth push waited until its deadline
			t.Errorf("buffer of %d bytes: blocked at item %d of a quarter of the buffer each, %v", size, pushed, err)
		}
		if err := readmodel.Migrate(t.Context(), p.cfg.DatabaseURL); err != nil {
			t.Fatal(err)
		}
		p.writer = newSharedWriter(func(ctx context.Context) (*store.Store, error) {
			return store.Open(ctx, p.cfg.DatabaseURL, readmodel.Schema)
		})
		if g.conn, err = p.writer.tryLockGroup(t.Context(), 0); err != nil || g.conn == nil {
			t.Fatal(g.conn, err)
		}
		if err := g.loadCheckpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.writer.close(); err != nil {
			t.Fatal(err)
		}
		if kept, want := remembers(t, g.model, 20), p.cfg.PresentRows >= 20; kept != want {
			t.Errorf("with %d present rows, the first of 20 sessions is kept: %v", p.cfg.PresentRows, kept)
		}
	}
}

// remembers reports whether a model still has the first session after it has folded the given number of sessions.
func remembers(t *testing.T, m *fold.Model, sessions int) bool {
	t.Helper()
	batch := func(n int) fold.CommitBatch {
		id := events.DeriveID(events.KindSession, fmt.Sprint(n))
		created := events.Event{ID: events.DeriveID(events.KindEvent, id), Data: events.SessionCreated{Agent: "default", Architecture: "spool", Provider: "local"}}
		return fold.CommitBatch{Records: []eventlog.Record{{Position: eventlog.Position{Seq: uint64(n + 1)}, Subject: events.LifeSubject("default", id), Events: []events.Event{created}}}}
	}
	for n := range sessions {
		missing := m.MissingRows(batch(n))
		if err := m.PutRows(missing, fold.FoundRows{}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Fold(batch(n)); err != nil {
			t.Fatal(err)
		}
		m.EvictRows()
	}
	missing := m.MissingRows(batch(0))
	return missing.Empty()
}
