package gateway_test

import (
	"encoding/json"
	"net"
	"net/http"
	"testing"

	"github.com/spoolhq/spool/pkg/daemon/porttest"
	"github.com/spoolhq/spool/services/gateway"
)

// TestServeWaiting_ReportsWhatIsMissing tests that a gateway without the layout of the log reports its dependencies, refuses other
// requests with 503, and releases its address.
func TestServeWaiting_ReportsWhatIsMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	addr := porttest.FreeAddrs(t, 1)[0]
	stop, err := gateway.ServeWaiting(t.Context(), gateway.Config{Listen: addr}, gateway.Deps{NATS: w.nc, Pool: w.pool})
	must(t, err)
	get := func(path string, want int) map[string]any {
		t.Helper()
		resp, err := http.Get("http://" + addr + path) //nolint:noctx // on loopback
		must(t, err)
		defer resp.Body.Close() //nolint:errcheck // read to its end
		var body map[string]any
		must(t, json.NewDecoder(resp.Body).Decode(&body))
		if resp.StatusCode != want {
			t.Errorf("%s: %d %v, want %d", path, resp.StatusCode, body, want)
		}
		return body
	}
	get("/healthz", http.StatusOK)
	checks, _ := get("/readyz", http.StatusServiceUnavailable)["checks"].(map[string]any)
	if checks["nats"] != "ok" || checks["postgres"] != "ok" || checks["streams"] == nil {
		t.Errorf("checks: %v", checks)
	}
	if code := get("/api/sessions", http.StatusServiceUnavailable)["code"]; code != "UNAVAILABLE" {
		t.Errorf("code %v", code)
	}
	stop()
	l, err := net.Listen("tcp", addr) //nolint:noctx // closed at once
	must(t, err)
	must(t, l.Close())
}
