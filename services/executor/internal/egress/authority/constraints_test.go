package authority_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress/authority"
)

func trust(t *testing.T, a *authority.Authority, entries ...string) string {
	t.Helper()
	text, err := a.TrustCertificate(entries)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// anchors are allowlists whose certificates are trusted in turn.
var anchors = map[string][]string{
	"names":     {"GET api.example.com", "GET,POST *.wild.example:8443", "all.example"},
	"addresses": {"GET 93.184.216.34", "all.example"},
	"both":      {"GET other.example", "GET [2606:4700::1111]"},
}

// permitted lists hosts and the only anchor that permits each.
var permitted = []struct{ host, anchor string }{
	{"api.example.com", "names"},
	{"a.wild.example", "names"},
	{"93.184.216.34", "addresses"},
	{"other.example", "both"},
	{"[2606:4700::1111]", "both"},
	{"api.example.com.evil.example", ""},
	{"notapi.example.com", ""},
	{"evil.example", ""},
	{"all.example", ""}, // no entry for this host has methods
	{"com", ""},
	{"93.184.216.35", ""},
	{"[2606:4700::1112]", ""},
}

func TestTrust_PermitsHostsWithMethodsOnly(t *testing.T) {
	t.Parallel()
	a := open(t, t.TempDir(), nil, true)
	for _, c := range permitted {
		for name, entries := range anchors {
			if _, err := verify(t, a, trust(t, a, entries...), c.host, time.Now()); (err == nil) != (c.anchor == name) {
				t.Errorf("%s, trusted by %s: %v", c.host, name, err)
			}
		}
	}
}

func TestTrust_CertificateIsOfTheHostsAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a := open(t, dir, nil, true)
	one := trust(t, a, "GET api.example.com", "GET *.wild.example", "GET 93.184.216.34")
	if again := trust(t, open(t, dir, nil, false), "HEAD,POST 93.184.216.34:8443", "PUT *.wild.example", "all.example", "GET api.example.com:443", "POST api.example.com"); again != one {
		t.Error("other methods, ports, order and a restart change the certificate")
	}
	for _, none := range [][]string{nil, {"all.example", "*.all.example:443", "provider:web_search"}} {
		if text := trust(t, a, none...); text != "" {
			t.Errorf("%q: %s", none, text)
		}
	}
	if _, err := a.TrustCertificate([]string{"GET ok..example"}); err == nil || !strings.Contains(err.Error(), "ok..example") {
		t.Errorf("an entry that does not parse: %v", err)
	}
	block, rest := pem.Decode([]byte(one))
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil || block.Type != "CERTIFICATE" || len(rest) > 0 {
		t.Fatalf("%s, %d more bytes, %v", block.Type, len(rest), err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, authority.FileName))
	if err != nil {
		t.Fatal(err)
	}
	_, raw = pem.Decode(raw)
	own, _ := pem.Decode(raw)
	unconstrained, err := x509.ParseCertificate(own.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if !cert.PermittedDNSDomainsCritical || !cert.NotAfter.Equal(unconstrained.NotAfter) || cert.SerialNumber.Cmp(unconstrained.SerialNumber) == 0 || cert.Subject.String() != unconstrained.Subject.String() {
		t.Errorf("%+v", cert)
	}
	other, _ := pem.Decode([]byte(trust(t, a, "GET api.example.com")))
	if c, err := x509.ParseCertificate(other.Bytes); err != nil || c.SerialNumber.Cmp(cert.SerialNumber) == 0 {
		t.Errorf("certificates of two allowlists have one serial number (%v)", err)
	}
}

// A certificate that was issued for an earlier allowlist verifies certificates that the authority signs later, and so
// does the unconstrained certificate of earlier releases.
func TestTrust_EarlierCertificatesStayGood(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a := open(t, dir, nil, true)
	wild := trust(t, a, "GET *.example.com")
	trust(t, a, "GET *.example.com", "GET api.example.com", "GET new.example")
	later := open(t, dir, nil, false)
	for host, good := range map[string]bool{"api.example.com": true, "new.example": false} {
		if _, err := verify(t, later, wild, host, time.Now()); (err == nil) != good {
			t.Errorf("%s: %v", host, err)
		}
	}
	released, err := os.ReadFile(filepath.Join(dir, authority.FileName))
	if err != nil {
		t.Fatal(err)
	}
	_, released = pem.Decode(released)
	if _, err := verify(t, later, string(released), "new.example", time.Now()); err != nil {
		t.Errorf("a process that was started by an earlier release: %v", err)
	}
}

func TestTrust_TakesAsManyEntriesAsAnAllowlist(t *testing.T) {
	t.Parallel()
	a := open(t, t.TempDir(), nil, true)
	var entries []string
	name := func(i int) string { return fmt.Sprintf("h%03d.%sexample", i, strings.Repeat("abcdefghi.", 24)[:238]) }
	for i := range 256 {
		entries = append(entries, "GET "+name(i))
	}
	text := trust(t, a, entries...)
	if len(text) > 1<<17 {
		t.Errorf("%d bytes", len(text))
	}
	if _, err := verify(t, a, text, name(255), time.Now()); err != nil {
		t.Error(err)
	}
	if _, err := verify(t, a, text, name(256), time.Now()); err == nil {
		t.Error("a host without an entry is trusted")
	}
}

// serve answers with 404 under the certificate of a host.
func serve(t *testing.T, a *authority.Authority, name string) (port string) {
	t.Helper()
	cert, err := a.Certificate(host(t, name))
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(http.NotFoundHandler())
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{*cert}, MinVersion: tls.VersionTLS12}
	srv.Config.ErrorLog = log.New(io.Discard, "", 0) // drops the errors about clients that refuse the certificate
	srv.StartTLS()
	t.Cleanup(srv.Close)
	_, port, err = net.SplitHostPort(srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// clients are commands that connect to $PORT of this machine, expect the certificate of
// $NAME and trust $FILE. Their output contains "accepted" or "not found" only then.
var clients = map[string][]string{
	"openssl": {"sh", "-c", `case $NAME in *[a-z]*) set -- -verify_hostname "$NAME" -servername "$NAME";; *) set -- -verify_ip "$NAME";; esac
openssl s_client -connect 127.0.0.1:$PORT "$@" -CAfile "$FILE" -verify_return_error </dev/null && echo accepted`},
	"curl": {"sh", "-c", `curl -sS -o /dev/null --noproxy '*' --cacert "$FILE" --connect-to ::127.0.0.1:$PORT "https://$NAME/" && echo accepted`},
	"python3": {"python3", "-c", `
import os, socket, ssl
context = ssl.create_default_context(cafile=os.environ["FILE"])
context.verify_flags |= ssl.VERIFY_X509_STRICT
context.wrap_socket(socket.create_connection(("127.0.0.1", os.environ["PORT"])), server_hostname=os.environ["NAME"]).close()
print("accepted")`},
	"node": {"node", "-e", `
const tls = require("tls"), {NAME, PORT, FILE} = process.env;
const s = tls.connect({host: "127.0.0.1", port: PORT, ca: require("fs").readFileSync(FILE), checkServerIdentity: (_, c) => tls.checkServerIdentity(NAME, c)}, () => {
  console.log("accepted");
  s.end();
}).on("error", e => console.log(e.message));`},
	"git": {"sh", "-c", `GIT_SSL_CAINFO="$FILE" git -c http.proxy= -c "http.curloptResolve=$NAME:$PORT:127.0.0.1" ls-remote "https://$NAME:$PORT/x"`}, // of Debian: GnuTLS
}

// Programs enforce the constraints of a certificate that they trust. OpenSSL and GnuTLS do so for trust anchors too,
// which RFC 5280 leaves open.
func TestTrust_ProgramsObeyConstraints(t *testing.T) {
	t.Parallel()
	a := open(t, t.TempDir(), nil, true)
	dir := t.TempDir()
	for name, entries := range anchors {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(trust(t, a, entries...)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for program, command := range clients {
		if _, err := exec.LookPath(program); err != nil {
			t.Logf("%s is not on this machine", program)
			continue
		}
		for _, c := range permitted[:3] {
			port := serve(t, a, c.host)
			for anchor := range anchors {
				if program == "git" && c.anchor == "addresses" {
					continue // the program cannot be made to connect to another address
				}
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
				cmd := exec.CommandContext(ctx, command[0], command[1:]...)
				cmd.Env = append(slices.Clone(os.Environ()), "NAME="+c.host, "PORT="+port, "FILE="+filepath.Join(dir, anchor), "LC_ALL=C", "GIT_TERMINAL_PROMPT=0")
				out, err := cmd.CombinedOutput()
				cancel()
				accepted := strings.Contains(string(out), "accepted") || strings.Contains(string(out), "not found")
				if accepted != (c.anchor == anchor) {
					t.Errorf("%s, %s, trusting %s: accepted %v, %v\n%s", program, c.host, anchor, accepted, err, out)
				}
			}
		}
	}
}
