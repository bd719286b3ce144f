// Package admin serves the admin API of the egress proxy, with which executors register sandboxes, and read and acknowledge
// their journals. Package api has its types and its client.
package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// Config configures the handler of the egress proxy's admin API.
type Config struct {
	Registry *registry.Registry
	Metrics  http.Handler
	Health   func() error                                 // returns nil if the proxy is healthy
	Trust    func(allow []string) (pem string, err error) // returns the certificate that a sandbox with the allowlist trusts, "" for none
	Logger   *slog.Logger
}

// maxBodyBytes is the maximum size in bytes of the body of a request.
const maxBodyBytes = 1 << 20

// statusOfCode maps the code of a refusal to the HTTP status of the answer.
var statusOfCode = map[string]int{
	api.CodeInvalid: http.StatusBadRequest, api.CodeNotFound: http.StatusNotFound,
	api.CodeFenced: http.StatusConflict, api.CodeTokenTaken: http.StatusConflict,
}

// handler serves the egress proxy's admin API.
type handler struct{ Config }

// New returns the HTTP handler of the egress proxy's admin API.
func New(cfg Config) http.Handler {
	h := handler{cfg}
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /v1/sandboxes/{sandbox}", h.jsonHandler(h.putSandbox))
	mux.HandleFunc("GET /v1/sandboxes/{sandbox}", h.jsonHandler(h.getSandbox))
	mux.HandleFunc("DELETE /v1/sandboxes/{sandbox}", h.jsonHandler(h.releaseSandbox))
	mux.HandleFunc("GET /v1/sandboxes/{sandbox}/journal", h.serveLines)
	mux.HandleFunc("POST /v1/sandboxes/{sandbox}/journal/ack", h.jsonHandler(h.acknowledgeLines))
	mux.Handle("GET /healthz", Health(cfg.Health))
	mux.Handle("GET /metrics", cfg.Metrics)
	return mux
}

// Health returns a handler that answers 200 if check returns nil, else 503 and the error.
func Health(check func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			writeJSON(w, http.StatusServiceUnavailable, api.Problem{Type: "about:blank", Title: "Unhealthy", Status: http.StatusServiceUnavailable, Code: "UNHEALTHY", Detail: err.Error()})
			return
		}
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})
}

// jsonHandler returns an HTTP handler that answers with the result of serve as JSON, or with the error of serve as a problem
// document.
func (h handler) jsonHandler(serve func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		v, err := serve(r)
		if err != nil {
			h.writeProblem(w, err)
			return
		}
		writeJSON(w, http.StatusOK, v)
	}
}

// writeProblem answers a request with an error, as a problem document.
func (h handler) writeProblem(w http.ResponseWriter, err error) {
	p := api.Problem{Type: "about:blank", Status: http.StatusInternalServerError, Code: "INTERNAL", Detail: err.Error()}
	var refused *api.Error
	if errors.As(err, &refused) {
		p.Status, p.Code, p.Detail, p.Field = statusOfCode[refused.Code], refused.Code, refused.Detail, refused.Field
	} else {
		h.Logger.Error("admin request", "error", err)
	}
	p.Title = http.StatusText(p.Status)
	writeJSON(w, p.Status, p)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	kind := "application/json"
	if _, ok := v.(api.Problem); ok {
		kind = "application/problem+json"
	}
	w.Header().Set("Content-Type", kind)
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v) //nolint:errcheck // the client is gone
}

// decodeBody decodes the JSON body of a request into v. It returns an *api.Error if the body is too large or has an unknown field.
func decodeBody(r *http.Request, v any) error {
	raw, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBodyBytes))
	if err != nil {
		return api.InvalidFieldError("", "body: %v", err)
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return api.InvalidFieldError("", "body: %v", err)
	}
	return nil
}

// queryNumber returns the number in a parameter of the request's query, or 0 if the request does not have the parameter.
func queryNumber(r *http.Request, name string) (uint64, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, api.InvalidFieldError(name, "%s: %q is not a number from 0 upward", name, s)
	}
	return n, nil
}

// putSandbox registers the sandbox that the request names, or replaces its registration.
func (h handler) putSandbox(r *http.Request) (any, error) {
	var g api.Registration
	if err := decodeBody(r, &g); err != nil {
		return nil, err
	}
	state, err := h.Registry.Register(r.PathValue("sandbox"), g)
	if err != nil {
		return nil, err
	}
	h.Logger.Info("sandbox registered", "sandbox", state.Sandbox, "tenant", state.Tenant, "session", state.Session, "execution", state.Execution, "epoch", state.Epoch, "allow", len(state.Allow))
	state.Authority, err = h.Trust(state.Allow)
	return state, err
}

// getSandbox returns the registration of the sandbox that the request names.
func (h handler) getSandbox(r *http.Request) (any, error) {
	sb, err := h.Registry.Get(r.PathValue("sandbox"))
	if err != nil {
		return nil, err
	}
	state := sb.State()
	state.Authority, err = h.Trust(state.Allow)
	return state, err
}

// releaseSandbox ends the registration of the sandbox that the request names.
func (h handler) releaseSandbox(r *http.Request) (any, error) {
	state, err := h.Registry.Release(r.Context(), r.PathValue("sandbox"))
	if err != nil {
		return nil, err
	}
	h.Logger.Info("sandbox released", "sandbox", state.Sandbox, "tenant", state.Tenant, "session", state.Session, "last", state.Last)
	return state, nil
}

// acknowledgeLines removes journal lines that the executor has stored, and forgets a released sandbox without further lines.
func (h handler) acknowledgeLines(r *http.Request) (any, error) {
	var ack api.AckRequest
	if err := decodeBody(r, &ack); err != nil {
		return nil, err
	}
	sb, err := h.Registry.Get(r.PathValue("sandbox"))
	if err != nil {
		return nil, err
	}
	if ack.Journal != sb.Journal.Name() {
		return sb.State(), nil
	}
	if err := sb.Journal.AckLines(ack.Line); err != nil {
		var ahead *journal.AheadError
		if errors.As(err, &ahead) {
			return nil, api.InvalidFieldError("line", "line: %s", err)
		}
		return nil, err
	}
	state := sb.State()
	return state, h.Registry.ForgetIfDone(sb)
}

// settleTimeout is the maximum time that a request with settle=1 waits for open model requests.
const settleTimeout = 200 * time.Millisecond

// serveLines answers with the lines of a sandbox's journal after a line number, one JSON object for each line. With settle=1 it
// first waits up to settleTimeout for open model requests, so that their lines are included. It sends all lines if the request
// names another journal than the sandbox's present one, because the line number then counts lines of a journal that no longer
// exists.
func (h handler) serveLines(w http.ResponseWriter, r *http.Request) {
	sb, after, err := h.requestedLines(r)
	if err != nil {
		h.writeProblem(w, err)
		return
	}
	if r.URL.Query().Get("settle") == "1" {
		ctx, cancel := context.WithTimeout(r.Context(), settleTimeout)
		_ = sb.AwaitModelRequests(ctx) // a request that runs for longer is in a later answer
		cancel()
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	for {
		raw, last, err := sb.Journal.ReadLines(after)
		if err != nil {
			if _, gone := h.Registry.Get(sb.ID()); gone == nil {
				h.Logger.Error("read a journal", "sandbox", sb.ID(), "error", err)
			}
			return
		}
		if _, err := w.Write(raw); err != nil || len(raw) == 0 {
			return
		}
		after = last
	}
}

// requestedLines returns the sandbox whose journal a request reads, and the number of the line after which the answer begins.
func (h handler) requestedLines(r *http.Request) (*registry.Sandbox, uint64, error) {
	sb, err := h.Registry.Get(r.PathValue("sandbox"))
	if err != nil {
		return nil, 0, err
	}
	after, err := queryNumber(r, "after")
	if err != nil {
		return nil, 0, err
	}
	if known := r.URL.Query().Get("journal"); known != "" && known != sb.Journal.Name() {
		after = 0
	}
	return sb, after, nil
}
