package rest

import (
	"encoding/json"
	"net/http"
)

// health answers 200 while the process is alive.
func (h *Handler) health(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
}

// ready reports which dependencies of the gateway are not available.
func (h *Handler) ready(w http.ResponseWriter, r *http.Request) {
	status := http.StatusOK
	checks := map[string]string{}
	for name, err := range h.cfg.Ready(r.Context()) {
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
