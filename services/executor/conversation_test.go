package executor_test

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
)

// TestConversation_LostFailsTheTurn tests that a turn of a real agent whose record is gone fails, also when it is repeated, and that it runs once
// the session allows a new conversation.
func TestConversation_LostFailsTheTurn(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, program)
	e := b.run()
	s := b.session(func(c *events.SessionCreated) { c.Architecture = "spool" })
	s.untilEnded(s.post("remember 4711"))
	own := s.load().Run.AgentSession
	if err := syscall.Kill(int(starts(s.events())[0].PID), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(of[events.TranscriptWritten](s)[0].Path); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		execution := s.post("which number was it?")
		l := s.untilEnded(execution)
		failed, ok := s.last(execution).(events.ExecutionFailed)
		if !ok || failed.Code != runner.CodeConversationLost || !strings.Contains(failed.Message, own) || l.Run.AgentSession != own {
			t.Fatalf("ended with %+v; the agent's session is %s, was %s", s.last(execution), l.Run.AgentSession, own)
		}
	}
	options := s.load().Life.Options
	options.OnConversationLoss = events.OnLossContinue
	s.life(func(base session.CommandBase, _ *eventlog.SessionState) session.Command {
		return session.UpdateOptions{CommandBase: base, Options: options}
	})
	execution := s.post("which number was it?")
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed || l.Run.AgentSession == own {
		t.Errorf("allowed: ended with %+v in session %s", s.last(execution), l.Run.AgentSession)
	}
	if lost := of[events.Error](s); len(lost) != 1 || lost[0].Code != "TRANSCRIPT_LOST" {
		t.Errorf("told %+v", lost)
	}
	s.removeAll(e)
}

// TestConversation_MayBeginAnewInTheFirstTurn tests which queries allow the agent to begin a new conversation: the attempts of a session's first
// execution, and those of an agent whose definition, or a session whose options, allow it.
func TestConversation_MayBeginAnewInTheFirstTurn(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		agent   string
		session string
		want    bool
	}{
		"by default":                          {"", "", false},
		"the agent allows it":                 {events.OnLossContinue, "", true},
		"the session allows it":               {"", events.OnLossContinue, true},
		"the session forbids what agents may": {events.OnLossContinue, events.OnLossFail, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, exits(2))
			b.run()
			ref := b.agent("stubborn", 11, events.AgentSpec{
				Architecture: "claude-code", Instructions: "Do not give up.", Retries: events.Retries{Attempts: 2}, Conversation: events.Conversation{OnLoss: c.agent},
			})
			s := b.session(of1(ref), func(created *events.SessionCreated) { created.Options.OnConversationLoss = c.session })
			s.untilEnded(s.post("go"))
			s.untilEnded(s.post("go on"))
			q := b.provider.onlyBox().runner.receivedQueries()
			if len(q) != 4 || q[1].Resume == "" || q[3].Resume == "" {
				t.Fatalf("asked %+v", q)
			}
			for i, want := range []bool{true, true /* the first execution has nothing to lose */, c.want, c.want} {
				if q[i].ContinueAfterLoss != want {
					t.Errorf("query %d may begin anew: %v, want %v", i, q[i].ContinueAfterLoss, want)
				}
			}
		})
	}
}
