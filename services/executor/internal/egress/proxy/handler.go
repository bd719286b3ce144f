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
	NotAllowed       = "NOT_ALLOWED"
	PrivateAddress   = "PRIVATE_ADDRESS"
	BadHost          = "BAD_HOST"
	Unresolved       = "UNRESOLVED"
	BadToken         = "BAD_TOKEN"
	MethodNotAllowed = "METHOD_NOT_ALLOWED"
	// BudgetExhausted is the code of a model call that was refused because a budget is used up.
	BudgetExhausted = "BUDGET_EXHAUSTED"
	// Untrusted is the code of a tunnel whose client does not trust the proxy's certificate.
	Untrusted = "UNTRUSTED"
	// UnknownServer is the code of a request for an MCP server that is not registered. The proxy forgets MCP servers
	// when it restarts.
	UnknownServer = "UNKNOWN_SERVER"
	// ProviderSide is the code of a model request that makes the provider fetch, run or look up something that the
	// allowlist does not allow.
	ProviderSide = "PROVIDER_SIDE"
	// UnreadableBody is the code of a model request that the proxy cannot check, because two parsers could read it
	// differently.
	UnreadableBody = "UNREADABLE_BODY"
	// NoExecution is the code of a model call while no execution runs in the sandbox.
	NoExecution = "NO_EXECUTION"
)

// errSilent is the cause with which a request is cancelled after the idle time without a byte.
var errSilent = errors.New("no byte was sent for too long")

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connKey{}).(*conn)
	c.setHandled()
	if !s.begin() {
		panic(http.ErrAbortHandler) // the proxy shuts down
	}
	defer s.end()
	switch {
	case c.tunnel != nil:
		s.serveTunneled(w, r, c)
	case r.Method == http.MethodConnect && !strings.HasPrefix(r.RequestURI, "/"):
		s.serveTunnel(w, r, c.sandbox)
	case r.URL.IsAbs():
		s.forward(w, r, c.sandbox)
	case c.hostsOnly:
		s.deny(w, c.sandbox, http.StatusForbidden, events.EgressDenied{Host: r.URL.Path, Method: r.Method, Code: NotAllowed, Message: "an MCP server's container reaches only hosts of the allowlist, no models and no other MCP servers"})
	case strings.HasPrefix(r.URL.Path, mcpPath):
		s.serveMCP(w, r, c.sandbox)
	default:
		s.route(w, r, c.sandbox)
	}
}

// truncateText returns the first 500 bytes of a text that a sandbox or a server may have chosen, as valid UTF-8.
func truncateText(s string) string { return strings.ToValidUTF8(truncate.Prefix(s, 500), "\uFFFD") }

// recordDenial journals and counts a denial.
func (s *Server) recordDenial(sb *registry.Sandbox, d events.EgressDenied) {
	s.cfg.Metrics.Denied(d.Code)
	if err := sb.Journal.Denied(time.Now(), sb.Owner(), d); err != nil {
		s.cfg.Logger.Error("a denial is not journaled", "sandbox", sb.ID(), "error", err)
	}
}

// deny journals and counts a denial, and answers the sandbox with it.
func (s *Server) deny(w http.ResponseWriter, sb *registry.Sandbox, status int, d events.EgressDenied) {
	d.Host, d.Method, d.Message = truncateText(d.Host), truncateText(d.Method), truncateText(d.Message)
	s.recordDenial(sb, d)
	failure{status, d.Code, d.Message}.write(w)
}

// checkAllowed returns the target of a request and what the allowlist allows at that target, or a denial if the
// allowlist does not name it.
func (s *Server) checkAllowed(sb *registry.Sandbox, method, authority string, assume uint16) (egress.Target, egress.Access, *events.EgressDenied) {
	t, err := egress.ParseTarget(authority, assume)
	if err != nil {
		return t, egress.Access{}, &events.EgressDenied{Host: authority, Method: method, Code: BadHost, Message: err.Error()}
	}
	d := newDenial(t, method)
	if t.Host.Name == "" {
		if err := egress.CheckAddress(t.Host.Addr); err != nil {
			d.Code, d.Address, d.Message = PrivateAddress, t.Host.Addr.String(), err.Error()
			return t, egress.Access{}, d
		}
	}
	access := sb.Access(t)
	if !access.AllowsAny() {
		d.Code, d.Message = NotAllowed, notAllowedMessage(t)
		return t, access, d
	}
	return t, access, nil
}

// newDenial returns a denial of a request to a target, without code and message.
func newDenial(t egress.Target, method string) *events.EgressDenied {
	return &events.EgressDenied{Host: t.Host.String(), Port: uint32(t.Port), Method: method}
}

func notAllowedMessage(t egress.Target) string {
	return t.String() + " is not in the session's allowlist; models need no entry, they are reached through their routes"
}

// dialDenial returns the denial for an error of a dial, nil if the error is not a denial.
func dialDenial(t egress.Target, method string, err error) *events.EgressDenied {
	d := newDenial(t, method)
	var address *egress.AddressError
	var unresolved *policy.UnresolvedError
	switch {
	case errors.As(err, &address):
		d.Code, d.Address, d.Message = PrivateAddress, address.Addr.String(), d.Host+" leads to "+err.Error()
		if t.Host.Name == "" {
			d.Message = err.Error()
		}
	case errors.As(err, &unresolved):
		d.Code, d.Message = Unresolved, err.Error()
	default:
		return nil
	}
	return d
}

func statusOf(d *events.EgressDenied) int {
	if d.Code == Unresolved {
		return http.StatusBadGateway
	}
	return http.StatusForbidden
}

// watch returns a context that is canceled with errSilent when progress is not called for the idle time. The caller must call stop.
func watch(ctx context.Context, idle time.Duration) (_ context.Context, progress func(), stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(idle, func() { cancel(errSilent) })
	return ctx, func() { timer.Reset(idle) }, func() {
		timer.Stop()
		cancel(nil)
	}
}

// sinceMs returns the time since t in milliseconds, or the nearest value that a uint32 can hold.
func sinceMs(t time.Time) uint32 {
	return uint32(min(max(time.Since(t).Milliseconds(), 0), 1<<32-1)) //nolint:gosec // within bounds
}
