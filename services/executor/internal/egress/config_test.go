package egress_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

func TestNew_RefusesInvalidSettings(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	hosts := func(entry string) func(*egress.Config) {
		path := file(t, "hosts.yaml", "hosts:\n- {name: fine, url: 'https://fine.example'}\n- "+entry+"\n")
		return func(c *egress.Config) { c.Hosts = path }
	}
	for _, c := range []struct {
		name   string
		change func(*egress.Config)
		wants  []string
	}{
		{"admin socket among the sandboxes", func(c *egress.Config) { c.ListenAdmin = filepath.Join(dir, "s", "admin.sock") }, []string{"listen-admin"}},
		{"data among the sandboxes", func(c *egress.Config) { c.Data = filepath.Join(dir, "s", "x", "data") }, []string{"data"}},
		{"connections", func(c *egress.Config) { c.Connections = -1 }, []string{"connections"}},
		{"idle", func(c *egress.Config) { c.Idle = -time.Second }, []string{"idle"}},
		{"model-idle", func(c *egress.Config) { c.ModelIdle = time.Nanosecond }, []string{"model-idle"}},
		{"drain", func(c *egress.Config) { c.Drain = 10000 * time.Hour }, []string{"drain"}},
		{"keep-for", func(c *egress.Config) { c.KeepFor = -1 }, []string{"keep-for"}},
		{"journal-max", func(c *egress.Config) { c.JournalMax = 5 }, []string{"journal-max"}},
		{"a TLS listener without a certificate", func(c *egress.Config) { c.ListenTLS = "127.0.0.1:0" }, []string{"listen-tls", "tls-cert"}},
		{"a certificate without a TLS listener", func(c *egress.Config) { c.TLSCert, c.TLSKey = dir+"/c", dir+"/k" }, []string{"listen-tls"}},
		{"a certificate without a key", func(c *egress.Config) { c.ListenTLS, c.TLSCert = "127.0.0.1:0", dir+"/c" }, []string{"tls-key"}},
		{"a certificate that is not there", func(c *egress.Config) { c.ListenTLS, c.TLSCert, c.TLSKey = "127.0.0.1:0", dir+"/c", dir+"/k" }, []string{"tls-cert", dir + "/c"}},
		{"a TLS listener at no address", func(c *egress.Config) { c.ListenTLS, c.TLSCert, c.TLSKey = "7443", dir+"/c", dir+"/k" }, []string{"listen-tls", `"7443"`}},
		{"tls-connections", func(c *egress.Config) { c.TLSConnections = -1 }, []string{"tls-connections"}},
		{"tls-address-connections", func(c *egress.Config) { c.TLSAddressConnections = 5000 }, []string{"tls-address-connections"}},
		{"tls-handshake", func(c *egress.Config) { c.TLSHandshake = -1 }, []string{"tls-handshake"}},
		{"closed", func(c *egress.Config) { c.Closed = []string{"10.0.0.0"} }, []string{"closed", `"10.0.0.0"`}},
		{"a base URL with /v1", func(c *egress.Config) { c.AnthropicBaseURL = "https://x.example/v1/" }, []string{"anthropic-base-url", "/v1"}},
		{"a base URL without a scheme", func(c *egress.Config) { c.OpenAIBaseURL = "x.example/v1" }, []string{"openai-base-url", "http://"}},
		{"a base URL with a user", func(c *egress.Config) { c.NVIDIABaseURL = "https://u:hunter2@x.example/v1" }, []string{"nvidia-base-url", "user"}},
		{"a base URL with a query", func(c *egress.Config) { c.OpenAIBaseURL = "https://x.example/v1?a=b" }, []string{"openai-base-url", "query"}},
		{"a base URL that is none", func(c *egress.Config) { c.OpenAIBaseURL = "https://u:hunter2@x.example:port/" }, []string{"openai-base-url"}},
		{"a key with a line's end", func(c *egress.Config) { c.AnthropicKey = "sk-hunter2\n" }, []string{"ANTHROPIC_API_KEY"}},
		{"no file of prices", func(c *egress.Config) { c.Prices = filepath.Join(dir, "none.yaml") }, []string{"prices", "none.yaml"}},
		{"no file of hosts", func(c *egress.Config) { c.Hosts = filepath.Join(dir, "none.yaml") }, []string{"hosts", "none.yaml"}},
		{"host without a name", hosts("{url: 'https://x.example'}"), []string{"hosts.yaml: hosts[1]", "name"}},
		{"host with a name that is none", hosts("{name: 'a/b', url: 'https://x.example'}"), []string{"hosts[1] (a/b)", "name"}},
		{"host with a provider's name", hosts("{name: openai, url: 'https://x.example'}"), []string{"hosts[1] (openai)", "already"}},
		{"host twice", hosts("{name: fine, url: 'https://x.example'}"), []string{"hosts[1] (fine)", "already"}},
		{"host without a URL", hosts("{name: x}"), []string{"hosts[1] (x)", "url"}},
		{"host with a URL that is none", hosts("{name: x, url: 'ftp://x.example'}"), []string{"hosts[1] (x)", "url"}},
		{"host with a kind that is none", hosts("{name: x, url: 'https://x.example', kind: gemini}"), []string{"hosts[1] (x)", "kind", "gemini"}},
		{"host with a header that is none", hosts("{name: x, url: 'https://x.example', header: 'a b'}"), []string{"hosts[1] (x)", "header"}},
		{"host with a scheme that is none", hosts("{name: x, url: 'https://x.example', scheme: 'a b'}"), []string{"hosts[1] (x)", "scheme"}},
		{"host whose variable is empty", hosts("{name: x, url: 'https://x.example', env: X_KEY}"), []string{"hosts[1] (x)", "env", "X_KEY"}},
		{"host with a field that is none", hosts("{name: x, url: 'https://x.example', key: sk-hunter2}"), []string{"hosts.yaml", "key"}},
	} {
		cfg := egress.Config{ListenSandboxes: filepath.Join(dir, "s", "e.sock"), ListenAdmin: filepath.Join(dir, "a", "e.sock"), Data: filepath.Join(t.TempDir(), "d")}
		c.change(&cfg)
		_, err := egress.New(cfg, egress.Deps{Getenv: func(string) string { return "" }})
		if err == nil {
			t.Errorf("%s: taken", c.name)
			continue
		}
		for _, want := range c.wants {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v does not name %s", c.name, err, want)
			}
		}
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error tells a secret: %v", c.name, err)
		}
	}
}

// The file of hosts, in YAML or JSON, defines routes with their credentials.
func TestHosts_DefineRoutes(t *testing.T) {
	t.Parallel()
	got := make(chan *http.Request, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- r
		_, _ = io.WriteString(w, `{"model":"m","usage":{"prompt_tokens":3,"completion_tokens":1}}`)
	}))
	t.Cleanup(srv.Close)
	for _, text := range []string{
		"hosts:\n- {name: mirror, url: " + srv.URL + "/base/, env: MIRROR_KEY, kind: openai}\n- {name: tool, url: " + srv.URL + ", header: x-token, env: TOOL_KEY}\n",
		`{"hosts":[{"name":"mirror","url":"` + srv.URL + `/base/","env":"MIRROR_KEY","kind":"openai"},{"name":"tool","url":"` + srv.URL + `","header":"x-token","env":"TOOL_KEY"}]}`,
	} {
		w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
			c.Hosts = file(t, "hosts", text)
			c.Prices = file(t, "prices.yaml", "version: ours-1\nmodels: [{provider: mirror, model: m, input: 1000000, output: 0}]")
			d.Getenv = func(name string) string {
				return map[string]string{"MIRROR_KEY": "mirror-0123456789", "TOOL_KEY": "tool-0123456789"}[name]
			}
		})
		b := w.box()
		b.post("/mirror/chat/completions", "{}")
		if r := <-got; r.URL.Path != "/base/chat/completions" || r.Header.Get("Authorization") != "Bearer mirror-0123456789" {
			t.Errorf("%s %v", r.URL, r.Header)
		}
		if m := b.called(b.lines(0, 1)[0]); m.Provider != "mirror" || m.CostUSD != 3 || m.Prices != "ours-1" || m.Usage.InputTokens != 3 {
			t.Errorf("%+v", m)
		}
		b.post("/tool/anything/at/all", "{}")
		if r := <-got; r.URL.Path != "/anything/at/all" || r.Header.Get("X-Token") != "tool-0123456789" || r.Header.Get("Authorization") != "" {
			t.Errorf("%s %v", r.URL, r.Header)
		}
		if s, err := w.client.State(t.Context(), b.id); err != nil || s.Last != 1 {
			t.Errorf("what is no model is journaled as one: %+v, %v", s, err)
		}
	}
}

// No sandbox reaches a network that the operator closed.
func TestClosed_NetworksAreUnreachable(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, nil)
	w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		change(c, d)
		c.Closed = []string{"93.184.216.0/24"}
	})
	b := w.box("ok.example")
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://ok.example/", nil)
	if status, _, _ := b.do(req); status != http.StatusForbidden || len(p.seen()) > 0 {
		t.Errorf("%d, dialed %v", status, p.seen())
	}
}

// The permissions of the sockets keep sandboxes off the admin socket, and a proxy starts although a proxy that died
// left its sockets.
func TestSockets_PermissionsAndLeftovers(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // a free port
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	w := newWorld(t, func(c *egress.Config, _ *egress.Deps) {
		c.ListenMetrics = l.Addr().String()
		if err := os.MkdirAll(filepath.Dir(c.ListenSandboxes), 0o755); err != nil {
			t.Fatal(err)
		}
		stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: c.ListenSandboxes, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		stale.SetUnlinkOnClose(false)
		stale.Close()
	})
	for path, want := range map[string]os.FileMode{w.cfg.ListenSandboxes: 0o666, w.cfg.ListenAdmin: 0o600, filepath.Dir(w.cfg.ListenAdmin): 0o700, w.cfg.Data: 0o700} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	poll(t, "metrics on a port", func() bool {
		req, _ := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+w.cfg.ListenMetrics+"/metrics", nil)
		res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			return false
		}
		defer res.Body.Close()
		raw, err := io.ReadAll(res.Body)
		return err == nil && strings.Contains(string(raw), "spool_egress_sandboxes 0")
	})
}

// The journal of a released sandbox is removed by the first cleanup after SPOOL_EGRESS_KEEP_FOR.
func TestKeepFor_RemovesReleasedJournals(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *egress.Config, _ *egress.Deps) { c.KeepFor = 10 * time.Millisecond })
	b := w.box()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://evil.example/", nil)
	b.do(req)
	if _, err := w.client.Release(t.Context(), b.id); err != nil {
		t.Fatal(err)
	}
	poll(t, "it is forgotten", func() bool {
		_, err := w.client.Release(t.Context(), b.id) // a release runs the same cleanup as the timer
		return code(err) == api.CodeNotFound
	})
}
