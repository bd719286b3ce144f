package e2e

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestChanges_OfARealSession follows the changes of all sessions from one gateway, and continues with the cursor on another, while a session is created,
// answers a message and is deleted.
func TestChanges_OfARealSession(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateways: 2, Script: script(t, "stream.yaml")})
	cursor := ""
	// follow reads changes from a gateway until done returns true for one.
	follow := func(gateway int, done func(kind string, s map[string]any) bool) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.URL(gateway)+"/api/sessions/stream", nil)
		if err != nil {
			t.Fatal(err)
		}
		if cursor != "" {
			req.Header.Set("Last-Event-ID", cursor)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		kind := ""
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			name, value, _ := strings.Cut(lines.Text(), ": ")
			switch name {
			case "id":
				cursor = value
			case "event":
				kind = value
			case "data":
				var s map[string]any
				if err := json.Unmarshal([]byte(value), &s); err != nil {
					t.Fatal(err)
				}
				if done(kind, s) {
					return
				}
			}
		}
		t.Fatal("the stream ended")
	}
	follow(0, func(kind string, _ map[string]any) bool { return kind == "started" })
	session := c.CreateSession("spool", nil)
	c.PostMessage(session, "hello")
	ran := false
	follow(1, func(kind string, s map[string]any) bool {
		ran = ran || s["activeExecutionId"] != nil
		return kind == "session" && s["sessionId"] == session && s["executions"] == 1.0 && s["activeExecutionId"] == nil && ran
	})
	c.DeleteSession(session)
	follow(0, func(kind string, s map[string]any) bool {
		return kind == "session_deleted" && s["sessionId"] == session
	})
}
