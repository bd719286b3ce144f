package egress_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/daemon/porttest"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress"
)

// issuer is an authority, and the certificate that it issued for a TLS listener.
type issuer struct {
	t   *testing.T
	dir string
}

// newIssuer issues a certificate for 127.0.0.1.
func newIssuer(t *testing.T) *issuer {
	t.Helper()
	i := &issuer{t, t.TempDir()}
	i.issue(time.Now(), time.Hour, "127.0.0.1")
	return i
}

// issue replaces the certificate with one that is issued at the time now.
func (i *issuer) issue(now time.Time, valid time.Duration, names ...string) {
	i.t.Helper()
	a, err := certificate.OpenAuthority(filepath.Join(i.dir, "authority"), certificate.Validity{For: valid, RenewBefore: 1 << 60}, now)
	if err == nil {
		err = a.WriteTrustFile(i.authority())
	}
	if err == nil {
		_, err = a.Issue(i.dir, names)
	}
	if err != nil {
		i.t.Fatal(err)
	}
}

func (i *issuer) authority() string { return filepath.Join(i.dir, "ca.pem") }

// pem is the value of SPOOL_RUNNER_EGRESS_AUTHORITY.
func (i *issuer) pem() string {
	i.t.Helper()
	text, err := os.ReadFile(i.authority())
	if err != nil {
		i.t.Fatal(err)
	}
	return string(text)
}

// listen sets a TLS listener with the certificate.
func (i *issuer) listen(c *egress.Config) {
	c.ListenTLS = porttest.FreeAddrs(i.t, 1)[0]
	c.TLSCert, c.TLSKey = filepath.Join(i.dir, certificate.CertificateFile), filepath.Join(i.dir, certificate.KeyFile)
}

func (i *issuer) client() *tls.Config {
	pool, err := certificate.ReadCertPool(i.authority())
	if err != nil {
		i.t.Error(err)
	}
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}

// TestOverTLS_SandboxesAreTreatedAsOnTheSocket runs tests of the socket with sandboxes that connect over TLS.
func TestOverTLS_SandboxesAreTreatedAsOnTheSocket(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"keys of models": TestModelRoutes, "streams": TestStream_IsNotBuffered, "denials": TestDenied_WhatTheAllowlistDoesNotName, "the allowlist": TestAllowed, "tunnels": TestTunnel,
		"methods": TestMethods, "changes of the allowlist": TestTunnels_AreClosedByANewAllowlist, "upgrades": TestUpgrade_IsForwarded, "budgets": TestBudget_RefusesTheCallAfterTheLimit, "MCP servers": TestServers_KeepTheirKeysSecret,
		"hosts only": TestHostsOnly_ReachesNoModelsAndServers, "routes": TestRoutesOfASandbox, "a restart": TestRestart_KeepsRegistrationsAndJournals, "a release": TestRelease_VoidsTheTokenAndKeepsTheJournal, "a drain": TestDrain_OpenRequestsEnd, "a bounded drain": TestDrain_IsBoundedByTimeAndSecondSignal,
		"connections of a sandbox": TestConnections_AreLimitedPerSandbox, "idle connections": TestIdle_ConnectionsAreClosed, "a stalled sandbox": TestStalledSandbox_ConnectionIsClosed, "canceled requests": TestCanceledRequest_CancelsTheModelCall,
		"large bodies": TestLargeBodies, "smuggled requests": TestSmuggling_ReachesOnlyAllowedMethods, "what models may not do": TestProviderSide_IsDeniedUnderAnEmptyAllowlist, "credentials": TestNoCredentialIsEverShown,
	} {
		t.Run(name, test)
	}
}

// overTLS returns a world whose sandboxes connect over TLS.
func overTLS(t *testing.T, change func(*egress.Config, *egress.Deps)) *world {
	t.Helper()
	i := newIssuer(t)
	w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		i.listen(c)
		if change != nil {
			change(c, d)
		}
	})
	w.issuer = i
	return w
}

// refused returns how many connections over TLS were refused, by reason.
func (w *world) refused(reason string) int {
	w.t.Helper()
	m := regexp.MustCompile(`spool_egress_tls_refused_total\{reason="` + reason + `"\} (\d+)`).FindStringSubmatch(w.metrics())
	if m == nil {
		return 0
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// plain opens a connection to the TLS listener, from an address of loopback, without a handshake.
func (w *world) plain(from string) net.Conn {
	w.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(w.t.Context(), "tcp", w.cfg.ListenTLS)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		w.t.Fatal(err)
	}
	return c
}

// secure opens a connection to the TLS listener.
func (w *world) secure(cfg *tls.Config) *tls.Conn {
	w.t.Helper()
	c, err := tls.Dial("tcp", w.cfg.ListenTLS, cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		w.t.Fatal(err)
	}
	return c
}

// onlyOwnLines fails the test unless the journal of a sandbox has at least n lines, all of which are about its own
// requests, which name no route.
func (b *box) onlyOwnLines(n int) {
	b.t.Helper()
	b.lines(0, n)
	s, err := b.client.State(b.t.Context(), b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, l := range b.lines(0, int(s.Last)) { //nolint:gosec // few
		if d := b.denied(l); !strings.HasPrefix(d.Message, "there is no route") {
			b.t.Errorf("the journal has %+v", d)
		}
	}
}

// closedUnanswered fails the test unless the proxy closes a connection without sending a byte.
func closedUnanswered(t *testing.T, what string, c net.Conn) {
	t.Helper()
	got, err := io.ReadAll(c)
	if len(got) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: read %q, %v", what, got, err)
	}
}

func TestAttack_EgressTLS_UnknownTokensAreCutWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	w := overTLS(t, nil)
	b := w.box()
	released := w.box()
	if _, err := w.client.Release(t.Context(), released.id); err != nil {
		t.Fatal(err)
	}
	request := "\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"
	for what, line := range map[string]string{
		"a guess": "SPOOL/1 " + strings.Repeat("0", 26), "an empty token": "SPOOL/1 ", "a token with one character more": "SPOOL/1 " + b.token + "x", "a part of a token": "SPOOL/1 " + b.token[:20],
		"a released sandbox's token": "SPOOL/1 " + released.token, "the token's hash": "SPOOL/1 " + strings.Repeat("ab", 32), "a NUL behind the token": "SPOOL/1 " + b.token + "\x00",
	} {
		before := w.refused("token")
		c := w.secure(w.issuer.client())
		_, _ = io.WriteString(c, line+request)
		closedUnanswered(t, what, c)
		if got := w.refused("token"); got != before+1 {
			t.Errorf("%s: counted %d times", what, got-before)
		}
	}
	for what, line := range map[string]string{
		"no preamble": "GET / HTTP/1.1\r\nHost: x\r\n\r", "another version": "SPOOL/2 " + b.token, "a huge first line": "SPOOL/1 " + strings.Repeat("x", 1<<20), "an HTTP/2 preface": "PRI * HTTP/2.0\r",
	} {
		before := w.refused("preamble")
		c := w.secure(w.issuer.client())
		_, _ = io.WriteString(c, line+request) // the proxy may have closed the connection before the end
		closedUnanswered(t, what, c)
		if got := w.refused("preamble"); got != before+1 {
			t.Errorf("%s: counted %d times", what, got-before)
		}
	}
	if status, _, _ := b.post("/", ""); status != http.StatusNotFound {
		t.Errorf("the registered sandbox: %d", status)
	}
	b.onlyOwnLines(1)
	if strings.Contains(w.log.String(), b.token) || strings.Contains(w.log.String(), released.token) {
		t.Error("the log shows a token")
	}
	list, err := os.ReadDir(filepath.Join(w.cfg.Data, "sandboxes"))
	if err != nil || len(list) != 1 {
		t.Errorf("what was refused left %v, %v", list, err)
	}
}

func TestAttack_EgressTLS_HandshakesThatAreRefused(t *testing.T) {
	t.Parallel()
	w := overTLS(t, nil)
	b := w.box()
	old := w.issuer.client()
	old.MaxVersion = tls.VersionTLS12
	before := w.refused("handshake")
	if c, err := tls.Dial("tcp", w.cfg.ListenTLS, old); err == nil {
		t.Error("TLS 1.2, which has renegotiation, is taken")
		_ = c.Close()
	}
	for what, text := range map[string]string{
		"plain HTTP": "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "the preamble in the clear": "SPOOL/1 " + b.token + "\n", "nonsense": strings.Repeat("\xff", 4096),
		"a record that is too long": "\x16\x03\x01\xff\xff" + strings.Repeat("\x01", 70000), "a hello that is too long": "\x16\x03\x01\x40\x00\x01\xff\xff\xff" + strings.Repeat("\x00", 16<<10),
	} {
		c := w.plain("127.0.0.1")
		_, _ = io.WriteString(c, text)
		got, err := io.ReadAll(c)
		if errors.Is(err, os.ErrDeadlineExceeded) || bytes.Contains(got, []byte("HTTP")) {
			t.Errorf("%s: read %q, %v", what, got, err)
		}
	}
	if got := w.refused("handshake"); got != before+6 {
		t.Errorf("%d handshakes were counted, want 6", got-before)
	}

	// The proxy requests no client certificate, and accepts no protocol other than Spool's.
	strange := w.issuer.client()
	strange.NextProtos = []string{"h2", "http/1.1"}
	strange.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		t.Error("a client is asked for a certificate")
		return &tls.Certificate{}, nil
	}
	c := w.secure(strange)
	if s := c.ConnectionState(); s.NegotiatedProtocol != "" || s.Version != tls.VersionTLS13 {
		t.Errorf("negotiated %q, version %x", s.NegotiatedProtocol, s.Version)
	}
	_, _ = io.WriteString(c, runner.EgressPreamble+b.token+"\nGET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if got, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 404") {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestAttack_EgressTLS_SlowHandshakesAreCut(t *testing.T) {
	t.Parallel()
	w := overTLS(t, func(c *egress.Config, _ *egress.Deps) { c.TLSHandshake = 3 * time.Second })
	// A connection of the same age that named its sandbox in time stays open.
	b := w.box()
	named, err := b.dialWith(b.token)
	if err != nil {
		t.Fatal(err)
	}
	defer named.Close()
	drip := func(c net.Conn, text string) { // until the proxy closes the connection
		for i := 0; ; i++ {
			if _, err := c.Write([]byte{text[i%len(text)]}); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	silent, half := w.plain("127.0.0.1"), w.plain("127.0.0.1")
	go drip(half, "\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"+strings.Repeat("\x03", 16<<10))
	noLine, slowLine := w.secure(w.issuer.client()), w.secure(w.issuer.client())
	go drip(slowLine, "SPOOL/1 x")
	for what, c := range map[string]net.Conn{"no hello": silent, "a hello by bytes": half, "no first line": noLine, "a first line by bytes": slowLine} {
		closedUnanswered(t, what, c)
	}
	poll(t, "all four are counted", func() bool { return w.refused("handshake") == 2 && w.refused("preamble") == 2 })

	_ = named.SetDeadline(time.Now().Add(within))
	_, _ = io.WriteString(named, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if got, err := io.ReadAll(named); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 404") {
		t.Errorf("read %q, %v", got, err)
	}
}

// Connections without a token do not use up the connections of other addresses, nor those of a sandbox that sends its
// token at once.
func TestAttack_EgressTLS_ThousandsOfSilentConnections(t *testing.T) {
	t.Parallel()
	const perAddress, silent, addresses = 16, 400, 8
	w := overTLS(t, func(c *egress.Config, _ *egress.Deps) {
		c.TLSAddressConnections, c.TLSHandshake = perAddress, time.Hour
	})
	b := w.box()
	patient := w.plain("127.0.0.50")
	for i := range silent * addresses {
		c := w.plain(fmt.Sprintf("127.0.0.%d", 2+i%addresses))
		if i%2 == 0 {
			_, _ = io.WriteString(c, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03") // the beginning of a ClientHello; the connection may be closed already
		}
	}
	poll(t, "the oldest of each address are closed", func() bool { return w.refused("crowd") == (silent-perAddress)*addresses })
	if status, _, _ := b.post("/", ""); status != http.StatusNotFound {
		t.Errorf("a sandbox: %d", status)
	}
	c := tls.Client(patient, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}) //nolint:gosec // whether it is served is what counts
	_, err := io.WriteString(c, runner.EgressPreamble+b.token+"\nGET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if got, readErr := io.ReadAll(c); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 404") {
		t.Errorf("one of another address, which is older: %q, %v, %v", got, err, readErr)
	}
	b.onlyOwnLines(1) // equal denials within a second share one line
}

// The release of a sandbox closes all of its connections at once, in every state, and refuses new ones.
func TestAttack_EgressTLS_TokenAfterRelease(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, nil)
	p.at["93.184.216.34:443"] = listen(t, func(c net.Conn) { // a host that never stops sending
		_, _ = io.Copy(c, zeros{})
		c.Close()
	})
	w := overTLS(t, change)
	b := w.box("ok.example")
	resumed := w.issuer.client()
	resumed.ClientSessionCache = tls.NewLRUClientSessionCache(1)
	var open []*tls.Conn
	for _, text := range []string{"", "GET / HT", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "CONNECT ok.example:443 HTTP/1.1\r\nHost: x\r\n\r\n"} {
		c := w.secure(resumed)
		_, _ = io.WriteString(c, runner.EgressPreamble+b.token+"\n"+text)
		open = append(open, c)
	}
	// The client receives the session ticket with its first read.
	if _, err := io.ReadFull(open[2], make([]byte, 12)); err != nil {
		t.Fatal(err)
	}
	poll(t, "the tunnel's host waits for the sandbox to read", func() bool {
		s, err := w.client.State(t.Context(), b.id)
		return err == nil && s.OpenConnections == len(open)
	})
	if _, err := io.ReadFull(open[3], make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := w.client.Release(t.Context(), b.id); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > within/2 {
		t.Errorf("the release took %s", took)
	}
	for i, c := range open {
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection %d is open: %v", i, err)
		}
	}
	again := w.secure(resumed)
	if !again.ConnectionState().DidResume {
		t.Error("the session was not resumed, so this test does not show what a ticket allows")
	}
	_, _ = io.WriteString(again, runner.EgressPreamble+b.token+"\nGET / HTTP/1.1\r\nHost: x\r\n\r\n")
	closedUnanswered(t, "a resumed session", again)
}

func TestTLSConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	w := overTLS(t, func(c *egress.Config, _ *egress.Deps) { c.TLSConnections = 2 })
	one, two, three := w.box(), w.box(), w.box()
	for _, b := range []*box{one, two} {
		if status, _, _ := b.post("/", ""); status != http.StatusNotFound {
			t.Fatal(status)
		}
	}
	if status, _, body := three.post("/", ""); status != http.StatusServiceUnavailable || !strings.Contains(body, "too many connections") || w.refused("limit") != 1 {
		t.Errorf("one too many: %d %s", status, body)
	}
	c, err := net.Dial("unix", w.cfg.ListenSandboxes)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(within))
	_, _ = io.WriteString(c, runner.EgressPreamble+three.token+"\nGET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if got, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 404") {
		t.Errorf("on the socket: %q, %v", got, err)
	}
	one.http.CloseIdleConnections()
	poll(t, "there is room again", func() bool {
		status, _, _ := three.post("/", "")
		return status == http.StatusNotFound
	})
}

// The certificate is read again when its files change, and open connections stay open. Health and metrics report an
// invalid certificate.
func TestTLSCertificateIsReplaced(t *testing.T) {
	t.Parallel()
	w := overTLS(t, nil)
	b := w.box()
	before := w.secure(w.issuer.client())
	if err := w.client.Health(t.Context()); err != nil {
		t.Errorf("health: %v", err)
	}
	w.issuer.issue(time.Now(), 48*time.Hour, "127.0.0.1")
	after := w.secure(w.issuer.client())
	serial := func(c *tls.Conn) string { return c.ConnectionState().PeerCertificates[0].SerialNumber.String() }
	if serial(before) == serial(after) {
		t.Error("the former certificate is served")
	}
	for _, c := range []*tls.Conn{before, after} {
		_, _ = io.WriteString(c, runner.EgressPreamble+b.token+"\nGET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if got, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 404") {
			t.Errorf("read %q, %v", got, err)
		}
	}
	if err := os.Remove(w.cfg.TLSKey); err != nil {
		t.Fatal(err)
	}
	if err := w.client.Health(t.Context()); err == nil || !strings.Contains(err.Error(), "tls-key") {
		t.Errorf("health without a key: %v", err)
	}
	if text := w.metrics(); !strings.Contains(text, "spool_egress_certificate_reload_failed 1") {
		t.Error("the metrics do not show that the key is gone")
	}
	w.issuer.issue(time.Now().Add(-48*time.Hour), time.Hour, "127.0.0.1")
	if err := w.client.Health(t.Context()); err == nil || !strings.Contains(err.Error(), "expired at") {
		t.Errorf("health with an expired certificate: %v", err)
	}
	w.issuer.issue(time.Now(), time.Hour, "127.0.0.1")
	if err := w.client.Health(context.WithoutCancel(t.Context())); err != nil {
		t.Errorf("health with a good certificate: %v", err)
	}
}
