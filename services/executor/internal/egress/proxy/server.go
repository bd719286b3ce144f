// Package proxy is what sandboxes talk to: it takes their connections off a Unix
// socket and a TLS port, leads requests to models through routes that put the credentials in,
// and requests to other hosts past the allowlist.
package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/authority"
	"github.com/spoolhq/spool/services/executor/internal/egress/meter"
	"github.com/spoolhq/spool/services/executor/internal/egress/policy"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
	"github.com/spoolhq/spool/services/executor/internal/egress/telemetry"
)

// Config of a Server.
type Config struct {
	Routes   []Route
	Registry *registry.Registry
	Dialer   *policy.Dialer
	Prices   meter.Prices
	Metrics  *telemetry.Metrics
	Logger   *slog.Logger

	Authority *authority.Authority // of hosts whose requests are looked into
	Roots     *x509.CertPool       // that hosts of allowlists are verified against; nil for the system's

	// Open are hosts and ports of MCP servers that may have addresses which are not public.
	Open []egress.Target

	Idle      time.Duration // without a byte on a tunnel or a connection between requests, and for each write to a sandbox; 0 means 10 min
	ModelIdle time.Duration // without a byte of a request or its answer; 0 means 15 min
}

// Bounds of requests and their heads.
const (
	maxHeader    = 128 << 10
	headerWithin = 30 * time.Second
)

// Server serves sandboxes.
type Server struct {
	cfg    Config
	routes map[string]*Route
	http   *http.Server
	models http.RoundTripper // to routes
	others *http.Transport   // to hosts of the allowlist
	mcps   *http.Transport   // to MCP servers
	conns  *handover
	quiet  limiter
	bodies memory             // of requests to models
	cut    context.CancelFunc // ends every request
	remote atomic.Int64       // connections over TLS that have said whose they are

	mu       sync.Mutex
	open     int           // requests
	calm     chan struct{} // closed when open falls to 0
	tunnels  map[net.Conn]bool
	draining bool
}

// New makes a Server.
func New(cfg Config) *Server {
	if cfg.Idle == 0 {
		cfg.Idle = 10 * time.Minute
	}
	if cfg.ModelIdle == 0 {
		cfg.ModelIdle = 15 * time.Minute
	}
	s := &Server{cfg: cfg, routes: map[string]*Route{}, calm: make(chan struct{}), conns: newHandover(), tunnels: map[net.Conn]bool{}, bodies: memory{each: map[*registry.Sandbox]int{}}}
	for i := range cfg.Routes {
		s.routes[cfg.Routes[i].Name] = &cfg.Routes[i]
	}
	s.models = &http.Transport{
		DialContext: (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext, ForceAttemptHTTP2: true,
		TLSHandshakeTimeout: 15 * time.Second, DisableCompression: true, MaxIdleConnsPerHost: 64, IdleConnTimeout: 90 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
	s.others = &http.Transport{
		DialContext: s.dialAllowed, TLSHandshakeTimeout: 15 * time.Second, DisableCompression: true,
		// A connection is one sandbox's: what it has proved to the host is not the next one's.
		DisableKeepAlives: true, ExpectContinueTimeout: time.Second,
		TLSClientConfig: &tls.Config{RootCAs: cfg.Roots, MinVersion: tls.VersionTLS12},
	}
	s.mcps = s.others.Clone()
	s.mcps.DialContext = s.dialServer
	ctx, cut := context.WithCancel(context.Background())
	s.cut = cut
	s.http = &http.Server{
		BaseContext: func(net.Listener) context.Context { return ctx },
		Handler:     http.HandlerFunc(s.serve), ReadHeaderTimeout: headerWithin, IdleTimeout: cfg.Idle, MaxHeaderBytes: maxHeader,
		DisableGeneralOptionsHandler: true, ConnState: s.connState, ConnContext: withConn,
		ErrorLog: slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug),
	}
	return s
}

type connKey struct{}

func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// Serve takes connections off the listeners until Shutdown or Close, or until all of them are closed, then returns nil. It is called once.
func (s *Server) Serve(listeners ...Listener) error {
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(s.conns) }()
	var accepting sync.WaitGroup
	for _, l := range listeners {
		accepting.Go(func() { s.accept(l) })
	}
	accepting.Wait()
	s.conns.Close() //nolint:errcheck // it never fails
	if err := <-served; !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// limiter lets one of many messages a second through.
type limiter struct {
	mu   sync.Mutex
	last time.Time
	held int
}

func (l *limiter) allow(now time.Time) (held int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.last) < time.Second {
		l.held++
		return 0, false
	}
	held, l.held, l.last = l.held, 0, now
	return held, true
}

func (s *Server) connState(c net.Conn, state http.ConnState) {
	mine := c.(*conn)
	switch state {
	case http.StateIdle:
		mine.idle()
	case http.StateClosed:
		if mine.inside != nil {
			s.unjudged(mine)
		} else if method, target, ok := mine.unhandled(); ok {
			s.denied(mine.sandbox, events.EgressDenied{Host: clip(target), Method: clip(method), Code: BadHost, Message: "the request names no host that could be one"})
		}
		mine.Close() //nolint:errcheck // it is closed; this counts it
	}
}

// endWithin bounds how long requests that were cut may take to end.
const endWithin = 5 * time.Second

// Shutdown takes no more connections, and waits for open requests until ctx
// ends; tunnels are cut when no request is open any more. What is left is cut.
// When it returns, all that was used is journaled.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	s.Close()
	s.mu.Lock()
	open, calm := s.open, s.calm
	s.mu.Unlock()
	if open == 0 {
		return err
	}
	select {
	case <-calm:
		return err
	case <-time.After(endWithin):
		return errors.Join(err, fmt.Errorf("%d requests do not end", open))
	}
}

// begin counts a request; false when none is to begin any more.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.open++
	return true
}

func (s *Server) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open--; s.open == 0 {
		close(s.calm)
		s.calm = make(chan struct{})
	}
}

// Close cuts everything.
func (s *Server) Close() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.cut()
	s.http.Close() //nolint:errcheck // listeners are closed already
	s.mu.Lock()
	for c := range s.tunnels {
		c.Close() //nolint:errcheck // what matters is that it ends
	}
	s.mu.Unlock()
	s.models.(*http.Transport).CloseIdleConnections()
}

// handover is a listener whose connections are given to it.
type handover struct {
	c    chan net.Conn
	done chan struct{}
	once sync.Once
}

func newHandover() *handover {
	return &handover{c: make(chan net.Conn), done: make(chan struct{})}
}

func (h *handover) give(c net.Conn) {
	select {
	case h.c <- c:
	case <-h.done:
		c.Close() //nolint:errcheck // nobody serves it
	}
}

func (h *handover) Accept() (net.Conn, error) {
	select {
	case c := <-h.c:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

func (h *handover) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

// Addr returns an address of no network: the connections come from several listeners.
func (h *handover) Addr() net.Addr { return &net.UnixAddr{Name: "sandboxes", Net: "unix"} }
