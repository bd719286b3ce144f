package session_test

import (
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/session"
)

// end ends the active execution as an executor does, after its agent has received the query if started is set.
func (s *stack) end(sid, exe string, started bool, outcome events.Payload) {
	s.t.Helper()
	l := s.await(sid, "dispatched", func(l *eventlog.SessionState) bool { return l.Life.Active.ExecutionID == exe })
	meta := func() events.CommandMeta {
		return events.CommandMeta{CommandID: id(events.KindCommand), Now: time.Now()}
	}
	store := func(c run.Command) {
		s.t.Helper()
		d, err := run.Decide(l.Run, c)
		must(s.t, err)
		must(s.t, s.ses.AppendRun(s.t.Context(), l, events.Actor{Kind: "executor"}, id(events.KindCommit), d))
	}
	store(run.ClaimExecution{CommandMeta: meta(), ExecutionID: exe, Turn: l.Life.Active.Turn, Executor: "xtr_test"})
	if started {
		m := events.NewEventList(meta())
		m.Add(exe, events.ExecutionStarted{Attempt: 1})
		store(run.RecordEvents{Epoch: l.Run.Epoch, Events: m.Events()})
	}
	store(run.EndExecution{CommandMeta: meta(), Epoch: l.Run.Epoch, ExecutionID: exe, Outcome: outcome})
}

// recover sends a command to recover an execution, and returns the id of the new execution with the answer.
func (s *stack) recover(sid, failed string, variables map[string]events.Variable) (exe string, a command.Answer) {
	s.t.Helper()
	exe = id(events.KindExecution)
	return exe, s.send(command.TypeRecoverExecution, sid, exe, command.RecoverExecution{ExecutionID: failed, Environment: variables})
}

// mustRefuseRecovery fails the test unless the recovery is refused with a code and writes nothing.
func (s *stack) mustRefuseRecovery(sid, failed, code string) {
	s.t.Helper()
	before := len(s.history(sid))
	if _, a := s.recover(sid, failed, nil); a.Error == nil || a.Error.Code != code || a.Error.Detail == "" {
		s.t.Errorf("the answer is %+v, want %s", a, code)
	}
	if after := len(s.history(sid)); after != before {
		s.t.Errorf("the refused recovery wrote %d events", after-before)
	}
}

var modelError = events.ExecutionFailed{Code: "MODEL_ERROR", Message: "the model's API answered 500"}

// TestRecover_RepeatsTheMessageAsANewExecution tests that a recovery is dispatched with the message of the failed execution, once for each
// command, and that a failed recovery can be recovered in turn.
func TestRecover_RepeatsTheMessageAsANewExecution(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid, exe := s.create(events.Options{}), id(events.KindExecution)
	post := command.PostMessage{
		Parts: []events.Part{{Type: "text", Text: "look"}}, Metadata: []byte(`{"ticket":7}`), Environment: map[string]events.Variable{"REGION": {Value: "eu"}},
		Permissions: events.ExecutionPermissions{Rules: []events.PermissionRule{{Tool: "Bash", Then: "deny"}}, Unattended: true},
	}
	bad := post
	bad.Permissions.Rules = []events.PermissionRule{{Tool: "Bash"}}
	if a := s.send(command.TypePostMessage, sid, exe, bad); a.Error == nil || a.Error.Field != "permissions.rules[0].then" {
		t.Errorf("a rule without an action: %+v", a.Error)
	}
	if a := s.send(command.TypePostMessage, sid, exe, post); a.Error != nil {
		t.Fatal(a.Error)
	}
	s.mustRefuseRecovery(sid, exe, "EXECUTION_NOT_FAILED")
	s.end(sid, exe, true, modelError)

	cmd, first := id(events.KindCommand), id(events.KindExecution)
	for range 2 { // the same command, as a gateway sends it for the same Idempotency-Key
		a, err := s.trySend(cmd, command.TypeRecoverExecution, sid, first, command.RecoverExecution{ExecutionID: exe})
		must(t, err)
		if a.Error != nil || a.ExecutionID != first {
			t.Fatalf("the answer is %+v", a)
		}
	}
	s.mustRefuseRecovery(sid, exe, "EXECUTION_RECOVERED")
	s.mustRefuseRecovery(sid, first, "EXECUTION_NOT_FAILED")
	s.end(sid, first, false, modelError)
	s.mustRefuseRecovery(sid, exe, "EXECUTION_RECOVERED")
	second, a := s.recover(sid, first, map[string]events.Variable{"REGION": {Value: "us"}})
	if a.Error != nil {
		t.Fatal(a.Error)
	}
	l := s.await(sid, "dispatched", func(l *eventlog.SessionState) bool { return l.Life.Active.ExecutionID == second })
	m, err := s.ses.AcceptedMessage(t.Context(), l, l.Life.Active)
	must(t, err)
	if m.RecoveredFrom != first || !m.Continue || len(m.Parts) != 1 || string(m.Metadata) != `{"ticket":7}` || m.Environment["REGION"].Value != "us" || !m.Permissions.Unattended || len(m.Permissions.Rules) != 1 {
		t.Errorf("the second recovery has the message %+v", m)
	}
	accepted := 0
	for _, e := range s.history(sid) {
		if m, ok := e.Data.(events.MessageAccepted); ok {
			if accepted++; e.ExecutionID == first && (m.RecoveredFrom != exe || m.BlockID == "" || m.Environment["REGION"].Value != "eu") {
				t.Errorf("the first recovery has the message %+v", m)
			}
		}
	}
	if accepted != 3 {
		t.Errorf("%d messages were accepted, want 3", accepted)
	}
}

// TestRecover_RefusesWhatHasNotFailedLast tests the refusals that depend on the session.
func TestRecover_RefusesWhatHasNotFailedLast(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	for name, c := range map[string]struct {
		outcome events.Payload
		then    func(sid string)
		code    string
	}{
		"completed":               {outcome: events.ExecutionCompleted{}, code: "EXECUTION_NOT_FAILED"},
		"cancelled":               {outcome: events.ExecutionCancelled{Reason: "cancelled"}, code: "EXECUTION_NOT_FAILED"},
		"a later message":         {outcome: modelError, then: func(sid string) { s.post(sid) }, code: "EXECUTION_NOT_LAST"},
		"session that is deleted": {outcome: modelError, then: func(sid string) { s.send(command.TypeDeleteSession, sid, "", nil) }, code: "SESSION_NOT_FOUND"},
	} {
		t.Run(name, func(t *testing.T) {
			sid := s.create(events.Options{})
			exe := s.post(sid)
			s.end(sid, exe, true, c.outcome)
			if c.then != nil {
				c.then(sid)
			}
			s.mustRefuseRecovery(sid, exe, c.code)
		})
	}
	sid := s.create(events.Options{})
	s.end(sid, s.post(sid), true, modelError)
	s.mustRefuseRecovery(sid, id(events.KindExecution), "EXECUTION_NOT_LAST")
	s.mustRefuseRecovery(sid, "exe_nonsense", "INVALID_REQUEST")
	s.mustRefuseRecovery(id(events.KindSession), id(events.KindExecution), "SESSION_NOT_FOUND")

	closed := s.create(events.Options{SessionLimitMs: 60_000, TurnLimitMs: 60_000})
	exe := s.post(closed)
	s.end(closed, exe, true, modelError)
	l := s.load(closed)
	m := events.NewEventList(events.CommandMeta{CommandID: id(events.KindCommand), Now: time.Now()})
	m.Add("", events.SessionClosed{Reason: "limit"})
	must(t, s.ses.AppendLife(t.Context(), l, events.Actor{Kind: "service"}, id(events.KindCommand), m.Events()))
	s.mustRefuseRecovery(closed, exe, "SESSION_CLOSED")
}

// TestRecover_NeedsTheSecretsOfTheMessageAgain tests that a recovery without the secrets of the failed execution is refused, with their names.
func TestRecover_NeedsTheSecretsOfTheMessageAgain(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid, exe := s.create(events.Options{}), id(events.KindExecution)
	post := command.PostMessage{Content: "hello", Environment: map[string]events.Variable{"TOKEN": {Secret: true, Sealed: "default." + exe + ".old"}}}
	if a := s.send(command.TypePostMessage, sid, exe, post); a.Error != nil {
		t.Fatal(a.Error)
	}
	s.end(sid, exe, true, modelError)
	_, a := s.recover(sid, exe, nil)
	if a.Error == nil || a.Error.Code != "SECRETS_REQUIRED" || a.Error.Field != "environment" || !strings.Contains(a.Error.Detail, "TOKEN") {
		t.Fatalf("without the secret: %+v", a)
	}
	if _, a := s.recover(sid, exe, map[string]events.Variable{"TOKEN": {Secret: true, Value: "plain"}}); a.Error == nil || a.Error.Code != "INVALID_REQUEST" {
		t.Errorf("with a secret that is not encrypted: %+v", a)
	}
	fresh := events.Variable{Secret: true, Sealed: "default.new"}
	recovery, a := s.recover(sid, exe, map[string]events.Variable{"TOKEN": fresh})
	if a.Error != nil {
		t.Fatal(a.Error)
	}
	l := s.await(sid, "dispatched", func(l *eventlog.SessionState) bool { return l.Life.Active.ExecutionID == recovery })
	m, err := s.ses.AcceptedMessage(t.Context(), l, l.Life.Active)
	must(t, err)
	if m.Environment["TOKEN"] != fresh {
		t.Errorf("the recovery has the variables %+v", m.Environment)
	}
}

// TestRecover_OfAUsedUpBudgetFailsLikeAMessage tests that a recovery does not get around the session's budget.
func TestRecover_OfAUsedUpBudgetFailsLikeAMessage(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid := s.create(events.Options{Budget: events.Budget{Turns: 1}})
	exe := s.post(sid)
	s.end(sid, exe, true, modelError)
	recovery, a := s.recover(sid, exe, nil)
	if a.Error != nil {
		t.Fatal(a.Error)
	}
	s.failedWith(sid, recovery, "turns")
}
