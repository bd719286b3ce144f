package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// A tunnel hides methods. If the allowlist names methods for a host, the proxy terminates the tunnel: it ends TLS with a
// certificate of its own, or reads plain HTTP, and checks and forwards each request as it does outside of tunnels. It writes
// forwarded requests anew, so that the host cannot read other requests in them.

// inspectedTunnel is a CONNECT tunnel of a sandbox, of which the proxy inspects the requests.
type inspectedTunnel struct {
	target    egress.Target
	scheme    string          // http or https: of the sandbox's requests, and of those to the host
	transport *http.Transport // connections to the host, of this tunnel only
	closed    atomic.Bool     // the sandbox's connection is closed
}

func (t *inspectedTunnel) close() {
	t.closed.Store(true)
	t.transport.CloseIdleConnections()
}

// handshakeWithin is the maximum time that a client may take for its first byte and the TLS handshake.
const handshakeWithin = 15 * time.Second

// serveInspected serves CONNECT to a host for which not all methods are allowed.
func (s *Server) serveInspected(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, t egress.Target) {
	counted := s.cfg.Metrics.Begin("connect")
	status := 0
	defer func() { counted(status) }()
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		sb.Log(s.cfg.Logger).Error("take over a connection", "error", err)
		return
	}
	if !s.enter(here) {
		here.Close() //nolint:errcheck // the proxy shuts down
		return
	}
	defer s.leave(here)
	early := make([]byte, buffered.Reader.Buffered())
	_, err = io.ReadFull(buffered, early)
	if err == nil {
		_, err = io.WriteString(here, "HTTP/1.1 200 Connection Established\r\n\r\n")
	}
	if err != nil {
		here.Close() //nolint:errcheck // it is broken
		return
	}
	status = http.StatusOK
	inner, scheme, err := s.terminate(r.Context(), here, early, t)
	if err != nil {
		here.Close() //nolint:errcheck // no request can be read from it
		s.journalUnreadable(sb, t, err)
		return
	}
	transport := s.others.Clone()
	transport.DisableKeepAlives, transport.IdleConnTimeout = false, s.cfg.Idle
	tunnel := &inspectedTunnel{target: t, scheme: scheme, transport: transport}
	s.conns.add(&conn{Conn: inner, sandbox: sb, writeWithin: s.cfg.Idle, onClose: tunnel.close, tunnel: tunnel})
}

// terminate returns the HTTP stream inside a tunnel, and its scheme. early has the bytes that came with the CONNECT request.
func (s *Server) terminate(ctx context.Context, here net.Conn, early []byte, t egress.Target) (net.Conn, string, error) {
	if err := here.SetReadDeadline(time.Now().Add(handshakeWithin)); err != nil {
		return nil, "", err
	}
	peeked := bufio.NewReader(io.MultiReader(bytes.NewReader(early), here))
	first, err := peeked.Peek(1)
	if err != nil {
		return nil, "", err
	}
	stream := &bufferedConn{Conn: here, from: peeked}
	switch c := first[0]; {
	case c == handshakeRecord:
		inner, err := s.terminateTLS(ctx, stream, t)
		if err != nil {
			return nil, "", err
		}
		return inner, "https", here.SetReadDeadline(time.Time{})
	case c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z':
		return stream, "http", here.SetReadDeadline(time.Time{})
	}
	return nil, "", errors.New("the tunnel carries neither TLS nor HTTP")
}

// terminateTLS makes the TLS handshake with a certificate for the host.
func (s *Server) terminateTLS(ctx context.Context, stream net.Conn, t egress.Target) (net.Conn, error) {
	cert, err := s.cfg.Authority.Certificate(t.Host)
	if err != nil {
		return nil, err
	}
	c := tls.Server(stream, &tls.Config{
		Certificates: []tls.Certificate{*cert}, NextProtos: []string{"http/1.1"}, MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			return nil, checkServerName(hello, t.Host) // a nil config means the one above
		},
	})
	ctx, cancel := context.WithTimeout(ctx, handshakeWithin)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// journalUnreadable journals why no request in a tunnel could be read. A client that only closed the connection is not journaled.
func (s *Server) journalUnreadable(sb *registry.Sandbox, t egress.Target, err error) {
	d := newDenial(t, http.MethodConnect)
	var remote *net.OpError
	var stalled net.Error
	switch {
	case errors.Is(err, errOtherName):
		d.Code, d.Message = BadHost, err.Error()
	case errors.As(err, &remote) && remote.Op == "remote error":
		d.Code, d.Message = Untrusted, "the allowlist names methods for "+t.String()+", so the proxy ends TLS, and the program in the sandbox did not go on with its certificate ("+
			remote.Err.Error()+"): it is to trust the file that SSL_CERT_FILE names, which a new turn brings up to date"
	case errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.As(err, &remote) || errors.As(err, &stalled) || errors.Is(err, context.Canceled):
		return
	default:
		d.Code, d.Message = MethodNotAllowed, "the allowlist names methods for "+t.String()+", and nothing else than requests of HTTP/1.1, in TLS or plain, can be judged by them: "+err.Error()
	}
	d.Message = truncateText(d.Message)
	s.recordDenial(sb, *d)
}

// journalUnparsed journals a request in a tunnel that the HTTP server refused before any handler saw it.
func (s *Server) journalUnparsed(c *conn) {
	method, ok := c.refusedRequest()
	if !ok {
		return
	}
	t := c.tunnel.target
	d := newDenial(t, truncateText(method))
	d.Code, d.Message = MethodNotAllowed, "the allowlist names methods for "+t.String()+", and what was sent is no request of HTTP/1.1 that could be judged by them"
	s.recordDenial(c.sandbox, *d)
}

// serveTunneled serves a request inside a tunnel, by the current policy.
func (s *Server) serveTunneled(w http.ResponseWriter, r *http.Request, c *conn) {
	t := c.tunnel.target
	denial := checkMethod(t, c.sandbox.Access(t), r)
	if denial == nil {
		denial = checkTarget(c.tunnel, r)
	}
	if denial != nil {
		s.deny(w, c.sandbox, statusOf(denial), *denial)
		return
	}
	s.pass(w, r, c.sandbox, destination{route: "judged", target: t, scheme: c.tunnel.scheme, transport: c.tunnel.transport})
	if c.tunnel.closed.Load() { // this request's connection became idle after close
		c.tunnel.transport.CloseIdleConnections()
	}
}

// checkTarget returns the denial of a request whose target is not the tunnel's, nil for the tunnel's.
func checkTarget(tunnel *inspectedTunnel, r *http.Request) *events.EgressDenied {
	d := newDenial(tunnel.target, r.Method)
	d.Code = BadHost
	assume := uint16(80)
	if tunnel.scheme == "https" {
		assume = 443
	}
	switch named, err := egress.ParseTarget(r.Host, assume); {
	case err != nil || named != tunnel.target:
		d.Message = "the request is for " + egress.QuotePrefix(r.Host) + ", and the tunnel was opened to " + tunnel.target.String()
	case !strings.HasPrefix(r.RequestURI, "/"):
		d.Message = "in a tunnel a request names a path, not " + egress.QuotePrefix(r.RequestURI)
	default:
		return nil
	}
	return d
}

// overrideHeaders are headers by which web frameworks use another method than that of the request.
var overrideHeaders = []string{"X-Http-Method-Override", "X-Http-Method", "X-Method-Override"}

// checkMethod returns the denial of a request whose method the allowlist does not allow for a target, nil if it does. If not all
// methods are allowed, checkMethod removes an offer to upgrade to HTTP/2 from the request, and denies any other upgrade: after
// it there are no methods to check, or they are hidden.
func checkMethod(t egress.Target, a egress.Access, r *http.Request) *events.EgressDenied {
	d := newDenial(t, r.Method)
	d.Code = MethodNotAllowed
	switch {
	case !a.AllowsAny():
		d.Code, d.Message = NotAllowed, notAllowedMessage(t)
		return d
	case r.Method == http.MethodTrace:
		d.Message = "TRACE is not forwarded"
		return d
	case a.AllowsAll():
		return nil
	case !a.Allows(r.Method):
		d.Message = notInAccessMessage(r.Method, t, a)
		return d
	}
	for _, name := range overrideHeaders {
		for _, v := range r.Header.Values(name) {
			if m := strings.ToUpper(strings.TrimSpace(v)); !a.Allows(m) {
				d.Message = "header " + name + ": " + notInAccessMessage(m, t, a)
				return d
			}
		}
	}
	for _, v := range r.Header.Values("Upgrade") {
		if !strings.EqualFold(strings.TrimSpace(v), "h2c") {
			d.Message = "the allowlist names methods for " + t.String() + ", and after a change of protocol there are none to judge: an entry without methods allows it"
			return d
		}
	}
	r.Header.Del("Upgrade")
	r.Header.Del("Http2-Settings")
	return nil
}

func notInAccessMessage(method string, t egress.Target, a egress.Access) string {
	return egress.QuotePrefix(method) + " is not among the methods that the session's allowlist names for " + t.String() + ": " + strings.Join(a.Methods(), ", ")
}

// bufferedConn is a connection with bytes that were read ahead.
type bufferedConn struct {
	net.Conn
	from *bufio.Reader
}

func (r *bufferedConn) Read(p []byte) (int, error) { return r.from.Read(p) }

// CloseWrite closes the write direction.
func (r *bufferedConn) CloseWrite() error { return closeWrite(r.Conn) }
