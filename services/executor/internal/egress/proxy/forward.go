package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/egress"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// dialAllowed connects to a host of the allowlist, after it has checked that the host's addresses are public.
func (s *Server) dialAllowed(ctx context.Context, _, address string) (net.Conn, error) {
	t, err := egress.ParseTarget(address, 0)
	if err != nil {
		return nil, err
	}
	return s.cfg.Dialer.Dial(ctx, t)
}

// serveAbsoluteURI serves a request whose URI has a scheme and a host, as clients send it to an HTTP proxy.
func (s *Server) serveAbsoluteURI(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) {
	assume := uint16(80)
	d := events.EgressDenied{Host: r.URL.Host, Method: r.Method}
	switch {
	case r.Method == http.MethodTrace:
		d.Code, d.Message = CodeMethodNotAllowed, "TRACE is not forwarded"
	case r.URL.Scheme == "https":
		assume = 443
	case r.URL.Scheme != "http":
		d.Code, d.Message = CodeMethodNotAllowed, "only http and https are forwarded"
	}
	if d.Code == "" && r.URL.User != nil {
		d.Code, d.Message = CodeBadHost, "the URL has a user: leave it out"
	}
	if d.Code != "" {
		s.deny(w, sb, http.StatusForbidden, d)
		return
	}
	t, access, denial := s.checkAllowed(sb, r.Method, r.URL.Host, assume)
	if denial == nil {
		denial = checkMethod(t, access, r)
	}
	if denial != nil {
		s.deny(w, sb, denialStatus(denial), *denial)
		return
	}
	s.forwardRequest(w, r, sb, destination{route: "forward", target: t, scheme: r.URL.Scheme, transport: s.others})
}

// destination is the host to which the proxy forwards an allowed request, and how it connects to the host.
type destination struct {
	route     string // label of the metrics
	target    egress.Target
	scheme    string
	transport http.RoundTripper
}

// forwardRequest forwards an allowed request of a sandbox to its destination, and copies the answer back.
func (s *Server) forwardRequest(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, to destination) {
	t := to.target
	done, counted := sb.BeginRequest(false), s.cfg.Metrics.BeginRequest(to.route)
	ctx, progress, stop := withIdleTimeout(r.Context(), s.cfg.Idle)
	status := 0
	defer func() {
		stop()
		counted(status)
		done()
		sb.WithSandbox(s.cfg.Logger).Debug("request to a host", "host", t.String(), "method", r.Method, "status", status)
	}()
	p := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.Out.URL.Scheme, pr.Out.URL.Host, pr.Out.Host = to.scheme, t.String(), t.String()
			if t.Host.Name != "" && (t.Port == 80 && to.scheme == "http" || t.Port == 443 && to.scheme == "https") {
				pr.Out.Host = t.Host.Name // browsers and SDKs leave a default port out
			}
			pr.Out.URL.RawQuery = pr.In.URL.RawQuery
		},
		Transport: to.transport, FlushInterval: -1,
		ModifyResponse: func(res *http.Response) error {
			status = res.StatusCode
			if both, ok := res.Body.(io.ReadWriteCloser); ok { // after an upgrade of the protocol
				res.Body = &progressReadWriter{ReadWriteCloser: both, progress: progress}
			} else {
				res.Body = &progressReader{ReadCloser: res.Body, progress: progress}
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if denial := denialOfDialError(t, r.Method, err); denial != nil {
				status = denialStatus(denial)
				s.deny(w, sb, status, *denial)
				return
			}
			status = s.answerHostUnreachable(w, r, t, err)
		},
		ErrorLog: slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	// Otherwise the answer would wait for the end of the request. It fails only for HTTP/2, which the proxy does not serve.
	_ = http.NewResponseController(w).EnableFullDuplex()
	r = r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &progressReader{ReadCloser: &stickyEOF{ReadCloser: r.Body}, progress: progress}
	}
	p.ServeHTTP(w, r)
}

// answerHostUnreachable answers a request with the error that its host does not respond, and returns the HTTP status, or 0 if
// the sandbox has closed the connection.
func (s *Server) answerHostUnreachable(w http.ResponseWriter, r *http.Request, t egress.Target, err error) int {
	f := failure{http.StatusBadGateway, codeUpstream, fmt.Sprintf("%s is not reached: %v", t, err)}
	switch {
	case errors.Is(context.Cause(r.Context()), errIdleTimeout):
		f = failure{http.StatusGatewayTimeout, codeTimeout, fmt.Sprintf("%s sent nothing for %s", t, s.cfg.Idle)}
	case r.Context().Err() != nil:
		return 0 // the sandbox went away
	}
	f.write(w)
	return f.status
}

// progressReader calls progress after each read of another reader.
type progressReader struct {
	io.ReadCloser
	progress func()
}

func (m *progressReader) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	m.progress()
	return n, err
}

// progressReadWriter calls progress after each read and each write of a connection.
type progressReadWriter struct {
	io.ReadWriteCloser
	progress func()
}

func (m *progressReadWriter) Read(p []byte) (int, error) {
	n, err := m.ReadWriteCloser.Read(p)
	m.progress()
	return n, err
}

func (m *progressReadWriter) Write(p []byte) (int, error) {
	m.progress()
	return m.ReadWriteCloser.Write(p)
}

// serveTunnel serves a CONNECT request of a sandbox.
func (s *Server) serveTunnel(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) {
	t, access, denial := s.checkAllowed(sb, r.Method, r.RequestURI, 0)
	if denial != nil {
		s.deny(w, sb, denialStatus(denial), *denial)
		return
	}
	if !access.AllowsAll() {
		s.serveInspected(w, r, sb, t)
		return
	}
	done, counted := sb.BeginRequest(false), s.cfg.Metrics.BeginRequest("connect")
	status := 0
	defer func() {
		counted(status)
		done()
		sb.WithSandbox(s.cfg.Logger).Debug("tunnel ended", "host", t.String(), "status", status)
	}()
	there, err := s.cfg.Dialer.Dial(r.Context(), t)
	if err != nil {
		if denial := denialOfDialError(t, r.Method, err); denial != nil {
			status = denialStatus(denial)
			s.deny(w, sb, status, *denial)
			return
		}
		status = s.answerHostUnreachable(w, r, t, err)
		return
	}
	defer there.Close() //nolint:errcheck // both directions have ended
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		sb.WithSandbox(s.cfg.Logger).Error("take over a connection", "error", err)
		return
	}
	defer here.Close() //nolint:errcheck // both directions have ended
	if !s.addTunnel(here) {
		return
	}
	defer s.removeTunnel(here)
	remove, ok := sb.AddTunnel(here, t)
	if !ok { // the registration was replaced during the dial
		return
	}
	defer remove()
	status = http.StatusOK
	if _, err := io.WriteString(here, "HTTP/1.1 200 Connection Established\r\n\r\n"); err != nil {
		return
	}
	early := make([]byte, buffered.Reader.Buffered())
	if _, err := io.ReadFull(buffered, early); err != nil {
		return
	}
	checked := newHelloChecker(here, early, t.Host)
	s.copyTunnel(here, checked, there)
	if checked.err != nil {
		d := newDenial(t, r.Method)
		d.Code, d.Message = CodeBadHost, truncateText(checked.err.Error())
		s.recordDenial(sb, *d)
	}
}

// addTunnel records the connection of a tunnel, so that Close closes it. It returns false if the server is shutting down.
func (s *Server) addTunnel(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.tunnels[c] = true
	return true
}

// removeTunnel removes the connection of a tunnel that has ended.
func (s *Server) removeTunnel(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.tunnels, c)
}

// copyTunnel copies bytes between the connections of a sandbox and of a host, until both directions have ended or no byte was
// sent for the idle time. It reads what the sandbox sends from sent, which contains bytes that were read from sandboxConn
// before.
func (s *Server) copyTunnel(sandboxConn net.Conn, sent io.Reader, hostConn net.Conn) {
	closeBoth := func() {
		sandboxConn.Close() //nolint:errcheck // a connection that fails to close is broken
		hostConn.Close()    //nolint:errcheck // the same
	}
	timer := time.AfterFunc(s.cfg.Idle, closeBoth)
	defer timer.Stop()
	var both sync.WaitGroup
	direct := func(to net.Conn, from io.Reader, direction string) {
		buf := make([]byte, 32<<10)
		for {
			n, err := from.Read(buf)
			timer.Reset(s.cfg.Idle)
			if n > 0 {
				s.cfg.Metrics.CountTunnelBytes(direction, n)
				if _, err := to.Write(buf[:n]); err != nil {
					closeBoth()
					return
				}
			}
			if errors.Is(err, io.EOF) {
				if closeWrite(to) != nil {
					closeBoth()
				}
				return
			}
			if err != nil {
				closeBoth()
				return
			}
		}
	}
	both.Go(func() { direct(hostConn, sent, "out") })
	both.Go(func() { direct(sandboxConn, hostConn, "in") })
	both.Wait()
}
