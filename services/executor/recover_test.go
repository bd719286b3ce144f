package executor_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// recover accepts the recovery of the active execution, which has failed, and publishes the job.
func (s *talk) recover() (execution string) {
	s.b.t.Helper()
	execution = mint(s.b.t, events.KindExecution)
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		message, err := s.b.sessions.AcceptedMessage(s.b.ctx, l, l.Life.Active)
		if err != nil {
			s.b.t.Fatal(err)
		}
		return session.RecoverExecution{CommandBase: base, ExecutionID: execution, Failed: l.Life.Active.ExecutionID, Message: message, Run: l.RunView()}
	})
	s.job()
	return execution
}

// failsAfterACall is an agent that fails after a finished tool call, and completes when it is asked to continue.
func failsAfterACall(t *fakeTurn) {
	t.Start()
	if strings.Contains(t.Query.Content, "Continue it") {
		t.Text("rest", "done")
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
		return
	}
	t.Say("transcript_written", events.TranscriptWritten{AgentSessionID: "agent-session-7"})
	for _, b := range []events.Block{
		{ID: "call", Kind: events.KindToolUse, ToolName: "bash", ToolUseID: "1"}, {ID: "result", Kind: events.KindToolResult, ToolUseID: "1", Output: "42"},
	} {
		b.Status = events.StatusPending
		t.Say("block_start", events.BlockStart{Block: b})
		b.Status = events.StatusComplete
		t.Say("block_complete", events.BlockComplete{Block: b})
	}
	t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_ERROR", Message: "the model's API answered 500"})
}

// TestRecover_ContinuesTheAgentsConversation tests that a recovery resumes the agent's own session, asks the agent to continue, and adds the
// request, and that the log keeps the finished call of the failed execution and the content as it was sent.
func TestRecover_ContinuesTheAgentsConversation(t *testing.T) {
	t.Parallel()
	b := newBench(t, failsAfterACall)
	b.run()
	s := b.session()
	failed := s.post("compute it")
	if l := s.untilEnded(failed); l.Run.Phase != run.Failed {
		t.Fatalf("the execution ended as %s", l.Run.Phase)
	}
	recovery := s.recover()
	if l := s.untilEnded(recovery); l.Run.Phase != run.Completed {
		t.Fatalf("the recovery ended as %s: %+v", l.Run.Phase, s.last(recovery))
	}
	q := b.provider.onlyBox().runner.receivedQueries()
	if len(q) != 2 || q[1].ExecutionID != recovery || q[1].Attempt != 1 || q[1].Resume != "agent-session-7" {
		t.Fatalf("queries %+v", q)
	}
	if !strings.HasSuffix(q[1].Content, "The request was:\n\ncompute it") || len(q[1].Parts) > 0 {
		t.Errorf("the agent is asked %q", q[1].Content)
	}
	list := s.events()
	var results int
	for _, e := range list {
		switch d := e.Data.(type) {
		case events.BlockComplete:
			if d.Block.Kind == events.KindToolResult && d.Block.Status == events.StatusComplete && e.ExecutionID == failed {
				results++
			}
		case events.MessageAccepted:
			if d.Content != "compute it" || (e.ExecutionID == recovery) != (d.RecoveredFrom == failed) {
				t.Errorf("execution %s has the message %+v", e.ExecutionID, d)
			}
		}
	}
	if results != 1 {
		t.Errorf("%d results of the failed execution are in the log", results)
	}
	b.noJobs()
}

// TestRecover_InANewSandbox tests that a recovery resumes the agent's session also after the sandbox of the failed execution was lost.
func TestRecover_InANewSandbox(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		if strings.Contains(t.Query.Content, "Continue it") {
			t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
			return
		}
		t.Say("transcript_written", events.TranscriptWritten{AgentSessionID: "agent-session-7"})
		<-t.killed
	})
	b.run()
	s := b.retryingSession(events.Retries{Attempts: 1})
	failed := s.post("compute it")
	s.until("the agent's session is known", func(l *eventlog.SessionState) bool { return l.Run.AgentSession != "" })
	b.provider.onlyBox().runner.die()
	s.untilEnded(failed)
	if f, ok := s.last(failed).(events.ExecutionFailed); !ok || f.Code != "SANDBOX_LOST" {
		t.Fatalf("the execution ended with %+v", s.last(failed))
	}
	s.untilEnded(s.recover())
	q := b.provider.onlyBox().runner.receivedQueries()
	if len(q) != 1 || q[0].Resume != "agent-session-7" || !strings.Contains(q[0].Content, "compute it") || b.provider.made != 2 {
		t.Errorf("in sandbox %d: queries %+v", b.provider.made, q)
	}
}

// TestRecover_OfAnExecutionThatNeverStarted tests that the agent receives the query unchanged if it has not received it before.
func TestRecover_OfAnExecutionThatNeverStarted(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.provider.createErr = &sandbox.Error{Code: sandbox.CodeImageNotFound, Message: "no such image"}
	b.run()
	s := b.session()
	failed := s.post("/compute it")
	s.untilEnded(failed)
	if _, ok := s.last(failed).(events.ExecutionFailed); !ok {
		t.Fatalf("the execution ended with %+v", s.last(failed))
	}
	b.provider.mu.Lock()
	b.provider.createErr = nil
	b.provider.mu.Unlock()
	recovery := s.recover()
	if l := s.untilEnded(recovery); l.Run.Phase != run.Completed {
		t.Fatalf("the recovery ended with %+v", s.last(recovery))
	}
	if q := b.provider.onlyBox().runner.receivedQueries(); len(q) != 1 || q[0].Content != "/compute it" || q[0].Resume != "" {
		t.Errorf("queries %+v", q)
	}
}
