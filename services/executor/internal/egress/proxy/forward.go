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

// dialAllowed connects to a host of the allowlist, after a look at its addresses.
func (s *Server) dialAllowed(ctx context.Context, _, address string) (net.Conn, error) {
	t, err := egress.ParseTarget(address, 0)
	if err != nil {
		return nil, err
	}
	return s.cfg.Dialer.Dial(ctx, t)
}

// forward serves a request with an absolute URI.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) {
	assume := uint16(80)
	d := events.EgressDenied{Host: r.URL.Host, Method: r.Method}
	switch {
	case r.Method == http.MethodTrace:
		d.Code, d.Message = MethodNotAllowed, "TRACE is not passed on"
	case r.URL.Scheme == "https":
		assume = 443
	case r.URL.Scheme != "http":
		d.Code, d.Message = MethodNotAllowed, "only http and https are passed on"
	}
	if d.Code == "" && r.URL.User != nil {
		d.Code, d.Message = BadHost, "the address names a user: leave that out"
	}
	if d.Code != "" {
		s.deny(w, sb, http.StatusForbidden, d)
		return
	}
	t, access, why := s.judge(sb, r.Method, r.URL.Host, assume)
	if why == nil {
		why = permit(t, access, r)
	}
	if why != nil {
		s.deny(w, sb, statusOf(why), *why)
		return
	}
	s.pass(w, r, sb, way{route: "forward", target: t, scheme: r.URL.Scheme, by: s.others})
}

// way is how a request that may be sent on gets to its host.
type way struct {
	route  string // as it is counted
	target egress.Target
	scheme string
	by     http.RoundTripper
}

// pass sends a request on to a target that may be named.
func (s *Server) pass(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, to way) {
	t := to.target
	done, counted := sb.BeginRequest(false), s.cfg.Metrics.Begin(to.route)
	ctx, move, stop := watch(r.Context(), s.cfg.Idle)
	status := 0
	defer func() {
		stop()
		counted(status)
		done()
		sb.Log(s.cfg.Logger).Debug("request to a host", "host", t.String(), "method", r.Method, "status", status)
	}()
	p := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.Out.URL.Scheme, pr.Out.URL.Host, pr.Out.Host = to.scheme, t.String(), t.String()
			if t.Host.Name != "" && (t.Port == 80 && to.scheme == "http" || t.Port == 443 && to.scheme == "https") {
				pr.Out.Host = t.Host.Name // a default port is not named
			}
			pr.Out.URL.RawQuery = pr.In.URL.RawQuery
		},
		Transport: to.by, FlushInterval: -1,
		ModifyResponse: func(res *http.Response) error {
			status = res.StatusCode
			if both, ok := res.Body.(io.ReadWriteCloser); ok { // the protocol was changed
				res.Body = &movingBoth{ReadWriteCloser: both, move: move}
			} else {
				res.Body = &moving{ReadCloser: res.Body, move: move}
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if why := refusal(t, r.Method, err); why != nil {
				status = statusOf(why)
				s.deny(w, sb, status, *why)
				return
			}
			status = s.unreached(w, r, t, err)
		},
		ErrorLog: slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	// Otherwise the answer would wait for the end of the request. It fails for HTTP/2 alone, which is not spoken here.
	_ = http.NewResponseController(w).EnableFullDuplex()
	r = r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &moving{ReadCloser: &ending{ReadCloser: r.Body}, move: move}
	}
	p.ServeHTTP(w, r)
}

// unreached tells the sandbox that a host did not answer, and gives the status.
func (s *Server) unreached(w http.ResponseWriter, r *http.Request, t egress.Target, err error) int {
	f := failure{http.StatusBadGateway, codeUpstream, fmt.Sprintf("%s is not reached: %v", t, err)}
	switch {
	case errors.Is(context.Cause(r.Context()), errSilent):
		f = failure{http.StatusGatewayTimeout, codeSilent, fmt.Sprintf("%s sent nothing for %s", t, s.cfg.Idle)}
	case r.Context().Err() != nil:
		return 0 // the sandbox went away
	}
	f.write(w)
	return f.status
}

// moving tells of each read.
type moving struct {
	io.ReadCloser
	move func()
}

func (m *moving) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	m.move()
	return n, err
}

// movingBoth tells of each read and write.
type movingBoth struct {
	io.ReadWriteCloser
	move func()
}

func (m *movingBoth) Read(p []byte) (int, error) {
	n, err := m.ReadWriteCloser.Read(p)
	m.move()
	return n, err
}

func (m *movingBoth) Write(p []byte) (int, error) {
	m.move()
	return m.ReadWriteCloser.Write(p)
}

// tunnel serves CONNECT.
func (s *Server) tunnel(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) {
	t, access, why := s.judge(sb, r.Method, r.RequestURI, 0)
	if why != nil {
		s.deny(w, sb, statusOf(why), *why)
		return
	}
	if !access.All() {
		s.inspect(w, r, sb, t)
		return
	}
	done, counted := sb.BeginRequest(false), s.cfg.Metrics.Begin("connect")
	status := 0
	defer func() {
		counted(status)
		done()
		sb.Log(s.cfg.Logger).Debug("tunnel ended", "host", t.String(), "status", status)
	}()
	there, err := s.cfg.Dialer.Dial(r.Context(), t)
	if err != nil {
		if why := refusal(t, r.Method, err); why != nil {
			status = statusOf(why)
			s.deny(w, sb, status, *why)
			return
		}
		status = s.unreached(w, r, t, err)
		return
	}
	defer there.Close() //nolint:errcheck // both ways are over
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		sb.Log(s.cfg.Logger).Error("take over a connection", "error", err)
		return
	}
	defer here.Close() //nolint:errcheck // both ways are over
	if !s.enter(here) {
		return
	}
	defer s.leave(here)
	end, still := sb.AddTunnel(here, t)
	if !still { // another policy came while it was dialed
		return
	}
	defer end()
	status = http.StatusOK
	if _, err := io.WriteString(here, "HTTP/1.1 200 Connection Established\r\n\r\n"); err != nil {
		return
	}
	early := make([]byte, buffered.Reader.Buffered())
	if _, err := io.ReadFull(buffered, early); err != nil {
		return
	}
	checked := newHelloChecker(here, early, t.Host)
	s.join(here, checked, there)
	if checked.err != nil {
		d := about(t, r.Method)
		d.Code, d.Message = BadHost, clip(checked.err.Error())
		s.denied(sb, *d)
	}
}

// enter counts a tunnel, which Close cuts; false once it has.
func (s *Server) enter(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.tunnels[c] = true
	return true
}

func (s *Server) leave(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.tunnels, c)
}

// join copies both ways until both have ended, or nothing moves for too long. sent is what is read of here.
func (s *Server) join(here net.Conn, sent io.Reader, there net.Conn) {
	cut := func() {
		here.Close()  //nolint:errcheck // what matters is that it ends
		there.Close() //nolint:errcheck // the same
	}
	timer := time.AfterFunc(s.cfg.Idle, cut)
	defer timer.Stop()
	var both sync.WaitGroup
	way := func(to net.Conn, from io.Reader, direction string) {
		buf := make([]byte, 32<<10)
		for {
			n, err := from.Read(buf)
			timer.Reset(s.cfg.Idle)
			if n > 0 {
				s.cfg.Metrics.Tunnelled(direction, n)
				if _, err := to.Write(buf[:n]); err != nil {
					cut()
					return
				}
			}
			if errors.Is(err, io.EOF) {
				if closeWrite(to) != nil {
					cut()
				}
				return
			}
			if err != nil {
				cut()
				return
			}
		}
	}
	both.Go(func() { way(there, sent, "out") })
	both.Go(func() { way(here, there, "in") })
	both.Wait()
}
