package e2e

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// newAsking returns a session of the built-in agent that asks about commands, on a cluster that other tests do not use.
func newAsking(t *testing.T) cautious {
	t.Helper()
	c := harness.New(t, harness.Options{Script: script(t, "approvals.yaml"), Executor: executor.Config{AnthropicModel: "known-model", Slots: 2}})
	return asker{architecture: "spool", comment: true}.begin(t, c, "asks", map[string]any{"preset": "ask"})
}

// mustCall calls the API and fails the test unless the request is accepted.
func (k cautious) mustCall(method, path string) {
	k.t.Helper()
	if status := k.c.Call(0, method, path, map[string]any{}, nil); status >= 300 {
		k.t.Fatalf("%s %s: %d", method, path, status)
	}
}

// TestApprovals_ControlsEndAWaitingExecution tests that each control that ends an execution also ends one that waits for a person: the request is
// retracted, a late decision is refused, the call does not run, and the session goes on.
func TestApprovals_ControlsEndAWaitingExecution(t *testing.T) {
	t.Parallel()
	k := newAsking(t)
	for name, path := range map[string]func(execution string) string{
		"cancel":    func(x string) string { return "/api/executions/" + x + "/cancel" },
		"terminate": func(x string) string { return "/api/executions/" + x + "/terminate" },
		"interrupt": func(string) string { return "/api/sessions/" + k.session + "/interrupt" },
	} {
		t.Run(name, func(t *testing.T) {
			k := cautious{&talk{t: t, c: k.c.ForSubtest(t), session: k.session, s: k.s}, k.asker}
			execution, list := k.asks("run touch "+name+".txt", 1)
			k.mustCall("POST", path(execution))
			x := k.until(execution)
			retracted := of[events.ApprovalRetracted](x)
			if len(retracted) != 1 || retracted[0].ApprovalID != list[0].ApprovalID || x.end.Type == "execution_completed" || x.end.Type == "execution_failed" {
				t.Errorf("ended with %s, retracted %+v", x.end.Type, retracted)
			}
			if status, code := k.decide(list[0], map[string]any{"decision": "approve"}); status != http.StatusConflict || code != "APPROVAL_NOT_OPEN" {
				t.Errorf("a late decision: %d %s", status, code)
			}
			harness.Eventually(t, "the read models have the end of the request", func() bool { return k.approval(list[0]).Status == "retracted" })
			execution, list = k.asks("run touch next-"+name+".txt", 1)
			k.mustDecide(list[0], map[string]any{"decision": "approve"})
			if k.mustEnd(execution); !k.created("next-" + name + ".txt") {
				t.Error("the call of the next execution did not run")
			}
			if k.created(name + ".txt") {
				t.Error("the call of the ended execution ran")
			}
		})
	}
}

// TestApprovals_OfADeletedSession tests that deleting a session whose execution waits for a person ends it: nothing of it can be decided or is shown.
func TestApprovals_OfADeletedSession(t *testing.T) {
	t.Parallel()
	k := newAsking(t)
	_, list := k.asks("run touch deleted.txt", 1)
	k.c.DeleteSession(k.session)
	if k.isAlive() {
		t.Error("the agent is alive")
	}
	harness.Eventually(t, "a late decision finds nothing", func() bool {
		status, code := k.decide(list[0], map[string]any{"decision": "approve"})
		return status == http.StatusNotFound && (code == "APPROVAL_NOT_FOUND" || code == "SESSION_NOT_FOUND")
	})
	var page struct{ Approvals []json.RawMessage }
	if status := k.c.Call(0, "GET", "/api/approvals?status=open", nil, &page); status != http.StatusOK || len(page.Approvals) > 0 {
		t.Errorf("list: %d, %s", status, page.Approvals)
	}
}

// TestApprovals_OfAPausedExecution tests that a decision on an execution that was paused while it waited reaches the agent, at the latest when the
// execution is resumed.
func TestApprovals_OfAPausedExecution(t *testing.T) {
	t.Parallel()
	k := newAsking(t)
	execution, list := k.asks("run touch paused.txt", 1)
	k.mustCall("POST", "/api/executions/"+execution+"/pause")
	k.mustDecide(list[0], map[string]any{"decision": "approve"})
	k.mustCall("POST", "/api/executions/"+execution+"/resume")
	if k.mustEnd(execution); !k.created("paused.txt") {
		t.Error("the approved call did not run")
	}
}
