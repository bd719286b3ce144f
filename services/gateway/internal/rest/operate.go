package rest

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// serveHealth answers 200 while the process is alive.
func (h *Handler) serveHealth(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
}

// WaitingHandler returns the HTTP handler of a gateway that does not know the partitions of the log yet. It reports
// the dependencies that are not available, and refuses other requests.
func WaitingHandler(check func(context.Context) map[string]error) http.Handler {
	mux := http.NewServeMux()
	h := &Handler{}
	mux.HandleFunc("GET /health", h.serveHealth)
	mux.HandleFunc("GET /healthz", h.serveHealth)
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		dependencies := check(r.Context())
		dependencies["streams"] = errStreamsUnknown
		writeReady(w, dependencies)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		problem.New(problem.Unavailable, "", errStreamsUnknown.Error()+"; try again").Write(w)
	})
	return mux
}

// errStreamsUnknown is the state of the dependency streams while the gateway does not know the partitions of the log.
var errStreamsUnknown = errors.New("the gateway has not read the streams of NATS yet: NATS does not respond, or its streams are not installed")

// serveReady answers whether the gateway is ready, with each dependency that is not available.
func (h *Handler) serveReady(w http.ResponseWriter, r *http.Request) {
	writeReady(w, h.cfg.Ready(r.Context()))
}

// writeReady writes the readiness of a gateway: for each dependency its error, or "ok". The status is 503 if a
// dependency has an error.
func writeReady(w http.ResponseWriter, dependencies map[string]error) {
	status := http.StatusOK
	checks := map[string]string{}
	for name, err := range dependencies {
		checks[name] = "ok"
		if err != nil {
			checks[name], status = err.Error(), http.StatusServiceUnavailable
		}
	}
	if status != http.StatusOK {
		w.Header().Set("Retry-After", "2")
	}
	writeJSON(w, status, map[string]any{"ready": status == http.StatusOK, "checks": checks})
}

// writeJSON writes v as the JSON response to an HTTP request.
func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil { // maps of strings always encode
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // the client may be gone
}
