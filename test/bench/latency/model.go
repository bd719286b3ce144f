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
	// minPieceInterval is the minimum time between two pieces of text that the model sends.
	minPieceInterval = 5 * time.Millisecond
	// maxPieceInterval is the maximum time between two pieces of text that the model sends.
	maxPieceInterval = 35 * time.Millisecond
)

// fakeModel is a model server that streams pieces of text, each of which contains the time at which it was sent.
type fakeModel struct {
	mu     sync.Mutex
	pieces int
}

// setPieces sets the number of pieces of text in each further answer of the model.
func (m *fakeModel) setPieces(pieces int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pieces = pieces
}

// start starts the model server on loopback. It returns its base URL, with /v1, and a function that stops it.
func (m *fakeModel) start() (url string, stop func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", m.serveCompletion)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = srv.Serve(l) // returns after Close
	}()
	return "http://" + l.Addr().String() + "/v1", func() error { err := srv.Close(); <-ended; return err }, nil
}

// serveCompletion is the HTTP handler of requests to the model. It streams an answer in OpenAI's format.
func (m *fakeModel) serveCompletion(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	pieces := m.pieces
	m.mu.Unlock()
	w.Header().Set("Content-Type", "text/event-stream")
	flush := http.NewResponseController(w).Flush
	chance := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same in every run
	for range pieces {
		if !sleepUnlessDone(r.Context(), minPieceInterval+time.Duration(chance.Int64N(int64(maxPieceInterval-minPieceInterval)))) {
			return
		}
		sendChunk(w, fmt.Sprintf(`{"role":"assistant","content":%q}`, system.TimestampText(time.Now())), "null")
		if flush() != nil {
			return // the agent has gone; the turn fails
		}
	}
	sendChunk(w, "{}", `"stop"`)
	_, _ = fmt.Fprint(w, "data: [DONE]\n\n") // as above
}

// sendChunk writes one chunk of a streamed answer in OpenAI's format.
func sendChunk(w http.ResponseWriter, delta, finish string) {
	_, _ = fmt.Fprintf(w, `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":[{"index":0,"delta":%s,"finish_reason":%s}]}`+"\n\n", delta, finish)
}

// sleepUnlessDone sleeps for the duration d, or until ctx ends, and reports whether ctx has not ended.
func sleepUnlessDone(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
