package auth

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// keyCheckInterval is the interval at which the keys of open streams are checked.
const keyCheckInterval = time.Second

// KeyWatch ends streams whose API key is no longer accepted. Use NewKeyWatch to create one.
type KeyWatch struct {
	keys   KeyStore
	logger *slog.Logger

	mu      sync.Mutex
	streams map[string]map[*watchedStream]struct{} // by key id
}

// watchedStream is an open stream that KeyWatch can end.
type watchedStream struct{ cancel context.CancelCauseFunc }

// NewKeyWatch returns a KeyWatch. Its Run must be called.
func NewKeyWatch(keys KeyStore, logger *slog.Logger) *KeyWatch {
	return &KeyWatch{keys: keys, logger: logger, streams: map[string]map[*watchedStream]struct{}{}}
}

// AddStream returns a context for a stream that is cancelled with the cause UNAUTHENTICATED when the principal's API
// key, or a key that it descends from, is revoked or expires, or when its session credential expires. release must be called when the stream ends.
func (w *KeyWatch) AddStream(ctx context.Context, p Principal) (_ context.Context, release func()) {
	endSession := func() {}
	if !p.SessionEnd.IsZero() {
		ctx, endSession = context.WithDeadlineCause(ctx, p.SessionEnd, problem.New(problem.Unauthenticated, "Authorization", "the session credential has expired"))
	}
	ctx, stop := context.WithCancelCause(ctx)
	cancel := func(cause error) { stop(cause); endSession() }
	if p.KeyID == "" { // without a key nothing can be revoked
		return ctx, func() { cancel(nil) }
	}
	s := &watchedStream{cancel}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams[p.KeyID] == nil {
		w.streams[p.KeyID] = map[*watchedStream]struct{}{}
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

// Run checks the keys of open streams once a second, until ctx ends.
func (w *KeyWatch) Run(ctx context.Context) {
	tick := time.NewTicker(keyCheckInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.checkKeys(ctx)
		}
	}
}

// checkKeys ends the streams whose API key is no longer accepted.
func (w *KeyWatch) checkKeys(ctx context.Context) {
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
