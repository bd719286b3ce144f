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
	identifyTimeout      = 5 * time.Second
	maxUnidentifiedConns = 1024 // of each listener
	refusalLinger        = time.Second
	maxPreambleBytes     = 512
)

// Listener is a listening socket to which sandboxes connect.
type Listener struct {
	net.Listener
	TLS *TLSConfig // nil for a Unix socket, which only sandboxes of this machine reach
}

// TLSConfig configures a listener that other machines can reach. The proxy closes a connection that does not identify a registered sandbox
// without an answer.
type TLSConfig struct {
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

// pendingConns holds the connections of one listener that have not identified their sandbox yet.
type pendingConns struct {
	perAddress int // 0 for no limit

	mu     sync.Mutex
	list   *list.List         // of *pendingConn, oldest first
	counts map[netip.Addr]int // by address
	done   sync.WaitGroup     // of the goroutines that identify them
}

// pendingConn is a connection in a pendingConns.
type pendingConn struct {
	net.Conn
	address netip.Addr
	evicted bool // guarded by the lock of pendingConns
}

func newPendingConns(perAddress int) *pendingConns {
	return &pendingConns{perAddress: perAddress, list: list.New(), counts: map[netip.Addr]int{}}
}

// countedAddress returns the address by which the limit of connections counts a connection: an IPv4 address, or the /64 network of an IPv6
// address, because one host may have all addresses of such a network. It returns the zero address for a Unix socket.
func countedAddress(c net.Conn) netip.Addr {
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

// add adds a connection to the list. If the list has too many connections, add closes the oldest one and returns evicted as true.
func (a *pendingConns) add(c net.Conn) (element *list.Element, evicted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mine := &pendingConn{Conn: c, address: countedAddress(c)}
	element = a.list.PushBack(mine)
	a.counts[mine.address]++
	oldest := a.list.Front()
	switch {
	case a.perAddress > 0 && a.counts[mine.address] > a.perAddress:
		for oldest.Value.(*pendingConn).address != mine.address {
			oldest = oldest.Next()
		}
	case a.list.Len() <= maxUnidentifiedConns:
		return element, false
	}
	victim := oldest.Value.(*pendingConn)
	victim.evicted = true
	a.removeElement(oldest)
	victim.Close() //nolint:errcheck // its goroutine sees the error
	return element, true
}

// removeElement removes a connection from the list. The caller holds the lock.
func (a *pendingConns) removeElement(element *list.Element) {
	gone := a.list.Remove(element).(*pendingConn)
	if a.counts[gone.address]--; a.counts[gone.address] == 0 {
		delete(a.counts, gone.address)
	}
}

// remove removes a connection that has identified its sandbox or was refused, and reports whether the connection was evicted before.
func (a *pendingConns) remove(element *list.Element) (evicted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mine := element.Value.(*pendingConn)
	if !mine.evicted {
		a.removeElement(element)
	}
	return mine.evicted
}

// close closes all connections of the list, and blocks until their goroutines have ended.
func (a *pendingConns) close() {
	a.mu.Lock()
	for e := a.list.Front(); e != nil; e = e.Next() {
		e.Value.(*pendingConn).Close() //nolint:errcheck // it has sent no request
	}
	a.mu.Unlock()
	a.done.Wait()
}

// acceptConns accepts connections until the listener is closed, each in a goroutine of its own.
func (s *Server) acceptConns(l Listener) {
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
			s.cfg.Metrics.CountTLSRefusal(refusedEvicted)
		}
		pending.done.Go(func() { s.handleConn(l, pending, element) })
	}
}

// sandboxIdentity has what a sandbox sends in the first line of a connection, the preamble, to identify itself.
type sandboxIdentity struct {
	sandbox   *registry.Sandbox
	hostsOnly bool // the connection reaches hosts of the allowlist only
}

// handleConn identifies the sandbox of a new connection, and passes the connection to the HTTP server.
func (s *Server) handleConn(l Listener, pending *pendingConns, element *list.Element) {
	raw := element.Value.(*pendingConn).Conn
	c, id, fail := s.handshake(l, raw)
	if evicted := pending.remove(element); evicted {
		return
	}
	if fail != nil {
		s.refuseConn(l, c, *fail)
		return
	}
	owner := newMemoryOwner(id.sandbox)
	mine := &identifiedConn{Conn: c, sandbox: id.sandbox, hostsOnly: id.hostsOnly, writeWithin: s.cfg.Idle, memory: s.memory, owner: owner}
	mine.onClose = func() { // set before AddConn: a release may close the connection at once
		id.sandbox.RemoveConn(mine)
		s.releaseConn(l, owner)
	}
	switch {
	case !s.memory.reserve(owner, connMemoryBytes):
		s.refuseConn(l, c, failure{http.StatusServiceUnavailable, codeTooManyConnections, errMemoryFull.Error()})
	case !s.admitConn(l):
		s.memory.release(owner, connMemoryBytes)
		s.refuseConn(l, c, failure{http.StatusServiceUnavailable, codeTooManyConnections, "the egress proxy has too many connections open: try again"})
	case !id.sandbox.AddConn(mine):
		s.releaseConn(l, owner)
		s.refuseConn(l, c, failure{http.StatusServiceUnavailable, codeTooManyConnections, "this sandbox has too many connections open: close some"})
	default:
		s.conns.add(mine)
	}
}

// handshake makes the TLS handshake, if the listener has TLS, and reads the preamble. It returns the connection that the caller must use
// from then on.
func (s *Server) handshake(l Listener, c net.Conn) (net.Conn, sandboxIdentity, *failure) {
	within := identifyTimeout
	if l.TLS != nil {
		within = l.TLS.Within
	}
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return c, sandboxIdentity{}, &failure{code: refusedHandshake}
	}
	if l.TLS == nil {
		id, fail := s.readIdentity(c)
		return c, id, fail
	}
	secure, err := tlsconn.Server(context.Background(), c, l.TLS.Config)
	if err != nil {
		return c, sandboxIdentity{}, &failure{code: refusedHandshake, message: err.Error()}
	}
	id, fail := s.readIdentity(secure)
	return secure, id, fail
}

// admitConn counts a connection that has identified its sandbox. It returns false if the listener has TLS and too many connections over TLS
// are open.
func (s *Server) admitConn(l Listener) bool {
	if l.TLS != nil && s.remote.Add(1) > int64(l.TLS.Connections) {
		s.remote.Add(-1)
		return false
	}
	s.cfg.Metrics.AddConnections(1)
	return true
}

// releaseConn counts the end of a connection for which memory was reserved and that admitConn has counted.
func (s *Server) releaseConn(l Listener, owner memoryOwner) {
	s.memory.release(owner, connMemoryBytes)
	if l.TLS != nil {
		s.remote.Add(-1)
	}
	s.cfg.Metrics.AddConnections(-1)
}

// readIdentity reads the preamble before the connection's deadline, and then removes the deadline.
func (s *Server) readIdentity(c net.Conn) (sandboxIdentity, *failure) {
	bad := &failure{http.StatusBadRequest, codeMalformed, "a connection begins with a line of " + strings.TrimSpace(runner.EgressPreamble) + " and a token"}
	line := make([]byte, 0, 128)
	for one := [1]byte{}; ; { // byte by byte, since the HTTP server reads the bytes after the line
		if _, err := io.ReadFull(c, one[:]); err != nil {
			return sandboxIdentity{}, bad
		}
		if one[0] == '\n' {
			break
		}
		if line = append(line, one[0]); len(line) > maxPreambleBytes {
			return sandboxIdentity{}, bad
		}
	}
	// TLS itself writes to a connection that has no answer, so the write deadline is set here as well.
	if err := errors.Join(c.SetDeadline(time.Time{}), c.SetWriteDeadline(time.Now().Add(s.cfg.Idle))); err != nil {
		return sandboxIdentity{}, bad
	}
	token, ok := strings.CutPrefix(strings.TrimSuffix(string(line), "\r"), runner.EgressPreamble)
	if !ok {
		return sandboxIdentity{}, bad
	}
	token, hostsOnly := strings.CutSuffix(token, runner.EgressHostsOnly)
	sb, ok := s.cfg.Registry.ByToken(token)
	if !ok {
		return sandboxIdentity{}, &failure{http.StatusProxyAuthRequired, CodeBadToken, "the token belongs to no registered sandbox"}
	}
	return sandboxIdentity{sb, hostsOnly}, nil
}

// refuseConn closes a connection that the proxy does not serve. Before that it sends the reason, but over TLS only to an identified
// sandbox.
func (s *Server) refuseConn(l Listener, c net.Conn, f failure) {
	defer c.Close() //nolint:errcheck // a connection that fails to close is broken
	if l.TLS != nil {
		reason, identified := tlsRefusalReason(f)
		s.cfg.Metrics.CountTLSRefusal(reason)
		if n, ok := s.logs.allowMessage(time.Now()); ok {
			s.cfg.Logger.Warn("a connection over TLS is refused", "reason", reason, "error", f.message, "address", c.RemoteAddr().String(), "since_last", n)
		}
		if !identified {
			return
		}
	} else {
		s.cfg.Metrics.CountDenial(f.code)
		if n, ok := s.logs.allowMessage(time.Now()); ok {
			s.cfg.Logger.Warn("a connection is refused", "code", f.code, "reason", f.message, "since_last", n)
		}
	}
	if c.SetDeadline(time.Now().Add(refusalLinger)) != nil {
		return
	}
	if _, err := c.Write(f.httpResponse()); err != nil || closeWrite(c) != nil {
		return
	}
	// Closing with unread bytes would reset the connection, and the sandbox would lose the answer.
	_, _ = io.CopyN(io.Discard, c, maxHeaderBytes)
}

// tlsRefusalReason returns the value of the metric's label for a connection over TLS that was refused with f, and whether the connection
// had identified its sandbox.
func tlsRefusalReason(f failure) (reason string, identified bool) {
	switch f.code {
	case refusedHandshake:
		return refusedHandshake, false
	case CodeBadToken:
		return refusedToken, false
	case codeTooManyConnections:
		return refusedLimit, true
	}
	return refusedPreamble, false
}
