package egress_test

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/egress/authority"
)

func loseAuthority(t *testing.T, data string) {
	t.Helper()
	if err := os.Remove(filepath.Join(data, authority.FileName)); err != nil {
		t.Fatal(err)
	}
}

// A client in the sandbox that does not trust the proxy's certificate causes a line in the journal.
func TestUntrusted_IsJournaled(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.box("GET ok.example")
	b.http.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: s.deps.Roots, MinVersion: tls.VersionTLS12}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://ok.example/", nil)
	if res, err := b.http.Do(req); err == nil {
		res.Body.Close()
		t.Fatalf("it is trusted: %s", res.Status)
	}
	if d := b.one(); d.Code != "UNTRUSTED" || d.Host != "ok.example" || d.Port != 443 || !strings.Contains(d.Message, "SSL_CERT_FILE") {
		t.Errorf("%+v", d)
	}
}

// A proxy that lost its authority creates another one, and returns it to the next registration.
func TestRegister_ReturnsTheNewAuthority(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.trusting("GET ok.example")
	before := b.authority()
	restart := func(lose bool) {
		s.stop()
		if lose {
			loseAuthority(t, s.cfg.Data)
		}
		s.start()
		t.Cleanup(s.stop)
		b.http.CloseIdleConnections()
	}
	restart(false)
	if b.authority() != before {
		t.Fatal("a restart has another authority")
	}
	if status, _, _ := b.request("GET", "https://ok.example/", ""); status != 200 {
		t.Errorf("after a restart: %d", status)
	}
	restart(true)
	b.reg.Token = "" // the proxy still has the sandbox's token
	state, err := b.client.Register(t.Context(), b.id, b.reg)
	if err != nil || state.Authority == before || state.Authority == "" {
		t.Fatalf("%q, %v", state.Authority, err)
	}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://ok.example/", nil)
	if res, err := b.http.Do(req); err == nil {
		res.Body.Close()
		t.Errorf("the authority before is still of use: %s", res.Status)
	}
	if d := b.one(); d.Code != "UNTRUSTED" {
		t.Errorf("%+v", d)
	}
	b.http.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: pool(t, state.Authority), MinVersion: tls.VersionTLS12}
	if status, _, _ := b.request("GET", "https://ok.example/", ""); status != 200 {
		t.Errorf("with the new authority: %d", status)
	}
}

// handshake opens a tunnel and performs a TLS handshake in it, with a client that trusts roots.
func (b *box) handshake(target string, roots *x509.CertPool) error {
	b.t.Helper()
	c, _ := b.tunnel(target)
	defer c.Close()
	name, _, err := net.SplitHostPort(target)
	if err != nil {
		b.t.Fatal(err)
	}
	return tls.Client(c, &tls.Config{RootCAs: roots, ServerName: name, MinVersion: tls.VersionTLS12}).HandshakeContext(b.t.Context())
}

// A sandbox trusts the proxy for the hosts with methods in its allowlist and for no others, across changes of the allowlist and restarts.
func TestTrust_IsLimitedToTheAllowlist(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.box("GET *.ok.example")
	early := pool(t, b.authority())
	b.reg.Token, b.reg.Allow = "", []string{"GET *.ok.example", "GET sub.ok.example", "GET 93.184.216.34", "GET ok.example", "mixed.example"}
	state, err := b.client.Register(t.Context(), b.id, b.reg)
	if err != nil {
		t.Fatal(err)
	}
	late := pool(t, state.Authority)
	for _, when := range []string{"at once", "after a restart"} {
		for _, c := range []struct {
			target      string
			early, late bool
		}{{"sub.ok.example:443", true, true}, {"new.ok.example:443", true, true}, {"93.184.216.34:443", false, true}} {
			for roots, good := range map[*x509.CertPool]bool{early: c.early, late: c.late} {
				if err := b.handshake(c.target, roots); (err == nil) != good {
					t.Errorf("%s, %s, the later certificate %v: %v", when, c.target, roots == late, err)
				}
			}
		}
		s.stop()
		s.start()
		t.Cleanup(s.stop)
	}
	if b.authority() != state.Authority {
		t.Error("after a restart another certificate is trusted")
	}
	// The proxy's key cannot be used to sign for another host.
	ca, _, err := authority.Open(s.cfg.Data, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, good := range map[string]bool{"ok.example": true, "mixed.example": false} {
		srv := httptest.NewUnstartedServer(http.NotFoundHandler())
		srv.TLS = certified(t, ca, name)
		srv.StartTLS()
		c, err := tls.Dial("tcp", srv.Listener.Addr().String(), &tls.Config{RootCAs: late, ServerName: name, MinVersion: tls.VersionTLS12})
		if (err == nil) != good {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			c.Close()
		}
		srv.Close()
	}
	b.reg.Allow = []string{"ok.example"}
	if state, err := b.client.Register(t.Context(), b.id, b.reg); err != nil || state.Authority != "" {
		t.Errorf("an allowlist without methods: %q, %v", state.Authority, err)
	}
}

// A proxy that lost its data refuses a registration without a token as SANDBOX_NOT_FOUND, so that the executor replaces the sandbox.
func TestRegister_UnknownSandboxAfterDataLoss(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.trusting("GET ok.example")
	s.stop()
	if err := os.RemoveAll(s.cfg.Data); err != nil {
		t.Fatal(err)
	}
	s.start()
	t.Cleanup(s.stop)
	again := b.reg
	again.Token = ""
	if _, err := b.client.Register(t.Context(), b.id, again); code(err) != api.CodeNotFound {
		t.Errorf("without a token: %v", err)
	}
	if _, err := b.client.Register(t.Context(), b.id, b.reg); err != nil {
		t.Errorf("with one: %v", err)
	}
}
