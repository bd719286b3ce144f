package session_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

var (
	failed    = session.RunView{ActiveEnded: true, ActiveFailed: true, ActiveStarted: true}
	recovered = func(x, from string) []events.Event {
		return commit(fact(x, at(2), events.MessageAccepted{Content: from, RecoveredFrom: from}), fact(x, at(2), events.ExecutionDispatched{}))
	}
	withdrawn = func(x string) []events.Event {
		return commit(fact(x, at(3), events.ExecutionWithdrawn{Reason: "cancelled"}))
	}
)

func TestDecide_RecoversOnlyTheFailedLastExecution(t *testing.T) {
	t.Parallel()
	const accepted = "message_accepted/R execution_dispatched/R"
	for name, c := range map[string]struct {
		given session.State
		of    string
		run   session.RunView
		then  string
		code  string
	}{
		"failed":                           {given(created, posted("A")), "A", failed, accepted, ""},
		"failed after others":              {given(created, posted("A"), posted("B")), "B", failed, accepted, ""},
		"failed, a later one is withdrawn": {given(created, posted("A"), queued("B"), withdrawn("B")), "A", failed, accepted, ""},
		"failed recovery":                  {given(created, posted("A"), recovered("B", "A")), "B", failed, accepted, ""},
		"no session":                       {given(), "A", failed, "", session.CodeNotFound},
		"deleted session":                  {given(created, posted("A"), deleted), "A", failed, "", session.CodeNotFound},
		"closed session":                   {given(created, posted("A"), closed), "A", failed, "", session.CodeClosed},
		"no execution yet":                 {given(created), "A", session.RunView{}, "", session.CodeNotLast},
		"unknown":                          {given(created, posted("A")), "Z", failed, "", session.CodeNotLast},
		"earlier":                          {given(created, posted("A"), posted("B")), "A", failed, "", session.CodeNotLast},
		"a later message is queued":        {given(created, posted("A"), queued("B")), "A", failed, "", session.CodeNotLast},
		"queued":                           {given(created, posted("A"), queued("B")), "B", session.RunView{}, "", session.CodeNotFailed},
		"running":                          {given(created, posted("A")), "A", session.RunView{ActiveStarted: true}, "", session.CodeNotFailed},
		"completed or cancelled":           {given(created, posted("A")), "A", session.RunView{ActiveEnded: true, ActiveStarted: true}, "", session.CodeNotFailed},
		"recovered, and that runs":         {given(created, posted("A"), recovered("B", "A")), "A", session.RunView{}, "", session.CodeRecovered},
		"recovered, and that failed":       {given(created, posted("A"), recovered("B", "A")), "A", failed, "", session.CodeRecovered},
		"recovered, and others followed":   {given(created, posted("A"), recovered("B", "A"), posted("C")), "A", failed, "", session.CodeNotLast},
		"the same command again":           {given(created, posted("A"), recovered("R", "A")), "A", session.RunView{}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			list, err := session.Decide(c.given, session.RecoverExecution{CommandBase: meta(0), ExecutionID: "R", Failed: c.of, Run: c.run, Message: events.MessageAccepted{Content: "hello"}})
			var refused *session.Error
			if errors.As(err, &refused) != (c.code != "") || refused != nil && refused.Code != c.code {
				t.Fatalf("error %v, want code %q", err, c.code)
			}
			if got := describe(list); got != c.then {
				t.Fatalf("decided %q, want %q", got, c.then)
			}
		})
	}
}

func TestDecide_RefusalOfASecondRecoveryNamesTheFirst(t *testing.T) {
	t.Parallel()
	_, err := session.Decide(given(created, posted("A"), recovered("exe_first", "A")), session.RecoverExecution{CommandBase: meta(0), ExecutionID: "R", Failed: "A", Run: failed})
	if err == nil || !strings.Contains(err.Error(), "exe_first") {
		t.Errorf("error %v", err)
	}
}

// TestDecide_RecoveryHasTheMessageOfTheFailedExecution tests that the recovery has the content, the metadata and the variables of the failed
// execution, and that the agent is asked to continue only if it received the query once.
func TestDecide_RecoveryHasTheMessageOfTheFailedExecution(t *testing.T) {
	t.Parallel()
	message := events.MessageAccepted{
		BlockID: "blk", Parts: []events.Part{{Type: "text", Text: "look"}}, Metadata: []byte(`{"a":1}`),
		Environment: map[string]events.Variable{"REGION": {Value: "eu"}, "STAGE": {Value: "test"}},
	}
	for name, c := range map[string]struct {
		continued, started, want bool
	}{
		"the agent had not received the query":          {},
		"the agent had received the query":              {started: true, want: true},
		"only the agent of the execution before had":    {continued: true, want: true},
		"the agents of both executions had received it": {continued: true, started: true, want: true},
	} {
		m := message
		m.Continue = c.continued
		list, err := session.Decide(given(created, posted("A")), session.RecoverExecution{
			CommandBase: meta(0), ExecutionID: "R", Failed: "A", Message: m, Environment: map[string]events.Variable{"REGION": {Value: "us"}},
			Run: session.RunView{ActiveEnded: true, ActiveFailed: true, ActiveStarted: c.started},
		})
		if err != nil {
			t.Fatal(err)
		}
		want := message
		want.BlockID, want.RecoveredFrom, want.Continue = events.DeriveID(events.KindBlock, "R", "message"), "A", c.want
		want.Environment = map[string]events.Variable{"REGION": {Value: "us"}, "STAGE": {Value: "test"}}
		if got := list[0].Data; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: accepted %+v, want %+v", name, got, want)
		}
	}
}

// TestDecide_RecoveryNeedsSecretsAgain tests that a recovery is refused without the secrets of the failed execution's message, which no longer
// exist.
func TestDecide_RecoveryNeedsSecretsAgain(t *testing.T) {
	t.Parallel()
	old, fresh := events.Variable{Secret: true, Sealed: "old"}, events.Variable{Secret: true, Sealed: "fresh"}
	recovery := session.RecoverExecution{
		CommandBase: meta(0), ExecutionID: "R", Failed: "A", Run: failed, Environment: map[string]events.Variable{"B": fresh},
		Message: events.MessageAccepted{Environment: map[string]events.Variable{"B": old, "C": old, "A": old, "D": {Value: "plain"}}},
	}
	s := given(created, posted("A"))
	_, err := session.Decide(s, recovery)
	var refused *session.Error
	if !errors.As(err, &refused) || refused.Code != session.CodeSecretsRequired || !strings.HasSuffix(refused.Detail, ": A, C") {
		t.Fatalf("error %v", err)
	}
	recovery.Environment = map[string]events.Variable{"A": fresh, "B": fresh, "C": {Value: "no longer a secret"}}
	list, err := session.Decide(s, recovery)
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range list[0].Data.(events.MessageAccepted).Environment {
		if v == old {
			t.Errorf("variable %s refers to a secret that no longer exists", name)
		}
	}
}
