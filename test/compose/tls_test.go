package compose

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// certificate makes a key and a certificate for a host, signed by itself, as PEM.
func certificate(t *testing.T, host string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: host}, DNSNames: []string{host}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	encode := func(kind string, der []byte) string {
		var b bytes.Buffer
		if err := pem.Encode(&b, &pem.Block{Type: kind, Bytes: der}); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	return encode("CERTIFICATE", der), encode("PRIVATE KEY", pkcs8)
}

// verifyTLS has the gateway check the certificate of Postgres by its URL: it connects by TLS to the right server, and not to another one.
func (p *project) verifyTLS(key string) {
	p.t.Helper()
	cert, private := certificate(p.t, "postgres")
	other, _ := certificate(p.t, "postgres")
	for name, text := range map[string]string{"server.crt": cert, "server.key": private} {
		p.run(time.Minute, p.compose("exec", "--no-TTY", "--user", "postgres", "postgres", "sh", "-c", "umask 077; printf %s \"$1\" >\"$PGDATA/"+name+"\"", "sh", text)...)
	}
	psql := func(sql string) string {
		p.t.Helper()
		return strings.TrimSpace(p.run(time.Minute, p.compose("exec", "--no-TTY", "postgres", "psql", "--username=spool", "--tuples-only", "--no-align", "--command", sql)...))
	}
	psql("ALTER SYSTEM SET ssl = on")
	psql("SELECT pg_reload_conf()")
	p.await("Postgres has TLS", time.Minute, func() error {
		if ssl := psql("SHOW ssl"); ssl != "on" {
			return fmt.Errorf("ssl is %s", ssl)
		}
		return nil
	})
	// A file that is laid over deploy/compose.yaml.
	authority, over := filepath.Join(p.dir, "deploy", "postgres-ca.pem"), filepath.Join(p.dir, "deploy", "tls.yaml")
	text := `services: {gateway: {volumes: ["./postgres-ca.pem:/etc/spool/postgres-ca.pem:ro"], environment: {SPOOL_DATABASE_URL:
  "postgres://spool_gateway:${SPOOL_POSTGRES_PASSWORD_GATEWAY}@postgres:5432/spool?sslmode=verify-full&sslrootcert=/etc/spool/postgres-ca.pem"}}}`
	up := append(p.compose("-f", "deploy/tls.yaml", "up", "--detach", "--no-build", "--no-deps", "--force-recreate"), "gateway")
	for _, file := range []struct{ path, text string }{{over, text}, {authority, other}} {
		if err := os.WriteFile(file.path, []byte(file.text), 0o644); err != nil { //nolint:gosec // the gateway's user reads it
			p.t.Fatal(err)
		}
	}
	p.run(3*time.Minute, up...)
	p.await("the gateway refuses the certificate", 2*time.Minute, func() error {
		var ready struct{ Checks map[string]string }
		err := (server{p.url(1), key}).call(p.t.Context(), "GET", "/readyz", nil, http.StatusServiceUnavailable, &ready)
		if err == nil && !strings.Contains(ready.Checks["postgres"], "certificate") {
			err = fmt.Errorf("postgres: %s", ready.Checks["postgres"])
		}
		return err
	})
	if err := os.WriteFile(authority, []byte(cert), 0o644); err != nil { //nolint:gosec // the gateway's user reads it
		p.t.Fatal(err)
	}
	p.run(3*time.Minute, up...)
	p.await("the gateway reads by TLS", 2*time.Minute, func() error {
		return (server{p.url(1), key}).call(p.t.Context(), "GET", "/api/sessions", nil, http.StatusOK, nil)
	})
	if got := psql("SELECT count(*) > 0 AND bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'spool_gateway'"); got != "t" {
		p.t.Errorf("connections of gateways have TLS: %q", got)
	}
}
