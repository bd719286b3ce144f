package command

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestSessions_ShowPhases tests the filters that "spool sessions ls" sends, and what the list, its JSON and
// "spool sessions show" show of a session's phase.
func TestSessions_ShowPhases(t *testing.T) {
	t.Parallel()
	session := fmt.Sprintf(`{"sessionId":%q,"status":"open","phase":"waiting_for_approval","phaseSince":"2026-03-04T05:06:07Z","openApprovals":2,"queued":1,"costUsd":0.125,
		"usage":{"inputTokens":10,"outputTokens":20},"lastError":{"code":"AGENT_FAILED","message":"no\u001b[2J answer","executionId":%q,"time":"2026-03-04T05:06:07Z"}}`, ses, exe)
	requests := make(chan string, 10)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests <- r.URL.RequestURI()
		answer := `{"sessions":[` + session + `]}`
		switch r.URL.Path {
		case "/api/sessions/" + ses:
			answer = session
		case "/api/sessions/" + ses + "/executions":
			answer = `{}`
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, answer)
	}))
	t.Cleanup(s.Close)
	const status = "open, waiting_for_approval, 2 open approvals, 1 queued"
	got := spool(t, testIO(t), "sessions", "ls", "--phase", "failed", "--phase", "waiting_for_approval", "--open-approvals", "--url", s.URL)
	if got.code != ExitDone || !strings.Contains(got.out, status) || !strings.Contains(got.out, "$0.1250") {
		t.Errorf("ls: %+v", got)
	}
	if r := <-requests; r != "/api/sessions?hasOpenApprovals=true&phase=failed&phase=waiting_for_approval" {
		t.Errorf("ls requested %s", r)
	}
	got = spool(t, testIO(t), "sessions", "ls", "--json", "--url", s.URL)
	if got.code != ExitDone || !strings.Contains(got.out, `"openApprovals":2`) || !strings.Contains(got.out, `"AGENT_FAILED"`) {
		t.Errorf("ls --json: %+v", got)
	}
	if r := <-requests; r != "/api/sessions" {
		t.Errorf("ls without flags requested %s", r)
	}
	got = spool(t, testIO(t), "sessions", "show", ses, "--url", s.URL)
	if got.code != ExitDone || strings.Contains(got.out, "\x1b") {
		t.Errorf("show: %+v", got)
	}
	for _, part := range []string{status, "AGENT_FAILED: no", "(" + exe + ", ", "10 in (0 from cache, 0 into it), 20 out", "$0.1250"} {
		if !strings.Contains(got.out, part) {
			t.Errorf("show lacks %q: %s", part, got.out)
		}
	}
	if got = spool(t, testIO(t), "sessions", "ls", "--phase", "completed", "--url", s.URL); got.code != ExitUsage || !strings.Contains(got.err, "--phase") || !strings.Contains(got.err, "waiting_for_approval") {
		t.Errorf("ls of an unknown phase: %+v", got)
	}
}
