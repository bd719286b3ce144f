package latency

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

// Limits of the time between two pieces. The model streams 50 pieces a second on average, unevenly, so that they arrive
// at any moment of the runner's coalescing.
const (
	minPause = 5 * time.Millisecond
	maxPause = 35 * time.Millisecond
)

// model is a scripted model that streams pieces of text, each of which holds the time at which it was sent.
type model struct {
	mu     sync.Mutex
	pieces int
}

// set sets the number of pieces of text of the model's further answers.
func (m *model) set(pieces int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pieces = pieces
}

// serve listens on loopback. It returns the base URL, with /v1, and a function that stops the server.
func (m *model) serve() (url string, stop func() error, err error) {
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
		_ = srv.Serve(l) // returns after Close
	}()
	return "http://" + l.Addr().String() + "/v1", func() error { err := srv.Close(); <-ended; return err }, nil
}

func (m *model) answer(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	pieces := m.pieces
	m.mu.Unlock()
	w.Header().Set("Content-Type", "text/event-stream")
	flush := http.NewResponseController(w).Flush
	chance := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same in every run
	for range pieces {
		if !pause(r.Context(), minPause+time.Duration(chance.Int64N(int64(maxPause-minPause)))) {
			return
		}
		sendChunk(w, fmt.Sprintf(`{"role":"assistant","content":%q}`, system.Stamp(time.Now())), "null")
		if flush() != nil {
			return // the agent has gone; the turn fails
		}
	}
	sendChunk(w, "{}", `"stop"`)
	_, _ = fmt.Fprint(w, "data: [DONE]\n\n") // as above
}

func sendChunk(w http.ResponseWriter, delta, finish string) {
	_, _ = fmt.Fprintf(w, `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":[{"index":0,"delta":%s,"finish_reason":%s}]}`+"\n\n", delta, finish)
}

// pause waits for a duration and reports whether ctx is still alive.
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
