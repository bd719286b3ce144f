// Package proxy is what sandboxes talk to: it takes their connections off a Unix
// socket, leads requests to models through routes that put the credentials in,
// and requests to other hosts past the allowlist.
package proxy

import (
	"container/list"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
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

// Bounds of connections that have not said yet whose they are.
const (
	introduceWithin = 5 * time.Second
	introduceMost   = 1024
	lingerFor       = time.Second
	maxPreamble     = 512
	maxHeader       = 128 << 10
	headerWithin    = 30 * time.Second
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

	mu       sync.Mutex
	open     int           // requests
	calm     chan struct{} // closed when open falls to 0
	fresh    *list.List    // of net.Conn: those that have not said whose they are, oldest first
	tunnels  map[net.Conn]bool
	draining bool
	waiting  sync.WaitGroup // goroutines of fresh connections
}

// New makes a Server.
func New(cfg Config) *Server {
	if cfg.Idle == 0 {
		cfg.Idle = 10 * time.Minute
	}
	if cfg.ModelIdle == 0 {
		cfg.ModelIdle = 15 * time.Minute
	}
	s := &Server{cfg: cfg, routes: map[string]*Route{}, calm: make(chan struct{}), fresh: list.New(), tunnels: map[net.Conn]bool{}, bodies: memory{each: map[*registry.Sandbox]int{}}}
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

// Serve takes connections off a listener until Shutdown or Close, then gives nil.
func (s *Server) Serve(l net.Listener) error {
	s.mu.Lock()
	s.conns = newHandover(l.Addr())
	conns := s.conns
	s.mu.Unlock()
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(conns) }()
	err := s.accept(l)
	conns.Close() //nolint:errcheck // it never fails
	s.mu.Lock()
	for e := s.fresh.Front(); e != nil; e = e.Next() {
		e.Value.(net.Conn).Close() //nolint:errcheck // it has said nothing yet
	}
	s.mu.Unlock()
	s.waiting.Wait()
	if served := <-served; !errors.Is(served, http.ErrServerClosed) && !errors.Is(served, net.ErrClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func (s *Server) accept(l net.Listener) error {
	for pause := time.Duration(0); ; {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil { // out of file descriptors: it passes
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			s.cfg.Logger.Error("accept a sandbox's connection", "error", err, "again", pause)
			time.Sleep(pause)
			continue
		}
		pause = 0
		s.mu.Lock()
		at := s.fresh.PushBack(c)
		if s.fresh.Len() > introduceMost { // who says at once whose it is, is never the oldest
			s.fresh.Remove(s.fresh.Front()).(net.Conn).Close() //nolint:errcheck // its own goroutine sees it
		}
		s.mu.Unlock()
		s.waiting.Go(func() { s.introduce(c, at) })
	}
}

// introduce reads a connection's first line and hands the connection over to be served.
func (s *Server) introduce(c net.Conn, at *list.Element) {
	sb, hosts, fail := s.identify(c)
	s.mu.Lock()
	s.fresh.Remove(at)
	s.mu.Unlock()
	if fail != nil {
		s.refuse(c, *fail)
		return
	}
	mine := &conn{Conn: c, sandbox: sb, hosts: hosts, stall: s.cfg.Idle}
	mine.left = func() { // before it joins: it may be cut at once
		sb.Leave(mine)
		s.cfg.Metrics.Connected(-1)
	}
	if !sb.Join(mine) {
		s.refuse(c, failure{http.StatusServiceUnavailable, codeConnections, "this sandbox has too many connections open: close some"})
		return
	}
	s.cfg.Metrics.Connected(1)
	s.conns.give(mine)
}

// identify reads whose connection it is, and whether it is to reach hosts alone.
func (s *Server) identify(c net.Conn) (sb *registry.Sandbox, hosts bool, fail *failure) {
	bad := &failure{http.StatusBadRequest, codeMalformed, "a connection begins with " + strings.TrimSpace(runner.EgressPreamble) + ", a token and the end of the line"}
	if err := c.SetDeadline(time.Now().Add(introduceWithin)); err != nil {
		return nil, false, bad
	}
	line := make([]byte, 0, 128)
	for one := [1]byte{}; ; { // by bytes: what follows is the server's to read
		if _, err := io.ReadFull(c, one[:]); err != nil {
			return nil, false, bad
		}
		if one[0] == '\n' {
			break
		}
		if line = append(line, one[0]); len(line) > maxPreamble {
			return nil, false, bad
		}
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return nil, false, bad
	}
	token, ok := strings.CutPrefix(strings.TrimSuffix(string(line), "\r"), runner.EgressPreamble)
	if !ok {
		return nil, false, bad
	}
	token, hosts = strings.CutSuffix(token, runner.EgressHosts)
	sb, ok = s.cfg.Registry.ByToken(token)
	if !ok {
		return nil, false, &failure{http.StatusProxyAuthRequired, BadToken, "the token is nobody's: the sandbox is not registered, or no more"}
	}
	return sb, hosts, nil
}

// refuse answers a connection that is not served, and ends it.
func (s *Server) refuse(c net.Conn, f failure) {
	defer c.Close() //nolint:errcheck // nothing is lost with it
	s.cfg.Metrics.Denied(f.code)
	if n, ok := s.quiet.allow(time.Now()); ok {
		s.cfg.Logger.Warn("a connection is refused", "code", f.code, "reason", f.message, "since_last", n)
	}
	if c.SetDeadline(time.Now().Add(lingerFor)) != nil {
		return
	}
	if _, err := c.Write(f.raw()); err != nil || closeWrite(c) != nil {
		return
	}
	// What it sends on is read, or the answer could be thrown away with it.
	_, _ = io.CopyN(io.Discard, c, maxHeader)
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
	addr net.Addr
	c    chan net.Conn
	done chan struct{}
	once sync.Once
}

func newHandover(addr net.Addr) *handover {
	return &handover{addr: addr, c: make(chan net.Conn), done: make(chan struct{})}
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

func (h *handover) Addr() net.Addr { return h.addr }
