package command

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
)

// TestLists_SendEachFlagAsParameter tests that each flag of a list is sent as the parameter of the same name.
func TestLists_SendEachFlagAsParameter(t *testing.T) {
	t.Parallel()
	var requested url.Values
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/sessions" || r.URL.Path == "/api/executions" {
			requested = r.URL.Query()
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"sessions":[],"executions":[],"nextPageToken":""}`))
	}))
	defer s.Close()
	flags := []string{
		"--agent=acme/reviewer", "--architecture=codex", "--metadata=team=a=b", "--created-after=2026-01-01T00:00:00Z", "--created-before=2026-02-01T00:00:00Z",
		"--updated-after=2026-01-02T00:00:00Z", "--updated-before=2026-02-02T00:00:00Z", "--text=look at", "--sort=updated", "--order=asc",
	}
	want := url.Values{
		"agent": {"acme/reviewer"}, "architecture": {"codex"}, "metadataKey": {"team"}, "metadataValue": {"a=b"},
		"createdAfter": {"2026-01-01T00:00:00Z"}, "createdBefore": {"2026-02-01T00:00:00Z"}, "updatedAfter": {"2026-01-02T00:00:00Z"},
		"updatedBefore": {"2026-02-02T00:00:00Z"}, "text": {"look at"}, "sort": {"updated"}, "order": {"asc"},
	}
	for noun, state := range map[string][2]string{"sessions": {"status", "closed"}, "executions": {"phase", "failed"}} {
		want := url.Values(http.Header(want).Clone())
		want.Set(state[0], state[1])
		got := spool(t, testIO(t), append([]string{noun, "ls", "--url", s.URL, "--" + state[0] + "=" + state[1]}, flags...)...)
		if got.code != ExitDone || requested.Encode() != want.Encode() {
			t.Errorf("%s: %+v requested %s, want %s", noun, got, requested.Encode(), want.Encode())
		}
		if got := spool(t, testIO(t), noun, "ls", "--url", s.URL, "--metadata=team"); got.code != ExitDone || requested.Encode() != "metadataKey=team" {
			t.Errorf("%s: %+v requested %s", noun, got, requested.Encode())
		}
	}
	const ses = "ses_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	if got := spool(t, testIO(t), "executions", "ls", "--url", s.URL, "--session", ses, "--text=x"); got.code != ExitUsage {
		t.Errorf("a session's executions with another filter: %+v", got)
	}
}

// TestShow_PrintsTitleAgentAndInstance tests that sessions and executions are shown with their title or query, agent and
// instance.
func TestShow_PrintsTitleAgentAndInstance(t *testing.T) {
	t.Parallel()
	const ses, exe, instance = "ses_01ARZ3NDEKTSV4RRFFQ69G5FAV", "exe_01ARZ3NDEKTSV4RRFFQ69G5FAV", "acme/reviewer.default@0123"
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer := `{"executions":[],"nextPageToken":""}`
		switch r.URL.Path {
		case "/api/sessions/" + ses:
			answer = `{"sessionId":"` + ses + `","agent":"reviewer","instance":"` + instance + `","title":"look at it"}`
		case "/api/executions/" + exe:
			answer = `{"executionId":"` + exe + `","agent":"reviewer","instance":"` + instance + `","query":"look at it"}`
		}
		_, _ = w.Write([]byte(answer))
	}))
	defer s.Close()
	for noun, id := range map[string]string{"sessions": ses, "executions": exe} {
		got := spool(t, testIO(t), noun, "show", "--url", s.URL, id)
		for _, want := range []string{instance, "look at it", "reviewer"} {
			if got.code != ExitDone || !strings.Contains(got.out, want) {
				t.Errorf("%s show: %+v lacks %s", noun, got, want)
			}
		}
	}
}
