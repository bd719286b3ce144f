package rest

import (
	"log/slog"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/metrics"
)

// TestServeHTTP_RemovesTheDeadlineOfThePreviousResponse tests that a response without a deadline can be sent on a
// connection on which a file was sent before.
func TestServeHTTP_RemovesTheDeadlineOfThePreviousResponse(t *testing.T) {
	t.Parallel()
	h := &Handler{cfg: Config{Metrics: metrics.New(nil), Logger: slog.New(slog.DiscardHandler)}}
	w := &deadlineRecorder{httptest.NewRecorder(), time.Now()}
	h.ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
	if w.Code != 200 || !w.deadline.IsZero() {
		t.Errorf("status %d, deadline %s", w.Code, w.deadline)
	}
}
