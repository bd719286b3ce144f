package proxy

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/tlsconn"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// Bounds of connections that have not said yet whose they are.
const (
	introduceWithin = 5 * time.Second
	introduceMost   = 1024 // of each listener
	lingerFor       = time.Second
	maxPreamble     = 512
)

// Listener is a socket at which sandboxes connect.
type Listener struct {
	net.Listener
	TLS *TLS // nil for a socket that only sandboxes of this machine reach
}

// TLS is how a listener that anybody may reach serves. A connection that does not name a registered sandbox is closed without an answer.
type TLS struct {
	Config      *tls.Config
	Within      time.Duration // for the handshake and the first line together
	Connections int           // of all sandboxes at once
	PerAddress  int           // connections of an address that have not named a sandbox; the oldest gives way
}

// Reasons for which a connection over TLS is closed, as the metric names them.
const (
	refusedHandshake = "handshake" // not TLS 1.3, or too slow
	refusedPreamble  = "preamble"  // the first line is none, too long or too slow
	refusedToken     = "token"     // it names no registered sandbox
	refusedCrowd     = "crowd"     // too many wait to say whose they are, of its address or of all
	refusedLimit     = "limit"     // too many connections of sandboxes
)

// arrivals are the connections of one listener that have not said yet whose they are.
type arrivals struct {
	perAddress int // 0 for no limit

	mu      sync.Mutex
	waiting *list.List // of *arrival, oldest first
	from    map[netip.Addr]int
	done    sync.WaitGroup // their goroutines
}

type arrival struct {
	net.Conn
	address netip.Addr
	evicted bool // guarded by the lock of arrivals
}

func newArrivals(perAddress int) *arrivals {
	return &arrivals{perAddress: perAddress, waiting: list.New(), from: map[netip.Addr]int{}}
}

// addressOf returns what connections are counted by: an IPv4 address, or the first 64 bits of an IPv6 one, as one host may have all of
// those; the zero address for a Unix socket.
func addressOf(c net.Conn) netip.Addr {
	tcp, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	a := tcp.AddrPort().Addr().Unmap()
	if !a.Is6() {
		return a
	}
	network, err := a.WithZone("").Prefix(64)
	if err != nil {
		return a
	}
	return network.Addr()
}

// add counts a connection, and evicts the oldest one where there are too many; who says at once whose it is, is never the oldest.
func (a *arrivals) add(c net.Conn) (at *list.Element, evicted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mine := &arrival{Conn: c, address: addressOf(c)}
	at = a.waiting.PushBack(mine)
	a.from[mine.address]++
	oldest := a.waiting.Front()
	switch {
	case a.perAddress > 0 && a.from[mine.address] > a.perAddress:
		for oldest.Value.(*arrival).address != mine.address {
			oldest = oldest.Next()
		}
	case a.waiting.Len() <= introduceMost:
		return at, false
	}
	victim := oldest.Value.(*arrival)
	victim.evicted = true
	a.forget(oldest)
	victim.Close() //nolint:errcheck // its own goroutine sees it
	return at, true
}

// forget takes a connection off the list. The lock is held.
func (a *arrivals) forget(at *list.Element) {
	gone := a.waiting.Remove(at).(*arrival)
	if a.from[gone.address]--; a.from[gone.address] == 0 {
		delete(a.from, gone.address)
	}
}

// remove is called when a connection has said whose it is, or failed to. It reports whether the connection was evicted before.
func (a *arrivals) remove(at *list.Element) (evicted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mine := at.Value.(*arrival)
	if !mine.evicted {
		a.forget(at)
	}
	return mine.evicted
}

// close closes what still waits, and returns when its goroutines have ended.
func (a *arrivals) close() {
	a.mu.Lock()
	for e := a.waiting.Front(); e != nil; e = e.Next() {
		e.Value.(*arrival).Close() //nolint:errcheck // it has said nothing yet
	}
	a.mu.Unlock()
	a.done.Wait()
}

// accept takes connections off a listener until that is closed.
func (s *Server) accept(l Listener) {
	perAddress := 0
	if l.TLS != nil {
		perAddress = l.TLS.PerAddress
	}
	fresh := newArrivals(perAddress)
	defer fresh.close()
	for pause := time.Duration(0); ; {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of file descriptors: it passes
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			s.cfg.Logger.Error("accept a sandbox's connection", "error", err, "again", pause)
			time.Sleep(pause)
			continue
		}
		pause = 0
		at, evicted := fresh.add(c)
		if evicted && l.TLS != nil {
			s.cfg.Metrics.RefusedTLS(refusedCrowd)
		}
		fresh.done.Go(func() { s.introduce(l, fresh, at) })
	}
}

// introduction is what a connection says first.
type introduction struct {
	sandbox *registry.Sandbox
	hosts   bool // it is to reach hosts of the allowlist alone
}

// introduce learns whose a connection is, and hands the connection over to be served.
func (s *Server) introduce(l Listener, fresh *arrivals, at *list.Element) {
	raw := at.Value.(*arrival).Conn
	c, who, fail := s.meet(l, raw)
	if evicted := fresh.remove(at); evicted {
		return
	}
	if fail != nil {
		s.refuse(l, c, *fail)
		return
	}
	mine := &conn{Conn: c, sandbox: who.sandbox, hosts: who.hosts, stall: s.cfg.Idle}
	mine.left = func() { // before it joins: it may be cut at once
		who.sandbox.RemoveConn(mine)
		s.dismiss(l)
	}
	switch {
	case !s.admit(l):
		s.refuse(l, c, failure{http.StatusServiceUnavailable, codeConnections, "the egress proxy has too many connections open: try again"})
	case !who.sandbox.AddConn(mine):
		s.dismiss(l)
		s.refuse(l, c, failure{http.StatusServiceUnavailable, codeConnections, "this sandbox has too many connections open: close some"})
	default:
		s.conns.give(mine)
	}
}

// meet makes the handshake, where there is one, and reads the first line. The connection that it returns is to be used from then on.
func (s *Server) meet(l Listener, c net.Conn) (net.Conn, introduction, *failure) {
	within := introduceWithin
	if l.TLS != nil {
		within = l.TLS.Within
	}
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return c, introduction{}, &failure{code: refusedHandshake}
	}
	if l.TLS == nil {
		who, fail := s.identify(c)
		return c, who, fail
	}
	secure, err := tlsconn.Server(context.Background(), c, l.TLS.Config)
	if err != nil {
		return c, introduction{}, &failure{code: refusedHandshake, message: err.Error()}
	}
	who, fail := s.identify(secure)
	return secure, who, fail
}

// admit counts a connection that has said whose it is; false when there are too many over TLS.
func (s *Server) admit(l Listener) bool {
	if l.TLS != nil && s.remote.Add(1) > int64(l.TLS.Connections) {
		s.remote.Add(-1)
		return false
	}
	s.cfg.Metrics.Connected(1)
	return true
}

// dismiss counts the end of a connection that was admitted. It takes no lock: connections are closed under several.
func (s *Server) dismiss(l Listener) {
	if l.TLS != nil {
		s.remote.Add(-1)
	}
	s.cfg.Metrics.Connected(-1)
}

// identify reads the first line, within the deadline of the connection, and takes the deadline away.
func (s *Server) identify(c net.Conn) (introduction, *failure) {
	bad := &failure{http.StatusBadRequest, codeMalformed, "a connection begins with " + strings.TrimSpace(runner.EgressPreamble) + ", a token and the end of the line"}
	line := make([]byte, 0, 128)
	for one := [1]byte{}; ; { // by bytes: what follows is the server's to read
		if _, err := io.ReadFull(c, one[:]); err != nil {
			return introduction{}, bad
		}
		if one[0] == '\n' {
			break
		}
		if line = append(line, one[0]); len(line) > maxPreamble {
			return introduction{}, bad
		}
	}
	// A connection that is never written to still has a deadline for what TLS itself writes.
	if err := errors.Join(c.SetDeadline(time.Time{}), c.SetWriteDeadline(time.Now().Add(s.cfg.Idle))); err != nil {
		return introduction{}, bad
	}
	token, ok := strings.CutPrefix(strings.TrimSuffix(string(line), "\r"), runner.EgressPreamble)
	if !ok {
		return introduction{}, bad
	}
	token, hosts := strings.CutSuffix(token, runner.EgressHosts)
	sb, ok := s.cfg.Registry.ByToken(token)
	if !ok {
		return introduction{}, &failure{http.StatusProxyAuthRequired, BadToken, "the token is nobody's: the sandbox is not registered, or no more"}
	}
	return introduction{sb, hosts}, nil
}

// refuse ends a connection that is not served. A sandbox is told why; over TLS only one that has named itself by its token.
func (s *Server) refuse(l Listener, c net.Conn, f failure) {
	defer c.Close() //nolint:errcheck // nothing is lost with it
	if l.TLS != nil {
		reason, known := refusalOverTLS(f)
		s.cfg.Metrics.RefusedTLS(reason)
		if n, ok := s.quiet.allow(time.Now()); ok {
			s.cfg.Logger.Warn("a connection over TLS is refused", "reason", reason, "error", f.message, "address", c.RemoteAddr().String(), "since_last", n)
		}
		if !known {
			return
		}
	} else {
		s.cfg.Metrics.Denied(f.code)
		if n, ok := s.quiet.allow(time.Now()); ok {
			s.cfg.Logger.Warn("a connection is refused", "code", f.code, "reason", f.message, "since_last", n)
		}
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

// refusalOverTLS returns the reason that the metric names, and whether the connection has named a registered sandbox.
func refusalOverTLS(f failure) (reason string, known bool) {
	switch f.code {
	case refusedHandshake:
		return refusedHandshake, false
	case BadToken:
		return refusedToken, false
	case codeConnections:
		return refusedLimit, true
	}
	return refusedPreamble, false
}
