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

// inspectedTunnel is a CONNECT tunnel of a sandbox in which the proxy reads and checks each HTTP request.
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

// handshakeTimeout is the maximum time that the client of a tunnel may take to send its first byte and to complete the TLS
// handshake.
const handshakeTimeout = 15 * time.Second

// serveInspected serves a CONNECT request to a host for which the allowlist limits the methods, so that the proxy has to read the
// requests in the tunnel.
func (s *Server) serveInspected(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, t egress.Target) {
	counted := s.cfg.Metrics.BeginRequest("connect")
	status := 0
	defer func() { counted(status) }()
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		sb.WithSandbox(s.cfg.Logger).Error("take over a connection", "error", err)
		return
	}
	if !s.addTunnel(here) {
		here.Close() //nolint:errcheck // the proxy shuts down
		return
	}
	defer s.removeTunnel(here)
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
	inner, scheme, err := s.openTunnelStream(r.Context(), here, early, t)
	if err != nil {
		here.Close() //nolint:errcheck // no request can be read from it
		s.journalUnreadable(sb, t, err)
		return
	}
	transport := s.others.Clone()
	transport.DisableKeepAlives, transport.IdleConnTimeout = false, s.cfg.Idle
	tunnel := &inspectedTunnel{target: t, scheme: scheme, transport: transport}
	s.conns.add(&identifiedConn{Conn: inner, sandbox: sb, writeWithin: s.cfg.Idle, onClose: tunnel.close, tunnel: tunnel, memory: s.memory, owner: newMemoryOwner(sb)})
}

// openTunnelStream returns the stream of HTTP requests in a tunnel, decrypted if the client uses TLS, and the scheme http or https.
// early are the bytes that arrived together with the CONNECT request.
func (s *Server) openTunnelStream(ctx context.Context, here net.Conn, early []byte, t egress.Target) (net.Conn, string, error) {
	if err := here.SetReadDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, "", err
	}
	peeked := bufio.NewReader(io.MultiReader(bytes.NewReader(early), here))
	first, err := peeked.Peek(1)
	if err != nil {
		return nil, "", err
	}
	stream := &bufferedConn{Conn: here, from: peeked}
	switch c := first[0]; {
	case c == tlsHandshakeRecord:
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

// terminateTLS makes the TLS handshake with the client of a tunnel, with a certificate for the tunnel's host, and returns the
// decrypted stream.
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
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// journalUnreadable records a denial for a tunnel in which no HTTP request could be read. It does nothing if the client only closed
// the connection.
func (s *Server) journalUnreadable(sb *registry.Sandbox, t egress.Target, err error) {
	d := newDenial(t, http.MethodConnect)
	var remote *net.OpError
	var stalled net.Error
	switch {
	case errors.Is(err, errOtherServerName):
		d.Code, d.Message = CodeBadHost, err.Error()
	case errors.As(err, &remote) && remote.Op == "remote error":
		d.Code, d.Message = CodeUntrusted, "the allowlist names methods for "+t.String()+", so the proxy ends TLS, and the program in the sandbox did not go on with its certificate ("+
			remote.Err.Error()+"): it is to trust the file that SSL_CERT_FILE names, which a new turn brings up to date"
	case errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.As(err, &remote) || errors.As(err, &stalled) || errors.Is(err, context.Canceled):
		return
	default:
		d.Code, d.Message = CodeMethodNotAllowed, "the allowlist names methods for "+t.String()+", and nothing else than requests of HTTP/1.1, in TLS or plain, can be judged by them: "+err.Error()
	}
	d.Message = truncateText(d.Message)
	s.recordDenial(sb, *d)
}

// journalUnparsed records a denial for a request in a tunnel that the HTTP server refused without calling a handler.
func (s *Server) journalUnparsed(c *identifiedConn) {
	method, ok := c.refusedRequest()
	if !ok {
		return
	}
	t := c.tunnel.target
	d := newDenial(t, truncateText(method))
	d.Code, d.Message = CodeMethodNotAllowed, "the allowlist names methods for "+t.String()+", and what was sent is no request of HTTP/1.1 that could be judged by them"
	s.recordDenial(c.sandbox, *d)
}

// serveTunneled serves an HTTP request in a tunnel. It applies the sandbox's present allowlist, not that of the time of the
// CONNECT.
func (s *Server) serveTunneled(w http.ResponseWriter, r *http.Request, c *identifiedConn) {
	t := c.tunnel.target
	denial := checkMethod(t, c.sandbox.AllowedAccess(t), r)
	if denial == nil {
		denial = checkTunnelTarget(c.tunnel, r)
	}
	if denial != nil {
		s.deny(w, c.sandbox, denialStatus(denial), *denial)
		return
	}
	s.forwardRequest(w, r, c.sandbox, destination{route: "judged", target: t, scheme: c.tunnel.scheme, transport: c.tunnel.transport})
	if c.tunnel.closed.Load() { // this request's connection became idle after close
		c.tunnel.transport.CloseIdleConnections()
	}
}

// checkTunnelTarget returns a denial if a request in a tunnel has another target than the tunnel, and nil otherwise.
func checkTunnelTarget(tunnel *inspectedTunnel, r *http.Request) *events.EgressDenied {
	d := newDenial(tunnel.target, r.Method)
	d.Code = CodeBadHost
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

// overrideHeaders are the headers by which some web frameworks replace the method of a request.
var overrideHeaders = []string{"X-Http-Method-Override", "X-Http-Method", "X-Method-Override"}

// checkMethod returns a denial if the allowlist does not allow the method of a request at a target, and nil otherwise. If the
// methods are limited, it removes an offer to upgrade to HTTP/2 from the request and denies any other upgrade, because after an
// upgrade the proxy could not check methods.
func checkMethod(t egress.Target, a egress.Access, r *http.Request) *events.EgressDenied {
	d := newDenial(t, r.Method)
	d.Code = CodeMethodNotAllowed
	switch {
	case !a.AllowsAny():
		d.Code, d.Message = CodeNotAllowed, notAllowedMessage(t)
		return d
	case r.Method == http.MethodTrace:
		d.Message = "TRACE is not forwarded"
		return d
	case a.AllowsAll():
		return nil
	case !a.Allows(r.Method):
		d.Message = methodDeniedMessage(r.Method, t, a)
		return d
	}
	for _, name := range overrideHeaders {
		for _, v := range r.Header.Values(name) {
			if m := strings.ToUpper(strings.TrimSpace(v)); !a.Allows(m) {
				d.Message = "header " + name + ": " + methodDeniedMessage(m, t, a)
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

// methodDeniedMessage returns the message of a denial of a method.
func methodDeniedMessage(method string, t egress.Target, a egress.Access) string {
	return egress.QuotePrefix(method) + " is not among the methods that the session's allowlist names for " + t.String() + ": " + strings.Join(a.Methods(), ", ")
}

// bufferedConn is a connection whose first bytes were already read into a buffer. Read returns these bytes first.
type bufferedConn struct {
	net.Conn
	from *bufio.Reader
}

func (r *bufferedConn) Read(p []byte) (int, error) { return r.from.Read(p) }

// CloseWrite closes the write direction.
func (r *bufferedConn) CloseWrite() error { return closeWrite(r.Conn) }
