// Package rest serves HTTP: the routes that grpc-gateway generates from spool.v1, which call the API in the same
// process, and the routes of WebSocket, SSE, files, health and metrics.
package rest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/cors"
	"github.com/spoolhq/spool/services/gateway/internal/metrics"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/signin"
	"github.com/spoolhq/spool/services/gateway/internal/socket"
	"github.com/spoolhq/spool/services/gateway/internal/sse"
	"github.com/spoolhq/spool/web"
)

// Config configures a Handler of HTTP requests. Every field is required, except Page and PathPrefix.
type Config struct {
	// Page is the inspector; nil serves no page.
	Page    *web.Page
	API     *api.Server
	Auth    *auth.Authenticator
	CORS    cors.Policy
	Proxies auth.TrustedProxies
	Socket  *socket.Handler
	SSE     *sse.Handler
	Metrics *metrics.Metrics
	// Failures limits refused keys in first messages of WebSockets.
	Failures *signin.Failures
	// PathPrefix is the path below which a proxy serves the gateway, such as /spool; "" for none.
	PathPrefix string
	Ready      func(context.Context) map[string]error // dependencies by name, with an error for each that is not available
	Logger     *slog.Logger

	Admission  *admission.Admission
	MaxRequest int64 // largest body with files, in bytes
	MaxFile    int64 // largest uploaded file, in bytes

	MaxTranscript int64         // largest transcript, in bytes
	ReadTimeout   time.Duration // maximum time that a body may take to arrive
}

// Handler serves the gateway's HTTP API: REST, and the routes of the WebSocket and of SSE.
type Handler struct {
	cfg     Config
	api     http.Handler
	metrics http.Handler
	openAPI []byte
}

// New returns a Handler.
func New(cfg Config) (*Handler, error) {
	h := &Handler{cfg: cfg, metrics: cfg.Metrics.Handler()}
	mux, err := h.newMux()
	if err != nil {
		return nil, fmt.Errorf("routes of spool.v1: %w", err)
	}
	h.api = mux
	h.openAPI, err = openAPIDocument(cfg.PathPrefix)
	return h, err
}

// ServeHTTP answers a request, counts it, and converts a panic to INTERNAL.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer h.cfg.Metrics.BeginRequest()()
	began := time.Now()
	if r.ProtoMajor == 1 {
		// The deadline of the connection's previous response, such as a file, does not apply to this one.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // a test's recorder has no connection
	}
	r = h.withoutPrefix(r)
	out := &statusRecorder{ResponseWriter: w, route: "none"}
	defer func() {
		if v := recover(); v != nil {
			if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
				panic(v)
			}
			h.cfg.Logger.Error("panic in request", "method", r.Method, "path", r.URL.Path, "panic", v)
			h.writeProblem(out, r, fmt.Errorf("panic: %v", v))
		}
		h.cfg.Metrics.CountRequest(methodLabel(r.Method), out.route, out.statusCode(), time.Since(began), out.waits || strings.HasSuffix(out.route, streamSuffix))
		h.cfg.Logger.Debug("answered", "method", r.Method, "path", r.URL.Path, "status", out.statusCode(), "took", time.Since(began))
	}()
	if err := h.serveRoute(out, r); err != nil {
		h.writeProblem(out, r, err)
	}
}

// methodLabel returns the HTTP method as a metric label; unknown methods share one label.
func methodLabel(m string) string {
	switch m {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPatch, http.MethodPut, http.MethodDelete, http.MethodOptions:
		return m
	}
	return "other"
}

// writeProblem answers a request with the problem for err, and logs errors of the server.
func (h *Handler) writeProblem(w *statusRecorder, r *http.Request, err error) {
	p := problem.From(err)
	switch p.Code {
	case problem.Internal:
		h.cfg.Logger.Error("request failed", "method", r.Method, "path", r.URL.Path, "error", p)
	case problem.Unavailable:
		h.cfg.Logger.Warn("request refused: not available", "method", r.Method, "path", r.URL.Path, "error", p)
	case problem.Unauthenticated:
		h.cfg.Metrics.CountUnauthenticated()
	}
	if w.status != 0 {
		return
	}
	if r.ProtoMajor > 1 {
		// On HTTP/2, flow control would allow a client that does not read the response to keep its request in memory.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(refusalTimeout))
	}
	p.Write(w)
}

// refusalTimeout bounds how long an HTTP/2 client may take to receive the response with which its request is refused.
const refusalTimeout = 10 * time.Second

// plainRoute returns the handler of a route that is not generated from spool.v1 and needs no key (except /metrics).
func (h *Handler) plainRoute(path string) http.HandlerFunc {
	switch path {
	case "/health", "/healthz":
		return h.serveHealth
	case "/readyz":
		return h.serveReady
	case metricsPath:
		return h.metrics.ServeHTTP
	case "/api/openapi.json":
		return h.serveOpenAPI
	}
	return nil
}

const (
	metricsPath  = "/metrics"
	pageRoute    = "/" // all paths of the inspector, in metrics
	socketPath   = "/api/ws"
	changesPath  = "/api/sessions/stream"
	signInPath   = "/api/signin/sessions" // the only route of spool.v1 that needs no key
	signInPrefix = "/api/signin/"
	streamPrefix = "/api/sessions/"
	streamSuffix = "/events/stream"
)

// serveRoute checks the origin, the key and the rates of a request, and calls the handler of its route.
func (h *Handler) serveRoute(w *statusRecorder, r *http.Request) error {
	admission.EndHeader(r.Context())
	if err := checkHeaderSize(r); err != nil {
		return err
	}
	if err := h.cfg.CORS.Check(r); err != nil {
		return err
	}
	if h.cfg.CORS.SetHeaders(w, r) {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	if serve := h.plainRoute(r.URL.Path); serve != nil {
		w.route = r.URL.Path
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			return methodNotAllowed(r)
		}
		if r.URL.Path == metricsPath {
			if err := h.checkOperator(r); err != nil {
				return err
			}
		}
		serve(w, r)
		return nil
	}
	if isPagePath(r.URL.Path) {
		return h.servePage(w, r)
	}
	if r.URL.Path == socketPath && r.Method == http.MethodGet && r.URL.Query().Has("auth") {
		return h.serveSocketWithFirstMessage(w, r)
	}
	ctx, tenant, err := h.authenticate(w, r)
	if err != nil {
		return err
	}
	r = r.WithContext(ctx)
	if serve := h.streamHandler(w, r); serve != nil {
		return serve()
	}
	held, err := h.cfg.Admission.Begin(tenant)
	if err != nil {
		return err
	}
	defer held.End()
	r = r.WithContext(admission.With(ctx, held))
	if session, file, has, ok := parseFilesPath(r.URL.Path); ok {
		return h.serveFiles(w, r, session, file, has)
	}
	if serve := h.skillHandler(r); serve != nil {
		return serve(w, r)
	}
	if r.URL.Path == transcriptsPath {
		return h.putTranscript(w, r)
	}
	h.api.ServeHTTP(w, r)
	return nil
}

// authenticate checks the key or the session of a request, and its rate. It returns the context that carries the caller,
// and the tenant against whose limits the request counts.
func (h *Handler) authenticate(w http.ResponseWriter, r *http.Request) (ctx context.Context, tenant string, err error) {
	ctx = r.Context()
	if strings.HasPrefix(r.URL.Path, signInPrefix) {
		ctx = signin.WithClient(ctx, h.signInClient(w, r))
	}
	if r.Method == http.MethodPost && r.URL.Path == signInPath {
		return ctx, auth.NoTenant, h.cfg.Admission.CheckRate(auth.NoTenant)
	}
	p, err := h.authenticateCaller(w, r)
	if err != nil {
		return nil, "", err
	}
	if p.User, err = auth.ParseUser(auth.HeaderUser, r.Header.Values(auth.HeaderUser)); err != nil {
		return nil, "", err
	}
	p.Address = h.clientIP(r)
	if ctx, err = auth.With(ctx, p, isManagementRoute(r.URL.Path)); err != nil {
		return nil, "", err
	}
	if !p.Admin || !isManagementRoute(r.URL.Path) { // rate limits of a tenant must not lock out the operator
		err = h.cfg.Admission.CheckRate(p.Tenant)
	}
	return ctx, p.Tenant, err
}

// clientIP returns the IP address of a request's client.
func (h *Handler) clientIP(r *http.Request) string {
	return h.cfg.Proxies.ClientIP(r.RemoteAddr, r.Header.Values("X-Forwarded-For"))
}

// serveSocketWithFirstMessage serves a WebSocket whose first message has the key.
func (h *Handler) serveSocketWithFirstMessage(w *statusRecorder, r *http.Request) error {
	w.route = socketPath
	if q := r.URL.Query()["auth"]; len(q) != 1 || q[0] != "message" {
		return problem.Invalid("auth", "must be message, once, or left out")
	}
	if err := h.cfg.Admission.CheckRate(auth.NoTenant); err != nil {
		return err
	}
	address := h.clientIP(r)
	return h.cfg.Socket.ServeUnauthenticated(w, r, func(ctx context.Context, key string) (auth.Principal, error) {
		return h.authenticateMessage(ctx, key, address)
	})
}

// authenticateMessage returns the principal of a WebSocket whose first message has a key or a session credential. It limits
// the refused ones of an address.
func (h *Handler) authenticateMessage(ctx context.Context, key, address string) (auth.Principal, error) {
	end, err := h.cfg.Failures.Begin(address)
	if err != nil {
		return auth.Principal{}, err
	}
	p, err := h.cfg.Auth.Authenticate(ctx, "Bearer "+key)
	refused := err != nil && problem.From(err).Code == problem.Unauthenticated
	end(refused)
	if refused {
		h.cfg.Metrics.CountUnauthenticated()
	}
	if err != nil {
		return p, err
	}
	p.Address = address
	if ctx, err = auth.With(ctx, p, false); err != nil {
		return p, err
	}
	if err = auth.CheckAllowed(ctx, http.MethodGet+" "+socketPath); err != nil {
		return p, err
	}
	return p, h.cfg.Admission.CheckRate(p.Tenant)
}

// admissionOf returns the admission.Request that holds the bytes of an HTTP request. Every request that is served has
// one.
func admissionOf(r *http.Request) *admission.Request {
	return admission.From(r.Context())
}

// streamHandler returns the handler of a WebSocket or SSE route, or nil for other routes.
func (h *Handler) streamHandler(w *statusRecorder, r *http.Request) func() error {
	session, streams := strings.CutPrefix(r.URL.Path, streamPrefix)
	session, ends := strings.CutSuffix(session, streamSuffix)
	var serve func() error
	switch {
	case r.URL.Path == socketPath:
		w.route = socketPath
		serve = func() error { return h.cfg.Socket.Serve(w, r) }
	case r.URL.Path == changesPath:
		w.route = changesPath
		serve = func() error { return h.cfg.SSE.ServeChanges(w, r) }
	case streams && ends && !strings.Contains(session, "/"):
		w.route = streamPrefix + "{session_id}" + streamSuffix
		serve = func() error { return h.cfg.SSE.Serve(w, r, session) }
	default:
		return nil
	}
	if r.Method != http.MethodGet {
		return func() error { return methodNotAllowed(r) }
	}
	return func() error {
		if err := checkAllowed(w, r); err != nil {
			return err
		}
		return serve()
	}
}

// checkAllowed calls auth.CheckAllowed for a route that is not generated from spool.v1.
func checkAllowed(w *statusRecorder, r *http.Request) error {
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	return auth.CheckAllowed(r.Context(), method+" "+w.route)
}

// OverloadedResponse returns the response to a connection over the limit, as bytes of HTTP/1.1.
func OverloadedResponse() []byte {
	p := problem.New(problem.Overloaded, "", "the gateway, or your address, has as many connections open as it may (--max-connections, --max-address-connections); try again")
	body := p.JSON()
	return fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nCache-Control: no-store\r\nRetry-After: %d\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s",
		int(p.RetryAfter.Seconds()), len(body), body)
}

// MaxHeaderBytes is the largest total size of the URL and the header fields of a request, in bytes.
const MaxHeaderBytes = 32 << 10

// checkHeaderSize returns an error if the URL and the header fields of a request are too large. The error names the
// largest field, or "" for the URL.
func checkHeaderSize(r *http.Request) error {
	total, largest, field := len(r.RequestURI), len(r.RequestURI), ""
	for name, values := range r.Header {
		size := 0
		for _, v := range values {
			size += len(name) + len(v)
		}
		if total += size; size > largest {
			largest, field = size, name
		}
	}
	if total > MaxHeaderBytes {
		return problem.Invalid(field, "the URL and the header have %d bytes, %d of them here; the limit is %d", total, largest, MaxHeaderBytes)
	}
	return nil
}

// checkOperator returns an error unless a request for /metrics is from the operator, because metrics concern all
// tenants. SPOOL_METRICS_LISTEN serves them without a key, on a network of the operator.
func (h *Handler) checkOperator(r *http.Request) error {
	p, err := h.cfg.Auth.Authenticate(r.Context(), r.Header.Get("Authorization"))
	if err == nil && !p.Admin {
		err = problem.New(problem.Forbidden, "Authorization", "metrics require the root key; they are also served on the address of SPOOL_METRICS_LISTEN")
	}
	return err
}

// isManagementRoute reports whether a path belongs to the management of API keys, limits or budgets.
func isManagementRoute(path string) bool {
	for _, route := range []string{"/api/keys", "/api/budgets", "/api/limits"} {
		if path == route || strings.HasPrefix(path, route+"/") {
			return true
		}
	}
	return false
}

// methodNotAllowed returns the problem for an HTTP method that a route does not have.
func methodNotAllowed(r *http.Request) error {
	return problem.New(problem.MethodNotAllowed, "", fmt.Sprintf("%s does not support the method %.20s", truncate.Text(r.URL.Path, 100), r.Method))
}

// routeNotFound returns the problem for a path that is not a route.
func routeNotFound(r *http.Request) error {
	return problem.New(problem.NotFound, "", fmt.Sprintf("there is no route %+q; /api/openapi.json lists them", truncate.Text(r.URL.Path, 100)))
}

// serveOpenAPI serves the OpenAPI document.
func (h *Handler) serveOpenAPI(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(h.openAPI) // the client may be gone
}

// statusRecorder is a ResponseWriter that records the status of the response. Unwrap lets http.ResponseController reach
// the connection.
type statusRecorder struct {
	http.ResponseWriter
	route  string
	status int
	waits  bool // the request waits for the end of an execution
}

func (a *statusRecorder) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
	a.ResponseWriter.WriteHeader(status)
}

func (a *statusRecorder) Write(b []byte) (int, error) {
	if a.status == 0 {
		a.status = http.StatusOK
	}
	return a.ResponseWriter.Write(b)
}

// Unwrap returns the wrapped ResponseWriter.
func (a *statusRecorder) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// statusCode returns the status that was sent, or 200 if the handler has written nothing.
func (a *statusRecorder) statusCode() int {
	if a.status == 0 {
		return http.StatusOK
	}
	return a.status
}
