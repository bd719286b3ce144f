package web

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/e2e/harness"
)

// openPage returns the URL that `spool open` prints.
func openPage(t *testing.T, u *harness.UpInstallation, args ...string) string {
	t.Helper()
	code, printed := u.RunCLI(nil, append([]string{"open"}, args...)...)
	page := strings.TrimSpace(printed)
	if code != 0 || strings.Count(page, "#code=") != 1 {
		t.Fatalf("spool open exited with %d and printed %q", code, printed)
	}
	return page
}

func TestPage_AtTheRoot(t *testing.T) {
	t.Parallel()
	needBrowser(t)
	u := harness.NewUpInstallation(t)
	u.RunWhileUp(nil, func() {
		runScenario(t, "signin", openPage(t, u))
		runScenario(t, "load", openPage(t, u))
		runScenario(t, "attack", openPage(t, u))
	})
}

// TestPage_SignInMessageAndApproval tests what a person does in the page, with an agent that asks before each call.
func TestPage_SignInMessageAndApproval(t *testing.T) {
	t.Parallel()
	needBrowser(t)
	u := harness.NewUpInstallation(t)
	u.RunWhileUp(nil, func() {
		definition := filepath.Join(t.TempDir(), "asks.yaml")
		if err := os.WriteFile(definition, []byte("kind: agent\nslug: asks\nspec:\n  architecture: spool\n  instructions: You write programs.\n  permissions: {preset: ask}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if code, printed := u.RunCLI(nil, "agents", "apply", "-f", definition); code != 0 {
			t.Fatalf("spool agents apply exited with %d and printed %q", code, printed)
		}
		_, key := u.RunCLI(nil, "keys", "local")
		runScenario(t, "inspect", openPage(t, u), "SPOOL_KEY="+strings.TrimSpace(key))
	})
}

// TestPage_BelowAPrefix tests the page of a gateway with a path prefix: behind a proxy that keeps the prefix, behind one
// that removes it, and without a proxy.
func TestPage_BelowAPrefix(t *testing.T) {
	t.Parallel()
	needBrowser(t)
	const prefix = "/tools/spool"
	u := harness.NewUpInstallation(t)
	u.RunWhileUp([]string{"SPOOL_PATH_PREFIX=" + prefix}, func() {
		gateway := u.Connection().URL
		target, err := url.Parse(gateway)
		if err != nil {
			t.Fatal(err)
		}
		_, key := u.RunCLI(nil, "keys", "local")
		proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = r.In.Host
		}, FlushInterval: -1}
		for _, c := range []struct {
			name  string
			proxy http.Handler
		}{{"a proxy that keeps it", proxy}, {"a proxy that removes it", http.StripPrefix(prefix, proxy)}} {
			t.Run(c.name, func(t *testing.T) {
				front := httptest.NewServer(c.proxy)
				defer front.Close()
				page := openPage(t, u, "--url", front.URL+prefix, "--key", strings.TrimSpace(key))
				if !strings.HasPrefix(page, front.URL+prefix+"/#") {
					t.Fatalf("spool open printed %s", page)
				}
				runScenario(t, "load", page)
			})
		}
		page := openPage(t, u)
		if !strings.HasPrefix(page, gateway+prefix+"/#") {
			t.Fatalf("spool open printed %s", page)
		}
		runScenario(t, "signin", page)
	})
}
