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

// A tunnel hides methods. Where the allowlist names some, the proxy is the end of
// it: inside TLS, which it ends with a certificate of its own, or in plain HTTP, it reads
// requests as it reads those outside of tunnels, judges each, and sends on what may
// pass. What it sends on it writes anew, so that nobody reads another request out of it.

// inside is what is known of a tunnel whose requests are judged.
type inside struct {
	target egress.Target
	scheme string          // http or https: what the sandbox speaks, the host is spoken to in
	by     *http.Transport // connections to the host, of this tunnel alone
	over   atomic.Bool     // the tunnel's end is closed
}

func (i *inside) end() {
	i.over.Store(true)
	i.by.CloseIdleConnections()
}

// speakWithin bounds how long a client may take for its first byte and the TLS handshake.
const speakWithin = 15 * time.Second

// inspect serves CONNECT to a host of which not all methods are allowed.
func (s *Server) inspect(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, t egress.Target) {
	counted := s.cfg.Metrics.Begin("connect")
	status := 0
	defer func() { counted(status) }()
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		sb.Log(s.cfg.Logger).Error("take over a connection", "error", err)
		return
	}
	if !s.enter(here) {
		here.Close() //nolint:errcheck // the proxy ends
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
	inner, scheme, err := s.listen(r.Context(), here, early, t)
	if err != nil {
		here.Close() //nolint:errcheck // nobody is understood there
		s.unheard(sb, t, err)
		return
	}
	by := s.others.Clone()
	by.DisableKeepAlives, by.IdleConnTimeout = false, s.cfg.Idle
	in := &inside{target: t, scheme: scheme, by: by}
	s.conns.give(&conn{Conn: inner, sandbox: sb, stall: s.cfg.Idle, left: in.end, inside: in})
}

// listen gives a tunnel's stream of HTTP and its scheme. early is what came with the request for the tunnel.
func (s *Server) listen(ctx context.Context, here net.Conn, early []byte, t egress.Target) (net.Conn, string, error) {
	if err := here.SetReadDeadline(time.Now().Add(speakWithin)); err != nil {
		return nil, "", err
	}
	peeked := bufio.NewReader(io.MultiReader(bytes.NewReader(early), here))
	first, err := peeked.Peek(1)
	if err != nil {
		return nil, "", err
	}
	stream := &replayed{Conn: here, from: peeked}
	switch c := first[0]; {
	case c == handshakeRecord:
		inner, err := s.vouch(ctx, stream, t)
		if err != nil {
			return nil, "", err
		}
		return inner, "https", here.SetReadDeadline(time.Time{})
	case c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z':
		return stream, "http", here.SetReadDeadline(time.Time{})
	}
	return nil, "", errors.New("what is sent is neither TLS nor HTTP")
}

// vouch ends TLS in the name of the host.
func (s *Server) vouch(ctx context.Context, stream net.Conn, t egress.Target) (net.Conn, error) {
	cert, err := s.cfg.Authority.Certificate(t.Host)
	if err != nil {
		return nil, err
	}
	c := tls.Server(stream, &tls.Config{
		Certificates: []tls.Certificate{*cert}, NextProtos: []string{"http/1.1"}, MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			return nil, checkServerName(hello, t.Host) // without an error, the config that there is
		},
	})
	ctx, cancel := context.WithTimeout(ctx, speakWithin)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// unheard journals why nothing in a tunnel could be judged. A client that only went away is no denial.
func (s *Server) unheard(sb *registry.Sandbox, t egress.Target, err error) {
	d := about(t, http.MethodConnect)
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
	d.Message = clip(d.Message)
	s.denied(sb, *d)
}

// unjudged journals a request in a tunnel that was refused before anyone could look at it.
func (s *Server) unjudged(c *conn) {
	method, ok := c.refused()
	if !ok {
		return
	}
	t := c.inside.target
	d := about(t, clip(method))
	d.Code, d.Message = MethodNotAllowed, "the allowlist names methods for "+t.String()+", and what was sent is no request of HTTP/1.1 that could be judged by them"
	s.denied(c.sandbox, *d)
}

// judged serves a request inside a tunnel, by the policy as it is now.
func (s *Server) judged(w http.ResponseWriter, r *http.Request, c *conn) {
	t := c.inside.target
	why := permit(t, c.sandbox.Access(t), r)
	if why == nil {
		why = addressed(c.inside, r)
	}
	if why != nil {
		s.deny(w, c.sandbox, statusOf(why), *why)
		return
	}
	s.pass(w, r, c.sandbox, way{route: "judged", target: t, scheme: c.inside.scheme, by: c.inside.by})
	if c.inside.over.Load() { // the connection to the host came back after the others were closed
		c.inside.by.CloseIdleConnections()
	}
}

// addressed is why a request does not belong into its tunnel; nil if it does.
func addressed(in *inside, r *http.Request) *events.EgressDenied {
	d := about(in.target, r.Method)
	d.Code = BadHost
	assume := uint16(80)
	if in.scheme == "https" {
		assume = 443
	}
	switch named, err := egress.ParseTarget(r.Host, assume); {
	case err != nil || named != in.target:
		d.Message = "the request is for " + egress.Printable(r.Host) + ", and the tunnel was opened to " + in.target.String()
	case !strings.HasPrefix(r.RequestURI, "/"):
		d.Message = "in a tunnel a request names a path, not " + egress.Printable(r.RequestURI)
	default:
		return nil
	}
	return d
}

// overrides are headers by which frameworks take another method for the request's own.
var overrides = []string{"X-Http-Method-Override", "X-Http-Method", "X-Method-Override"}

// permit is why a request may not be sent to a target by what it does there; nil
// if it may. Where not all methods are allowed, it takes an offer to go on in HTTP/2 out of the request, and
// refuses any other change of protocol: what follows has no methods, or hides them.
func permit(t egress.Target, a egress.Access, r *http.Request) *events.EgressDenied {
	d := about(t, r.Method)
	d.Code = MethodNotAllowed
	switch {
	case !a.Named():
		d.Code, d.Message = NotAllowed, unnamed(t)
		return d
	case r.Method == http.MethodTrace:
		d.Message = "TRACE is not passed on"
		return d
	case a.All():
		return nil
	case !a.Allows(r.Method):
		d.Message = notAmong(r.Method, t, a)
		return d
	}
	for _, name := range overrides {
		for _, v := range r.Header.Values(name) {
			if m := strings.ToUpper(strings.TrimSpace(v)); !a.Allows(m) {
				d.Message = "header " + name + ": " + notAmong(m, t, a)
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

func notAmong(method string, t egress.Target, a egress.Access) string {
	return egress.Printable(method) + " is not among the methods that the session's allowlist names for " + t.String() + ": " + strings.Join(a.Methods(), ", ")
}

// replayed is a connection of which something was read already.
type replayed struct {
	net.Conn
	from *bufio.Reader
}

func (r *replayed) Read(p []byte) (int, error) { return r.from.Read(p) }

// CloseWrite says that nothing more comes.
func (r *replayed) CloseWrite() error { return closeWrite(r.Conn) }
