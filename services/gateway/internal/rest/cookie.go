package rest

import (
	"crypto/subtle"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/signin"
)

// csrfHeader is the header with the CSRF token of the session cookie.
const csrfHeader = "X-CSRF-Token"

// cookies accesses the session cookie of one request.
type cookies struct {
	handler *Handler
	w       http.ResponseWriter
	r       *http.Request
}

// name returns the name of the session cookie. Browsers accept the prefixes __Host- and __Secure- over TLS only. A cookie
// with __Host- has the path /, and no other host of the domain can set it.
func (c cookies) name() string {
	switch {
	case !c.isSecure():
		return "spool"
	case c.handler.cfg.PathPrefix != "":
		return "__Secure-spool"
	}
	return "__Host-spool"
}

// isSecure reports whether the client uses TLS.
func (c cookies) isSecure() bool {
	return c.r.TLS != nil || c.handler.cfg.Proxies.IsHTTPS(c.r.RemoteAddr, c.r.Header.Values("X-Forwarded-Proto"))
}

// value returns the value of the session cookie, or "" for none. Several cookies of its name are an error, because another
// host of the domain, or another path, may have set one of them.
func (c cookies) value() (string, error) {
	list := c.r.CookiesNamed(c.name())
	switch len(list) {
	case 0:
		return "", nil
	case 1:
		return list[0].Value, nil
	}
	return "", problem.New(problem.Unauthenticated, "Cookie", fmt.Sprintf("the request has %d cookies %s; remove the cookies of this site and sign in again", len(list), c.name()))
}

// CheckOrigin implements signin.Cookies.
func (c cookies) CheckOrigin() error { return c.handler.cfg.CORS.CheckCookie(c.r) }

// SetCookie implements signin.Cookies.
func (c cookies) SetCookie(value string, until time.Time) {
	http.SetCookie(c.w, c.cookie(value, until))
}

// ClearCookie implements signin.Cookies.
func (c cookies) ClearCookie() {
	cookie := c.cookie("", time.Time{})
	cookie.MaxAge = -1
	http.SetCookie(c.w, cookie)
}

// cookie returns a session cookie. A zero time sets no expiry.
func (c cookies) cookie(value string, until time.Time) *http.Cookie {
	return &http.Cookie{
		Name: c.name(), Value: value, Path: c.handler.cfg.PathPrefix + "/", Expires: until,
		HttpOnly: true, Secure: c.isSecure(), SameSite: http.SameSiteStrictMode,
	}
}

// signInClient returns the client of a request about sign-in. The key is that of the header, if no session cookie is used
// instead.
func (h *Handler) signInClient(w http.ResponseWriter, r *http.Request) signin.Client {
	c := cookies{h, w, r}
	value, err := c.value()
	if err != nil {
		value = "" // neither of several cookies is the client's
	}
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		key = ""
	}
	return signin.Client{Address: h.clientIP(r), Key: strings.TrimSpace(key), Cookie: value, Cookies: c}
}

// authenticateCaller returns the principal of a request: by its header Authorization, or else by its session cookie. A
// gateway without keys ignores cookies, which may be those of another server on this host.
func (h *Handler) authenticateCaller(w http.ResponseWriter, r *http.Request) (auth.Principal, error) {
	header := r.Header.Get("Authorization")
	if header == "" && h.cfg.Auth.RequiresKey() {
		c := cookies{h, w, r}
		value, err := c.value()
		if err != nil {
			return auth.Principal{}, err
		}
		if value != "" {
			return h.authenticateCookie(c, value)
		}
	}
	return h.cfg.Auth.Authenticate(r.Context(), header)
}

// authenticateCookie returns the principal of a request with a session cookie. Unless the request only reads, it must have
// the session's CSRF token.
func (h *Handler) authenticateCookie(c cookies, value string) (auth.Principal, error) {
	if err := c.CheckOrigin(); err != nil {
		return auth.Principal{}, err
	}
	p, err := h.cfg.Auth.AuthenticateCookie(c.r.Context(), value)
	if err != nil {
		return p, err
	}
	switch c.r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return p, nil
	}
	if subtle.ConstantTimeCompare([]byte(c.r.Header.Get(csrfHeader)), []byte(auth.CSRFToken(value))) != 1 {
		return p, problem.New(problem.CSRFRefused, csrfHeader, "the header is missing or is not the CSRF token of this session; GET /api/signin/session answers with the token")
	}
	return p, nil
}
