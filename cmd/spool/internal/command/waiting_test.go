package command

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestShow_PrintsWhyAnExecutionWaits tests that "spool executions show" and "spool sessions show" print the reason of a wait,
// without control characters, and nothing for an execution that does not wait.
func TestShow_PrintsWhyAnExecutionWaits(t *testing.T) {
	t.Parallel()
	const waiting = `,"waiting":{"reason":"not_before","since":"2026-03-04T05:06:07Z","until":"2026-03-04T05:08:00Z","detail":"Attempt 1 failed.\u001b[2J","remedy":"Wait."}`
	for name, field := range map[string]string{"it waits": waiting, "it runs": ""} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			answer := fmt.Sprintf(`{"executionId":%q,"sessionId":%q,"phase":"starting"%s}`, exe, ses, field)
			switch r.URL.Path {
			case "/api/sessions/" + ses:
				answer = fmt.Sprintf(`{"sessionId":%q,"status":"open","activeExecutionId":%q}`, ses, exe)
			case "/api/sessions/" + ses + "/executions":
				answer = `{}`
			}
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, answer)
		}))
		t.Cleanup(s.Close)
		for _, args := range [][]string{{"executions", "show", exe}, {"sessions", "show", ses}} {
			got := spool(t, testIO(t), append(args, "--url", s.URL)...)
			if got.code != ExitDone || strings.Contains(got.out, "\x1b") {
				t.Errorf("%s: %q: %+v", name, args, got)
			}
			for _, part := range []string{"not_before since ", " until ", ": Attempt 1 failed.", " Wait.\n"} {
				if strings.Contains(got.out, part) != (field != "") {
					t.Errorf("%s: %q prints %q: %s", name, args, part, got.out)
				}
			}
		}
	}
}
