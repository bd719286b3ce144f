package command

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// serveHistory serves the routes of states, diffs and comparisons, and records its requests.
func serveHistory(t *testing.T) (url string, requested func() string) {
	t.Helper()
	var mu sync.Mutex
	last := ""
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		last = strings.TrimPrefix(r.URL.RequestURI(), "/api/sessions/"+ses)
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.URL.Query().Get("at") == "9":
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusConflict)
			fmt.Fprint(w, `{"code":"CURSOR_AHEAD","field":"at","detail":"the session has no event 9 yet: its last is 3","tip":3}`)
		case strings.HasSuffix(r.URL.Path, "/state") && r.URL.Query().Get("pageToken") == "":
			fmt.Fprintf(w, `{"seq":3,"time":"2026-01-02T03:04:05Z","session":{"sessionId":%q,"status":"open","agent":"a\u001b[2J","sandboxMs":61500,"sandboxCostUsd":0.25},"executions":[{"executionId":%q,"phase":"running"}],
				"blocks":[{"id":"b1","kind":"user_message","status":"complete","timestamp":"2026-01-02T03:04:05Z","content":"first\u001b[2J"}],"blockCount":2,"nextPageToken":"next",
				"todos":[{"conversationId":"main","items":[{"content":"write it","status":"pending"}]}],"reported":{"inputTokens":7,"costUsd":0.5},"metered":{"requests":2},
				"resolved":{"agent":"a@1","skills":["s@2"]},"files":{"summary":"The last snapshot is that of event 2.","changes":[{"seq":3,"type":"file_created","path":"x\u001b[2J","size":5}],"changeCount":2},"extra":7}`, ses, exe)
		case strings.HasSuffix(r.URL.Path, "/state"):
			fmt.Fprint(w, `{"seq":3,"blocks":[{"id":"b2","kind":"tool_use","status":"pending","timestamp":"2026-01-02T03:04:05Z","toolName":"bash"},
				{"id":"b3","kind":"assistant_text","status":"pending","timestamp":"2026-01-02T03:04:05Z","content":"half"}],"incompleteText":[{"blockId":"b3","shownBytes":4}],"blockCount":2,"nextPageToken":""}`)
		case strings.HasSuffix(r.URL.Path, "/diff") && r.URL.Query().Get("from") == "2":
			fmt.Fprintf(w, `{"from":2,"to":2,"blocks":[],"blockCount":0,"statuses":[],"reported":{"inputTokens":0},"metered":{"requests":0},"files":{"summary":"x","files":[],"fileCount":0,"cut":false,"snapshotGone":%t}}`, r.URL.Query().Get("to") == "4")
		case strings.HasSuffix(r.URL.Path, "/compare") && r.URL.Query().Get("with") == ses:
			fmt.Fprint(w, `{"equal":true,"equalEvents":4,"summary":"The sessions do not differ: 4 events are alike."}`)
		case strings.HasSuffix(r.URL.Path, "/diff"):
			fmt.Fprint(w, `{"from":1,"to":3,"blocks":[{"change":"added","block":{"id":"b1","kind":"user_message","status":"complete","timestamp":"2026-01-02T03:04:05Z","content":"first"}}],"blockCount":5,
				"statuses":[{"kind":"session","id":"s","from":"open","to":"closed"}],"reported":{"inputTokens":7},"metered":{},
				"files":{"summary":"Two snapshots.","files":[{"path":"t","change":"changed","text":"--- a/t\n+++ b/t\n@@ -1 +1 @@\n-\told\u001b[2J\n+\tnew\n"},
				{"path":"bin","change":"added","omitted":"binary","to":{"kind":"file","size":2048,"mode":420,"sha256":"ab"}}],"fileCount":3,"cut":true}}`)
		default:
			fmt.Fprintf(w, `{"equal":false,"equalEvents":4,"summary":"They differ.","field":"type","event":{"seq":5,"type":"log","time":"2026-01-02T03:04:05Z","data":{"message":"m"}}}`)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, func() string {
		mu.Lock()
		defer mu.Unlock()
		return last
	}
}

func TestState_PrintsAllPages(t *testing.T) {
	t.Parallel()
	url, requested := serveHistory(t)
	got := spool(t, testIO(t), "state", ses, "--at", "3", "--url", url)
	for _, want := range []string{"event 3, ", exe + ", running", "pending: write it", "a@1", "s@2", "7 tokens in, 0 out, $0.5000", "2 requests", "1m1.5s, $0.2500",
		"The last snapshot is that of event 2.", "file_created", "and 1 more", "2 blocks", "user_message", "tool_use bash", "half\n          only the first 4 bytes of its text at that time are still stored\n"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if got.code != ExitDone || strings.Contains(got.out, "\x1b") || requested() != "/state?at=3&pageSize=200&pageToken=next" {
		t.Errorf("%+v, requested %s", got, requested())
	}
	got = spool(t, testIO(t), "state", ses, "--json", "--url", url)
	if strings.Count(got.out, "\n") != 1 || !strings.Contains(got.out, `"extra":7`) || !strings.Contains(got.out, `"b1"`) || !strings.Contains(got.out, `"b2"`) || !strings.Contains(got.out, `"incompleteText":[{"blockId":"b3"`) || strings.Contains(got.out, "nextPageToken") {
		t.Errorf("--json: %s", got.out)
	}
	if got := spool(t, testIO(t), "state", ses, "--at", "9", "--url", url); got.code != ExitFailed || got.err != "spool: at: the session has no event 9 yet: its last is 3 (CURSOR_AHEAD)\n" {
		t.Errorf("%+v", got)
	}
	for _, bad := range []string{"-1", "x", "4294967296"} {
		if got := spool(t, testIO(t), "state", ses, "--at="+bad, "--url", url); got.code != ExitUsage || !strings.Contains(got.err, "--at") {
			t.Errorf("--at %s: %+v", bad, got)
		}
	}
	spool(t, testIO(t), "files", "get", ses, "a", "-", "--at", "7", "--url", url)
	if requested() != "/files/a?at=7" {
		t.Errorf("requested %s", requested())
	}
	if got := spool(t, testIO(t), "files", "ls", ses, "--at", "7", "--live", "--url", url); got.code != ExitUsage {
		t.Errorf("%+v", got)
	}
}

func TestDiff_OfEventsAndOfSessions(t *testing.T) {
	t.Parallel()
	url, requested := serveHistory(t)
	got := spool(t, testIO(t), "diff", ses, "1", "3", "--url", url)
	for _, want := range []string{"session s: open -> closed", "+ complete  user_message", "and 4 more", "-\told", "+\tnew\n", "added bin (binary): none -> 2.0 KiB, mode 644, SHA-256 ab", "and 1 more files", "Compare a smaller range"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if got.code != ExitDone || strings.Contains(got.out, "\x1b") || requested() != "/diff?from=1&to=3" {
		t.Errorf("%+v, requested %s", got, requested())
	}
	other := "ses_" + strings.Repeat("0", 26)
	got = spool(t, testIO(t), "diff", ses, other, "--url", url)
	if got.code != ExitDone || requested() != "/compare?with="+other || !strings.HasPrefix(got.out, "They differ.\nThe 4 events before are equal") || !strings.Contains(got.out, "-     5  log") {
		t.Errorf("%+v, requested %s", got, requested())
	}
	if got := spool(t, testIO(t), "diff", ses, other, "--json", "--url", url); !strings.Contains(got.out, `"equalEvents":4`) {
		t.Errorf("--json: %s", got.out)
	}
	for _, bad := range [][]string{{"1"}, {"x", "3"}, {"1", "4294967296"}, {"-1", "2"}} {
		if got := spool(t, testIO(t), append(append([]string{"diff", ses}, bad...), "--url", url)...); got.code != ExitUsage {
			t.Errorf("%v: %+v", bad, got)
		}
	}
}

// TestDiff_ExitCode tests that with --exit-code a difference ends the command with 1 and without an error message, and
// that without the flag it ends with 0.
func TestDiff_ExitCode(t *testing.T) {
	t.Parallel()
	url, _ := serveHistory(t)
	other := "ses_" + strings.Repeat("0", 26)
	for _, c := range []struct {
		name string
		args []string
		code int
	}{
		{"two events that differ", []string{"1", "3"}, ExitFailed},
		{"two events without a difference", []string{"2", "2"}, ExitDone},
		{"two events whose files cannot be compared", []string{"2", "4"}, ExitFailed},
		{"two sessions that differ", []string{other}, ExitFailed},
		{"two sessions that are alike", []string{ses}, ExitDone},
	} {
		for _, json := range [][]string{nil, {"--json"}} {
			args := append(append([]string{"diff", ses, "--url", url}, c.args...), json...)
			plain := spool(t, testIO(t), args...)
			got := spool(t, testIO(t), append(args, "--exit-code")...)
			if plain.code != ExitDone || got.code != c.code || got.out != plain.out || got.err != "" {
				t.Errorf("%s %v: %+v, without --exit-code %+v", c.name, json, got, plain)
			}
		}
	}
}
