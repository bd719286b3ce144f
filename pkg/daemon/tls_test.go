package daemon

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/certificate"
)

// issue writes an authority and a certificate for 127.0.0.1 into dir, replacing those of an earlier call, and returns
// the path of the authority's file.
func issue(t *testing.T, dir string, now time.Time, valid time.Duration) (caFile string) {
	t.Helper()
	caFile = filepath.Join(dir, "ca.pem")
	authority, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: valid, RenewBefore: 1 << 60}, now)
	if err == nil {
		err = authority.WriteTrustFile(caFile)
	}
	if err == nil {
		_, err = authority.Issue(dir, []string{"127.0.0.1"})
	}
	if err != nil {
		t.Fatal(err)
	}
	return caFile
}

// secureNATS runs a NATS server with the certificate in dir, and reloads it when the file changes. With an empty dir
// the server has no TLS.
func secureNATS(t *testing.T, dir string) *server.Server {
	t.Helper()
	options := &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true}
	if dir != "" {
		pair, err := certificate.OpenPair(filepath.Join(dir, certificate.CertificateFile), filepath.Join(dir, certificate.KeyFile), nil)
		if err != nil {
			t.Fatal(err)
		}
		options.TLS, options.TLSConfig, options.TLSTimeout = true, pair.TLSConfig(), 30
	}
	ns, err := server.NewServer(options)
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() { ns.Shutdown(); ns.WaitForShutdown() })
	if !ns.ReadyForConnections(time.Minute) {
		t.Fatal("NATS is not ready")
	}
	return ns
}

// syncBuffer is a log that a test can read while it is written.
type syncBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// await polls ok until it returns true, for at most two minutes. what describes the fact in the failure.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting until %s", what)
		}
	}
}

// runAt runs a service that connects to ns, and returns the exit code.
func runAt(ns *server.Server, stderr io.Writer, run func(context.Context, Env) error, args ...string) int {
	var c cli
	p := serviceProgram{name: "svc", doc: "A service.", cli: &c, settings: &c.Settings, run: run, open: openNoLog}
	return p.runMain(append([]string{"--database=x", "--nats-url=" + ns.ClientURL()}, args...), io.Discard, stderr)
}

// TestSettingNATSCA tests that a service with SPOOL_NATS_CA connects by TLS to a server whose certificate that
// authority signed, and to no other server.
func TestSettingNATSCA(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ca, other := issue(t, dir, time.Now(), time.Hour), issue(t, t.TempDir(), time.Now(), time.Hour)
	right := secureNATS(t, dir)
	if code := runAt(right, io.Discard, func(_ context.Context, env Env) error {
		await(t, "the service connects", env.NATS.IsConnected)
		if state, err := env.NATS.TLSConnectionState(); err != nil || state.Version < 0x0303 {
			t.Errorf("TLS is %x, %v", state.Version, err)
		}
		left := 0.
		families, err := env.Metrics.(prometheus.Gatherer).Gather()
		if err != nil {
			t.Error(err)
		}
		for _, f := range families {
			if f.GetName() == "spool_nats_certificate_expiry_seconds" {
				left = f.GetMetric()[0].GetGauge().GetValue()
			}
		}
		if left < 3000 || left > 3600 {
			t.Errorf("the certificate expires in %.0f s, want an hour", left)
		}
		return nil
	}, "--nats-ca="+ca); code != 0 {
		t.Errorf("the service ended with %d", code)
	}
	for want, refused := range map[string]struct {
		ns *server.Server
		ca string
	}{"signed by unknown authority": {right, other}, "secure connection not available": {secureNATS(t, ""), ca}} {
		var said syncBuffer
		if code := runAt(refused.ns, &said, func(_ context.Context, env Env) error {
			await(t, "the log says why", func() bool { return strings.Contains(said.String(), want) })
			if env.NATS.IsConnected() {
				t.Errorf("%s: the service connected", want)
			}
			if report, _ := env.Health.RunChecks(t.Context()); !strings.HasPrefix(report["nats"], "NATS is ") {
				t.Errorf("readiness is %v", report)
			}
			return nil
		}, "--nats-ca="+refused.ca); code != 0 {
			t.Errorf("the service ended with %d", code)
		}
	}
	var said bytes.Buffer
	missing := filepath.Join(dir, "missing.pem")
	if code := runAt(right, &said, nil, "--nats-ca="+missing); code != 1 || !strings.Contains(said.String(), "nats-ca: open "+missing) {
		t.Errorf("without the file it ended with %d: %s", code, said.String())
	}
}

// TestStart_WaitsForAnExpiredCertificateOfNATS tests that a service whose NATS server has an expired certificate
// starts, logs the reason once, and connects when the certificate is renewed.
func TestStart_WaitsForAnExpiredCertificateOfNATS(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ca := issue(t, dir, time.Now().Add(-48*time.Hour), time.Hour)
	ns := secureNATS(t, dir)
	var said syncBuffer
	code := runAt(ns, &said, func(_ context.Context, env Env) error {
		await(t, "the log says why", func() bool { return strings.Contains(said.String(), "renew it") })
		await(t, "readiness says why", func() bool {
			report, _ := env.Health.RunChecks(t.Context())
			return strings.Contains(report["nats"], "renew it")
		})
		issue(t, dir, time.Now(), time.Hour)
		await(t, "the service connects", env.NATS.IsConnected)
		return env.NATS.FlushTimeout(time.Minute)
	}, "--nats-ca="+ca)
	if code != 0 || !strings.Contains(said.String(), ca) || strings.Count(said.String(), "NATS cannot be reached") != 1 {
		t.Errorf("the service ended with %d: %s", code, said.String())
	}
}

func TestHealth_UsesTLS(t *testing.T) {
	t.Parallel()
	ready := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }))
	defer ready.Close()
	addr := strings.TrimPrefix(ready.URL, "https://")
	if err := requestHealth(t.Context(), addr, true); err != nil {
		t.Error(err)
	}
	if err := requestHealth(t.Context(), addr, false); err == nil {
		t.Error("a listener with TLS answered without it")
	}
}
