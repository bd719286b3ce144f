package gateway_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// TestRecover_IsAnExecutionOfTheSameSession tests the answer of a recovery over REST, that a repeat with the same Idempotency-Key is the same
// recovery, and that reads of the new execution name the recovered one.
func TestRecover_IsAnExecutionOfTheSameSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	sealed := w.newSealer()
	g := w.gateway(gateway.Config{})
	posted := g.do("POST", "/api/executions", `{"content":"hello"}`).want(t, 202)
	sid, failed := posted.text("sessionId"), posted.text("executionId")
	path, body := "/api/executions/"+failed+"/recover", `{"environment":{"A":{"value":"1"},"TOKEN":{"value":"`+topSecret+`","secret":true}}}`
	first := g.do("POST", path, body, header("Idempotency-Key", "again")).want(t, 202).requireNoSecret(t)
	exe := first.text("executionId")
	if first.text("sessionId") != sid || exe == "" || exe == failed || first.text("position") == "" {
		t.Fatalf("got %s", first)
	}
	if second := g.do("POST", path, body, header("Idempotency-Key", "again")).want(t, 202); string(second.body) != string(first.body) {
		t.Errorf("the repeat is answered with %s, the first request with %s", second, first)
	}
	g.do("POST", path, `{}`, header("Idempotency-Key", "again")).wantProblem(t, 409, "IDEMPOTENCY_MISMATCH", "Idempotency-Key")
	var sent []command.Command
	for _, c := range s.commands(t) {
		if c.Type == command.TypeRecoverExecution {
			sent = append(sent, c)
		}
	}
	var b command.RecoverExecution
	if len(sent) != 1 || sent[0].SessionID != sid || sent[0].ExecutionID != exe {
		t.Fatalf("sent %+v", sent)
	}
	if err := json.Unmarshal(sent[0].Body, &b); err != nil || b.ExecutionID != failed || b.Environment["A"].Value != "1" || !b.Environment["TOKEN"].Secret || sealed.values[b.Environment["TOKEN"].Sealed] != topSecret {
		t.Errorf("sent %s, %v; sealed are %v", sent[0].Body, err, sealed.values)
	}

	one := g.get("/api/executions/"+exe+"?minPosition="+first.text("position")).want(t, 200)
	if one.text("recoveredFrom") != failed {
		t.Errorf("got %s", one)
	}
	for _, list := range []string{"/api/executions", "/api/sessions/" + sid + "/executions"} {
		if a := g.get(list).want(t, 200); strings.Count(string(a.body), `"recoveredFrom":"`+failed+`"`) != 1 {
			t.Errorf("%s: %s", list, a)
		}
	}
	if a := g.get("/api/executions/"+failed).want(t, 200); strings.Contains(string(a.body), "recoveredFrom") {
		t.Errorf("an execution that recovers nothing: %s", a)
	}
	answer, err := spoolv1.NewExecutionsClient(g.conn()).RecoverExecution(t.Context(), &spoolv1.RecoverExecutionRequest{ExecutionId: failed})
	if err != nil || answer.SessionId != sid || answer.ExecutionId == "" || answer.ExecutionId == exe {
		t.Errorf("over gRPC: %+v, %v", answer, err)
	}
}

// TestRecover_RefusalsHaveTypes tests the problems of recoveries: those that the gateway finds, and those of the session service.
func TestRecover_RefusalsHaveTypes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	exe := g.do("POST", "/api/executions", `{"content":"hello"}`).want(t, 202).text("executionId")
	unknown := events.DeriveID(events.KindExecution, "unknown")
	for _, c := range []struct {
		execution, body string
		status          int
		code, field     string
	}{
		{"exe_1", `{}`, 400, "INVALID_REQUEST", "executionId"},
		{unknown, `{}`, 404, "EXECUTION_NOT_FOUND", "executionId"},
		{exe, `{"environment":{"A B":{"value":"1"}}}`, 400, "INVALID_REQUEST", "environment.A B"},
		{exe, `{"environment":{"TOKEN":{"value":"some-secret","secret":true}}}`, 503, "SECRETS_UNAVAILABLE", "environment.TOKEN"},
	} {
		g.do("POST", "/api/executions/"+c.execution+"/recover", c.body).wantProblem(t, c.status, c.code, c.field)
	}
	before := len(s.commands(t))
	for code, field := range map[string]string{
		"EXECUTION_NOT_FAILED": "executionId", "EXECUTION_NOT_LAST": "executionId", "EXECUTION_RECOVERED": "executionId", "SECRETS_REQUIRED": "environment",
		"SESSION_CLOSED": "sessionId",
	} {
		s.mu.Lock()
		s.answer = &command.Answer{Error: &command.Error{Code: code, Field: field, Detail: "no"}}
		s.mu.Unlock()
		g.do("POST", "/api/executions/"+exe+"/recover", "").wantProblem(t, 409, code, field)
	}
	if n := len(s.commands(t)) - before; n != 5 {
		t.Errorf("%d commands were sent", n)
	}
}
