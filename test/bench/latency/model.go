package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/spoolhq/spool/test/bench/system"
)

// The time from piece to piece: a model that streams 50 a second, unevenly, so
// that the pieces come at any moment of the coalescing.
const (
	shortest = 5 * time.Millisecond
	longest  = 35 * time.Millisecond
)

// model answers any Chat Completions request with pieces that say when they were sent.
type model struct {
	mu     sync.Mutex
	pieces int
}

func (m *model) set(pieces int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pieces = pieces
}

// serve listens on loopback and gives the base URL, with /v1.
func (m *model) serve() (url string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", m.answer)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = srv.Serve(l) // ends with Close
	}()
	return "http://" + l.Addr().String() + "/v1", func() { _ = srv.Close(); <-ended }, nil
}

func (m *model) answer(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	pieces := m.pieces
	m.mu.Unlock()
	w.Header().Set("Content-Type", "text/event-stream")
	flush := http.NewResponseController(w).Flush
	chance := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same in every run
	for range pieces {
		if !pause(r.Context(), shortest+time.Duration(chance.Int64N(int64(longest-shortest)))) {
			return
		}
		chunk(w, fmt.Sprintf(`{"role":"assistant","content":%q}`, system.Stamp(time.Now())), "null")
		if flush() != nil {
			return // the agent is gone; the turn tells
		}
	}
	chunk(w, "{}", `"stop"`)
	_, _ = fmt.Fprint(w, "data: [DONE]\n\n") // as above
}

func chunk(w http.ResponseWriter, delta, finish string) {
	_, _ = fmt.Fprintf(w, `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":[{"index":0,"delta":%s,"finish_reason":%s}]}`+"\n\n", delta, finish)
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
