package gateway_test

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/daemon/porttest"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/services/gateway"
)

// TestProcess_ReadsItsSettings tests that the real process reads its environment variables: it serves the database of
// SPOOL_DATABASE_URL on SPOOL_LISTEN and SPOOL_GRPC_LISTEN, and its metrics also on SPOOL_METRICS_LISTEN.
func TestProcess_ReadsItsSettings(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "gateway")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./cmd/gateway").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	srv := natstest.RunConfig(t, natsserver.Config{Relaxed: true, Port: natsserver.RandomPort})
	w := newWorldOn(t, natstest.Conn(t, srv))
	id := w.session("default")
	addrs := porttest.FreeAddrs(t, 3)
	http, rpcs, metrics := addrs[0], addrs[1], addrs[2]
	var log bytes.Buffer
	serve := exec.CommandContext(t.Context(), binary)
	serve.Stderr = &log
	serve.Env = append(os.Environ(), "SPOOL_DATABASE_URL="+w.url, "SPOOL_LISTEN="+http, "SPOOL_GRPC_LISTEN="+rpcs, "SPOOL_METRICS_LISTEN="+metrics, "SPOOL_NATS_URL="+srv.ClientURL())
	must(t, serve.Start())
	defer func() {
		must(t, serve.Process.Signal(os.Interrupt))
		if err := serve.Wait(); err != nil {
			t.Errorf("the process ended with %v\n%s", err, log.String())
		}
	}()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if c, err := net.Dial("tcp", rpcs); err == nil {
			_ = c.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("gRPC does not listen")
		}
	}
	g := &served{t: t, url: "http://" + http}
	g.do("GET", "/api/sessions/"+id, "").want(t, 200)
	g.wantMetric(t, `spool_gateway_http_requests_total{method="GET",route="/api/sessions/{session_id}",status="200"} 1`)
	side := &served{t: t, url: "http://" + metrics}
	side.wantMetric(t, `spool_gateway_http_requests_total{method="GET",route="/api/sessions/{session_id}",status="200"} 1`)

	wrong := exec.CommandContext(t.Context(), binary)
	wrong.Env = append(os.Environ(), "SPOOL_DATABASE_URL=postgres://%zz", "SPOOL_NATS_URL="+srv.ClientURL())
	if out, err := wrong.CombinedOutput(); err == nil || !strings.HasPrefix(string(out), "gateway: ") {
		t.Errorf("with an invalid database URL: %v, %s", err, out)
	}
}

// TestMetrics_CountStreamsByKind tests that open streams are counted by kind, and that all metrics can be described
// without a gateway.
func TestMetrics_CountStreamsByKind(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.session("default")
	g := w.gateway(gateway.Config{})
	g.do("GET", "/api/sessions/nothing", "")
	g.ws(id, 1)
	g.sse(id, 1)
	g.wantMetric(t, `spool_gateway_streams{kind="ws"} 1`)
	g.wantMetric(t, `spool_gateway_streams{kind="sse"} 1`)
	registry := prometheus.NewRegistry()
	gateway.DescribeMetrics(registry)
	if list, err := registry.Gather(); err != nil || len(list) == 0 {
		t.Errorf("%d metrics, %v", len(list), err)
	}
}

// TestSettingStoreReserve tests that requests that need room are refused before anything is stored, if less room than the
// reserve is left.
func TestSettingStoreReserve(t *testing.T) {
	t.Parallel()
	w := newWorldOn(t, natstest.Conn(t, natstest.RunWithMinStore(t)))
	id := w.session("default")
	natstest.FillStore(t, w.nc, 21)
	g := w.gatewayOn(gateway.Config{ReserveSettings: storage.ReserveSettings{StoreReserve: 80}}, w.nc, w.openPool(w.url))
	g.do("POST", "/api/sessions", `{}`, header("Idempotency-Key", "k")).wantProblem(t, 507, "STORAGE_FULL", "")
	g.do("PUT", "/api/sessions/"+id+"/files/a", "b").wantProblem(t, 507, "STORAGE_FULL", "")
	g.wantMetric(t, `spool_store_reserve_bytes 5.3687088e+08`)
	if _, err := gateway.New(gateway.Config{ReserveSettings: storage.ReserveSettings{StoreReserve: -1}}, gateway.Deps{}); err == nil || !strings.Contains(err.Error(), "store-reserve") {
		t.Errorf("a reserve of -1 %%: %v", err)
	}
}
