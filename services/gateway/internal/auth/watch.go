package auth

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// watchInterval is the interval at which the keys of open streams are checked.
const watchInterval = time.Second

// Watch ends streams whose key is not accepted any more. Use NewWatch to create one.
type Watch struct {
	keys   Keys
	logger *slog.Logger

	mu      sync.Mutex
	streams map[string]map[*stream]struct{} // by key id
}

type stream struct{ cancel context.CancelCauseFunc }

// NewWatch returns a Watch. Run does the checks.
func NewWatch(keys Keys, logger *slog.Logger) *Watch {
	return &Watch{keys: keys, logger: logger, streams: map[string]map[*stream]struct{}{}}
}

// Add returns a context that is cancelled with the cause UNAUTHENTICATED when the principal's key, or a key that it
// descends from, is revoked or expires. release must be called when the stream ends.
func (w *Watch) Add(ctx context.Context, p Principal) (_ context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	if p.KeyID == "" { // without a key nothing can be revoked
		return ctx, func() { cancel(nil) }
	}
	s := &stream{cancel}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams[p.KeyID] == nil {
		w.streams[p.KeyID] = map[*stream]struct{}{}
	}
	w.streams[p.KeyID][s] = struct{}{}
	return ctx, func() {
		cancel(nil)
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.streams[p.KeyID], s)
		if len(w.streams[p.KeyID]) == 0 {
			delete(w.streams, p.KeyID)
		}
	}
}

// Run checks the keys once a second, until ctx ends.
func (w *Watch) Run(ctx context.Context) {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.check(ctx)
		}
	}
}

// check ends the streams whose key is not accepted any more.
func (w *Watch) check(ctx context.Context) {
	w.mu.Lock()
	ids := make([]string, 0, len(w.streams))
	for id := range w.streams {
		ids = append(ids, id)
	}
	w.mu.Unlock()
	if len(ids) == 0 {
		return
	}
	refusals, err := w.keys.KeyRefusals(ctx, ids)
	if err != nil {
		// Without Postgres no new events are streamed either; the next check decides.
		w.logger.Warn("check keys of open streams", "error", err)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		why, known := refusals[id]
		if known && why == "" {
			continue
		}
		detail := "the API key was revoked"
		if why == reads.KeyExpired {
			detail = "the API key has expired"
		}
		for s := range w.streams[id] {
			s.cancel(problem.New(problem.Unauthenticated, "Authorization", detail))
		}
	}
}
