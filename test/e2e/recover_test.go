package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// failingOnce is a script whose first turn fails after a tool call, and which completes a turn that continues it. The result of the call,
// heron-42, occurs nowhere in the call.
const failingOnce = `
models: [known-model, gpt-5.5]
rules:
  - name: continued
    match: {user: {regex: 'Continue it(?s).*add the numbers'}}
    steps:
      - text: 'The sum is known.'
  - name: failing, built in
    match: {user: add the numbers, tools: [run_code]}
    steps:
      - tool: {name: run_code, input: {language: bash, code: 'echo heron-$((40+2)); echo once >> runs.txt'}}
      - error: {status: 400, message: broken on purpose}
  - name: failing, Claude Code
    match: {user: add the numbers, tools: [Bash]}
    steps:
      - tool: {name: Bash, input: {command: 'echo heron-$((40+2)); echo once >> runs.txt', description: Add}}
      - error: {status: 400, message: broken on purpose}
  - name: failing, Codex
    match: {user: add the numbers, tools: [exec_command]}
    steps:
      - tool: {name: exec_command, input: {cmd: 'echo heron-$((40+2)); echo once >> runs.txt'}}
      - error: {status: 400, message: broken on purpose}
  - name: failing, OpenCode
    match: {user: add the numbers, tools: [bash]}
    steps:
      - tool: {name: bash, input: {command: 'echo heron-$((40+2)); echo once >> runs.txt', description: Add}}
      - error: {status: 400, message: broken on purpose}
  - name: titles and summaries
    steps:
      - text: 'Numbers'
`

// TestRecover_KeepsFinishedToolCalls tests, for each agent, that the model's request of a recovery contains the result of the failed execution's
// tool call, that the call is not repeated, and that the read models name the recovered execution: in the agent's process that ran the failed
// execution, and in another sandbox, in which the agent resumes its own record.
func TestRecover_KeepsFinishedToolCalls(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: failingOnce})
	for architecture, program := range map[string]string{"spool": "", "claude-code": "claude", "codex": "codex", "opencode": "opencode"} {
		for name, otherSandbox := range map[string]bool{"in the same process": false, "in another sandbox": true} {
			t.Run(architecture+" "+name, func(t *testing.T) {
				t.Parallel()
				if program != "" {
					if _, err := exec.LookPath(program); err != nil {
						t.Skipf("%s is not on the PATH: run scripts/install: %v", program, err)
					}
				}
				recoverFailed(t, c.ForSubtest(t), architecture, "add the numbers, "+architecture+" "+name, otherSandbox)
			})
		}
	}
}

// recoverFailed checks the recovery of an execution that failed after a tool call.
func recoverFailed(t *testing.T, c *harness.Cluster, architecture, query string, otherSandbox bool) {
	session := c.CreateSession(architecture, architectures()[architecture])
	before, end := c.RunQuery(session, query, nil)
	if end.Type != (events.ExecutionFailed{}).EventType() {
		t.Fatalf("the execution ended with %s %s\n%s", end.Type, end.Data, before.View)
	}
	if otherSandbox {
		var s struct{ Snapshot string }
		harness.Eventually(t, "the workspace has a snapshot", func() bool {
			return c.Call(0, http.MethodGet, "/api/sessions/"+session, nil, &s) == http.StatusOK && s.Snapshot != ""
		})
		c.Call(0, http.MethodPost, "/api/sessions/"+session+"/environment/terminate", map[string]any{}, nil)
	}
	var accepted struct{ SessionID, ExecutionID string }
	if status := c.Call(0, http.MethodPost, "/api/executions/"+end.ExecutionID+"/recover", map[string]any{}, &accepted); status != http.StatusAccepted || accepted.SessionID != session {
		t.Fatalf("the recovery is answered with %d: %+v", status, accepted)
	}
	s, err := c.JoinSocket(0, session, before)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	recovered, err := s.ReadUntilEnd(accepted.ExecutionID)
	if err != nil {
		t.Fatal(err)
	}
	if recovered.Type != (events.ExecutionCompleted{}).EventType() || !strings.Contains(string(recovered.Data), "The sum is known.") {
		t.Fatalf("the recovery ended with %s %s\n%s", recovered.Type, recovered.Data, s.View)
	}
	runs, err := os.ReadFile(filepath.Join(c.WorkspaceFolder(session), "runs.txt"))
	if err != nil || string(runs) != "once\n" {
		t.Errorf("the tool call ran as often as the lines of %q, %v", runs, err)
	}
	checkRecoveredReads(t, c, query, end.ExecutionID, accepted.ExecutionID, recovered.Position)
	checkContinuedRequest(t, c, query)
}

// checkContinuedRequest checks that the model received a request to continue a query, with the finished call and its result.
func checkContinuedRequest(t *testing.T, c *harness.Cluster, query string) {
	t.Helper()
	requests := 0
	for _, r := range c.Model.Requests() {
		body := string(r.Body)
		if r.Rule != "continued" || !strings.Contains(body, query) {
			continue
		}
		requests++
		if !strings.Contains(body, "runs.txt") || !strings.Contains(body, "heron-42") {
			t.Errorf("a request of the recovery lacks the call or its result: %s", body)
		}
	}
	if requests == 0 {
		t.Error("the model received no request to continue")
	}
}

// checkRecoveredReads checks what clients read about a recovery, and the answer to a second one.
func checkRecoveredReads(t *testing.T, c *harness.Cluster, query, failed, recovery, position string) {
	t.Helper()
	var execution struct{ Phase, RecoveredFrom, Query string }
	if status := c.Call(0, http.MethodGet, "/api/executions/"+recovery+"?minPosition="+position, nil, &execution); status != http.StatusOK {
		t.Fatalf("the execution is answered with %d", status)
	}
	if execution.Phase != "completed" || execution.RecoveredFrom != failed || execution.Query != query {
		t.Errorf("the execution is %+v", execution)
	}
	var refused struct{ Code string }
	if status := c.Call(0, http.MethodPost, "/api/executions/"+failed+"/recover", map[string]any{}, &refused); status != http.StatusConflict || refused.Code != "EXECUTION_RECOVERED" {
		t.Errorf("a second recovery is answered with %d %s", status, refused.Code)
	}
}
