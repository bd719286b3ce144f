package proxy

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/egress"

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
	// BudgetExhausted is a model that is not called, because the execution has used up what it may.
	BudgetExhausted = "BUDGET_EXHAUSTED"
	// Untrusted is a client in the sandbox that does not trust the proxy's certificate.
	Untrusted = "UNTRUSTED"
	// UnknownServer is an MCP server that the proxy was not told of, or no more: it keeps them in memory alone.
	UnknownServer = "UNKNOWN_SERVER"
	// ProviderSide is a request that has a model's provider fetch, run or look up what the allowlist does not let it.
	ProviderSide = "PROVIDER_SIDE"
	// UnreadableBody is a request to a model that the proxy cannot check: what it says depends on who reads it.
	UnreadableBody = "UNREADABLE_BODY"
	// NoExecution is a model that is called while no execution of the sandbox runs.
	NoExecution = "NO_EXECUTION"
)

// errSilent is the cause of a request that ended because nothing moved.
var errSilent = errors.New("nothing was sent for too long")

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connKey{}).(*conn)
	c.handle()
	if !s.begin() {
		panic(http.ErrAbortHandler) // the proxy ends
	}
	defer s.end()
	switch {
	case c.inside != nil:
		s.judged(w, r, c)
	case r.Method == http.MethodConnect && !strings.HasPrefix(r.RequestURI, "/"):
		s.tunnel(w, r, c.sandbox)
	case r.URL.IsAbs():
		s.forward(w, r, c.sandbox)
	case c.hosts:
		s.deny(w, c.sandbox, http.StatusForbidden, events.EgressDenied{Host: r.URL.Path, Method: r.Method, Code: NotAllowed, Message: "an MCP server's container reaches hosts of the allowlist, and no models and no other MCP servers"})
	case strings.HasPrefix(r.URL.Path, mcpPath):
		s.mcp(w, r, c.sandbox)
	default:
		s.route(w, r, c.sandbox)
	}
}

// denied journals and counts a denial.
func (s *Server) denied(sb *registry.Sandbox, d events.EgressDenied) {
	s.cfg.Metrics.Denied(d.Code)
	if err := sb.Journal.Denied(time.Now(), sb.Owner(), d); err != nil {
		s.cfg.Logger.Error("a denial is not journaled", "sandbox", sb.ID(), "error", err)
	}
}

// deny is denied, and tells the sandbox.
func (s *Server) deny(w http.ResponseWriter, sb *registry.Sandbox, status int, d events.EgressDenied) {
	d.Host, d.Method, d.Message = clip(d.Host), clip(d.Method), clip(d.Message)
	s.denied(sb, d)
	failure{status, d.Code, d.Message}.write(w)
}

// judge tells whether a sandbox may name a target, and what it may do there; otherwise why not.
func (s *Server) judge(sb *registry.Sandbox, method, authority string, assume uint16) (egress.Target, egress.Access, *events.EgressDenied) {
	t, err := egress.ParseTarget(authority, assume)
	if err != nil {
		return t, egress.Access{}, &events.EgressDenied{Host: authority, Method: method, Code: BadHost, Message: err.Error()}
	}
	d := about(t, method)
	if t.Host.Name == "" {
		if err := egress.CheckAddress(t.Host.Addr); err != nil {
			d.Code, d.Address, d.Message = PrivateAddress, t.Host.Addr.String(), err.Error()
			return t, egress.Access{}, d
		}
	}
	access := sb.Access(t)
	if !access.Named() {
		d.Code, d.Message = NotAllowed, unnamed(t)
		return t, access, d
	}
	return t, access, nil
}

// about is a denial of a request to a target.
func about(t egress.Target, method string) *events.EgressDenied {
	return &events.EgressDenied{Host: t.Host.String(), Port: uint32(t.Port), Method: method}
}

func unnamed(t egress.Target) string {
	return t.String() + " is not in the session's allowlist; models are reached at their routes, without an entry"
}

// refusal is the denial that a failed dial is, nil if it is none.
func refusal(t egress.Target, method string, err error) *events.EgressDenied {
	d := about(t, method)
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

// watch ends a request in which nothing moves; move says that something did.
func watch(ctx context.Context, idle time.Duration) (_ context.Context, move func(), stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(idle, func() { cancel(errSilent) })
	return ctx, func() { timer.Reset(idle) }, func() {
		timer.Stop()
		cancel(nil)
	}
}

// sinceMs returns the milliseconds since a time, within 32 bits.
func sinceMs(t time.Time) uint32 {
	return uint32(min(max(time.Since(t).Milliseconds(), 0), 1<<32-1)) //nolint:gosec // within bounds
}

// clip bounds what a sandbox may have written into a line.
func clip(s string) string {
	const most = 500
	if len(s) > most {
		s = s[:most]
	}
	return strings.ToValidUTF8(s, "�")
}
