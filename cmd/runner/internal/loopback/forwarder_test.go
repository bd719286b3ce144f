package loopback_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/runner/internal/loopback"
	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/daemon/porttest"
	"github.com/spoolhq/spool/pkg/tlsconn"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience limits every wait.
const patience = 30 * time.Second

// proxy stands in for the egress proxy: the test accepts its connections. In tests whose name begins with TestOverTLS it speaks TLS.
type proxy struct {
	t       *testing.T
	cfg     loopback.Config // config of a forwarder to the proxy
	network string
	address string
	tls     *tls.Config // nil for a Unix socket
	l       net.Listener
}

// deadliner is a listener whose Accept has a deadline.
type deadliner interface{ SetDeadline(time.Time) error }

// conn is a connection whose directions can be closed one by one.
type conn interface {
	net.Conn
	CloseWrite() error
}

func newProxy(t *testing.T) *proxy {
	t.Helper()
	dir, err := os.MkdirTemp("", "eg") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if !strings.HasPrefix(t.Name(), "TestOverTLS") {
		socket := filepath.Join(dir, "p")
		return &proxy{t: t, cfg: loopback.Config{Socket: socket}, network: "unix", address: socket}
	}
	authority, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: time.Hour}, time.Now())
	if err == nil {
		_, err = authority.Issue(dir, []string{"127.0.0.1"})
	}
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "authority", certificate.CertificateFile))
	if err != nil {
		t.Fatal(err)
	}
	pair, err := certificate.OpenPair(filepath.Join(dir, certificate.CertificateFile), filepath.Join(dir, certificate.KeyFile), nil)
	if err != nil {
		t.Fatal(err)
	}
	server := porttest.FreeAddrs(t, 1)[0]
	return &proxy{t: t, cfg: loopback.Config{Server: server, Authority: string(text)}, network: "tcp", address: server, tls: pair.TLSConfig()}
}

// with returns the configuration of a forwarder to the proxy, changed.
func (p *proxy) with(change func(*loopback.Config)) loopback.Config {
	cfg := p.cfg
	change(&cfg)
	return cfg
}

func (p *proxy) up() {
	p.t.Helper()
	l, err := net.Listen(p.network, p.address)
	if err != nil {
		p.t.Fatal(err)
	}
	p.l = l
	p.t.Cleanup(func() { _ = l.Close() })
}

// accept accepts a connection and reads its preamble.
func (p *proxy) accept() (conn, *bufio.Reader) {
	p.t.Helper()
	if err := p.l.(deadliner).SetDeadline(time.Now().Add(patience)); err != nil {
		p.t.Fatal(err)
	}
	accepted, err := p.l.Accept()
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = accepted.Close() })
	c := accepted.(conn)
	if p.tls != nil {
		if c, err = tlsconn.Server(p.t.Context(), accepted, p.tls); err != nil {
			p.t.Fatal(err)
		}
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		p.t.Fatal(err)
	}
	in := bufio.NewReader(c)
	if line, err := in.ReadString('\n'); err != nil || line != "SPOOL/1 tok_1\n" {
		p.t.Fatalf("preamble %q, %v", line, err)
	}
	return c, in
}

// TestOverTLS_ConnectionsAreForwardedAsToTheSocket runs the tests of the socket with a proxy that speaks TLS.
func TestOverTLS_ConnectionsAreForwardedAsToTheSocket(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"half-close": TestDirectionsEndIndependently, "large bodies": TestLargeBodiesAreForwardedWhole, "unreachable proxy": TestUnreachableProxy_ClientsAreAnswered, "restarting proxy": TestRestartingProxy_ClientsWait,
		"proxy closes": TestProxyClosesBeforeItsAnswer_ClientIsAnswered, "idle connections": TestIdleConnectionsAreClosed, "many connections": TestConnectionsAreLimited,
	} {
		t.Run(name, test)
	}
}

// Further connections to the proxy resume the TLS session of an earlier one.
func TestOverTLS_SessionsAreResumed(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	p.up()
	address, _ := forward(t, p.cfg)
	for i := range 3 {
		client := dial(t, address)
		upstream, _ := p.accept()
		send(t, upstream, "x") // after the session ticket
		if _, err := client.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if resumed := upstream.(*tlsconn.Conn).ConnectionState().DidResume; resumed != (i > 0) {
			t.Errorf("connection %d resumed a session: %t", i, resumed)
		}
	}
}

// forward runs a forwarder until the test ends, and returns its address and log.
func forward(t *testing.T, cfg loopback.Config) (address string, log *buffer) {
	t.Helper()
	log = &buffer{}
	cfg.Address, cfg.Token, cfg.Log = "127.0.0.1:0", "tok_1", slog.New(slog.NewTextHandler(log, nil))
	f, err := loopback.Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return f.Addr().String(), log
}

type buffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func dial(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

func send(t *testing.T, w io.Writer, s string) {
	t.Helper()
	if _, err := io.WriteString(w, s); err != nil {
		t.Fatal(err)
	}
}

func TestDirectionsEndIndependently(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	p.up()
	address, _ := forward(t, p.cfg)
	client := dial(t, address)
	send(t, client, "question")
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	upstream, in := p.accept()
	if got, err := io.ReadAll(in); err != nil || string(got) != "question" {
		t.Fatalf("the proxy read %q, %v", got, err)
	}
	// The client has closed its direction; the other one is still open.
	send(t, upstream, "answer")
	if err := upstream.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(client); err != nil || string(got) != "answer" {
		t.Fatalf("the client read %q, %v", got, err)
	}

	// The proxy closes its direction first.
	client = dial(t, address)
	upstream, in = p.accept()
	send(t, upstream, "hello")
	if err := upstream.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(client); err != nil || string(got) != "hello" {
		t.Fatalf("the client read %q, %v", got, err)
	}
	send(t, client, "late")
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(in); err != nil || string(got) != "late" {
		t.Errorf("the proxy read %q, %v", got, err)
	}
}

func TestLargeBodiesAreForwardedWhole(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	p.up()
	address, _ := forward(t, p.cfg)
	client := dial(t, address)
	const size = 16 << 20
	go func() {
		_, _ = io.CopyN(client, zeros{}, size)
		_ = client.CloseWrite()
	}()
	upstream, in := p.accept()
	echoed := make(chan error, 1)
	go func() {
		_, err := io.Copy(upstream, in)
		echoed <- errors.Join(err, upstream.CloseWrite())
	}()
	if got, err := io.Copy(io.Discard, client); err != nil || got != size {
		t.Errorf("%d bytes came back, want %d: %v", got, size, err)
	}
	if err := <-echoed; err != nil {
		t.Error(err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// get sends an HTTP request through the forwarder, as an agent's SDK does.
func get(t *testing.T, address string) (int, string, error) {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	body := strings.NewReader(`{"model":"m","big":"` + strings.Repeat("x", 1<<20) + `"}`)
	resp, err := c.Post("http://"+address+"/anthropic/v1/messages", "application/json", body)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(got), err
}

func TestUnreachableProxy_ClientsAreAnswered(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	address, log := forward(t, p.with(func(c *loopback.Config) { c.Wait = -1 }))
	for range 3 {
		code, body, err := get(t, address)
		if err != nil || code != http.StatusBadGateway || !strings.Contains(body, "the egress proxy cannot be reached") || !strings.Contains(body, "EGRESS_UNAVAILABLE") {
			t.Fatalf("status %d, %s, %v", code, body, err)
		}
	}
	if n := strings.Count(log.String(), "cannot be reached"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, log)
	}
	// CONNECT gets the same answer.
	client := dial(t, address)
	send(t, client, "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n")
	if resp, err := http.ReadResponse(bufio.NewReader(client), nil); err != nil || resp.StatusCode != http.StatusBadGateway {
		t.Errorf("a tunnel: %v, %v", resp, err)
	}
	p.up()
	client = dial(t, address)
	upstream, _ := p.accept()
	send(t, upstream, "x")
	if _, err := client.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), "is back") {
		t.Errorf("the log does not say that the proxy is back:\n%s", log)
	}
}

// A proxy that restarts costs no client its connection: the forwarder holds the connection until the proxy is back.
func TestRestartingProxy_ClientsWait(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	address, log := forward(t, p.cfg)
	client := dial(t, address)
	send(t, client, "question")
	awaitLog(t, log, "cannot be reached")
	p.up()
	upstream, in := p.accept()
	if b, err := in.Peek(len("question")); err != nil || string(b) != "question" {
		t.Fatalf("%q, %v", b, err)
	}
	send(t, upstream, "answer")
	_ = upstream.CloseWrite()
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(client); err != nil || string(got) != "answer" {
		t.Errorf("%q, %v", got, err)
	}
	awaitLog(t, log, "is back")
}

// awaitLog waits until the forwarder has logged a text.
func awaitLog(t *testing.T, log *buffer, text string) {
	t.Helper()
	for deadline := time.Now().Add(patience); !strings.Contains(log.String(), text); <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the log does not have %q:\n%s", text, log)
		}
	}
}

func TestProxyClosesBeforeItsAnswer_ClientIsAnswered(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	p.up()
	address, _ := forward(t, p.cfg)
	type result struct {
		code int
		body string
		err  error
	}
	done := make(chan result, 1)
	go func() {
		code, body, err := get(t, address)
		done <- result{code, body, err}
	}()
	upstream, in := p.accept()
	if _, err := in.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	_ = upstream.Close() // with unread bytes: a reset
	if r := <-done; r.err != nil || r.code != http.StatusBadGateway || !strings.Contains(r.body, "without an answer") {
		t.Errorf("%+v", r)
	}
	// The proxy closes before the client sends anything.
	client := dial(t, address)
	upstream, _ = p.accept()
	_ = upstream.Close()
	send(t, client, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	if resp, err := http.ReadResponse(bufio.NewReader(client), nil); err != nil || resp.StatusCode != http.StatusBadGateway {
		t.Errorf("%v, %v", resp, err)
	}
	// The proxy closes within an answer: the connection breaks off, without an error answer.
	client = dial(t, address)
	send(t, client, "question")
	upstream, in = p.accept()
	if b, err := in.Peek(1); err != nil || b[0] != 'q' {
		t.Fatal(err)
	}
	send(t, upstream, "half")
	_ = upstream.Close() // with unread bytes
	got, err := io.ReadAll(client)
	if strings.Contains(string(got), "502") || err == nil && string(got) != "half" {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestIdleConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	p.up()
	address, _ := forward(t, p.with(func(c *loopback.Config) { c.Idle = 50 * time.Millisecond }))
	client := dial(t, address)
	_, in := p.accept()
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the proxy's side: %v", err)
	}
	if _, err := client.Read(make([]byte, 1)); err == nil {
		t.Error("the client's side is open")
	}
}

func TestConnectionsAreLimited(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	p.up()
	address, _ := forward(t, p.with(func(c *loopback.Config) { c.Connections = 2 }))
	one, two := dial(t, address), dial(t, address)
	p.accept()
	upstream, _ := p.accept()
	three := dial(t, address) // accepted by the kernel, not yet by the forwarder
	send(t, three, "q")
	if err := p.l.(deadliner).SetDeadline(time.Now().Add(100 * time.Millisecond)); err != nil { // only bounds the wait
		t.Fatal(err)
	}
	if c, err := p.l.Accept(); err == nil {
		t.Error("a third connection was forwarded")
		_ = c.Close()
	}
	_ = upstream.Close()
	_ = one.Close()
	_ = two.Close()
	_, in := p.accept()
	if b, err := in.ReadByte(); err != nil || b != 'q' {
		t.Errorf("the third: %q, %v", b, err)
	}
}

func TestListen_RefusesInvalidConfig(t *testing.T) {
	t.Parallel()
	for says, cfg := range map[string]loopback.Config{
		"socket":                     {Token: "t"},
		"shorter":                    {Token: "t", Socket: "/" + strings.Repeat("s", 120)},
		"token":                      {Socket: "/s"},
		"newline":                    {Socket: "/s", Token: "a\nb"},
		"connections":                {Socket: "/s", Token: "t", Connections: -1},
		"idle":                       {Socket: "/s", Token: "t", Idle: -1},
		"set one of them":            {Token: "t", Socket: "/s", Server: "x:1", Authority: "a"},
		"not a host and a port":      {Token: "t", Server: "proxy.example.com"},
		"no certificate in PEM form": {Token: "t", Server: "proxy.example.com:7443"},
		"listen on":                  {Socket: "/s", Token: "t", Address: "127.0.0.1:99999"},
	} {
		if _, err := loopback.Listen(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}
