package proxy

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/truncate"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/policy"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// Codes of events.EgressDenied.
const (
	CodeNotAllowed       = "NOT_ALLOWED"
	CodePrivateAddress   = "PRIVATE_ADDRESS"
	CodeBadHost          = "BAD_HOST"
	CodeUnresolved       = "UNRESOLVED"
	CodeBadToken         = "BAD_TOKEN"
	CodeMethodNotAllowed = "METHOD_NOT_ALLOWED"
	// CodeBudgetExhausted is the code of a model call that was refused because a budget is used up.
	CodeBudgetExhausted = "BUDGET_EXHAUSTED"
	// CodeUntrusted is the code of a tunnel whose client does not trust the proxy's certificate.
	CodeUntrusted = "UNTRUSTED"
	// CodeUnknownServer is the code of a request for an MCP server that is not registered. The proxy forgets MCP servers
	// when it restarts.
	CodeUnknownServer = "UNKNOWN_SERVER"
	// CodeProviderSide is the code of a model request that was denied because it makes the model provider fetch, run or look up something that
	// the allowlist does not allow.
	CodeProviderSide = "PROVIDER_SIDE"
	// CodeUnreadableBody is the code of a model request that the proxy cannot check, because two parsers could read it
	// differently.
	CodeUnreadableBody = "UNREADABLE_BODY"
	// CodeNoExecution is the code of a model call that was refused because no execution runs in the sandbox.
	CodeNoExecution = "NO_EXECUTION"
)

// errIdleTimeout is the cause with which the proxy cancels a request on which no byte was sent for the idle time.
var errIdleTimeout = errors.New("no byte was sent for too long")

// serveSandbox serves one HTTP request of a sandbox. The method, the target and the path determine the handler.
func (s *Server) serveSandbox(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connKey{}).(*identifiedConn)
	fits := c.setHandled(r)
	if !s.beginRequest() {
		panic(http.ErrAbortHandler) // the proxy shuts down
	}
	defer s.endRequest()
	if !fits {
		w.Header().Set("Connection", "close")
		failure{http.StatusServiceUnavailable, codeBodiesFull, errMemoryFull.Error()}.write(w)
		return
	}
	switch {
	case c.tunnel != nil:
		s.serveTunneled(w, r, c)
	case r.Method == http.MethodConnect && !strings.HasPrefix(r.RequestURI, "/"):
		s.serveTunnel(w, r, c.sandbox)
	case r.URL.IsAbs():
		s.serveAbsoluteURI(w, r, c.sandbox)
	case c.hostsOnly:
		s.deny(w, c.sandbox, http.StatusForbidden, events.EgressDenied{Host: r.URL.Path, Method: r.Method, Code: CodeNotAllowed, Message: "an MCP server's container reaches only hosts of the allowlist, no models and no other MCP servers"})
	case strings.HasPrefix(r.URL.Path, mcpPath):
		s.serveMCP(w, r, c.sandbox)
	default:
		s.serveRoute(w, r, c.sandbox)
	}
}

// truncateText returns the first 500 bytes of a text that a sandbox or a server may have chosen, as valid UTF-8.
func truncateText(s string) string { return strings.ToValidUTF8(truncate.Prefix(s, 500), "\uFFFD") }

// recordDenial adds a denial of a sandbox's request to the journal and to the metrics.
func (s *Server) recordDenial(sb *registry.Sandbox, d events.EgressDenied) {
	s.cfg.Metrics.CountDenial(d.Code)
	if err := sb.Journal.RecordDenial(time.Now(), sb.Owner(), d); err != nil {
		s.cfg.Logger.Error("a denial is not journaled", "sandbox", sb.ID(), "error", err)
	}
}

// deny records a denial in the journal and the metrics, and answers the request with it.
func (s *Server) deny(w http.ResponseWriter, sb *registry.Sandbox, status int, d events.EgressDenied) {
	d.Host, d.Method, d.Message = truncateText(d.Host), truncateText(d.Method), truncateText(d.Message)
	s.recordDenial(sb, d)
	failure{status, d.Code, d.Message}.write(w)
}

// checkAllowed returns the target of a request and what the allowlist allows at that target. If the allowlist does not name the target, it
// returns a denial. assume is the port of an authority without one.
func (s *Server) checkAllowed(sb *registry.Sandbox, method, authority string, assume uint16) (egress.Target, egress.Access, *events.EgressDenied) {
	t, err := egress.ParseTarget(authority, assume)
	if err != nil {
		return t, egress.Access{}, &events.EgressDenied{Host: authority, Method: method, Code: CodeBadHost, Message: err.Error()}
	}
	d := newDenial(t, method)
	if t.Host.Name == "" {
		if err := egress.CheckAddress(t.Host.Addr); err != nil {
			d.Code, d.Address, d.Message = CodePrivateAddress, t.Host.Addr.String(), err.Error()
			return t, egress.Access{}, d
		}
	}
	access := sb.AllowedAccess(t)
	if !access.AllowsAny() {
		d.Code, d.Message = CodeNotAllowed, notAllowedMessage(t)
		return t, access, d
	}
	return t, access, nil
}

// newDenial returns a denial of a request to a target. The caller sets its code and message.
func newDenial(t egress.Target, method string) *events.EgressDenied {
	return &events.EgressDenied{Host: t.Host.String(), Port: uint32(t.Port), Method: method}
}

// notAllowedMessage returns the message of a denial of a target that the allowlist does not name.
func notAllowedMessage(t egress.Target) string {
	return t.String() + " is not in the session's allowlist; models need no entry, they are reached through their routes"
}

// denialOfDialError returns the denial of a request whose host could not be dialled, because the host's address is not public or its name
// does not resolve. It returns nil for any other error.
func denialOfDialError(t egress.Target, method string, err error) *events.EgressDenied {
	d := newDenial(t, method)
	var address *egress.AddressError
	var unresolved *policy.UnresolvedError
	switch {
	case errors.As(err, &address):
		d.Code, d.Address, d.Message = CodePrivateAddress, address.Addr.String(), d.Host+" leads to "+err.Error()
		if t.Host.Name == "" {
			d.Message = err.Error()
		}
	case errors.As(err, &unresolved):
		d.Code, d.Message = CodeUnresolved, err.Error()
	default:
		return nil
	}
	return d
}

// denialStatus returns the HTTP status with which the proxy answers a denied request.
func denialStatus(d *events.EgressDenied) int {
	if d.Code == CodeUnresolved {
		return http.StatusBadGateway
	}
	return http.StatusForbidden
}

// withIdleTimeout returns a context that is cancelled with errIdleTimeout if progress is not called for the time idle. The caller must call
// stop.
func withIdleTimeout(ctx context.Context, idle time.Duration) (_ context.Context, progress func(), stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(idle, func() { cancel(errIdleTimeout) })
	return ctx, func() { timer.Reset(idle) }, func() {
		timer.Stop()
		cancel(nil)
	}
}

// sinceMs returns the milliseconds since t, limited to the range of uint32.
func sinceMs(t time.Time) uint32 {
	return uint32(min(max(time.Since(t).Milliseconds(), 0), 1<<32-1)) //nolint:gosec // within bounds
}
