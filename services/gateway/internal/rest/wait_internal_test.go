package rest

import (
	"net/http/httptest"
	"testing"
	"time"
)

// deadlineRecorder records the write deadline of a response.
type deadlineRecorder struct {
	*httptest.ResponseRecorder
	deadline time.Time
}

func (r *deadlineRecorder) SetWriteDeadline(t time.Time) error {
	r.deadline = t
	return nil
}

// TestBeginWait_ExtendsTheWriteDeadline tests that a response may be sent after the longest wait, and that only a request
// that waits gets a later deadline.
func TestBeginWait_ExtendsTheWriteDeadline(t *testing.T) {
	t.Parallel()
	for wait, want := range map[string]time.Duration{"10m": 10*time.Minute + responseTimeout, "1s": time.Second + responseTimeout, "0s": 0} {
		r := &deadlineRecorder{ResponseRecorder: httptest.NewRecorder()}
		out := &statusRecorder{ResponseWriter: r}
		began := time.Now()
		if err := extendDeadlineByWait(out, wait); err != nil {
			t.Fatal(err)
		}
		if want == 0 {
			if out.waits || !r.deadline.IsZero() {
				t.Errorf("wait=%s sets a deadline", wait)
			}
			continue
		}
		if r.deadline.Before(began.Add(want)) || !out.waits {
			t.Errorf("wait=%s: the response must be sent within %s, want %s", wait, r.deadline.Sub(began), want)
		}
	}
}
