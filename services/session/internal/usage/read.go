package usage

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/retry"
)

const (
	// payloadTries is the maximum number of times that missing data is requested from the object store before a commit is folded without it,
	// because a replica may lag.
	payloadTries = 3
	payloadPause = 200 * time.Millisecond
	// maxHistories is the number of histories of sessions that are read at once.
	maxHistories = 16
	// maxPresent is the approximate maximum number of sessions and executions in memory.
	maxPresent = 100_000
)

// commits yields the commits of a reader and skips commits that cannot be read. A message that is not part of the log,
// or that cannot be decoded, is yielded without events. read starts a reader after a position; after each failed
// commit, commits starts another one behind it.
func commits(ctx context.Context, after eventlog.Position, read func(eventlog.Position) iter.Seq2[eventlog.Record, error]) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		tries := 0
		for ended := false; !ended && ctx.Err() == nil; {
			ended = true
			for rec, err := range read(after) {
				if err != nil {
					if rec.Position.Seq == 0 || errors.Is(err, eventlog.ErrUnavailable) {
						yield(rec, err)
						return
					}
					ended = false
					if rec.Events != nil && tries < payloadTries {
						tries++
						if retry.Pause(ctx, payloadPause) != nil {
							return
						}
						break
					}
				}
				tries, after = 0, rec.Position
				if !yield(rec, nil) {
					return
				}
				if err != nil {
					break
				}
			}
		}
	}
}

// sessionKey is the tenant and the id of a session.
type sessionKey struct{ tenant, id string }

// sessions holds the folded usage of the sessions that were used most recently. For other sessions it is folded again
// from the log.
type sessions struct {
	log    eventlog.Log
	max    int
	recent map[sessionKey]*budget.SessionUsage
	older  map[sessionKey]*budget.SessionUsage
	size   int    // of recent
	whole  []bool // by shard: every session of the shard that is not in memory has no commits yet
}

func newSessions(log eventlog.Log, limit int) *sessions {
	return &sessions{log: log, max: limit, recent: map[sessionKey]*budget.SessionUsage{}, whole: make([]bool, log.Shards())}
}

// isSession reports whether a commit is one of a session.
func isSession(s events.Subject) bool { return s.Aspect == events.Life || s.Aspect == events.Run }

// find returns the fold of a session, or nil if it is not in memory.
func (s *sessions) find(k sessionKey) *budget.SessionUsage {
	if u := s.recent[k]; u != nil {
		return u
	}
	if u := s.older[k]; u != nil {
		delete(s.older, k)
		s.keep(k, u)
		return u
	}
	return nil
}

// keep adds the fold of a session to memory.
func (s *sessions) keep(k sessionKey, u *budget.SessionUsage) {
	s.recent[k] = u
	s.size += u.EntryCount()
}

// load ensures that the sessions of commits are in memory. Sessions that began before the commits are read from the
// log.
func (s *sessions) load(ctx context.Context, list []eventlog.Record) error {
	missing := map[sessionKey]eventlog.Record{} // the first commit in list of each missing session
	for _, rec := range list {
		k := sessionKey{rec.Subject.Tenant, rec.Subject.ID}
		if _, known := missing[k]; known || !isSession(rec.Subject) || len(rec.Events) == 0 || s.find(k) != nil {
			continue
		}
		missing[k] = rec
	}
	var mu sync.Mutex
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxHistories)
	for k, first := range missing {
		_, created := first.Events[0].Data.(events.SessionCreated)
		if created || s.whole[first.Position.Shard] {
			s.keepLocked(&mu, k, &budget.SessionUsage{})
			continue
		}
		g.Go(func() error {
			u, err := s.history(ctx, first)
			if err == nil {
				s.keepLocked(&mu, k, u)
			}
			return err
		})
	}
	return g.Wait()
}

// keepLocked calls keep while it holds mu.
func (s *sessions) keepLocked(mu *sync.Mutex, k sessionKey, u *budget.SessionUsage) {
	mu.Lock()
	defer mu.Unlock()
	s.keep(k, u)
}

// history folds the commits of a session before one of them.
func (s *sessions) history(ctx context.Context, before eventlog.Record) (*budget.SessionUsage, error) {
	u := &budget.SessionUsage{}
	subject := events.Subject{Tenant: before.Subject.Tenant, ID: before.Subject.ID}
	list := commits(ctx, eventlog.Position{Shard: before.Position.Shard}, func(after eventlog.Position) iter.Seq2[eventlog.Record, error] {
		return s.log.Read(ctx, after, eventlog.Filter{Subject: subject})
	})
	for rec, err := range list {
		if err != nil {
			return nil, fmt.Errorf("read session %s: %w", subject.ID, err)
		}
		if rec.Position.Seq >= before.Position.Seq {
			break
		}
		u.AddCommit(rec)
	}
	return u, ctx.Err()
}

// add folds a commit into the state of its session, and returns what the commit adds to the usage of the tenant, by
// day. A commit of another subject changes nothing.
func (s *sessions) add(rec eventlog.Record) map[string]budget.Usage {
	if !isSession(rec.Subject) {
		return nil
	}
	u := s.find(sessionKey{rec.Subject.Tenant, rec.Subject.ID})
	before := u.EntryCount()
	usage := u.AddCommit(rec)
	s.size += u.EntryCount() - before
	return usage
}

// trim removes the least recently used sessions from memory if there are too many.
func (s *sessions) trim() {
	if s.size <= s.max/2 {
		return
	}
	if len(s.older) > 0 {
		clear(s.whole)
	}
	s.older, s.recent, s.size = s.recent, map[sessionKey]*budget.SessionUsage{}, 0
}
