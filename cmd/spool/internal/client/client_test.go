package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

func answer(w http.ResponseWriter, status int, media, body string) {
	w.Header().Set("Content-Type", media)
	w.WriteHeader(status)
	fmt.Fprint(w, body)
}

const problemJSON = "application/problem+json"

func TestNew_RefusesInvalidConfig(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "127.0.0.1:7700", "ftp://host", "http://", "http://a b/", "nonsense"} {
		if _, err := client.New(client.Config{URL: bad}); err == nil || !strings.HasPrefix(err.Error(), "url: ") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := client.New(client.Config{URL: "http://host", Key: "a\nb"}); err == nil || !strings.HasPrefix(err.Error(), "key: ") {
		t.Errorf("key with a line feed: %v", err)
	}
}

func TestList_ReadsAllPages(t *testing.T) {
	t.Parallel()
	c := connect(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Query().Get("pageToken") {
		case "":
			answer(w, 200, "application/json", `{"sessions":[{"sessionId":"ses_1","extra":1},{"sessionId":"ses_2"}],"nextPageToken":"p2"}`)
		case "p2":
			answer(w, 200, "application/json", `{"sessions":[{"sessionId":"ses_3"}],"nextPageToken":""}`)
		}
		if r.URL.Path != "/api/sessions" || r.URL.Query().Get("status") != "open" {
			t.Errorf("requested %s", r.URL)
		}
	}), client.Config{})
	var ids []string
	for s, err := range client.List[*spoolv1.Session](t.Context(), c.Sessions.ListSessions, &spoolv1.ListSessionsRequest{Status: "open"}) {
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.Value.SessionId)
		if raw, err := json.Marshal(s); err != nil || s.Value.SessionId == "ses_1" && string(raw) != `{"sessionId":"ses_1","extra":1}` {
			t.Errorf("printed as %s %v", raw, err)
		}
	}
	if !slices.Equal(ids, []string{"ses_1", "ses_2", "ses_3"}) {
		t.Errorf("got %v", ids)
	}
}

// TestCall_RepeatsOnlyRepeatableMethods tests that a query is sent again with the same Idempotency-Key if its outcome is
// unknown, and that an interrupt is sent only once.
func TestCall_RepeatsOnlyRepeatableMethods(t *testing.T) {
	t.Parallel()
	var tries, interrupts atomic.Int32
	keys := make(chan string, 10)
	c := connect(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/interrupt") {
			interrupts.Add(1)
			answer(w, 503, problemJSON, `{"code":"UNAVAILABLE","detail":"not now"}`)
			return
		}
		keys <- r.Header.Get("Idempotency-Key")
		switch tries.Add(1) {
		case 1:
			answer(w, 503, problemJSON, `{"code":"UNAVAILABLE","detail":"not now"}`)
		case 2:
			panic(http.ErrAbortHandler)
		default:
			answer(w, 202, "application/json", `{"sessionId":"ses_1","executionId":"exe_1","position":"0-1"}`)
		}
	}), client.Config{})
	got, err := c.Executions.StartExecution(t.Context(), &spoolv1.StartExecutionRequest{Content: "q"})
	if err != nil || got.GetExecutionId() != "exe_1" {
		t.Fatalf("got %+v %v", got, err)
	}
	if a, b, d := <-keys, <-keys, <-keys; a == "" || a != b || b != d {
		t.Errorf("keys %q %q %q", a, b, d)
	}
	if _, err := c.Sessions.InterruptSession(t.Context(), &spoolv1.InterruptSessionRequest{SessionId: "ses_1"}); !client.IsCode(err, "UNAVAILABLE") || interrupts.Load() != 1 {
		t.Errorf("interrupt: %v after %d tries", err, interrupts.Load())
	}
}

func TestCall_ReportsThatTheServerIsNotSpool(t *testing.T) {
	t.Parallel()
	for name, h := range map[string]http.HandlerFunc{
		"a web page":     func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, "text/html", "<html>") },
		"not found":      http.NotFound,
		"a proxy's page": func(w http.ResponseWriter, _ *http.Request) { answer(w, 403, "text/html", "no") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := connect(t, h, client.Config{})
			_, err := c.Sessions.GetSession(t.Context(), &spoolv1.GetSessionRequest{SessionId: "ses_1"})
			if err == nil || !strings.Contains(err.Error(), "pass --url") {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestCall_EscapesIDsInPaths tests that an id cannot leave its segment of the path.
func TestCall_EscapesIDsInPaths(t *testing.T) {
	t.Parallel()
	var path atomic.Value
	c := connect(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path.Store(r.URL.EscapedPath())
		answer(w, 200, "application/json", "{}")
	}), client.Config{})
	for id, want := range map[string]string{"..": "/api/sessions/%2E%2E", "a/../b?c": "/api/sessions/a%2F..%2Fb%3Fc"} {
		if _, err := c.Sessions.GetSession(t.Context(), &spoolv1.GetSessionRequest{SessionId: id}); err != nil || path.Load() != want {
			t.Errorf("%q: requested %v (%v)", id, path.Load(), err)
		}
	}
}

// TestClient_UsesAURLWithAPath tests that requests and streams go below the path of the gateway's URL.
func TestClient_UsesAURLWithAPath(t *testing.T) {
	t.Parallel()
	list := script(t)
	g := &gateway{t: t, script: list, cut: func(int) bool { return false }}
	mux := http.NewServeMux()
	mux.Handle("GET /tools/spool/api/ws", g)
	mux.HandleFunc("GET /tools/spool/health", func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, "application/json", "{}") })
	mux.HandleFunc("POST /tools/spool/api/signin/codes", func(w http.ResponseWriter, _ *http.Request) { answer(w, 201, "application/json", `{"code":"c"}`) })
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	for _, path := range []string{"/tools/spool", "/tools/spool/"} {
		c, err := client.New(client.Config{URL: srv.URL + path, HTTP: srv.Client()})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Ping(t.Context()); err != nil {
			t.Error(err)
		}
		if code, err := c.SignIn.CreateSignInCode(t.Context(), &spoolv1.CreateSignInCodeRequest{}); err != nil || code.GetCode() != "c" {
			t.Errorf("got %v, %v", code, err)
		}
		if c.URL() != srv.URL+"/tools/spool" {
			t.Errorf("the URL is %s", c.URL())
		}
		if kept, _, _ := collect(t, c, 0); len(kept) == 0 {
			t.Error("no events are received")
		}
	}
}

func TestCall_ReturnsTheErrorOfTheContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	c := connect(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	}), client.Config{})
	if _, err := c.Sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: "ses_1"}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
