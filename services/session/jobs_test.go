package session_test

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
	service "github.com/spoolhq/spool/services/session"
)

// worker takes one job at a time, when a test calls it.
type worker struct {
	*stack
	jobs jetstream.Consumer
}

func (s *stack) worker() *worker {
	s.t.Helper()
	c, err := s.js.CreateOrUpdateConsumer(s.t.Context(), topology.StreamJobs, topology.ProviderJobsConsumer("local").Config)
	must(s.t, err)
	return &worker{s, c}
}

// waiting blocks until the queue holds n jobs.
func (w *worker) waiting(n uint64) {
	w.t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(pause) {
		stream, err := w.js.Stream(w.t.Context(), topology.StreamJobs)
		must(w.t, err)
		have := stream.CachedInfo().State.Msgs
		if have == n {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%d jobs wait, want %d", have, n)
		}
	}
}

// runJob waits for a job, does the work that is due like an executor, and acknowledges the job. what describes the
// job in the failure.
func (w *worker) runJob(what string) {
	w.t.Helper()
	msg, err := w.jobs.Next(jetstream.FetchMaxWait(within))
	if err != nil {
		w.t.Fatalf("no job %s: %v", what, err)
	}
	w.execute(w.t.Context(), "worker", msg.Data())
	ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Second)
	defer cancel()
	must(w.t, msg.DoubleAck(ctx))
}

// TestPauseAndResumeBeforeTheClaim_PublishesAnotherJob tests that an executor acknowledges the job of a paused
// execution, and that each resume publishes another job, however soon it follows.
func TestPauseAndResumeBeforeTheClaim_PublishesAnotherJob(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", service.Config{})
	w := s.worker()
	sid := s.create(events.Options{})
	exe := s.post(sid)
	for range 2 {
		w.waiting(1)
		s.mustSend(command.TypePause, sid, exe)
		w.runJob("of the dispatch, or of the last resume")
		s.mustSend(command.TypeResume, sid, exe)
	}
	w.runJob("after the last resume")
	s.await(sid, "at the end", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(exe) })
}

// TestSyncBehindAPausedExecution_PublishesAnotherJob tests that the job of a snapshot is acknowledged while a later
// execution is paused. When that execution is cancelled, the snapshot is due again.
func TestSyncBehindAPausedExecution_PublishesAnotherJob(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", service.Config{})
	w := s.worker()
	sid := s.create(events.Options{})
	first := s.post(sid)
	w.runJob("of the first turn")
	s.await(sid, "idle with its sandbox", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(first) && l.Run.Sandbox.ID != "" })
	s.mustSend(command.TypeSyncWorkspace, sid, "")
	w.waiting(1)
	second := s.post(sid)
	w.waiting(2)
	s.mustSend(command.TypePause, sid, second)
	s.await(sid, "paused behind the sync", func(l *eventlog.SessionState) bool {
		return l.Life.ShouldBePaused(second) && l.Life.Syncs == 1 && l.DueWork() == run.NoWork
	})
	w.runJob("of the sync")
	w.runJob("of the second turn")
	s.mustSend(command.TypeCancel, sid, second)
	w.runJob("of the sync, again")
	s.await(sid, "synced", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(second) && l.Run.Synced == 1 })
}

// TestTerminateOfAPausedExecution_PublishesTheJobOfTheRelease tests that the session service ends an execution that
// was never claimed, and that an executor releases its sandbox, which the previous turn left.
func TestTerminateOfAPausedExecution_PublishesTheJobOfTheRelease(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", service.Config{})
	w := s.worker()
	sid := s.create(events.Options{})
	first := s.post(sid)
	w.runJob("of the first turn")
	s.await(sid, "idle with its sandbox", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(first) && l.Run.Sandbox.ID != "" })
	second := s.post(sid)
	w.waiting(1)
	s.mustSend(command.TypePause, sid, second)
	w.runJob("of the second turn")
	s.mustSend(command.TypeTerminate, sid, second)
	w.runJob("of the release")
	l := s.await(sid, "released", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(second) && l.Run.Sandbox.ID == "" })
	if l.Life.Status != session.Open {
		t.Fatalf("the session is %s", l.Life.Status)
	}
}

// mustSend sends a command without a body, which must be accepted.
func (s *stack) mustSend(typ command.Type, sid, exe string) {
	s.t.Helper()
	if a := s.send(typ, sid, exe, nil); a.Error != nil {
		s.t.Fatalf("%s: %v", typ, a.Error)
	}
}
