package runlog_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

var session = events.DeriveID(events.KindSession, "runlog")

// flaky is a log that fails some appends.
type flaky struct {
	eventlog.Log
	fails int
}

func (f *flaky) Append(ctx context.Context, head eventlog.Head, draft events.Draft) (eventlog.Head, error) {
	if f.fails > 0 {
		f.fails--
		return eventlog.Head{}, eventlog.ErrUnavailable
	}
	return f.Log.Append(ctx, head, draft)
}

func newWriter(t *testing.T) (*runlog.Writer, *flaky, *[]events.Event) {
	t.Helper()
	log, err := memlog.New(memlog.Config{})
	if err != nil {
		t.Fatal(err)
	}
	f, stored := &flaky{Log: log}, &[]events.Event{}
	return &runlog.Writer{
		Sessions: eventlog.Sessions{Log: f}, Executor: events.DeriveID(events.KindExecutor, "me"), Now: time.Now,
		Stored: func(list []events.Event) { *stored = append(*stored, list...) },
	}, f, stored
}

func load(t *testing.T, w *runlog.Writer) *eventlog.SessionState {
	t.Helper()
	l, err := w.Sessions.Load(t.Context(), "default", session, eventlog.LeaderOnly)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

var fact = events.Error{Code: "TEST", Message: "a fact"}

// TestWriter_AppendFacts: facts are stored under the next epoch, and refused for a session that has changed since it was loaded.
func TestWriter_AppendFacts(t *testing.T) {
	t.Parallel()
	w, _, stored := newWriter(t)
	before := load(t, w)
	if err := w.AppendFacts(t.Context(), before, fact, fact); err != nil {
		t.Fatal(err)
	}
	after := load(t, w)
	if after.Run.Epoch != before.Run.Epoch+1 || len(*stored) != 2 {
		t.Errorf("epoch %d after %d, %d events stored", after.Run.Epoch, before.Run.Epoch, len(*stored))
	}
	if err := w.AppendFacts(t.Context(), before, fact); !errors.Is(err, runlog.ErrChanged) || len(*stored) != 2 {
		t.Errorf("facts about a session that has changed: %v, %d events stored", err, len(*stored))
	}
}

// TestWriter_AppendAll: an unavailable log is waited for, and the commit of another executor fences.
func TestWriter_AppendAll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, f, stored := newWriter(t)
		before := load(t, w)
		d, err := w.Decide(before.Run, run.RecordEvents{Epoch: before.Run.Epoch + 1, Events: w.NewEvents("", fact)})
		if err != nil {
			t.Fatal(err)
		}
		f.fails = 3
		after, err := w.AppendAll(t.Context(), before, d, slog.New(slog.DiscardHandler))
		if err != nil || after.Run.Epoch != before.Run.Epoch+1 || len(*stored) != 1 || f.fails != 0 {
			t.Fatalf("epoch %d, %d events stored, %v", after.Run.Epoch, len(*stored), err)
		}
		if _, err := w.AppendAll(t.Context(), before, d, slog.New(slog.DiscardHandler)); !errors.Is(err, run.ErrFenced) {
			t.Errorf("after the commit of another: %v", err)
		}
		f.fails = 1000
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		d, err = w.Decide(after.Run, run.RecordEvents{Epoch: after.Run.Epoch + 1, Events: w.NewEvents("", fact)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.AppendAll(ctx, after, d, slog.New(slog.DiscardHandler)); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, eventlog.ErrUnavailable) {
			t.Errorf("while the log is unavailable: %v", err)
		}
	})
}

// TestWriter_Events: the events of a command have ids of their own, and the execution.
func TestWriter_Events(t *testing.T) {
	t.Parallel()
	w, _, _ := newWriter(t)
	execution := events.DeriveID(events.KindExecution, "exe")
	list := w.NewEvents(execution, fact, fact)
	if len(list) != 2 || list[0].ID == list[1].ID || list[0].ExecutionID != execution {
		t.Errorf("%+v", list)
	}
}
