// Package cors refuses requests of web pages from other origins. A browser sends credentials and can reach loopback
// from any page, so the origin is checked. If no key is required, the host name is checked too, because DNS rebinding
// lets a foreign host name resolve to 127.0.0.1.
package cors

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Policy refuses HTTP requests of browsers on behalf of pages whose origin is not allowed, and sets the CORS headers for
// allowed origins.
type Policy struct {
	Origins  []string // allowed origins in addition to the server's own; "*" allows all
	Loopback bool     // only accept host names of loopback
}

// Check returns an error for a request that a page of a foreign origin sends, unless the request only reads. If
// Loopback is set, it also returns an error for a request whose Host header is not a name or address of loopback.
func (g Policy) Check(r *http.Request) error {
	if g.Loopback && !isLoopbackHostPort(r.Host) {
		return problem.New(problem.OriginRefused, "Host", fmt.Sprintf("without API keys only requests to localhost are served, not to host %+q", truncate.Text(r.Host, 100)))
	}
	origin := r.Header.Get("Origin")
	if origin == "" || g.isAllowed(origin) || isSameOrigin(origin, r.Host) {
		return nil
	}
	if (r.Method == http.MethodGet || r.Method == http.MethodHead) && !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return nil // without CORS headers the page cannot read the response
	}
	return problem.New(problem.OriginRefused, "Origin", fmt.Sprintf("a page of %+q may not use this server; add a trusted origin to allowed-origins", truncate.Text(origin, 100)))
}

// CheckCookie returns an error for a request with a session cookie unless it comes from a page of the server's own origin
// or of an origin that is allowed by name, or from no page. "*" allows nobody to use a cookie.
func (g Policy) CheckCookie(r *http.Request) error {
	origin, site := r.Header.Get("Origin"), r.Header.Get("Sec-Fetch-Site")
	if origin != "" && g.isNamed(origin) {
		return nil
	}
	if origin != "" && !isSameOrigin(origin, r.Host) {
		return problem.New(problem.OriginRefused, "Origin", fmt.Sprintf("a page of %+q may not use a session cookie of this server; add a trusted origin to allowed-origins by name", truncate.Text(origin, 100)))
	}
	if site != "" && site != "same-origin" && site != "none" {
		return problem.New(problem.OriginRefused, "Sec-Fetch-Site", "a page of another origin may not use a session cookie of this server")
	}
	return nil
}

// SetHeaders adds the CORS headers for an allowed origin, and reports whether the request is a preflight.
func (g Policy) SetHeaders(w http.ResponseWriter, r *http.Request) (preflight bool) {
	origin := r.Header.Get("Origin")
	if origin == "" || !g.isAllowed(origin) {
		return false
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", origin)
	h.Add("Vary", "Origin")
	if g.isNamed(origin) {
		h.Set("Access-Control-Allow-Credentials", "true") // for session cookies
	}
	h.Set("Access-Control-Expose-Headers", "Retry-After, ETag, Content-Disposition, Content-Range")
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
	h.Set("Access-Control-Allow-Headers", "Authorization, Content-Type, Idempotency-Key, Spool-User, X-CSRF-Token, Last-Event-ID, Range, If-None-Match")
	h.Set("Access-Control-Max-Age", "600")
	return true
}

// isAllowed reports whether the policy allows an origin.
func (g Policy) isAllowed(origin string) bool {
	return slices.Contains(g.Origins, "*") || g.isNamed(origin)
}

// isNamed reports whether the policy allows an origin by its name.
func (g Policy) isNamed(origin string) bool {
	return slices.Contains(g.Origins, strings.ToLower(origin))
}

// ValidateOrigin returns an error unless s can be an element of Policy.Origins.
func ValidateOrigin(s string) error {
	u, err := url.Parse(s)
	if s == "*" || err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.Scheme+"://"+u.Host == s {
		return nil
	}
	return fmt.Errorf("allowed-origins: %.100q is not an origin: write it as https://app.example.com, without a path, or *", s)
}

// isSameOrigin reports whether an origin has the host to which the request was sent.
func isSameOrigin(origin, host string) bool {
	u, err := url.Parse(origin)
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, host)
}

// isLoopbackHostPort reports whether a host with an optional port is a name or address of loopback.
func isLoopbackHostPort(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	return IsLoopbackHost(strings.Trim(host, "[]"))
}

// IsLoopbackHost reports whether a host name or address refers to loopback, so that only this machine can reach it.
func IsLoopbackHost(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// ListensOnLoopback reports whether a listener on host can only be reached from this machine. The empty host means
// all addresses. A name is resolved; all its addresses must be loopback ones.
func ListensOnLoopback(host string) bool {
	if ip := net.ParseIP(host); ip != nil || host == "" {
		return ip.IsLoopback()
	}
	ips, err := net.LookupIP(host)
	return err == nil && len(ips) > 0 && !slices.ContainsFunc(ips, func(ip net.IP) bool { return !ip.IsLoopback() })
}
