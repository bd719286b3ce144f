package session_test

import (
	"crypto/rand"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	service "github.com/spoolhq/spool/services/session"
)

// window is the duplicate window of the stream in these tests. The default is two minutes.
const window = 100 * time.Millisecond

// idFromClock returns an id from a gateway whose clock is ahead by the given time.
func idFromClock(t *testing.T, kind events.IDKind, ahead time.Duration) string {
	s, err := events.NewID(kind, time.Now().Add(ahead), rand.Reader)
	must(t, err)
	return s
}

// TestRetry_AfterManyOtherCommands_ChangesNothing tests that a repeated command returns the first answer and writes
// nothing, whatever commands came in between and whatever clock the gateway has.
func TestRetry_AfterManyOtherCommands_ChangesNothing(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	stream, err := s.js.Stream(t.Context(), topology.EventsStreamName(0))
	must(t, err)
	cfg := stream.CachedInfo().Config
	cfg.Duplicates = window
	_, err = s.js.UpdateStream(t.Context(), cfg)
	must(t, err)
	s.startCopy("one", service.Config{})
	s.executors(2)

	agent := command.ApplyAgent{Ref: events.Reference{Slug: "reviewer"}, Spec: events.AgentSpec{Name: "r", Instructions: "You review code with care.", Architecture: "spool"}}
	file := func(i int) command.PutFile {
		return command.PutFile{File: command.File{Path: fmt.Sprint("f", i), SHA256: strings.Repeat("ab", 32), Size: 1}}
	}
	for _, clock := range []time.Duration{0, time.Hour, -time.Hour} {
		for _, c := range []struct {
			typ  command.Type
			body any
		}{
			{command.TypePostMessage, command.PostMessage{Content: "hello"}},
			{command.TypeCreateSession, command.CreateSession{}},
			{command.TypeStartExecution, command.StartExecution{Post: command.PostMessage{Content: "hello"}}},
			{command.TypePutFile, file(0)},
			{command.TypeSyncWorkspace, nil},
			{command.TypeUpdateSession, command.UpdateSession{Options: &events.Options{IdleTimeoutMs: 61_000}}},
		} {
			t.Run(fmt.Sprintf("%s by a gateway that is ahead by %s", c.typ, clock), func(t *testing.T) {
				t.Parallel()
				sid, exe, cmd := idFromClock(t, events.KindSession, 0), idFromClock(t, events.KindExecution, 0), idFromClock(t, events.KindCommand, clock)
				if c.typ != command.TypeCreateSession && c.typ != command.TypeStartExecution {
					sid = s.create(events.Options{})
				}
				first, err := s.trySend(cmd, c.typ, sid, exe, c.body)
				must(t, err)
				if first.Error != nil {
					t.Fatal(first.Error)
				}
				if c.typ == command.TypePostMessage || c.typ == command.TypeStartExecution {
					s.await(sid, "at the end of the query", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(exe) })
				}
				began := time.Now()
				for i := range 70 {
					a, err := s.trySend(idFromClock(t, events.KindCommand, 0), command.TypePutFile, sid, "", file(i+1))
					must(t, err)
					if a.Error != nil {
						t.Fatal(a.Error)
					}
				}
				<-time.After(time.Until(began.Add(2 * window)))
				s.await(sid, "at rest", func(l *eventlog.SessionState) bool { return l.DueWork() == "" })
				before := len(s.history(sid))
				again, err := s.trySend(cmd, c.typ, sid, exe, c.body)
				must(t, err)
				if !reflect.DeepEqual(again, first) {
					t.Errorf("answered %+v, then %+v", first, again)
				}
				if after := s.history(sid); len(after) != before {
					t.Errorf("the retry wrote %v", after[before:])
				}
				s.checkLog(sid)
			})
		}
	}
	t.Run("of the catalogue", func(t *testing.T) {
		t.Parallel()
		cmd, budget := idFromClock(t, events.KindCommand, 0), idFromClock(t, events.KindCommand, 0)
		limit := command.SetBudget{Period: "day", Budget: events.Budget{Turns: 5}}
		for i := range 22 {
			if i == 21 {
				<-time.After(2 * window)
			}
			if i > 0 && i < 21 {
				agent.Spec.Name, limit.Budget.Turns = fmt.Sprint("r", i), 5+uint32(i)
				for typ, body := range map[command.Type]any{command.TypeApplyAgent: agent, command.TypeSetBudget: limit} {
					if a := s.send(typ, "", "", body); a.Error != nil {
						t.Fatal(a.Error)
					}
				}
				continue
			}
			first := agent
			first.Spec.Name = "r"
			for _, c := range []struct {
				id   string
				typ  command.Type
				body any
			}{{cmd, command.TypeApplyAgent, first}, {budget, command.TypeSetBudget, command.SetBudget{Period: "day", Budget: events.Budget{Turns: 5}}}} {
				a, err := s.trySend(c.id, c.typ, "", "", c.body)
				must(t, err)
				if a.Error != nil {
					t.Fatal(a.Error)
				}
			}
		}
		t.Cleanup(func() { s.checkLog("") })
	})
}

// checkLog checks the whole log, or one session of it.
func (s *stack) checkLog(sid string) {
	s.t.Helper()
	var scope eventlog.VerifyScope
	if sid != "" {
		scope = eventlog.VerifyScope{Tenant: "default", Session: sid}
	}
	report, err := eventlog.Verify(s.t.Context(), s.log, scope)
	if err != nil || report.Problem != nil {
		s.t.Errorf("verify: %v, %v", report.Problem, err)
	}
}
