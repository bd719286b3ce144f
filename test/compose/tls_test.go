package compose

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
)

// TestTLS tests that NATS and Postgres accept only TLS from other containers, that an expired certificate stops no
// service permanently and loses nothing, and that the gateway is published beyond loopback only with a certificate.
func TestTLS(t *testing.T) { //nolint:paralleltest // the test uses the whole machine
	p := newProject(t)
	up := append(p.compose("up", "--detach", "--no-build", "--wait"), "session", "gateway")
	p.run(5*time.Minute, up...)
	at := server{url: p.url(1)}
	at.key = p.key(at.url)
	p.attackNetwork()
	if owner := strings.TrimSpace(p.run(time.Minute, p.compose("exec", "--no-TTY", "postgres", "stat", "--format", "%U %a", "/etc/postgres/certificate/key.pem")...)); owner != "postgres 600" {
		t.Errorf("Postgres' private key has owner and mode %s", owner)
	}
	p.outliveExpiry(at)
	p.serveTLS(at.key, up)
}

// runInside runs a bash script in another container of the network core.
func (p *project) runInside(script string, args ...string) (string, error) {
	return p.try(time.Minute, append(p.compose("run", "--rm", "--no-TTY", "--no-deps", "--entrypoint", "bash", "postgres", "-c", script, "bash"), args...)...)
}

// attackNetwork connects to NATS and Postgres from another container in ways that no service does.
func (p *project) attackNetwork() {
	p.t.Helper()
	setting := func(name string) string {
		p.t.Helper()
		text, err := os.ReadFile(filepath.Join(p.dir, "deploy", ".env"))
		if err != nil {
			p.t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+"="); ok {
				return value
			}
		}
		p.t.Fatalf("deploy/.env has no %s", name)
		return ""
	}
	// The correct password, without TLS.
	out, err := p.runInside(`exec 3<>"/dev/tcp/nats/4222"; printf 'CONNECT {"user":"admin","pass":"%s"}\r\nPING\r\n' "$1" >&3; cat <&3`, setting("SPOOL_NATS_PASSWORD_ADMIN"))
	if strings.Contains(out, "PONG") || !strings.Contains(out, `"tls_required":true`) {
		p.t.Errorf("NATS without TLS: %s, %v", out, err)
	}
	if out, err := p.runInside(`exec 3<>"/dev/tcp/nats/8222"`); err == nil || !strings.Contains(err.Error(), "refused") {
		p.t.Errorf("NATS' monitoring is open: %s, %v", out, err)
	}
	if out, err := p.try(time.Minute, p.compose("exec", "--no-TTY", "nats", "wget", "-q", "-O", "-", "http://127.0.0.1:8222/healthz")...); err != nil || !strings.Contains(out, "ok") {
		p.t.Errorf("NATS' health within its container: %s, %v", out, err)
	}

	dir := p.t.TempDir()
	other, err := certificate.OpenAuthority(dir, certificate.Validity{For: time.Hour}, time.Now())
	if err != nil {
		p.t.Fatal(err)
	}
	if err := errors.Join(other.WriteTrustFile(filepath.Join(dir, "ca.pem")), os.Chmod(dir, 0o755)); err != nil { //nolint:gosec // users in containers read it
		p.t.Fatal(err)
	}
	url := "postgres://spool:" + setting("SPOOL_POSTGRES_PASSWORD") + "@postgres:5432/spool?"
	for query, want := range map[string]string{
		"sslmode=verify-full&sslrootcert=/var/lib/spool/certificates/public/ca.pem": "",
		"sslmode=disable": "no encryption", "sslmode=verify-full&sslrootcert=/other/ca.pem": "certificate verify failed",
	} {
		_, err := p.try(time.Minute, append(p.compose("run", "--rm", "--no-TTY", "--no-deps", "--volume", dir+":/other:ro", "--entrypoint", "psql", "postgres"), url+query, "--command", "SELECT 1")...)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			p.t.Errorf("Postgres with %s: %v, want %q", query, err, want)
		}
	}
	provision := append(p.compose("run", "--rm", "--no-TTY", "--no-deps", "--volume", dir+":/other:ro", "provision"), "provision", "--wait", "1s")
	p.run(time.Minute, provision...)
	if _, err := p.try(time.Minute, append(provision, "--nats-ca", "/other/ca.pem")...); err == nil || !strings.Contains(err.Error(), "certificate signed by unknown authority") {
		p.t.Errorf("NATS of another authority: %v", err)
	}
}

// outliveExpiry gives NATS and Postgres certificates that expire, so that services must wait until the certificates
// are renewed.
func (p *project) outliveExpiry(at server) {
	p.t.Helper()
	var made struct{ SessionID string }
	if err := at.call(p.t.Context(), "POST", "/api/sessions", map[string]any{"architecture": "spool"}, http.StatusCreated, &made); err != nil {
		p.t.Fatal(err)
	}
	before, err := at.events(p.t.Context(), made.SessionID)
	if err != nil {
		p.t.Fatal(err)
	}
	var f struct {
		Services map[string]struct{ Command []string }
	}
	if err := json.Unmarshal([]byte(p.run(time.Minute, p.compose("config", "--format", "json")...)), &f); err != nil {
		p.t.Fatal(err)
	}
	p.run(time.Minute, append(append(p.compose("run", "--rm", "--no-TTY", "certificates"), f.Services["certificates"].Command...), "--valid-for", "1ms", "--renew-before", "90000h")...)
	p.run(3*time.Minute, p.compose("restart", "nats", "postgres")...)
	p.run(3*time.Minute, p.compose("restart", "session", "projector", "gateway")...)
	for _, service := range []string{"session", "gateway"} {
		p.await(service+" says why it waits", 2*time.Minute, func() error {
			logs := p.run(time.Minute, p.compose("logs", "--no-color", "--no-log-prefix", service)...)
			if !strings.Contains(logs, "certificate for nats is only valid from") {
				return fmt.Errorf("%.2000s", logs)
			}
			return nil
		})
	}
	at.url = p.url(1)
	p.await("the gateway reports what it lacks", 2*time.Minute, func() error {
		var ready struct{ Checks map[string]string }
		err := at.call(p.t.Context(), "GET", "/readyz", nil, http.StatusServiceUnavailable, &ready)
		if err == nil && (!strings.Contains(ready.Checks["nats"], "certificate") || !strings.Contains(ready.Checks["postgres"], "certificate")) {
			err = fmt.Errorf("ready: %v", ready.Checks)
		}
		return err
	})

	p.run(time.Minute, p.compose("run", "--rm", "--no-TTY", "certificates")...)
	p.healthy()
	p.await("the session is readable", 2*time.Minute, func() error {
		after, err := at.events(p.t.Context(), made.SessionID)
		if err == nil && len(after) < len(before) {
			err = fmt.Errorf("%d events of %d", len(after), len(before))
		}
		return err
	})
	p.await("commands are executed", 2*time.Minute, func() error {
		return at.call(p.t.Context(), "POST", "/api/sessions", map[string]any{"architecture": "spool"}, http.StatusCreated, nil)
	})
	p.run(2*time.Minute, p.compose("run", "--rm", "--no-TTY", "--no-deps", "provision", "verify")...)
}

// serveTLS publishes the gateway beyond loopback, as deploy/README.md describes.
func (p *project) serveTLS(key string, up []string) {
	p.t.Helper()
	envFile := filepath.Join(p.dir, "deploy", ".env")
	add := func(lines string) {
		p.t.Helper()
		written, err := os.ReadFile(envFile)
		if err == nil {
			err = os.WriteFile(envFile, append(written, lines...), 0o600)
		}
		if err != nil {
			p.t.Fatal(err)
		}
	}
	add("SPOOL_GATEWAY_ADDRESS=0.0.0.0\n")
	if _, err := p.try(5*time.Minute, up...); err == nil {
		p.t.Error("the gateway is published on every address without TLS")
	}
	if logs := p.run(time.Minute, p.compose("logs", "--no-color", "gateway")...); !strings.Contains(logs, "where TLS is needed") {
		p.t.Errorf("the gateway does not log the reason: %s", logs)
	}
	add("SPOOL_TLS_CERT=/var/lib/spool/certificates/gateway/certificate.pem\nSPOOL_TLS_KEY=/var/lib/spool/certificates/gateway/key.pem\nSPOOL_TLS_NAMES=spool.example\n")
	p.run(5*time.Minute, up...)
	ca := filepath.Join(p.t.TempDir(), "ca.pem")
	text := p.run(time.Minute, p.compose("exec", "--no-TTY", "postgres", "cat", "/var/lib/spool/certificates/public/ca.pem")...)
	if err := os.WriteFile(ca, []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
	pool, err := certificate.ReadCertPool(ca)
	if err != nil {
		p.t.Fatal(err)
	}
	addr := strings.TrimPrefix(p.url(1), "http://")
	addr = "127.0.0.1" + addr[strings.LastIndex(addr, ":"):]
	for _, name := range []string{"127.0.0.1", "localhost", "spool.example"} {
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: name, MinVersion: tls.VersionTLS12}}}
		req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "https://"+addr+"/api/sessions", nil)
		if err != nil {
			p.t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := client.Do(req)
		if err != nil {
			p.t.Errorf("as %s: %v", name, err)
			continue
		}
		if resp.StatusCode != http.StatusOK {
			p.t.Errorf("as %s: %s", name, resp.Status)
		}
		_ = resp.Body.Close()
		client.CloseIdleConnections()
	}
}
