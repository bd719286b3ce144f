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

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// mcpPath is the prefix of the paths under which sandboxes reach MCP servers.
const mcpPath = runner.EgressMCPPath

// mcpMethods are the HTTP methods of MCP's streamable HTTP transport.
var mcpMethods = []string{http.MethodGet, http.MethodPost, http.MethodDelete, http.MethodHead, http.MethodOptions}

// dialServer connects to an MCP server. It refuses addresses that are not public, as policy.Dialer does, unless the operator lists
// the server's host and port in the setting Open.
func (s *Server) dialServer(ctx context.Context, network, address string) (net.Conn, error) {
	t, err := egress.ParseTarget(address, 0)
	if err != nil {
		return nil, err
	}
	if slices.Contains(s.cfg.Open, t) {
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	return s.cfg.Dialer.Dial(ctx, t)
}

// serveMCP serves a request to an MCP server of the sandbox. It drops the sandbox's credentials and sets the server's headers.
func (s *Server) serveMCP(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) {
	name, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, mcpPath), "/")
	server := sb.Server(name)
	d := events.EgressDenied{Host: "mcp/" + name, Method: r.Method}
	status := http.StatusForbidden
	switch {
	case server == nil:
		status = http.StatusNotFound
		d.Code, d.Message = UnknownServer, "this sandbox has no MCP server "+egress.QuotePrefix(name)+"; after a restart of the proxy servers are missing for a moment"
	case !slices.Contains(mcpMethods, r.Method):
		d.Code, d.Message = MethodNotAllowed, r.Method+" is not a method of MCP"
	case r.Header.Get("Upgrade") != "":
		d.Code, d.Message = MethodNotAllowed, "an MCP server takes plain requests and server-sent events, no upgrade of the protocol"
	case climbs(rest):
		d.Code, d.Message = BadHost, "the path has a dot-dot element"
	}
	if d.Code != "" {
		s.deny(w, sb, status, d)
		return
	}
	s.passServer(w, r, sb, server)
}

// serverURL returns the URL of a request to an MCP server: the path after the server's name is appended to the server's own.
func serverURL(server *registry.Server, in *url.URL) *url.URL {
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

func (s *Server) passServer(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, server *registry.Server) {
	done, counted := sb.BeginRequest(false), s.cfg.Metrics.Begin("mcp")
	ctx, progress, stop := watch(r.Context(), s.cfg.Idle)
	status := 0
	defer func() {
		stop()
		counted(status)
		done()
		sb.Log(s.cfg.Logger).Debug("request to an MCP server", "server", server.Name, "host", server.Target.String(), "method", r.Method, "status", status)
	}()
	secrets := server.Secrets
	p := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			out := pr.Out
			out.URL, out.Host = serverURL(server, pr.In.URL), server.URL.Host
			for _, name := range credentials {
				out.Header.Del(name)
			}
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
				body = redact(body, secret)
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
			status = s.answerUnreachable(w, r, sb, server, err, secrets)
		},
		ErrorLog: slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	r = r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &progressReader{ReadCloser: &stickyEOF{ReadCloser: r.Body}, progress: progress}
	}
	p.ServeHTTP(w, r)
}

// answerUnreachable answers a request with the error that its MCP server does not respond or may not be reached. It
// returns the HTTP status.
func (s *Server) answerUnreachable(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox, server *registry.Server, err error, secrets []string) int {
	if denial := dialDenial(server.Target, r.Method, err); denial != nil {
		s.deny(w, sb, statusOf(denial), *denial)
		return statusOf(denial)
	}
	detail := err.Error()
	for _, secret := range secrets {
		detail = redactText(detail, secret)
	}
	return s.answerHostUnreachable(w, r, server.Target, errors.New(detail))
}
