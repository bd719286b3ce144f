package gateway_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// writeCertificate writes a certificate for 127.0.0.1 to a folder, replacing the one that is there, and returns the pool that
// clients must trust.
func writeCertificate(t *testing.T, dir string, now time.Time, valid time.Duration) *x509.CertPool {
	t.Helper()
	authority, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: valid, RenewBefore: 1 << 60}, now)
	must(t, err)
	must(t, authority.WriteTrustFile(filepath.Join(dir, "ca.pem")))
	_, err = authority.Issue(dir, []string{"127.0.0.1"})
	must(t, err)
	pool, err := certificate.ReadCertPool(filepath.Join(dir, "ca.pem"))
	must(t, err)
	return pool
}

// withTrustedPool sets the pool that clients of the gateway trust, and gives them new connections.
func (s *served) withTrustedPool(pool *x509.CertPool) *served {
	c := *s
	c.tls = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	c.http = &http.Client{Transport: &http.Transport{TLSClientConfig: c.tls.Clone(), ForceAttemptHTTP2: true}}
	s.t.Cleanup(c.http.CloseIdleConnections)
	return &c
}

func (s *served) serial() string {
	s.t.Helper()
	resp, err := s.http.Get(s.url + "/healthz")
	must(s.t, err)
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	must(s.t, err)
	if resp.ProtoMajor != 2 {
		s.t.Errorf("REST is served by %s", resp.Proto)
	}
	return resp.TLS.PeerCertificates[0].SerialNumber.String()
}

// TestTLS_EveryProtocolServesTheRenewedCertificate tests that REST, SSE, WebSocket and gRPC use the certificate of SPOOL_TLS_CERT
// and SPOOL_TLS_KEY, that streams survive a renewal, and that new connections get the new certificate.
func TestTLS_EveryProtocolServesTheRenewedCertificate(t *testing.T) {
	t.Parallel()
	w, dir := newWorld(t), t.TempDir()
	pool := writeCertificate(t, dir, time.Now(), time.Hour)
	plain := w.gateway(gateway.Config{TLSCert: filepath.Join(dir, certificate.CertificateFile), TLSKey: filepath.Join(dir, certificate.KeyFile)})
	g := plain.withTrustedPool(pool)
	before := g.serial()
	id := w.session("default")
	g.get("/api/sessions/"+id).want(t, 200)
	streams := map[string]stream{"WebSocket": g.ws(id, 1), "SSE": g.sse(id, 1), "gRPC": g.rpc(id, 1)}
	read := func(seq uint32) {
		t.Helper()
		w.emit("default", id, events.Event{Data: events.Log{}})
		for name, s := range streams {
			if e, err := s.next(); err != nil || e.Seq != seq {
				t.Errorf("%s: event %d, %v; want %d", name, e.Seq, err, seq)
			}
		}
	}
	read(2)
	writeCertificate(t, dir, time.Now(), 48*time.Hour)
	if renewed := plain.withTrustedPool(pool).serial(); renewed == before {
		t.Error("a new connection is served the former certificate")
	}
	read(3)
	for _, s := range streams {
		s.close()
	}
	if left := g.seconds(); left < 47*3600 || left > 48*3600 {
		t.Errorf("the certificate expires in %.0f s, want 48 h", left)
	}
	g.wantMetric(t, "spool_gateway_certificate_reload_failed 0")

	for name, c := range map[string]*served{"without TLS": {t: t, url: "http" + strings.TrimPrefix(plain.url, "https"), http: &http.Client{}}, "another authority": plain.withTrustedPool(writeCertificate(t, t.TempDir(), time.Now(), time.Hour))} {
		resp, err := c.http.Get(c.url + "/healthz")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusBadRequest { // net/http's answer to HTTP on a TLS port
				t.Errorf("%s: answered %s", name, resp.Status)
			}
		}
		c.grpc = plain.grpc
		_, err = spoolv1.NewSessionsClient(c.conn()).GetSession(t.Context(), &spoolv1.GetSessionRequest{SessionId: id})
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%s: gRPC: %v", name, err)
		}
		c.http.CloseIdleConnections()
	}
	for _, addr := range []string{strings.TrimPrefix(plain.url, "https://"), plain.grpc} {
		old := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11} //nolint:gosec // must be refused
		if c, err := tls.Dial("tcp", addr, old); err == nil {
			_ = c.Close()
			t.Errorf("%s speaks TLS 1.1", addr)
		}
	}
}

// seconds returns the remaining validity of the certificate according to /metrics.
func (s *served) seconds() float64 {
	s.t.Helper()
	for line := range strings.Lines(string(s.get("/metrics").body)) {
		if value, ok := strings.CutPrefix(line, "spool_gateway_certificate_expiry_seconds "); ok {
			seconds, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			must(s.t, err)
			return seconds
		}
	}
	s.t.Fatal("the metric of the certificate is missing")
	return 0
}

func TestTLS_ExpiredCertificateIsServedUntilItIsRenewed(t *testing.T) {
	t.Parallel()
	w, dir := newWorld(t), t.TempDir()
	pool := writeCertificate(t, dir, time.Now().Add(-48*time.Hour), time.Hour)
	plain := w.gateway(gateway.Config{TLSCert: filepath.Join(dir, certificate.CertificateFile), TLSKey: filepath.Join(dir, certificate.KeyFile)})
	g := plain.withTrustedPool(pool)
	_, err := g.http.Get(g.url + "/healthz") //nolint:bodyclose // there is none
	var invalid x509.CertificateInvalidError
	if !errors.As(err, &invalid) || invalid.Reason != x509.Expired {
		t.Errorf("error of a client: %v", err)
	}
	writeCertificate(t, dir, time.Now(), time.Hour)
	g.get("/healthz").want(t, 200)
}

// TestTLS_LimitsHoldWithTLS tests that connections and headers are limited with TLS as without it.
func TestTLS_LimitsHoldWithTLS(t *testing.T) {
	t.Parallel()
	w, dir := newWorld(t), t.TempDir()
	pool := writeCertificate(t, dir, time.Now(), time.Hour)
	plain := w.gateway(gateway.Config{TLSCert: filepath.Join(dir, certificate.CertificateFile), TLSKey: filepath.Join(dir, certificate.KeyFile), MaxConnections: 1})
	addr := strings.TrimPrefix(plain.url, "https://")
	first, err := tls.Dial("tcp", addr, &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12})
	must(t, err)
	if second, err := tls.Dial("tcp", addr, &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}); err == nil {
		_ = second.Close()
		t.Error("a second connection was taken")
	}
	_, err = fmt.Fprintf(first, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: %s\r\n\r\n", strings.Repeat("x", 40<<10))
	must(t, err)
	if a := answerOn(t, first); a.status != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("a header of 40 KiB: %s", a)
	}
	must(t, first.Close())
	g := plain.withTrustedPool(pool)
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		resp, err := g.http.Get(g.url + "/healthz")
		if err == nil {
			must(t, resp.Body.Close())
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the connection that is closed still counts: %v", err)
		}
	}
}
