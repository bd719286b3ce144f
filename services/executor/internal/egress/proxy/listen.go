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

	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/tlsconn"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// Limits of connections that have not identified their sandbox yet.
const (
	identifyWithin  = 5 * time.Second
	maxUnidentified = 1024 // of each listener
	lingerFor       = time.Second
	maxPreamble     = 512
)

// Listener is a listening socket to which sandboxes connect.
type Listener struct {
	net.Listener
	TLS *TLS // nil for a Unix socket, which only sandboxes of this machine reach
}

// TLS configures a listener that is reachable from other machines. A connection that does not name a registered sandbox is closed without an answer.
type TLS struct {
	Config      *tls.Config
	Within      time.Duration // for the handshake and the first line together
	Connections int           // limit of identified connections of all sandboxes
	PerAddress  int           // limit of unidentified connections of an address; one more closes the oldest
}

// Reasons for closing a connection over TLS, as the metric names them.
const (
	refusedHandshake = "handshake" // not TLS 1.3, or too slow
	refusedPreamble  = "preamble"  // the first line is not a preamble, too long or too slow
	refusedToken     = "token"     // the token belongs to no registered sandbox
	refusedEvicted   = "crowd"     // too many unidentified connections, of its address or of all
	refusedLimit     = "limit"     // too many identified connections
)

// pendingConns holds the connections of one listener whose sandbox was not identified yet.
type pendingConns struct {
	perAddress int // 0 for no limit

	mu     sync.Mutex
	list   *list.List         // of *pendingConn, oldest first
	counts map[netip.Addr]int // by address
	done   sync.WaitGroup     // of the goroutines that identify them
}

type pendingConn struct {
	net.Conn
	address netip.Addr
	evicted bool // guarded by the lock of pendingConns
}

func newPendingConns(perAddress int) *pendingConns {
	return &pendingConns{perAddress: perAddress, list: list.New(), counts: map[netip.Addr]int{}}
}

// addressOf returns the address by which a connection is counted: an IPv4 address, or the /64 network of an IPv6 address, since one host
// may have all addresses of it. For a Unix socket it returns the zero address.
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

// add adds a connection, and evicts the oldest one if there are too many. A connection that identifies its sandbox at once is
// never the oldest.
func (a *pendingConns) add(c net.Conn) (element *list.Element, evicted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mine := &pendingConn{Conn: c, address: addressOf(c)}
	element = a.list.PushBack(mine)
	a.counts[mine.address]++
	oldest := a.list.Front()
	switch {
	case a.perAddress > 0 && a.counts[mine.address] > a.perAddress:
		for oldest.Value.(*pendingConn).address != mine.address {
			oldest = oldest.Next()
		}
	case a.list.Len() <= maxUnidentified:
		return element, false
	}
	victim := oldest.Value.(*pendingConn)
	victim.evicted = true
	a.forget(oldest)
	victim.Close() //nolint:errcheck // its goroutine sees the error
	return element, true
}

// forget removes a connection from the list. The lock is held.
func (a *pendingConns) forget(element *list.Element) {
	gone := a.list.Remove(element).(*pendingConn)
	if a.counts[gone.address]--; a.counts[gone.address] == 0 {
		delete(a.counts, gone.address)
	}
}

// remove removes a connection that was identified, or refused. It reports whether the connection was evicted before.
func (a *pendingConns) remove(element *list.Element) (evicted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mine := element.Value.(*pendingConn)
	if !mine.evicted {
		a.forget(element)
	}
	return mine.evicted
}

// close closes all connections of the list, and returns when their goroutines have ended.
func (a *pendingConns) close() {
	a.mu.Lock()
	for e := a.list.Front(); e != nil; e = e.Next() {
		e.Value.(*pendingConn).Close() //nolint:errcheck // it has sent no request
	}
	a.mu.Unlock()
	a.done.Wait()
}

// accept accepts connections until the listener is closed.
func (s *Server) accept(l Listener) {
	perAddress := 0
	if l.TLS != nil {
		perAddress = l.TLS.PerAddress
	}
	pending := newPendingConns(perAddress)
	defer pending.close()
	pauses := retry.NewDoubling(5*time.Millisecond, time.Second)
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // most likely out of file descriptors, which passes
			pause := pauses.NextBackOff()
			s.cfg.Logger.Error("accept a sandbox's connection", "error", err, "again", pause)
			time.Sleep(pause)
			continue
		}
		pauses.Reset()
		element, evicted := pending.add(c)
		if evicted && l.TLS != nil {
			s.cfg.Metrics.RefusedTLS(refusedEvicted)
		}
		pending.done.Go(func() { s.handle(l, pending, element) })
	}
}

// identity holds the fields of the first line of a connection, the preamble, by which a sandbox identifies itself.
type identity struct {
	sandbox   *registry.Sandbox
	hostsOnly bool // the connection reaches hosts of the allowlist only
}

// handle identifies the sandbox of a connection, and passes the connection on to be served.
func (s *Server) handle(l Listener, pending *pendingConns, element *list.Element) {
	raw := element.Value.(*pendingConn).Conn
	c, id, fail := s.handshake(l, raw)
	if evicted := pending.remove(element); evicted {
		return
	}
	if fail != nil {
		s.refuse(l, c, *fail)
		return
	}
	mine := &conn{Conn: c, sandbox: id.sandbox, hostsOnly: id.hostsOnly, writeWithin: s.cfg.Idle}
	mine.onClose = func() { // set before AddConn: a release may close the connection at once
		id.sandbox.RemoveConn(mine)
		s.dismiss(l)
	}
	switch {
	case !s.admit(l):
		s.refuse(l, c, failure{http.StatusServiceUnavailable, codeConnections, "the egress proxy has too many connections open: try again"})
	case !id.sandbox.AddConn(mine):
		s.dismiss(l)
		s.refuse(l, c, failure{http.StatusServiceUnavailable, codeConnections, "this sandbox has too many connections open: close some"})
	default:
		s.conns.add(mine)
	}
}

// handshake makes the TLS handshake, if the listener has TLS, and reads the first line. The caller uses the returned connection.
func (s *Server) handshake(l Listener, c net.Conn) (net.Conn, identity, *failure) {
	within := identifyWithin
	if l.TLS != nil {
		within = l.TLS.Within
	}
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return c, identity{}, &failure{code: refusedHandshake}
	}
	if l.TLS == nil {
		id, fail := s.identify(c)
		return c, id, fail
	}
	secure, err := tlsconn.Server(context.Background(), c, l.TLS.Config)
	if err != nil {
		return c, identity{}, &failure{code: refusedHandshake, message: err.Error()}
	}
	id, fail := s.identify(secure)
	return secure, id, fail
}

// admit counts a connection whose sandbox was identified. It returns false if the listener has TLS and too many
// connections over TLS are open.
func (s *Server) admit(l Listener) bool {
	if l.TLS != nil && s.remote.Add(1) > int64(l.TLS.Connections) {
		s.remote.Add(-1)
		return false
	}
	s.cfg.Metrics.Connected(1)
	return true
}

// dismiss counts the end of a connection that admit has counted. It takes no lock, because connections are closed with
// locks held.
func (s *Server) dismiss(l Listener) {
	if l.TLS != nil {
		s.remote.Add(-1)
	}
	s.cfg.Metrics.Connected(-1)
}

// identify reads the first line within the connection's deadline, and then removes the deadline.
func (s *Server) identify(c net.Conn) (identity, *failure) {
	bad := &failure{http.StatusBadRequest, codeMalformed, "a connection begins with a line of " + strings.TrimSpace(runner.EgressPreamble) + " and a token"}
	line := make([]byte, 0, 128)
	for one := [1]byte{}; ; { // byte by byte, since the HTTP server reads the bytes after the line
		if _, err := io.ReadFull(c, one[:]); err != nil {
			return identity{}, bad
		}
		if one[0] == '\n' {
			break
		}
		if line = append(line, one[0]); len(line) > maxPreamble {
			return identity{}, bad
		}
	}
	// TLS itself writes to a connection that has no answer, so the write deadline is set here as well.
	if err := errors.Join(c.SetDeadline(time.Time{}), c.SetWriteDeadline(time.Now().Add(s.cfg.Idle))); err != nil {
		return identity{}, bad
	}
	token, ok := strings.CutPrefix(strings.TrimSuffix(string(line), "\r"), runner.EgressPreamble)
	if !ok {
		return identity{}, bad
	}
	token, hostsOnly := strings.CutSuffix(token, runner.EgressHostsOnly)
	sb, ok := s.cfg.Registry.ByToken(token)
	if !ok {
		return identity{}, &failure{http.StatusProxyAuthRequired, BadToken, "the token belongs to no registered sandbox"}
	}
	return identity{sb, hostsOnly}, nil
}

// refuse closes a connection that is not served, after an answer with the reason. Over TLS only an identified sandbox gets an answer.
func (s *Server) refuse(l Listener, c net.Conn, f failure) {
	defer c.Close() //nolint:errcheck // a connection that fails to close is broken
	if l.TLS != nil {
		reason, identified := refusalOverTLS(f)
		s.cfg.Metrics.RefusedTLS(reason)
		if n, ok := s.logs.allow(time.Now()); ok {
			s.cfg.Logger.Warn("a connection over TLS is refused", "reason", reason, "error", f.message, "address", c.RemoteAddr().String(), "since_last", n)
		}
		if !identified {
			return
		}
	} else {
		s.cfg.Metrics.Denied(f.code)
		if n, ok := s.logs.allow(time.Now()); ok {
			s.cfg.Logger.Warn("a connection is refused", "code", f.code, "reason", f.message, "since_last", n)
		}
	}
	if c.SetDeadline(time.Now().Add(lingerFor)) != nil {
		return
	}
	if _, err := c.Write(f.raw()); err != nil || closeWrite(c) != nil {
		return
	}
	// Closing with unread bytes would reset the connection, and the sandbox would lose the answer.
	_, _ = io.CopyN(io.Discard, c, maxHeader)
}

// refusalOverTLS returns the reason for which a connection over TLS was refused, as the metric names it, and whether
// its sandbox was identified.
func refusalOverTLS(f failure) (reason string, identified bool) {
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
