package changes

import (
	"context"
	"errors"
	"testing"

	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// failingOnce is a ReadModels whose first read fails.
type failingOnce struct {
	ReadModels
	reads int
}

func (f *failingOnce) Changes(_ context.Context, _ string, after reads.ChangeCursor) ([]reads.SessionChange, reads.ChangeCursor, bool, error) {
	if f.reads++; f.reads == 1 {
		return nil, nil, false, errors.New("postgres is away")
	}
	return nil, after, false, nil
}

// A read that failed is not shared with Readers that come later: they read again.
func TestRead_DoesNotShareAFailureWithLaterReaders(t *testing.T) {
	t.Parallel()
	h := NewHub(Config{ReadModels: &failingOnce{}})
	h.run = t.Context()
	h.tenants["t"] = &tenant{changed: make(chan struct{}), shared: map[string]*sharedRead{}}
	if _, _, _, err := h.read(t.Context(), "t", reads.ChangeCursor{1}); err == nil {
		t.Fatal("the first read does not fail")
	}
	if _, _, _, err := h.read(t.Context(), "t", reads.ChangeCursor{1}); err != nil {
		t.Errorf("the second read: %v", err)
	}
}
