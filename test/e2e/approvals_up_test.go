package e2e

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/e2e/harness"
)

// upWaiting is an installation of `spool up` with a session whose agent asks before it appends a line to a file.
type upWaiting struct {
	t                  *testing.T
	u                  *harness.UpInstallation
	settings           []string
	session, execution string
}

// printed returns the JSON documents that a spool command prints.
func printed[D any](w *upWaiting, args ...string) (list []D) {
	w.t.Helper()
	code, out := w.u.RunCLI(nil, args...)
	if code != 0 {
		w.t.Fatalf("spool %q ended with %d:\n%s", args, code, out)
	}
	for d := json.NewDecoder(strings.NewReader(out)); ; {
		var document D
		switch err := d.Decode(&document); {
		case errors.Is(err, io.EOF):
			return list
		case err != nil:
			w.t.Fatalf("spool %q printed %v:\n%s", args, err, out)
		}
		list = append(list, document)
	}
}

// requests returns the status of each approval request of the session.
func (w *upWaiting) requests() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, a := range printed[struct{ ApprovalID, Status string }](w, "approvals", "ls", "--all", "--json", "--session", w.session) {
		out[a.ApprovalID] = a.Status
	}
	return out
}

// begin applies the agent, sends the query and returns the id of the approval request.
func (w *upWaiting) begin() string {
	w.t.Helper()
	file := filepath.Join(w.t.TempDir(), "agent.yaml")
	definition := "kind: agent\nslug: asks\nspec:\n  architecture: spool\n  model: known-model\n  modelProvider: openai\n  instructions: You run commands.\n  retries: {attempts: 3}\n  permissions: {preset: ask}\n"
	if err := os.WriteFile(file, []byte(definition), 0o600); err != nil {
		w.t.Fatal(err)
	}
	if code, printed := w.u.RunCLI(nil, "agents", "apply", "-f", file); code != 0 {
		w.t.Fatalf("spool agents apply ended with %d:\n%s", code, printed)
	}
	ids := printed[struct{ SessionID, ExecutionID string }](w, "run", "--detach", "--attended", "--json", "--agent", "asks", "run echo ran >> once.txt")
	w.session, w.execution = ids[0].SessionID, ids[0].ExecutionID
	return w.pendingExcept("")
}

// pendingExcept waits for a pending approval request other than former, and returns its id.
func (w *upWaiting) pendingExcept(former string) (id string) {
	w.t.Helper()
	harness.Eventually(w.t, "a request is pending", func() bool {
		for request, status := range w.requests() {
			if status == "pending" && request != former {
				id = request
			}
		}
		return id != ""
	})
	return id
}

// approve approves a request. The execution must complete, and the command must have run once.
func (w *upWaiting) approve(id string) {
	w.t.Helper()
	if code, printed := w.u.RunCLI(nil, "approvals", "approve", id); code != 0 {
		w.t.Fatalf("spool approvals approve ended with %d:\n%s", code, printed)
	}
	harness.Eventually(w.t, "the execution completes", func() bool {
		return printed[struct{ Phase string }](w, "executions", "show", "--json", w.execution)[0].Phase == "completed"
	})
	if code, printed := w.u.RunCLI(nil, "files", "get", w.session, "once.txt", "-"); code != 0 || printed != "ran\n" {
		w.t.Errorf("the command left %q (exit code %d), want one line", printed, code)
	}
}

// newUpWaiting returns a new installation, and a model server that survives its restarts.
func newUpWaiting(t *testing.T) *upWaiting {
	t.Helper()
	model := harness.StartModel(t, script(t, "approvals.yaml"))
	return &upWaiting{t: t, u: harness.NewUpInstallation(t), settings: []string{
		"SPOOL_MOCK_LLM=false", "SPOOL_OPENAI_BASE_URL=" + model.URL() + "/v1", "OPENAI_API_KEY=mock",
	}}
}

// TestApprovals_AskAgainAfterAStop tests that `spool up`, which ends its sandboxes when it stops, does not wait for a pending request, retracts it,
// and asks again after the next start.
func TestApprovals_AskAgainAfterAStop(t *testing.T) {
	t.Parallel()
	w := newUpWaiting(t)
	var first string
	w.u.RunWhileUp(w.settings, func() { first = w.begin() })
	w.u.RunWhileUp(w.settings, func() {
		second := w.pendingExcept(first)
		w.approve(second)
		if s := w.requests(); len(s) != 2 || s[first] != "retracted" || s[second] != "approved" {
			t.Errorf("the requests are %v, want %s retracted and %s approved", s, first, second)
		}
	})
}

// TestApprovals_SurviveAKill tests that a pending request survives a kill -9 of `spool up`, because the agent's process survives it.
func TestApprovals_SurviveAKill(t *testing.T) {
	t.Parallel()
	w := newUpWaiting(t)
	var id string
	w.u.RunUntilKilled(w.settings, func() { id = w.begin() })
	w.u.RunWhileUp(w.settings, func() {
		if got := w.pendingExcept(""); got != id {
			t.Errorf("pending is %s, want %s", got, id)
		}
		w.approve(id)
		if s := w.requests(); len(s) != 1 || s[id] != "approved" {
			t.Errorf("the requests are %v, want %s approved", s, id)
		}
	})
}
