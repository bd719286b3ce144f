package command

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// serveForks serves a session with forks, in pages of 15.
func serveForks(t *testing.T, forks int) (url string, requested *[]string) {
	t.Helper()
	requested = &[]string{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*requested = append(*requested, r.URL.RequestURI())
		var answer any
		switch r.URL.Path {
		case "/api/sessions/" + ses:
			answer = map[string]any{"sessionId": ses, "status": "open", "forks": forks}
		case "/api/sessions/" + ses + "/executions":
			answer = map[string]any{"executions": []any{}}
		case "/api/sessions":
			var first int
			if token := r.URL.Query().Get("pageToken"); token != "" {
				if _, err := fmt.Sscan(token, &first); err != nil {
					t.Error(err)
				}
			}
			var list []any
			for i := first; i < min(first+15, forks); i++ {
				list = append(list, map[string]any{"sessionId": fmt.Sprintf("ses_fork%03d", i), "status": "open", "title": "fork\u001b[2J", "parent": map[string]any{"sessionId": ses, "effective": 7 + i}})
			}
			page := map[string]any{"sessions": list, "nextPageToken": ""}
			if first+15 < forks {
				page["nextPageToken"] = fmt.Sprint(first + 15)
			}
			answer = page
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, requested
}

// TestSessionsShow_ListsForks tests that the newest 20 forks are shown, with the command that shows all.
func TestSessionsShow_ListsForks(t *testing.T) {
	t.Parallel()
	for forks, want := range map[int]struct {
		shown int
		hint  string
	}{0: {}, 3: {shown: 3}, 20: {shown: 20}, 40: {20, "only the newest 20 of 40 forks are shown; `spool sessions ls --parent " + ses + " --limit 0` shows all\n"}} {
		url, requested := serveForks(t, forks)
		got := spool(t, testIO(t), "sessions", "show", ses, "--url", url)
		if got.code != ExitDone || strings.Count(got.out, "ses_fork") != want.shown || got.err != want.hint || strings.Contains(got.out, "FORK  ") != (forks > 0) || strings.Contains(got.out, "\x1b") {
			t.Errorf("%d forks: %+v", forks, got)
		}
		if forks == 3 && !strings.Contains(got.out, "ses_fork002  9         open") {
			t.Errorf("a fork is shown as %s", got.out)
		}
		if last := (*requested)[len(*requested)-1]; forks == 40 && last != "/api/sessions?pageToken=15&parent="+ses {
			t.Errorf("requested %v", *requested)
		}
	}
}

func TestSessionsLs_ListsForksOfAParent(t *testing.T) {
	t.Parallel()
	url, requested := serveForks(t, 40)
	got := spool(t, testIO(t), "sessions", "ls", "--parent", ses, "--limit", "0", "--url", url)
	if got.code != ExitDone || strings.Count(got.out, "ses_fork") != 40 || len(*requested) != 3 || (*requested)[0] != "/api/sessions?parent="+ses {
		t.Errorf("requested %v: %+v", *requested, got)
	}
	if got = spool(t, testIO(t), "sessions", "ls", "--parent", "x", "--url", url); got.code != ExitUsage || !strings.Contains(got.err, "parent: ") {
		t.Errorf("of no session: %+v", got)
	}
}

// TestFork_PrintsWhetherTheConversationComesAlong tests a fork and its preview, which makes no session.
func TestFork_PrintsWhetherTheConversationComesAlong(t *testing.T) {
	t.Parallel()
	for conversation, want := range map[string]string{
		"continued": "the agent continues the conversation", "new": "there is no conversation to continue", "unverified": "the first turn fails with CONVERSATION_LOST",
		"lost": "the conversation is lost", "": "with an empty workspace\n",
	} {
		var asked map[string]any
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked = map[string]any{}
			answer := map[string]any{"parent": map[string]any{"sessionId": ses, "asked": 7, "effective": 7, "conversation": conversation}}
			if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
				t.Error(err)
			}
			if asked["preview"] != true {
				answer["sessionId"] = "ses_made"
			}
			w.Header().Set("Content-Type", "application/json")
			if err := json.NewEncoder(w).Encode(answer); err != nil {
				t.Error(err)
			}
		}))
		t.Cleanup(s.Close)
		if got := spool(t, testIO(t), "fork", ses, "--preview", "--url", s.URL); got.code != ExitDone || !strings.Contains(got.out, want) || asked["preview"] != true {
			t.Errorf("%s: the preview says %+v, asked %v", conversation, got, asked)
		}
		got := spool(t, testIO(t), "fork", ses, "--allow-conversation-loss", "--url", s.URL)
		if got.code != ExitDone || got.out != "ses_made\n" || !strings.Contains(got.err, want) || asked["allowConversationLoss"] != true {
			t.Errorf("%s: the fork says %+v, asked %v", conversation, got, asked)
		}
	}
}
