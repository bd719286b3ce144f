package egress_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	proxy "github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/authority"
)

// secured is a simulated public network with a TLS server at ok.example, ports 443 and 8443, and a plain HTTP server
// at port 80.
type secured struct {
	*world
	public *public
	names  *names
	heard  func() []string // requests that got through: method, host, target, Transfer-Encoding, body
}

func pool(t *testing.T, pem string) *x509.CertPool {
	t.Helper()
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM([]byte(pem)) {
		t.Fatalf("no certificate in %q", pem)
	}
	return p
}

// certified returns the TLS config of a host with a certificate of an authority of the simulated internet.
func certified(t *testing.T, ca *authority.Authority, name string) *tls.Config {
	t.Helper()
	h, err := egress.ParseHost(name)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.Certificate(h)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{*cert}, MinVersion: tls.VersionTLS12}
}

// roots returns the certificates that verify ok.example.
func roots(t *testing.T, ca *authority.Authority) *x509.CertPool {
	t.Helper()
	text, err := ca.TrustCertificate([]string{"GET ok.example"})
	if err != nil {
		t.Fatal(err)
	}
	return pool(t, text)
}

func newSecured(t *testing.T, answer http.HandlerFunc) *secured {
	t.Helper()
	ca, _, err := authority.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var got []string
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if answer != nil && strings.HasPrefix(r.URL.Path, "/answer") {
			answer(w, r)
			return
		}
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		got = append(got, fmt.Sprintf("%s %s%s %v %q", r.Method, r.Host, r.RequestURI, r.TransferEncoding, body))
		mu.Unlock()
		w.Header().Set("X-Tls", fmt.Sprint(r.TLS != nil))
		fmt.Fprintf(w, "heard %s", r.Method)
	})
	srv := httptest.NewUnstartedServer(h)
	srv.TLS = certified(t, ca, "ok.example")
	srv.StartTLS()
	t.Cleanup(srv.Close)
	change, n, p := withPublicNetwork(t, h)
	p.at["93.184.216.34:443"], p.at["93.184.216.34:8443"] = srv.Listener.Addr().String(), srv.Listener.Addr().String()
	s := &secured{public: p, names: n, heard: func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), got...)
	}}
	s.world = newWorld(t, func(c *proxy.Config, d *proxy.Deps) {
		change(c, d)
		d.Roots = roots(t, ca)
	})
	return s
}

// trusting returns a sandbox whose client trusts the proxy's certificate, as the runner configures it.
func (s *secured) trusting(allow ...string) *box {
	s.t.Helper()
	b := s.box(allow...)
	b.http.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: pool(s.t, b.authority()), MinVersion: tls.VersionTLS12}
	return b
}

func (b *box) authority() string {
	b.t.Helper()
	state, err := b.client.State(b.t.Context(), b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	return state.Authority
}

func (b *box) request(method, address, body string) (int, http.Header, string) {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), method, address, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	return b.do(req)
}

// tunnel opens a tunnel and returns its connection, with a reader behind the proxy's answer.
func (b *box) tunnel(target string) (net.Conn, *bufio.Reader) {
	b.t.Helper()
	c, err := b.dialWith(b.token)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(within))
	if _, err := io.WriteString(c, "CONNECT "+target+" HTTP/1.1\r\nHost: "+target+"\r\n\r\n"); err != nil {
		b.t.Fatal(err)
	}
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil || res.StatusCode != http.StatusOK {
		b.t.Fatalf("CONNECT %s: %v, %v", target, res, err)
	}
	return c, r
}

// inside speaks TLS in a tunnel.
func (b *box) inside(target, name string, protocols ...string) (*tls.Conn, error) {
	b.t.Helper()
	c, _ := b.tunnel(target)
	inner := tls.Client(c, &tls.Config{RootCAs: pool(b.t, b.authority()), ServerName: name, NextProtos: protocols, MinVersion: tls.VersionTLS12})
	return inner, inner.HandshakeContext(b.t.Context())
}

// openTunnel returns a TLS connection to ok.example through a tunnel whose requests the proxy inspects.
func (b *box) openTunnel() *tls.Conn {
	b.t.Helper()
	c, err := b.inside("ok.example:443", "ok.example", "h2", "http/1.1")
	if err != nil {
		b.t.Fatal(err)
	}
	if p := c.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
		b.t.Fatalf("the protocol is %q", p)
	}
	return c
}

// one returns the single denial of the sandbox's journal. It does not wait for further lines.
func (b *box) one() events.EgressDenied {
	b.t.Helper()
	return b.denied(b.lines(0, 1)[0])
}

func TestMethods(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	for _, c := range []struct {
		name, method, address string
		allow                 []string
		denied                bool
	}{
		{"https", "GET", "https://ok.example/a?b=c", []string{"GET,HEAD ok.example"}, false},
		{"https, another", "POST", "https://ok.example/a", []string{"GET,HEAD ok.example"}, true},
		{"https, its own port", "DELETE", "https://ok.example:8443/a", []string{"GET ok.example", "DELETE ok.example:8443"}, false},
		{"https, of another port", "GET", "https://ok.example:8443/a", []string{"GET ok.example", "DELETE ok.example:8443"}, true},
		{"https, below a name", "PUT", "https://ok.example/a", []string{"GET ok.example", "PUT *.example.org", "PUT *.ok.example"}, true},
		{"http", "GET", "http://ok.example/a", []string{"GET ok.example"}, false},
		{"http, another", "POST", "http://ok.example/a", []string{"GET ok.example"}, true},
		{"http, of two entries", "POST", "http://ok.example/a", []string{"GET ok.example", "POST ok.example:80"}, false},
		{"a method of one's own", "PROPFIND", "https://ok.example/a", []string{"PROPFIND ok.example"}, false},
		{"lower case", "get", "https://ok.example/a", []string{"GET ok.example"}, true},
		{"lower case, http", "get", "http://ok.example/a", []string{"GET ok.example"}, true},
		{"very long", strings.Repeat("GET", 10_000), "https://ok.example/a", []string{"GET ok.example"}, true},
		{"TRACE", "TRACE", "https://ok.example/a", []string{"GET ok.example"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := *s
			s.world = s.world.of(t)
			b := s.trusting(c.allow...)
			body := ""
			if c.method == "POST" || c.method == "PUT" {
				body = "body"
			}
			status, header, answer := b.request(c.method, c.address, body)
			if !c.denied {
				if status != 200 || answer != "heard "+c.method || header.Get("X-Tls") != fmt.Sprint(strings.HasPrefix(c.address, "https")) {
					t.Errorf("%d %v %s", status, header, answer)
				}
				return
			}
			d := b.one()
			port := uint32(443)
			if u, _ := url.Parse(c.address); u.Port() != "" || u.Scheme == "http" {
				port = map[string]uint32{"8443": 8443, "": 80}[u.Port()]
			}
			if status != 403 || header.Get("Spool-Egress") != "METHOD_NOT_ALLOWED" || d.Code != "METHOD_NOT_ALLOWED" || d.Host != "ok.example" || d.Port != port ||
				!strings.HasPrefix(c.method, d.Method) || d.Method == "" || len(d.Method) > 500 || d.Message == "" {
				t.Errorf("%d %v %+v", status, header, d)
			}
		})
	}
	t.Cleanup(func() {
		for _, line := range s.heard() {
			if strings.HasPrefix(line, "get ") || strings.HasPrefix(line, "TRACE") || strings.HasPrefix(line, "GETGET") {
				t.Errorf("got through: %s", line)
			}
		}
	})
}

// An entry without methods allows all methods, so a tunnel is not inspected although another entry for the host has
// methods.
func TestMethods_UnionOfAllMethodsIsAPlainTunnel(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.box("GET ok.example", "*.example.org", "ok.example:443")
	// The client gets the certificate of the server itself; it does not trust the proxy's.
	b.http.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: s.deps.Roots, MinVersion: tls.VersionTLS12}
	if status, _, body := b.request("POST", "https://ok.example/", "x"); status != 200 || body != "heard POST" {
		t.Errorf("%d %s", status, body)
	}
	if status, _, _ := b.request("POST", "http://ok.example/", "x"); status != 403 {
		t.Errorf("at port 80, for which there are methods: %d", status)
	}
}

// A tunnel that was opened while all methods were allowed is closed when the allowlist names methods for its host.
// Other tunnels stay open.
func TestTunnels_AreClosedByANewAllowlist(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	echo := listen(t, func(c net.Conn) {
		_, _ = io.Copy(c, c)
		c.Close()
	})
	s.public.at["93.184.216.34:443"], s.public.at["93.184.216.34:8443"] = echo, echo
	b := s.box("ok.example", "93.184.216.34:8443")
	open, opened := b.tunnel("ok.example:443")
	kept, keptReader := b.tunnel("93.184.216.34:8443")
	say := func(c net.Conn, r *bufio.Reader) error {
		if _, err := io.WriteString(c, "hello\n"); err != nil {
			return err
		}
		_, err := r.ReadString('\n')
		return err
	}
	if err := say(open, opened); err != nil {
		t.Fatal(err)
	}
	b.reg.Token, b.reg.Allow = "", []string{"GET ok.example", "93.184.216.34:8443"}
	if _, err := b.client.Register(t.Context(), b.id, b.reg); err != nil {
		t.Fatal(err)
	}
	if _, err := opened.ReadString('\n'); err == nil || isTimeout(err) {
		t.Errorf("the tunnel goes on: %v", err)
	}
	if err := say(kept, keptReader); err != nil {
		t.Errorf("another tunnel: %v", err)
	}
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error) //nolint:errorlint // as the connection gives it
	return ok && e.Timeout()
}

// A request is checked against the current allowlist, also in a tunnel that was opened under a former one.
func TestInspectedTunnel_UsesTheCurrentAllowlist(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.trusting("GET ok.example")
	c := b.openTunnel()
	r := bufio.NewReader(c)
	ask := func(method string) int {
		if _, err := io.WriteString(c, method+" / HTTP/1.1\r\nHost: ok.example\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		res, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		return res.StatusCode
	}
	b.reg.Token = ""
	for _, step := range []struct {
		allow     []string
		get, post int
	}{{[]string{"GET ok.example"}, 200, 403}, {[]string{"POST ok.example"}, 403, 200}, {[]string{"ok.example"}, 200, 200}, {[]string{}, 403, 403}} {
		b.reg.Allow = step.allow
		if _, err := b.client.Register(t.Context(), b.id, b.reg); err != nil {
			t.Fatal(err)
		}
		if get, post := ask("GET"), ask("POST"); get != step.get || post != step.post {
			t.Errorf("%v: GET %d, POST %d", step.allow, get, post)
		}
	}
}

// Bodies are streamed in both directions: the answer begins before the request ends.
func TestInspectedTunnel_StreamsBodies(t *testing.T) {
	t.Parallel()
	s := newSecured(t, func(w http.ResponseWriter, r *http.Request) {
		out := http.NewResponseController(w)
		_ = out.EnableFullDuplex()
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			fmt.Fprintf(w, "you said %s\n", lines.Text())
			_ = out.Flush()
		}
	})
	b := s.trusting("POST ok.example")
	body, say := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://ok.example/answer", body)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.WriteString(say, "first\n") }()
	res, err := b.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	r := bufio.NewReader(res.Body)
	if line, err := r.ReadString('\n'); err != nil || line != "you said first\n" {
		t.Fatalf("%q, %v", line, err)
	}
	go func() {
		_, _ = io.WriteString(say, "second\n")
		say.Close()
	}()
	if rest, err := io.ReadAll(r); err != nil || string(rest) != "you said second\n" {
		t.Errorf("%q, %v", rest, err)
	}
}

// The host's own certificate is verified, and so are its addresses.
func TestInspectedTunnel_VerifiesHostAndAddress(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.trusting("GET sub.ok.example", "GET mixed.example", "GET metadata.example", "GET nowhere.example", "GET rebind.example")
	if status, header, body := b.request("GET", "https://sub.ok.example/", ""); status != 502 || header.Get("Spool-Egress") != "UPSTREAM" || !strings.Contains(body, "certificate") {
		t.Errorf("another host's certificate: %d %v %s", status, header, body)
	}
	for host, code := range map[string]string{"mixed.example": "PRIVATE_ADDRESS", "metadata.example": "PRIVATE_ADDRESS", "nowhere.example": "UNRESOLVED"} {
		if status, header, body := b.request("GET", "https://"+host+"/", ""); header.Get("Spool-Egress") != code {
			t.Errorf("%s: %d %v %s", host, status, header, body)
		}
	}
	if len(s.heard()) != 0 {
		t.Errorf("heard %v", s.heard())
	}
	for _, a := range s.public.seen() {
		if !strings.HasPrefix(a, "93.184.216.34:") {
			t.Errorf("dialed %s", a)
		}
	}
}

// Node's fetch opens a tunnel for plain HTTP too.
func TestInspectedTunnel_ServesPlainHTTP(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.box("GET ok.example")
	c, r := b.tunnel("ok.example:80")
	if _, err := io.WriteString(c, "GET /a HTTP/1.1\r\nHost: ok.example\r\n\r\nPOST /b HTTP/1.1\r\nHost: ok.example\r\nContent-Length: 0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{200, 403} {
		res, err := http.ReadResponse(r, nil)
		if err != nil || res.StatusCode != want {
			t.Fatalf("%v, %v; want %d", res, err, want)
		}
		_, _ = io.Copy(io.Discard, res.Body)
	}
	if d := b.one(); d.Code != "METHOD_NOT_ALLOWED" || d.Method != "POST" || d.Port != 80 {
		t.Errorf("%+v", d)
	}
}

// The connection to the host is reused for the tunnel's next request, and closed with the tunnel.
func TestInspectedTunnel_ReusesAndClosesItsConnections(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.trusting("GET ok.example")
	for range 3 {
		if status, _, _ := b.request("GET", "https://ok.example/", ""); status != 200 {
			t.Fatal(status)
		}
	}
	if n := len(s.public.seen()); n != 1 {
		t.Errorf("%d connections for three requests of a tunnel", n)
	}
	b.http.CloseIdleConnections()
	poll(t, "the sandbox's connections are counted off", func() bool {
		state, err := b.client.State(context.Background(), b.id)
		return err == nil && state.OpenConnections == 0
	})
	if status, _, _ := b.request("GET", "https://ok.example/", ""); status != 200 || len(s.public.seen()) != 2 {
		t.Errorf("%d, %v", status, s.public.seen())
	}
	// A release closes open connections.
	if _, err := b.client.Release(t.Context(), b.id); err != nil {
		t.Error(err)
	}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://ok.example/", nil)
	if res, err := b.http.Do(req); err == nil {
		res.Body.Close()
		t.Errorf("after the release: %s", res.Status)
	}
}

// Entries with methods do not change the routes to models.
func TestMethods_DoNotApplyToRoutes(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	b := s.box("GET ok.example")
	if status, header, _ := b.post("/anthropic/v1/messages", "{}"); header.Get("Spool-Egress") != "NO_CREDENTIAL" {
		t.Errorf("%d %v", status, header)
	}
	if runner.EgressURL != "http://127.0.0.1:7070" {
		t.Errorf("agents reach models in TLS, which nobody ends: %s", runner.EgressURL)
	}
}
