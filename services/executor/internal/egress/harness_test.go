package egress_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(programsDir)
		os.Exit(code)
	}))
}

// within bounds each wait of a test.
const within = 20 * time.Second

// world is a running proxy with its client.
type world struct {
	t      *testing.T
	cfg    egress.Config
	deps   egress.Deps
	client *api.Client
	issuer *issuer // of the certificate of the TLS listener, by which dialWith connects; nil for the Unix socket
	log    *safeBuffer
	stop   func() // ends the proxy, and waits
}

// names is a resolver: each host has a list of results, one for each lookup; the last one stays.
type names struct {
	mu    sync.Mutex
	hosts map[string][][]string
	asked []string
}

func (n *names) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked = append(n.asked, host)
	sets := n.hosts[strings.TrimSuffix(host, ".")]
	if len(sets) == 0 {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	if len(sets) > 1 {
		n.hosts[strings.TrimSuffix(host, ".")] = sets[1:]
	}
	var out []netip.Addr
	for _, s := range sets[0] {
		out = append(out, netip.MustParseAddr(s))
	}
	return out, nil
}

// public stands in for the internet: it maps public addresses to servers of this machine.
type public struct {
	mu     sync.Mutex
	at     map[string]string
	dialed []string
}

func (p *public) dial(ctx context.Context, network, address string) (net.Conn, error) {
	p.mu.Lock()
	p.dialed = append(p.dialed, address)
	to := p.at[address]
	p.mu.Unlock()
	if to == "" {
		return nil, errors.New("nobody answers at " + address)
	}
	return (&net.Dialer{}).DialContext(ctx, network, to)
}

func (p *public) seen() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.dialed...)
}

// newWorld starts a proxy; change may be nil.
func newWorld(t *testing.T, change func(*egress.Config, *egress.Deps)) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "egr") //nolint:usetesting // short: the path of a socket has its limit
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := &world{t: t, log: &safeBuffer{}}
	w.cfg = egress.Config{
		ListenSandboxes: filepath.Join(dir, "s", "e.sock"), ListenAdmin: filepath.Join(dir, "a", "e.sock"), Data: filepath.Join(dir, "d"),
		Drain: 5 * time.Second,
	}
	w.deps = egress.Deps{
		Logger: slog.New(slog.NewJSONHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Own:    func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("93.184.215.99")}, nil },
		Getenv: func(string) string { return "" },
	}
	if strings.HasPrefix(t.Name(), "TestOverTLS") {
		w.issuer = newIssuer(t)
		w.issuer.listen(&w.cfg)
	}
	if change != nil {
		change(&w.cfg, &w.deps)
	}
	w.start()
	w.client = api.NewClient(api.DialSocket(w.cfg.ListenAdmin))
	t.Cleanup(func() {
		w.client.Close()
		w.stop()
	})
	return w
}

// start starts a proxy in the world's folder.
func (w *world) start() {
	w.t.Helper()
	s, err := egress.New(w.cfg, w.deps)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				w.t.Errorf("Run: %v", err)
			}
		case <-time.After(within):
			w.t.Error("the proxy does not end")
		}
	})
	poll(w.t, "the proxy is up", func() bool {
		c, err := net.Dial("unix", w.cfg.ListenAdmin)
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
}

func poll(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s: %s", within, what)
		}
	}
}

func mint(t *testing.T, kind events.IDKind) string {
	t.Helper()
	id, err := events.NewID(kind, time.Now(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// of returns a copy of the world that reports to a subtest.
func (w *world) of(t *testing.T) *world {
	other := *w
	other.t = t
	return &other
}

// box is a registered sandbox.
type box struct {
	*world
	id, token string
	reg       api.Registration
	http      *http.Client // uses the proxy for requests with an absolute URL
}

func (w *world) box(allow ...string) *box {
	w.t.Helper()
	b := &box{world: w, id: mint(w.t, events.KindSandbox), token: "token-of-a-sandbox-" + rand.Text()}
	b.reg = api.Registration{
		Token: b.token, Tenant: "acme", Session: mint(w.t, events.KindSession), Execution: mint(w.t, events.KindExecution), Epoch: 1, Allow: allow,
	}
	if _, err := w.client.Register(w.t.Context(), b.id, b.reg); err != nil {
		w.t.Fatal(err)
	}
	b.http = w.clientOf(b.token)
	return b
}

// clientOf returns a client that works like those in a sandbox: it sends requests for routes to the runner's address, and uses
// that address as a proxy for all others.
func (w *world) clientOf(token string) *http.Client {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return w.dialWith(token) },
		Proxy: func(r *http.Request) (*url.URL, error) {
			if r.URL.Host == runner.EgressAddress {
				return nil, nil
			}
			return url.Parse(runner.EgressURL)
		},
		DisableCompression: true,
	}
	w.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// dialWith opens a connection and sends the preamble with a token.
func (w *world) dialWith(token string) (net.Conn, error) {
	dial := func() (net.Conn, error) { return net.Dial("unix", w.cfg.ListenSandboxes) }
	if w.issuer != nil {
		dial = func() (net.Conn, error) { return tls.Dial("tcp", w.cfg.ListenTLS, w.issuer.client()) }
	}
	c, err := dial()
	if err != nil {
		return nil, err
	}
	if _, err := io.WriteString(c, runner.EgressPreamble+token+"\n"); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// raw sends bytes after the preamble, and returns the answer.
func (b *box) raw(text string) *http.Response {
	b.t.Helper()
	c, err := b.dialWith(b.token)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		b.t.Fatal(err)
	}
	if _, err := io.WriteString(c, text); err != nil {
		b.t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		b.t.Fatalf("answer to %q: %v", text, err)
	}
	return res
}

func (b *box) post(path, body string) (int, http.Header, string) {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), http.MethodPost, runner.EgressURL+path, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	return b.do(req)
}

func (b *box) do(req *http.Request) (int, http.Header, string) {
	b.t.Helper()
	res, err := b.http.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return res.StatusCode, res.Header, string(raw)
}

// lines blocks until the journal has n lines after a number, and returns these.
func (b *box) lines(after uint64, n int) []api.JournalLine {
	b.t.Helper()
	var out []api.JournalLine
	poll(b.t, fmt.Sprintf("the journal of %s has %d lines after %d", b.id, n, after), func() bool {
		var err error
		if out, err = b.client.JournalLines(b.t.Context(), b.id, "", after, false); err != nil {
			b.t.Fatalf("read the journal: %v", err)
		}
		return len(out) >= n
	})
	return out[:n]
}

func (b *box) called(l api.JournalLine) (m events.ModelCalled) {
	b.t.Helper()
	return decode[events.ModelCalled](b.t, l, "model_called")
}

func (b *box) denied(l api.JournalLine) (m events.EgressDenied) {
	b.t.Helper()
	return decode[events.EgressDenied](b.t, l, "egress_denied")
}

func decode[T any](t *testing.T, l api.JournalLine, kind events.Type) (v T) {
	t.Helper()
	if l.Type != kind {
		t.Fatalf("line %d is of type %s, not %s: %s", l.N, l.Type, kind, l.Data)
	}
	dec := json.NewDecoder(bytes.NewReader(l.Data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("line %d: %v", l.N, err)
	}
	return v
}

// safeBuffer is a buffer for concurrent use.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
