package auth

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// keyCheckInterval is the interval at which the keys of open streams are checked.
const keyCheckInterval = time.Second

// KeyWatch ends streams whose API key is no longer accepted, or whose session has ended. Use NewKeyWatch to create one.
type KeyWatch struct {
	keys     KeyStore
	sessions SessionStore
	logger   *slog.Logger

	mu         sync.Mutex
	ofKeys     streamSet // by key id
	ofSessions streamSet // by hash of the session
}

// streamSet holds open streams by what ends them.
type streamSet map[string]map[*watchedStream]struct{}

func (s streamSet) add(id string, w *watchedStream) {
	if id == "" {
		return
	}
	if s[id] == nil {
		s[id] = map[*watchedStream]struct{}{}
	}
	s[id][w] = struct{}{}
}

func (s streamSet) remove(id string, w *watchedStream) {
	delete(s[id], w)
	if len(s[id]) == 0 {
		delete(s, id)
	}
}

// cancel ends the streams with an id, with the cause UNAUTHENTICATED.
func (s streamSet) cancel(id, detail string) {
	for w := range s[id] {
		w.cancel(problem.New(problem.Unauthenticated, "Authorization", detail))
	}
}

// watchedStream is an open stream that KeyWatch can end.
type watchedStream struct{ cancel context.CancelCauseFunc }

// NewKeyWatch returns a KeyWatch. Its Run must be called.
func NewKeyWatch(keys KeyStore, sessions SessionStore, logger *slog.Logger) *KeyWatch {
	return &KeyWatch{keys: keys, sessions: sessions, logger: logger, ofKeys: streamSet{}, ofSessions: streamSet{}}
}

// AddStream returns a context for a stream that is cancelled with the cause UNAUTHENTICATED when the principal's API
// key, or a key that it descends from, is revoked or expires, or when its session ends. release must be called when the stream ends.
func (w *KeyWatch) AddStream(ctx context.Context, p Principal) (_ context.Context, release func()) {
	endSession := func() {}
	if !p.SessionEnd.IsZero() {
		ctx, endSession = context.WithDeadlineCause(ctx, p.SessionEnd, problem.New(problem.Unauthenticated, "Authorization", "the session has expired"))
	}
	ctx, stop := context.WithCancelCause(ctx)
	cancel := func(cause error) { stop(cause); endSession() }
	s := &watchedStream{cancel}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ofKeys.add(p.KeyID, s)
	w.ofSessions.add(p.SessionHash, s)
	return ctx, func() {
		cancel(nil)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.ofKeys.remove(p.KeyID, s)
		w.ofSessions.remove(p.SessionHash, s)
	}
}

// Run checks the keys and sessions of open streams once a second, until ctx ends.
func (w *KeyWatch) Run(ctx context.Context) {
	tick := time.NewTicker(keyCheckInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.checkKeys(ctx)
			w.checkSessions(ctx)
		}
	}
}

// checkKeys ends the streams whose API key is no longer accepted.
func (w *KeyWatch) checkKeys(ctx context.Context) {
	w.mu.Lock()
	ids := slices.Collect(maps.Keys(w.ofKeys))
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
		w.ofKeys.cancel(id, detail)
	}
}

// checkSessions ends the streams whose session has ended, on this gateway or on another one. An open stream counts as a
// request: it renews the session.
func (w *KeyWatch) checkSessions(ctx context.Context) {
	w.mu.Lock()
	hashes := slices.Collect(maps.Keys(w.ofSessions))
	w.mu.Unlock()
	for _, hash := range hashes {
		_, ok, err := w.sessions.Session(ctx, hash)
		if err != nil {
			w.logger.Warn("check sessions of open streams", "error", err)
			return
		}
		if !ok {
			w.mu.Lock()
			w.ofSessions.cancel(hash, "the session has ended")
			w.mu.Unlock()
		}
	}
}
