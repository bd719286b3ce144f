package api_test

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// earlierProxy answers as the first release of the proxy does: it fences off an epoch below the registered one, refuses
// fields that it does not know, and ends the lines of a released sandbox with an end line.
func earlierProxy(t *testing.T) *api.Client {
	t.Helper()
	fence := func(w http.ResponseWriter, epoch uint64) bool {
		if epoch >= 7 {
			return false
		}
		w.WriteHeader(http.StatusConflict)
		_ = json.NewEncoder(w).Encode(map[string]any{"code": "FENCED", "field": "epoch", "detail": "epoch"})
		return true
	}
	query := func(r *http.Request) uint64 {
		n, err := strconv.ParseUint(r.URL.Query().Get("epoch"), 10, 64)
		if err != nil {
			return 0
		}
		return n
	}
	mux := http.NewServeMux()
	mux.HandleFunc("DELETE /v1/sandboxes/{sandbox}", func(w http.ResponseWriter, r *http.Request) {
		if !fence(w, query(r)) {
			_, _ = io.WriteString(w, `{"sandbox":"sbx_1","epoch":9223372036854775807,"allow":[],"journal":"jnl_1","first":1,"last":1,"released":true}`)
		}
	})
	mux.HandleFunc("GET /v1/sandboxes/{sandbox}/journal", func(w http.ResponseWriter, r *http.Request) {
		if !fence(w, query(r)) {
			_, _ = io.WriteString(w, `{"n":1,"type":"egress_denied","time":"2026-01-02T03:04:05Z","data":{"journal":"jnl_1","line":1}}`+"\n"+`{"end":"released"}`+"\n")
		}
	})
	mux.HandleFunc("POST /v1/sandboxes/{sandbox}/journal/ack", func(w http.ResponseWriter, r *http.Request) {
		var ack struct {
			Journal string `json:"journal"`
			Line    uint64 `json:"line"`
			Epoch   uint64 `json:"epoch"`
		}
		dec := json.NewDecoder(r.Body)
		dec.DisallowUnknownFields()
		if err := dec.Decode(&ack); err != nil || ack.Journal != "jnl_1" || ack.Line != 1 {
			t.Errorf("acknowledgement %+v: %v", ack, err)
		}
		if !fence(w, ack.Epoch) {
			_, _ = io.WriteString(w, `{"sandbox":"sbx_1"}`)
		}
	})
	socket := filepath.Join(t.TempDir(), "e.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &httptest.Server{Listener: l, Config: &http.Server{Handler: mux}}
	srv.Start()
	t.Cleanup(srv.Close)
	c := api.NewClient(api.DialSocket(socket))
	t.Cleanup(c.Close)
	return c
}

// A proxy outlives executors: after an upgrade an executor works with a proxy of an earlier release.
func TestClient_WorksWithAnEarlierProxy(t *testing.T) {
	t.Parallel()
	c := earlierProxy(t)
	s, err := c.Release(t.Context(), "sbx_1")
	if err != nil || !s.Released || s.Last != 1 {
		t.Fatalf("release: %+v, %v", s, err)
	}
	lines, err := c.JournalLines(t.Context(), "sbx_1", "", 0, true)
	if err != nil || len(lines) != 1 || lines[0].N != 1 || lines[0].Type != "egress_denied" {
		t.Errorf("lines: %+v, %v", lines, err)
	}
	if err := c.AckLines(t.Context(), "sbx_1", s.Journal, s.Last); err != nil {
		t.Errorf("acknowledge: %v", err)
	}
}
