// Package proxy serves the connections of sandboxes, from a Unix socket and a TLS port. It forwards requests to models through
// routes, which set the credentials, requests to MCP servers, and requests to other hosts as far as the allowlist allows them.
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
	"runtime"
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

// Config configures a Server of the egress proxy.
type Config struct {
	Routes   []Route
	Registry *registry.Registry
	Dialer   *policy.Dialer
	Prices   meter.Prices
	Metrics  *telemetry.Metrics
	Logger   *slog.Logger

	Authority *authority.Authority // signs the certificates of hosts whose requests are inspected
	Roots     *x509.CertPool       // that certificates of allowed hosts are verified against; nil means the system's

	// Open are hosts and ports of MCP servers whose addresses need not be public.
	Open []egress.Target

	Idle      time.Duration // limit of the time without a byte on a tunnel or between requests, and of each write to a sandbox; 0 means 10 min
	ModelIdle time.Duration // limit of the time without a byte of a model request or its answer; 0 means 15 min
}

// Limits of request heads.
const (
	maxHeaderBytes = 64 << 10
	headerTimeout  = 30 * time.Second
)

// Server is the part of the egress proxy that serves the connections of sandboxes.
type Server struct {
	cfg    Config
	routes map[string]*Route
	http   *http.Server
	models http.RoundTripper // to routes
	others *http.Transport   // to hosts of the allowlist
	mcps   *http.Transport   // to MCP servers
	conns  *connQueue
	logs   logLimiter
	memory *memoryBudget      // of requests and connections
	checks *checkQueue        // of the bodies of requests to models
	cancel context.CancelFunc // cancels every request
	remote atomic.Int64       // identified connections over TLS

	mu       sync.Mutex
	open     int           // requests
	noneOpen chan struct{} // closed when open falls to 0
	tunnels  map[net.Conn]bool
	draining bool
}

// New returns a Server. The caller must call Serve.
func New(cfg Config) *Server {
	if cfg.Idle == 0 {
		cfg.Idle = 10 * time.Minute
	}
	if cfg.ModelIdle == 0 {
		cfg.ModelIdle = 15 * time.Minute
	}
	s := &Server{cfg: cfg, routes: map[string]*Route{}, noneOpen: make(chan struct{}), conns: newConnQueue(), tunnels: map[net.Conn]bool{}, memory: newMemoryBudget(maxMemoryBytes), checks: newCheckQueue(runtime.GOMAXPROCS(0))}
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
		// A connection must not be shared by sandboxes: the host may have authenticated one of them on it.
		DisableKeepAlives: true, ExpectContinueTimeout: time.Second,
		TLSClientConfig: &tls.Config{RootCAs: cfg.Roots, MinVersion: tls.VersionTLS12},
	}
	s.mcps = s.others.Clone()
	s.mcps.DialContext = s.dialMCPServer
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	s.http = &http.Server{
		BaseContext: func(net.Listener) context.Context { return ctx },
		Handler:     http.HandlerFunc(s.serveSandbox), ReadHeaderTimeout: headerTimeout, IdleTimeout: cfg.Idle, MaxHeaderBytes: maxHeaderBytes,
		DisableGeneralOptionsHandler: true, ConnState: s.handleConnState, ConnContext: withConn,
		ErrorLog: slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug),
	}
	return s
}

// connKey is the key of the connection in the context of a request.
type connKey struct{}

// withConn returns a context that contains the connection of a request.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// Serve accepts connections from the listeners until Shutdown or Close, or until all listeners are closed. Then it returns nil. It may be called once.
func (s *Server) Serve(listeners ...Listener) error {
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(s.conns) }()
	var accepting sync.WaitGroup
	for _, l := range listeners {
		accepting.Go(func() { s.acceptConns(l) })
	}
	accepting.Wait()
	s.conns.Close() //nolint:errcheck // it never fails
	if err := <-served; !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// logLimiter limits the rate of log messages to one a second, and counts the messages that are not logged.
type logLimiter struct {
	mu      sync.Mutex
	last    time.Time
	skipped int
}

// allowMessage reports whether a message may be logged now. skipped is the number of messages that were not logged since the last one that
// was.
func (l *logLimiter) allowMessage(now time.Time) (skipped int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.last) < time.Second {
		l.skipped++
		return 0, false
	}
	skipped, l.skipped, l.last = l.skipped, 0, now
	return skipped, true
}

// handleConnState is called by the HTTP server when the state of a connection changes.
func (s *Server) handleConnState(c net.Conn, state http.ConnState) {
	mine := c.(*identifiedConn)
	switch state {
	case http.StateIdle:
		mine.expectRequest()
	case http.StateClosed:
		if mine.tunnel != nil {
			s.journalUnparsed(mine)
		} else if method, target, ok := mine.unparsedRequest(); ok {
			s.recordDenial(mine.sandbox, events.EgressDenied{Host: truncateText(target), Method: truncateText(method), Code: CodeBadHost, Message: "the request does not name a valid host"})
		}
		mine.Close() //nolint:errcheck // it is closed already; this calls its onClose
	}
}

// cancelTimeout is the maximum time for which Shutdown waits for requests to end after it has cancelled them.
const cancelTimeout = 5 * time.Second

// Shutdown accepts no more connections, and blocks until no request is open or ctx ends. Then it closes all tunnels and
// connections. When it returns, the usage of all requests is journaled.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	s.Close()
	s.mu.Lock()
	open, noneOpen := s.open, s.noneOpen
	s.mu.Unlock()
	if open == 0 {
		return err
	}
	select {
	case <-noneOpen:
		return err
	case <-time.After(cancelTimeout):
		return errors.Join(err, fmt.Errorf("%d canceled requests did not end in %s", open, cancelTimeout))
	}
}

// beginRequest counts an open request. It returns false if the server is shutting down.
func (s *Server) beginRequest() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.open++
	return true
}

// endRequest counts the end of a request that beginRequest counted.
func (s *Server) endRequest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open--; s.open == 0 {
		close(s.noneOpen)
		s.noneOpen = make(chan struct{})
	}
}

// Close cancels all requests and closes all connections.
func (s *Server) Close() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.cancel()
	s.http.Close() //nolint:errcheck // listeners are closed already
	s.mu.Lock()
	for c := range s.tunnels {
		c.Close() //nolint:errcheck // a connection that fails to close is broken
	}
	s.mu.Unlock()
	s.models.(*http.Transport).CloseIdleConnections()
}

// connQueue is a net.Listener whose connections were accepted elsewhere, and have identified their sandbox. The HTTP server accepts them
// from it.
type connQueue struct {
	c    chan net.Conn
	done chan struct{}
	once sync.Once
}

func newConnQueue() *connQueue {
	return &connQueue{c: make(chan net.Conn), done: make(chan struct{})}
}

// add passes a connection to the HTTP server. It closes the connection if the queue is closed.
func (q *connQueue) add(c net.Conn) {
	select {
	case q.c <- c:
	case <-q.done:
		c.Close() //nolint:errcheck // it is not served
	}
}

func (q *connQueue) Accept() (net.Conn, error) {
	select {
	case c := <-q.c:
		return c, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

func (q *connQueue) Close() error {
	q.once.Do(func() { close(q.done) })
	return nil
}

// Addr returns an address of no network: the connections come from several listeners.
func (q *connQueue) Addr() net.Addr { return &net.UnixAddr{Name: "sandboxes", Net: "unix"} }
