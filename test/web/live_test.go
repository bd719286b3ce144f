package web

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// newClaudeCluster starts Spool for sessions of the real Claude Code with the scripted model of testdata/SCRIPT.yaml.
func newClaudeCluster(t *testing.T, script string, gateways int) *harness.Cluster {
	t.Helper()
	needBrowser(t)
	if _, err := exec.LookPath("claude"); err != nil {
		t.Skipf("claude is not on the PATH: run scripts/install: %v", err)
	}
	content, err := os.ReadFile("testdata/" + script + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	return harness.New(t, harness.Options{Gateways: gateways, Script: string(content)})
}

// TestPage_ShowsARealSession tests how a finished session of the real Claude Code is shown.
func TestPage_ShowsARealSession(t *testing.T) {
	t.Parallel()
	c := newClaudeCluster(t, "session", 1)
	session := c.CreateSession("claude-code", map[string]any{"model": "known-model"})
	if _, end := c.RunQuery(session, "make the tests pass", nil); end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("the query ended with %s %s", end.Type, end.Data)
	}
	runScenario(t, "session", c.URL(0)+"/", "SPOOL_SESSION="+session)
	c.DeleteSession(session)
}

// TestPage_GoesOnWhenItsGatewayStops tests two pages on two gateways with a session of the real Claude Code: approvals,
// questions, a gateway that stops in the middle of an answer, interrupts, a download and a deletion.
func TestPage_GoesOnWhenItsGatewayStops(t *testing.T) {
	t.Parallel()
	c := newClaudeCluster(t, "live", 2)
	stop := c.StartGateway()
	spec := map[string]any{"architecture": "claude-code", "model": "known-model", "instructions": "You run commands.", "permissions": map[string]any{"preset": "ask"}}
	if status := c.Call(0, http.MethodPost, "/api/agents", map[string]any{"ref": map[string]any{"slug": "asks"}, "spec": spec}, nil); status != http.StatusOK {
		t.Fatalf("apply the agent: status %d", status)
	}
	session := c.CreateSession("", map[string]any{"agent": "asks"})

	var target atomic.Pointer[url.URL]
	use := func(gateway int) {
		u, err := url.Parse(c.URL(gateway))
		if err != nil {
			t.Error(err)
		}
		target.Store(u)
	}
	use(2)
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target.Load())
		r.Out.Host = r.In.Host
	}, FlushInterval: -1}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stop-gateway" {
			use(1)
			stop()
			w.WriteHeader(http.StatusNoContent)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	defer front.Close()
	runScenario(t, "live", front.URL+"/", "SPOOL_OTHER="+strings.TrimSuffix(c.URL(0), "/")+"/", "SPOOL_SESSION="+session)
	c.AwaitDeleted("default", session)
}
