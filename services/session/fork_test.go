package session_test

import (
	"context"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
	"github.com/spoolhq/spool/services/session"
)

// countingLog is a log that counts the events that are read of one session.
type countingLog struct {
	eventlog.Log
	session string
	events  atomic.Int64

	// a read of the session blocks until this many callers have loaded the session's head
	loadedHead    sync.WaitGroup
	expectedLoads atomic.Int64
}

func (c *countingLog) Last(ctx context.Context, s events.Subject, f eventlog.Freshness) (eventlog.Head, error) {
	if s == events.LifeSubject("default", c.session) && c.expectedLoads.Add(-1) >= 0 {
		c.loadedHead.Done()
	}
	return c.Log.Last(ctx, s, f)
}

func (c *countingLog) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	if f.Subject.ID == c.session {
		c.loadedHead.Wait()
	}
	return func(yield func(eventlog.Record, error) bool) {
		for rec, err := range c.Log.Read(ctx, after, f) {
			if f.Subject.ID == c.session {
				c.events.Add(int64(len(rec.Events)))
			}
			if !yield(rec, err) {
				return
			}
		}
	}
}

// createLong creates a session with n events and one more, in commits of 50 events.
func (s *stack) createLong(sid string, n int) {
	s.t.Helper()
	if a := s.send(command.TypeCreateSession, sid, "", command.CreateSession{}); a.Error != nil {
		s.t.Fatal(a.Error)
	}
	l, err := s.ses.Load(s.t.Context(), "default", sid, eventlog.LeaderOnly)
	must(s.t, err)
	for i := range n / 50 {
		var list []events.Event
		for range 50 {
			list = append(list, events.Event{ID: id(events.KindEvent), Source: events.FromRunner, Data: events.Log{Level: "info", Message: fmt.Sprint(i)}})
		}
		must(s.t, s.ses.AppendRunPart(s.t.Context(), l, events.Actor{Kind: "executor", ID: "x"}, id(events.KindCommit), run.Decision{Epoch: 1, Events: list}))
	}
}

// TestFork_DoesNotReadTheLogTwice tests that a fork at any event reads its parent's log from the position that an
// earlier fork has reached.
func TestFork_DoesNotReadTheLogTwice(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	const length = 4001
	sid := id(events.KindSession)
	log := &countingLog{session: sid}
	s.startCopyWith("one", session.Config{}, func(l eventlog.Log) eventlog.Log { log.Log = l; return log })
	s.createLong(sid, length-1)
	forked := func(at uint32, most int64) {
		t.Helper()
		body := command.ForkSession{Parent: sid}
		if at > 0 {
			body.At = &at
		}
		before := log.events.Load()
		a := s.send(command.TypeForkSession, id(events.KindSession), "", body)
		if a.Error != nil || a.Forked == nil || at > 0 && a.Forked.Asked != at || a.Forked.Effective != a.Forked.Asked {
			t.Fatalf("fork at %d: %+v", at, a)
		}
		if n := log.events.Load() - before; n > most {
			t.Errorf("a fork at %d read %d events, want at most %d", at, n, most)
		}
	}
	forked(0, length) // the whole log, once
	forked(0, 0)
	forked(length, 0)
	for _, at := range []uint32{3999, 2500, 1001, 1500} {
		forked(at, 1100) // up to the next position that the service has remembered, and the rest of its commit
	}
	l, err := s.ses.Load(t.Context(), "default", sid, eventlog.LeaderOnly)
	must(t, err)
	must(t, s.ses.AppendRunPart(t.Context(), l, events.Actor{Kind: "executor", ID: "x"}, id(events.KindCommit),
		run.Decision{Epoch: 1, Events: []events.Event{{ID: id(events.KindEvent), Source: events.FromRunner, Data: events.Log{Level: "info", Message: "later"}}}}))
	forked(0, 1)
	forked(length+1, 0)
}

// TestFork_TwoHundredAtOnce tests that many concurrent forks of one session succeed, and that its log is read once
// for all of them.
func TestFork_TwoHundredAtOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	const length, forks = 2001, 200
	sid := id(events.KindSession)
	log := &countingLog{session: sid}
	s.startCopyWith("one", session.Config{}, func(l eventlog.Log) eventlog.Log { log.Log = l; return log })
	s.createLong(sid, length-1)
	const together = 40 // of the 64 workers of the copy
	log.loadedHead.Add(together)
	log.expectedLoads.Store(together)
	var all sync.WaitGroup
	ids := make([]string, forks)
	for i := range ids {
		ids[i] = id(events.KindSession)
		all.Go(func() {
			a, err := s.trySend(id(events.KindCommand), command.TypeForkSession, ids[i], "", command.ForkSession{Parent: sid})
			if err != nil || a.Error != nil {
				t.Errorf("fork %d: %+v, %v", i, a, err)
			}
		})
	}
	all.Wait()
	if n := log.events.Load(); n > length {
		t.Errorf("%d forks read %d events of a session that has %d", forks, n, length)
	}
	for _, fork := range ids {
		l, err := s.ses.Load(t.Context(), "default", fork, eventlog.LeaderOnly)
		if err != nil || l.Life.Fork == nil || l.Life.Fork.Parent != sid || l.Life.Fork.Effective != length {
			t.Errorf("fork %s is %+v, %v", fork, l.Life.Fork, err)
		}
	}
}

// TestFork_SaysWhetherTheConversationComesAlong tests that a fork whose agent cannot continue its conversation is refused unless that is allowed,
// and that a preview makes no session.
func TestFork_SaysWhetherTheConversationComesAlong(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid := id(events.KindSession)
	s.createLong(sid, 1)
	store, err := natsstore.Open(t.Context(), s.js, topology.BucketWorkspaces)
	must(t, err)
	fork := func(b command.ForkSession) (string, command.Answer) {
		t.Helper()
		b.Parent = sid
		made := id(events.KindSession)
		return made, s.send(command.TypeForkSession, made, "", b)
	}
	conversation := func(a command.Answer) string {
		t.Helper()
		if a.Error != nil || a.Forked == nil {
			t.Fatalf("answer %+v, %+v", a, a.Error)
		}
		return a.Forked.Conversation
	}
	if _, a := fork(command.ForkSession{}); conversation(a) != events.ForkConversationNew {
		t.Errorf("without a conversation: %+v", a.Forked)
	}
	for _, c := range []struct {
		written events.TranscriptWritten
		want    string
	}{
		{events.TranscriptWritten{AgentSessionID: "a1"}, events.ForkConversationContinued},
		{events.TranscriptWritten{AgentSessionID: "a2", Volatile: true}, events.ForkConversationLost},
	} {
		l, err := s.ses.Load(t.Context(), "default", sid, eventlog.LeaderOnly)
		must(t, err)
		taken, err := workspace.Snapshot(t.Context(), &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/a": "1"}}, store, workspace.Options{Tenant: "default", Session: sid})
		must(t, err)
		must(t, s.ses.AppendRunPart(t.Context(), l, events.Actor{Kind: "executor", ID: "x"}, id(events.KindCommit), run.Decision{Epoch: 1, Events: []events.Event{
			{ID: id(events.KindEvent), Source: events.FromRunner, Data: c.written},
			{ID: id(events.KindEvent), Source: events.FromServer, Data: events.WorkspaceSynced{Snapshot: taken.ID}},
		}}))
		made, a := fork(command.ForkSession{Preview: true})
		if got := conversation(a); got != c.want {
			t.Errorf("%+v: the preview says %q, want %q", c.written, got, c.want)
		}
		if l, err := s.ses.Load(t.Context(), "default", made, eventlog.LeaderOnly); err != nil || l.Life.Fork != nil {
			t.Errorf("the preview made %+v, %v", l.Life.Fork, err)
		}
	}
	made, a := fork(command.ForkSession{})
	if a.Error == nil || a.Error.Code != command.CodeConversationLost {
		t.Errorf("answer %+v", a)
	}
	if l, err := s.ses.Load(t.Context(), "default", made, eventlog.LeaderOnly); err != nil || l.Life.Fork != nil {
		t.Errorf("the refused fork is %+v, %v", l.Life.Fork, err)
	}
	if _, a = fork(command.ForkSession{AllowConversationLoss: true}); conversation(a) != events.ForkConversationLost || a.Forked.AgentSessionID != "" {
		t.Errorf("allowed: %+v", a.Forked)
	}
}
