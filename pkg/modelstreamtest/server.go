package modelstreamtest

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

// Server is a model server that answers the first requests with the given answers, and all later ones with the text OK. It refuses the requests
// that CheckRequest refuses.
type Server struct {
	*httptest.Server

	mu       sync.Mutex
	answers  []Answer
	requests [][]byte
	refused  []error
}

// StartServer starts a Server that serves until the test ends.
func StartServer(t testing.TB, answers ...Answer) *Server {
	t.Helper()
	s := &Server{answers: answers}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// okAnswer is the answer with the text OK.
var okAnswer = Answer{Body: `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"` + OK + `"}}]}` + "\n\n" +
	`data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = CheckRequest(body)
	}
	s.mu.Lock()
	answer := okAnswer
	switch n := len(s.requests); {
	case err != nil:
		s.refused = append(s.refused, err)
		answer = Answer{Status: http.StatusBadRequest, ContentType: "application/json", Body: fmt.Sprintf(`{"error":{"message":%q,"type":"invalid_request_error"}}`, err.Error())}
	case n < len(s.answers):
		answer = s.answers[n]
	}
	s.requests = append(s.requests, body)
	s.mu.Unlock()
	w.Header().Set("Content-Type", answer.MediaType())
	w.Header().Set("Retry-After-Ms", "1")
	if answer.Status != 0 {
		w.WriteHeader(answer.Status)
	}
	_, _ = io.WriteString(w, answer.Bytes()) //nolint:errcheck // the client may have gone
}

// Requests returns the bodies of the requests so far.
func (s *Server) Requests() [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([][]byte(nil), s.requests...)
}

// Refused returns the reasons for which the server refused requests.
func (s *Server) Refused() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]error(nil), s.refused...)
}
