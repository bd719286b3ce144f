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
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// mcpPath is the prefix of the paths under which sandboxes reach MCP servers.
const mcpPath = runner.EgressMCPPath

// mcpMethods are the HTTP methods of MCP's streamable HTTP transport.
var mcpMethods = []string{http.MethodGet, http.MethodPost, http.MethodDelete, http.MethodHead, http.MethodOptions}

// dialMCPServer connects to an MCP server. It refuses addresses that are not public, unless the setting Open lists the server's host
// and port.
func (s *Server) dialMCPServer(ctx context.Context, network, address string) (net.Conn, error) {
	t, err := egress.ParseTarget(address, 0)
	if err != nil {
		return nil, err
	}
	if slices.Contains(s.cfg.Open, t) {
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	return s.cfg.Dialer.Dial(ctx, t)
}

// serveMCP forwards a sandbox's request to one of its MCP servers. It replaces the credentials in the request by the headers of the
// server's registration.
func (s *Server) serveMCP(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) {
	name, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, mcpPath), "/")
	server := s.findMCPServer(r, sb, name)
	d := events.EgressDenied{Host: "mcp/" + name, Method: r.Method}
	status := http.StatusForbidden
	switch {
	case server == nil:
		status = http.StatusNotFound
		d.Code, d.Message = CodeUnknownServer, "this sandbox has no MCP server "+egress.QuotePrefix(name)
	case !slices.Contains(mcpMethods, r.Method):
		d.Code, d.Message = CodeMethodNotAllowed, r.Method+" is not a method of MCP"
	case r.Header.Get("Upgrade") != "":
		d.Code, d.Message = CodeMethodNotAllowed, "an MCP server takes plain requests and server-sent events, no upgrade of the protocol"
	case hasDotElement(rest):
		d.Code, d.Message = CodeBadHost, "the path has a dot-dot element"
	}
	if d.Code != "" {
		s.deny(w, sb, status, d)
		return
	}
	s.forwardToMCPServer(w, r, sb, server)
}

// registrationTimeout is the maximum time for which a request waits for the MCP servers of its sandbox after a restart of the proxy.
const registrationTimeout = 30 * time.Second

// findMCPServer returns the MCP server of a sandbox with a name, or nil if there is none. After a restart of the proxy it records that
// the server is missing, by which the executor notices the restart, and waits until the executor has registered the servers again.
func (s *Server) findMCPServer(r *http.Request, sb *registry.Sandbox, name string) *registry.MCPServer {
	server := sb.MCPServer(name)
	if server != nil || !sb.IsRestored() {
		return server
	}
	s.recordDenial(sb, events.EgressDenied{
		Host: truncateText("mcp/" + name), Method: truncateText(r.Method), Code: CodeUnknownServer, Message: "the proxy has restarted: the request waits until the MCP servers of the sandbox are registered again",
	})
	ctx, cancel := context.WithTimeout(r.Context(), registrationTimeout)
	defer cancel()
	if sb.AwaitRegistration(ctx) != nil {
		return nil
	}
	return sb.MCPServer(name)
}

// mcpServerURL returns the URL to which a request to an MCP server is forwarded: the URL of the server, with the part of the
// request's path after the server's name.
func mcpServerURL(server *registry.MCPServer, in *url.URL) *url.URL {
	out := *server.URL
	if rest := in.EscapedPath()[len(mcpPath)+len(server.Name):]; strings.Trim(rest, "/") != "" {
		out = *server.URL.JoinPath(rest)
	}
	query := in.RawQuery
	if out.RawQuery != "" && query != "" {
		query = "&" + query
	}
	out.RawQuery += query
	return &out
}

// forwardToMCPServer forwards a request to an MCP server and copies the answer back.
func (s *Server) forwardToMCPServer(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, server *registry.MCPServer) {
	done, counted := sb.BeginRequest(false), s.cfg.Metrics.BeginRequest("mcp")
	ctx, progress, stop := withIdleTimeout(r.Context(), s.cfg.Idle)
	status := 0
	defer func() {
		stop()
		counted(status)
		done()
		sb.WithSandbox(s.cfg.Logger).Debug("request to an MCP server", "server", server.Name, "host", server.Target.String(), "method", r.Method, "status", status)
	}()
	secrets := server.Secrets
	p := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			out := pr.Out
			out.URL, out.Host = mcpServerURL(server, pr.In.URL), server.URL.Host
			removeHeaders(out.Header, credentialHeaders)
			for name, values := range server.Header {
				out.Header[name] = values
			}
			out.Header.Set("Accept-Encoding", "identity") // answers are searched for secrets
		},
		Transport: s.mcps, FlushInterval: -1,
		ModifyResponse: func(res *http.Response) error {
			status = res.StatusCode
			if e := res.Header.Get("Content-Encoding"); e != "" && e != "identity" {
				return fmt.Errorf("the MCP server used content encoding %q although the request forbids it", truncateText(e))
			}
			var body io.Reader = res.Body
			for _, secret := range secrets {
				body = newRedactor(body, secret)
				for name, values := range res.Header {
					for i, v := range values {
						res.Header[name][i] = redactText(v, secret)
					}
				}
			}
			res.Body = &progressReader{ReadCloser: struct {
				io.Reader
				io.Closer
			}{body, res.Body}, progress: progress}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			status = s.answerMCPUnreachable(w, r, sb, server, err, secrets)
		},
		ErrorLog: slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	r = r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &progressReader{ReadCloser: &stickyEOF{ReadCloser: r.Body}, progress: progress}
	}
	p.ServeHTTP(w, r)
}

// answerMCPUnreachable answers a request with the error that its MCP server does not respond or must not be reached, and returns the
// HTTP status.
func (s *Server) answerMCPUnreachable(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, server *registry.MCPServer, err error, secrets []string) int {
	if denial := denialOfDialError(server.Target, r.Method, err); denial != nil {
		s.deny(w, sb, denialStatus(denial), *denial)
		return denialStatus(denial)
	}
	detail := err.Error()
	for _, secret := range secrets {
		detail = redactText(detail, secret)
	}
	return s.answerHostUnreachable(w, r, server.Target, errors.New(detail))
}
