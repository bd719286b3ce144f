package egress_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

const credential = "Bearer key-of-the-mcp-server"

// echoRequest answers with the request that it received, and repeats the credential in the answer.
func echoRequest(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("Mcp-Session-Id", "m-1")
	w.Header().Set("X-Told", r.Header.Get("Authorization"))
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "%s %s host=%s session=%s cookie=%q auth-ok=%v secret=%s body=%s", r.Method, r.URL.RequestURI(), r.Host, r.Header.Get("Mcp-Session-Id"),
		r.Header.Get("Cookie"), r.Header.Get("Authorization") == credential, r.Header.Get("Authorization"), body)
}

func (b *box) register(upstreams ...api.MCPServer) {
	b.t.Helper()
	b.reg.Token, b.reg.Upstreams = "", upstreams
	if _, err := b.client.Register(b.t.Context(), b.id, b.reg); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) ask(method, path string) (int, http.Header, string) {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), method, runner.EgressURL+path, strings.NewReader("{}"))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer of-the-sandbox")
	req.Header.Set("Cookie", "a=b")
	req.Header.Set("Mcp-Session-Id", "m-1")
	return b.do(req)
}

// A sandbox reaches the MCP servers of its registration. Their keys are neither sent to the sandbox nor written to
// the journal or the log.
func TestServers_KeepTheirKeysSecret(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, echoRequest)
	internal := httptest.NewServer(http.HandlerFunc(echoRequest))
	t.Cleanup(internal.Close)
	w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		change(c, d)
		c.Open = []string{internal.Listener.Addr().String()}
	})
	b := w.box()
	headers, secrets := map[string]string{"Authorization": credential, "X-Plain": "auth-ok="}, []string{strings.TrimPrefix(credential, "Bearer ")}
	b.register(
		api.MCPServer{Name: "docs", URL: "http://ok.example/mcp?tenant=1", Headers: headers, Secrets: secrets},
		api.MCPServer{Name: "ours", URL: internal.URL + "/v1/mcp", Headers: headers, Secrets: secrets},
	)
	for _, c := range []struct{ method, path, want string }{
		{"POST", "/mcp/docs", "POST /mcp?tenant=1 host=ok.example session=m-1"},
		{"GET", "/mcp/docs?x=2", "GET /mcp?tenant=1&x=2 host=ok.example"},
		{"DELETE", "/mcp/docs/below", "DELETE /mcp/below?tenant=1 host=ok.example"},
		{"POST", "/mcp/ours", "POST /v1/mcp host=" + internal.Listener.Addr().String()},
	} {
		status, h, body := b.ask(c.method, c.path)
		if status != 200 || !strings.HasPrefix(body, c.want) || !strings.Contains(body, `cookie=""`) || !strings.Contains(body, "auth-ok=true") || !strings.Contains(body, "body={}") {
			t.Errorf("%s %s: %d %s", c.method, c.path, status, body)
		}
		if strings.Contains(body+h.Get("X-Told"), "key-of-the-mcp-server") || h.Get("Mcp-Session-Id") != "m-1" {
			t.Errorf("%s %s tells the key: %s %v", c.method, c.path, body, h)
		}
	}
	if got := p.seen(); len(got) != 3 {
		t.Errorf("dialed %v", got)
	}
	if s, err := b.client.State(t.Context(), b.id); err != nil || strings.Join(s.Upstreams, " ") != "docs ours" {
		t.Errorf("the state names %v, %v", s.Upstreams, err)
	}
	for n, c := range []struct{ method, path, code string }{
		{"POST", "/mcp/none", "UNKNOWN_SERVER"}, {"PUT", "/mcp/docs", "METHOD_NOT_ALLOWED"}, {"TRACE", "/mcp/docs", "METHOD_NOT_ALLOWED"}, {"POST", "/mcp/docs/..;/x", "BAD_HOST"},
	} {
		if status, _, body := b.ask(c.method, c.path); status < 400 {
			t.Errorf("%s %s: %d %s", c.method, c.path, status, body)
		}
		if d := b.denied(b.lines(uint64(n), 1)[0]); d.Code != c.code { //nolint:gosec // a count
			t.Errorf("%s %s is journaled as %+v", c.method, c.path, d)
		}
	}
	// Another sandbox does not reach them, and neither does this one after a registration without them.
	other := w.box()
	if status, _, _ := other.ask("POST", "/mcp/docs"); status != http.StatusNotFound {
		t.Errorf("another sandbox: %d", status)
	}
	b.register()
	if status, _, _ := b.ask("POST", "/mcp/docs"); status != http.StatusNotFound {
		t.Errorf("after its removal: %d", status)
	}
	err := filepath.WalkDir(w.cfg.Data, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if strings.Contains(string(raw), "key-of-the-mcp-server") {
			t.Errorf("%s holds the key", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if strings.Contains(w.log.String(), "key-of-the-mcp-server") {
		t.Error("the log holds the key")
	}
}

// The proxy does not connect to an MCP server at an address that is not public, whatever its definition allows.
func TestServers_PrivateAddressesAreDenied(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, func(http.ResponseWriter, *http.Request) { t.Error("a request got through") })
	b := newWorld(t, change).box()
	for i, host := range []string{"loopback.example", "169.254.169.254", "mixed.example", "127.0.0.1:8080"} {
		b.register(api.MCPServer{Name: "m", URL: "http://" + host + "/mcp"})
		if status, _, body := b.ask("POST", "/mcp/m"); status != http.StatusForbidden {
			t.Errorf("%s: %d %s", host, status, body)
		}
		if d := b.denied(b.lines(uint64(i), 1)[0]); d.Code != "PRIVATE_ADDRESS" {
			t.Errorf("%s is journaled as %+v", host, d)
		}
	}
	if got := p.seen(); len(got) > 0 {
		t.Errorf("dialed %v", got)
	}
}

// A refused MCP server is named by its field, without its values.
func TestRegister_RefusesInvalidServers(t *testing.T) {
	t.Parallel()
	b := newWorld(t, nil).box()
	many := make([]api.MCPServer, 65)
	for name, c := range map[string]struct {
		list  []api.MCPServer
		field string
	}{
		"too many":     {many, "upstreams"},
		"a name":       {[]api.MCPServer{{Name: "a/b", URL: "http://ok.example"}}, "upstreams[0].name"},
		"twice":        {[]api.MCPServer{{Name: "a", URL: "http://ok.example"}, {Name: "a", URL: "http://ok.example"}}, "upstreams[1].name"},
		"a scheme":     {[]api.MCPServer{{Name: "a", URL: "file:///etc/passwd"}}, "upstreams[0].url"},
		"a user":       {[]api.MCPServer{{Name: "a", URL: "http://u:secret-value@ok.example"}}, "upstreams[0].url"},
		"a host":       {[]api.MCPServer{{Name: "a", URL: "http://127.1/"}}, "upstreams[0].url"},
		"a header":     {[]api.MCPServer{{Name: "a", URL: "http://ok.example", Headers: map[string]string{"A b": "secret-value"}}}, "upstreams[0].headers"},
		"a line break": {[]api.MCPServer{{Name: "a", URL: "http://ok.example", Headers: map[string]string{"A": "secret-value\r\nX: y"}}}, "upstreams[0].headers"},
	} {
		g := b.reg
		g.Token, g.Upstreams = "", c.list
		_, err := b.client.Register(t.Context(), b.id, g)
		var refused *api.Error
		if !errors.As(err, &refused) || refused.Field != c.field || strings.Contains(err.Error(), "secret-value") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A restarted proxy has no servers. Its journal shows that to the executor, which registers them again. The request waits for that.
func TestServers_RequestsWaitForThemAfterARestart(t *testing.T) {
	t.Parallel()
	change, _, _ := withPublicNetwork(t, echoRequest)
	w := newWorld(t, change)
	b := w.box()
	server := api.MCPServer{Name: "docs", URL: "http://ok.example/mcp"}
	b.register(server)
	w.stop()
	w.start()
	answered := make(chan int)
	go func() {
		status, _, _ := b.ask("POST", "/mcp/docs")
		answered <- status
	}()
	if d := b.denied(b.lines(0, 1)[0]); d.Code != "UNKNOWN_SERVER" || d.Host != "mcp/docs" {
		t.Errorf("journaled %+v", d)
	}
	b.register(server)
	if status := <-answered; status != http.StatusOK {
		t.Errorf("the request that waited: %d", status)
	}
	if status, _, _ := b.ask("POST", "/mcp/none"); status != http.StatusNotFound {
		t.Errorf("a server that is not registered: %d", status)
	}
}

// A connection that is limited to hosts reaches hosts of the allowlist, and neither models nor MCP servers.
func TestHostsOnly_ReachesNoModelsAndServers(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, echoRequest)
	w := newWorld(t, change)
	b := w.box("ok.example")
	b.register(api.MCPServer{Name: "docs", URL: "http://ok.example/mcp", Headers: map[string]string{"Authorization": credential}})
	b.http = w.clientOf(b.token + runner.EgressHostsOnly)
	for _, path := range []string{"/mcp/docs", "/anthropic/v1/messages", "/openai/v1/models", "/"} {
		if status, _, body := b.ask("POST", path); status != http.StatusForbidden || !strings.Contains(body, "NOT_ALLOWED") {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if l := b.denied(b.lines(0, 1)[0]); l.Code != "NOT_ALLOWED" || l.Host != "/mcp/docs" {
		t.Errorf("journaled %+v", l)
	}
	if got := p.seen(); len(got) != 0 {
		t.Errorf("dialled %v", got)
	}
	req, err := http.NewRequestWithContext(t.Context(), "GET", "http://ok.example/page", nil)
	if err != nil {
		t.Fatal(err)
	}
	if status, _, body := b.do(req); status != http.StatusOK || !strings.HasPrefix(body, "GET /page") {
		t.Errorf("a host of the allowlist: %d %s", status, body)
	}
}
