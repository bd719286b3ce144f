// Package admin is the proxy's other side, for the holders of sandboxes: they
// register sandboxes, read what was journaled of them and acknowledge it. It
// is HTTP and JSON over a Unix socket that no sandbox can reach.
package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// Config of the API.
type Config struct {
	Registry *registry.Registry
	Metrics  http.Handler
	Health   func() error                                 // nil, or what is wrong with the proxy
	Trust    func(allow []string) (pem string, err error) // returns the certificate that a sandbox with the allowlist trusts, "" for none
	Logger   *slog.Logger
}

// Problem is an error's body, application/problem+json.
type Problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Code   string `json:"code"` // of registry.Error, or INTERNAL, UNHEALTHY
	Field  string `json:"field,omitempty"`
}

// Ack is the body of an acknowledgement.
type Ack struct {
	Journal string `json:"journal"` // that the line is of; of another than the sandbox's it changes nothing
	Line    uint64 `json:"line"`    // lines up to it may be forgotten
	Epoch   uint64 `json:"epoch"`   // AnyEpoch
}

// AnyEpoch is the epoch that clients send with every request except a registration, which has its own. The proxy ignores
// it. Proxies of earlier releases answer FENCED to a request that has none.
const AnyEpoch = math.MaxInt64

// maxBody bounds a request's body in bytes.
const maxBody = 1 << 20

var statuses = map[string]int{
	registry.CodeInvalid: http.StatusBadRequest, registry.CodeNotFound: http.StatusNotFound,
	registry.CodeFenced: http.StatusConflict, registry.CodeTokenTaken: http.StatusConflict,
}

type api struct{ Config }

// New makes the handler.
func New(cfg Config) http.Handler {
	a := api{cfg}
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /v1/sandboxes/{sandbox}", a.answer(a.put))
	mux.HandleFunc("GET /v1/sandboxes/{sandbox}", a.answer(a.get))
	mux.HandleFunc("DELETE /v1/sandboxes/{sandbox}", a.answer(a.release))
	mux.HandleFunc("GET /v1/sandboxes/{sandbox}/journal", a.lines)
	mux.HandleFunc("POST /v1/sandboxes/{sandbox}/journal/ack", a.answer(a.ack))
	mux.Handle("GET /healthz", Health(cfg.Health))
	mux.Handle("GET /metrics", cfg.Metrics)
	return mux
}

// Health answers 200, or 503 and what is wrong.
func Health(check func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			write(w, http.StatusServiceUnavailable, Problem{Type: "about:blank", Title: "Unhealthy", Status: http.StatusServiceUnavailable, Code: "UNHEALTHY", Detail: err.Error()})
			return
		}
		write(w, http.StatusOK, map[string]string{"status": "ok"})
	})
}

func (a api) answer(h func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		v, err := h(r)
		if err != nil {
			a.fail(w, err)
			return
		}
		write(w, http.StatusOK, v)
	}
}

func (a api) fail(w http.ResponseWriter, err error) {
	p := Problem{Type: "about:blank", Status: http.StatusInternalServerError, Code: "INTERNAL", Detail: err.Error()}
	var refused *registry.Error
	if errors.As(err, &refused) {
		p.Status, p.Code, p.Detail, p.Field = statuses[refused.Code], refused.Code, refused.Detail, refused.Field
	} else {
		a.Logger.Error("admin request", "error", err)
	}
	p.Title = http.StatusText(p.Status)
	write(w, p.Status, p)
}

func write(w http.ResponseWriter, status int, v any) {
	kind := "application/json"
	if _, ok := v.(Problem); ok {
		kind = "application/problem+json"
	}
	w.Header().Set("Content-Type", kind)
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v) //nolint:errcheck // whoever asked is gone
}

func invalid(field, format string, args ...any) error {
	return &registry.Error{Code: registry.CodeInvalid, Field: field, Detail: fmt.Sprintf(format, args...)}
}

func decode(r *http.Request, v any) error {
	raw, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBody))
	if err != nil {
		return invalid("", "the body: %v", err)
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return invalid("", "the body: %v", err)
	}
	return nil
}

// number reads a number of the query; absent it is 0.
func number(r *http.Request, name string) (uint64, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, invalid(name, "%s: %q is not a number from 0 upward", name, s)
	}
	return n, nil
}

func (a api) put(r *http.Request) (any, error) {
	var g registry.Registration
	if err := decode(r, &g); err != nil {
		return nil, err
	}
	state, err := a.Registry.Put(r.PathValue("sandbox"), g)
	if err != nil {
		return nil, err
	}
	a.Logger.Info("sandbox registered", "sandbox", state.Sandbox, "tenant", state.Tenant, "session", state.Session, "execution", state.Execution, "epoch", state.Epoch, "allow", len(state.Allow))
	state.Authority, err = a.Trust(state.Allow)
	return state, err
}

func (a api) get(r *http.Request) (any, error) {
	sb, err := a.Registry.Get(r.PathValue("sandbox"))
	if err != nil {
		return nil, err
	}
	state := sb.State()
	state.Authority, err = a.Trust(state.Allow)
	return state, err
}

func (a api) release(r *http.Request) (any, error) {
	state, err := a.Registry.Release(r.Context(), r.PathValue("sandbox"))
	if err != nil {
		return nil, err
	}
	a.Logger.Info("sandbox released", "sandbox", state.Sandbox, "tenant", state.Tenant, "session", state.Session, "last", state.Last)
	return state, nil
}

func (a api) ack(r *http.Request) (any, error) {
	var ack Ack
	if err := decode(r, &ack); err != nil {
		return nil, err
	}
	sb, err := a.Registry.Get(r.PathValue("sandbox"))
	if err != nil {
		return nil, err
	}
	if ack.Journal != sb.Journal.Name() {
		return sb.State(), nil
	}
	if err := sb.Journal.Ack(ack.Line); err != nil {
		var ahead *journal.AheadError
		if errors.As(err, &ahead) {
			return nil, invalid("line", "line: %s", err)
		}
		return nil, err
	}
	state := sb.State()
	return state, a.Registry.Tidy(sb)
}

// settleWithin bounds how long a request with settle=1 waits for open model requests.
const settleWithin = 200 * time.Millisecond

// lines answers with the journal's lines after a number, one JSON object each line. With settle=1 it waits up to settleWithin
// for model requests that are about to end, so that their lines are included. A client that names another journal than the
// sandbox's gets all lines: its number counts lines of a journal that is gone.
func (a api) lines(w http.ResponseWriter, r *http.Request) {
	sb, after, err := a.position(r)
	if err != nil {
		a.fail(w, err)
		return
	}
	if r.URL.Query().Get("settle") == "1" {
		ctx, cancel := context.WithTimeout(r.Context(), settleWithin)
		_ = sb.Settle(ctx) // a request that runs for longer is in a later answer
		cancel()
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	for {
		raw, last, err := sb.Journal.Read(after)
		if err != nil {
			if _, gone := a.Registry.Get(sb.ID()); gone == nil {
				a.Logger.Error("read a journal", "sandbox", sb.ID(), "error", err)
			}
			return
		}
		if _, err := w.Write(raw); err != nil || len(raw) == 0 {
			return
		}
		after = last
	}
}

// position returns the sandbox whose journal is read, and the number of the line before the first one to send.
func (a api) position(r *http.Request) (*registry.Sandbox, uint64, error) {
	sb, err := a.Registry.Get(r.PathValue("sandbox"))
	if err != nil {
		return nil, 0, err
	}
	after, err := number(r, "after")
	if err != nil {
		return nil, 0, err
	}
	if known := r.URL.Query().Get("journal"); known != "" && known != sb.Journal.Name() {
		after = 0
	}
	return sb, after, nil
}
