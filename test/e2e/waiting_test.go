package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

const waitingScript = `
rules:
  - name: waits for a file
    steps:
      - tool: {name: run_code, input: {language: bash, code: 'until [ -e go ]; do sleep 0.1; done'}}
      - text: 'Done.'
`

// TestWaiting_ShowsReasons tests the reasons of waits through all services, each with the rights of its NATS user: from the
// executors' reports, the read models and the leases to REST and the command line.
func TestWaiting_ShowsReasons(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: waitingScript, Executor: executor.Config{Slots: 1, Reserved: -1}})
	type waiting struct{ Reason, Since, Detail, Remedy, ExecutionID string }
	wait := func(execution string) waiting {
		t.Helper()
		var e struct{ Waiting waiting }
		c.Call(0, "GET", "/api/executions/"+execution, nil, &e)
		return e.Waiting
	}
	until := func(execution, reason string) (w waiting) {
		t.Helper()
		harness.Eventually(t, execution+" waits for "+reason, func() bool { w = wait(execution); return w.Reason == reason })
		if reason != "" && (w.Detail == "" || w.Remedy == "") {
			t.Errorf("%s: %+v", reason, w)
		}
		return w
	}
	one, other := c.CreateSession("spool", nil), c.CreateSession("spool", nil)
	first := c.PostMessage(one, "go")
	harness.Eventually(t, "the first execution runs", func() bool {
		var e struct{ Phase string }
		c.Call(0, "GET", "/api/executions/"+first, nil, &e)
		return e.Phase == "running"
	})
	if w := wait(first); w.Reason != "" {
		t.Errorf("the running execution waits: %+v", w)
	}
	next, second := c.PostMessage(one, "go"), c.PostMessage(other, "go")
	if w := until(next, "earlier_execution"); w.ExecutionID != first {
		t.Errorf("got %+v, want execution %s", w, first)
	}
	if w := until(second, "slot"); w.Since == "" {
		t.Errorf("got %+v", w)
	}
	for _, args := range [][]string{{"executions", "show", second}, {"sessions", "show", other}} {
		if code, out, says := c.RunCLI(t, t.TempDir(), t.TempDir(), args...); code != 0 || !strings.Contains(out, "slot since ") || !strings.Contains(out, "SPOOL_SLOTS") {
			t.Errorf("%q: %d %s%s", args, code, out, says)
		}
	}
	finish := func(session, execution string) {
		t.Helper()
		harness.Eventually(t, "the workspace exists", func() bool {
			return os.WriteFile(filepath.Join(c.WorkspaceFolder(session), "go"), nil, 0o644) == nil //nolint:gosec // the agent may run as another user
		})
		s, err := c.JoinSSE(0, session, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if end, err := s.ReadUntilEnd(execution); err != nil || end.Type != (events.ExecutionCompleted{}).EventType() {
			t.Errorf("%s ended with %s %s, %v", execution, end.Type, end.Data, err)
		}
	}
	c.Call(0, "POST", "/api/executions/"+next+"/cancel", map[string]any{}, nil) // it would compete for the slot
	finish(one, first)
	until(second, "")
	c.StopExecutors()
	until(second, "engine_gone")
	c.StartExecutor()
	until(second, "")
	finish(other, second)
	for _, session := range []string{one, other} {
		c.DeleteSession(session) // before the executor that was started last stops
	}
}
