package session_test

import (
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session"
)

// TestControl_BeforeTheNextAttemptHasItsOwnJob tests an execution that waits for its next attempt: the job of the
// attempt is delayed, and a control has a separate job.
func TestControl_BeforeTheNextAttemptHasItsOwnJob(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid := s.create(events.Options{})
	exe := s.post(sid)
	jobs := func() uint64 {
		stream, err := s.js.Stream(t.Context(), topology.StreamJobs)
		must(t, err)
		info, err := stream.Info(t.Context())
		must(t, err)
		return info.State.LastSeq
	}
	l := s.await(sid, "dispatched", func(l *eventlog.SessionState) bool { return l.Life.Active.ExecutionID == exe && jobs() == 1 })
	claim := run.ClaimExecution{CommandMeta: events.CommandMeta{CommandID: id(events.KindCommand), Now: time.Now()}, ExecutionID: exe, Turn: l.Life.Active.Turn, Executor: "xtr_one"}
	d, err := run.Decide(l.Run, claim)
	must(t, err)
	must(t, s.ses.AppendRun(t.Context(), l, events.Actor{Kind: "executor"}, id(events.KindCommit), d))
	m := events.NewEventList(events.CommandMeta{CommandID: id(events.KindCommand), Now: time.Now()})
	m.Add(exe, events.AttemptFailed{Attempt: 1, Attempts: 2, Code: "AGENT_EXITED", WaitMs: 60_000})
	d, err = run.Decide(l.Run, run.RecordEvents{Epoch: 1, Events: m.Events()})
	must(t, err)
	must(t, s.ses.AppendRun(t.Context(), l, events.Actor{Kind: "executor"}, id(events.KindCommit), d))
	s.send(command.TypeCancel, sid, exe, nil)
	s.await(sid, "with a second job", func(*eventlog.SessionState) bool { return jobs() == 2 })
}
