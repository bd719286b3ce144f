package egress_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/services/executor/internal/egress"
)

// A sandbox that is registered with a list of routes reaches these routes only, also after a restart of the proxy.
// Without a list it reaches all routes, and with an empty list none, not even those of models.
func TestRoutesOfASandbox(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte("here")) }))
	t.Cleanup(s.Close)
	w := newWorld(t, func(c *egress.Config, _ *egress.Deps) {
		c.AnthropicKey, c.AnthropicBaseURL = "key", s.URL
		c.Hosts = filepath.Join(t.TempDir(), "hosts.yaml")
		if err := os.WriteFile(c.Hosts, []byte("hosts:\n  - {name: npm, url: "+s.URL+"}\n  - {name: other, url: "+s.URL+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	})
	paths := []string{"/npm/x", "/other/x", "/anthropic/v1/models"}
	boxes := map[string]*box{}
	for name, routes := range map[string]*[]string{"npm": {"npm"}, "none": {}, "all": nil} {
		b := w.box()
		b.reg.Routes = routes
		if _, err := w.client.Register(t.Context(), b.id, b.reg); err != nil {
			t.Fatal(err)
		}
		boxes[name] = b
	}
	look := func(when string) {
		t.Helper()
		for name, want := range map[string]string{"npm": "200 403 403", "none": "403 403 403", "all": "200 200 200"} {
			var got []string
			for _, path := range paths {
				res, err := boxes[name].http.Get("http://" + "127.0.0.1:7070" + path)
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				got = append(got, res.Status[:3])
			}
			if strings.Join(got, " ") != want {
				t.Errorf("%s: %s gets %v, want %s", when, name, got, want)
			}
		}
	}
	look("at first")
	w.stop()
	w.start()
	look("after a restart")
}
