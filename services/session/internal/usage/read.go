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
	// maxPayloadTries is the maximum number of times that a missing payload is requested from the object store before
	// its commit is folded without it. A replica of the store may lag.
	maxPayloadTries = 3
	// payloadRetryPause is the pause between two requests for a missing payload.
	payloadRetryPause = 200 * time.Millisecond
	// maxConcurrentHistories is the maximum number of sessions whose commits are read from the log at the same time.
	maxConcurrentHistories = 16
	// maxCachedUsage is the approximate maximum number of sessions and executions in memory.
	maxCachedUsage = 100_000
)

// readableCommits yields the commits of the log after a position. read returns an iterator over the log after a
// position. readableCommits yields a message that is not part of the log, or cannot be decoded, without events, and
// then calls read again to continue after it.
func readableCommits(ctx context.Context, after eventlog.Position, read func(eventlog.Position) iter.Seq2[eventlog.Record, error]) iter.Seq2[eventlog.Record, error] {
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
					if rec.Events != nil && tries < maxPayloadTries {
						tries++
						if retry.Pause(ctx, payloadRetryPause) != nil {
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

// sessionUsageCache holds the folded usage of the sessions that were used most recently. It folds the usage of another
// session from the log.
type sessionUsageCache struct {
	log    eventlog.Log
	max    int
	recent map[sessionKey]*budget.SessionUsage
	older  map[sessionKey]*budget.SessionUsage
	size   int    // of recent
	whole  []bool // by shard: every session of the shard that is not in memory has no commits yet
}

// newSessionUsageCache returns an empty cache of about limit sessions and executions, which reads sessions from log.
func newSessionUsageCache(log eventlog.Log, limit int) *sessionUsageCache {
	return &sessionUsageCache{log: log, max: limit, recent: map[sessionKey]*budget.SessionUsage{}, whole: make([]bool, log.Shards())}
}

// isSessionSubject reports whether a subject of the log belongs to a session.
func isSessionSubject(s events.Subject) bool {
	return s.Aspect == events.Life || s.Aspect == events.Run
}

// find returns the usage of a session, or nil if it is not in memory.
func (s *sessionUsageCache) find(k sessionKey) *budget.SessionUsage {
	if u := s.recent[k]; u != nil {
		return u
	}
	if u := s.older[k]; u != nil {
		delete(s.older, k)
		s.put(k, u)
		return u
	}
	return nil
}

// put adds the usage of a session to memory.
func (s *sessionUsageCache) put(k sessionKey, u *budget.SessionUsage) {
	s.recent[k] = u
	s.size += u.EntryCount()
}

// loadSessions ensures that the usage of the sessions of all commits in list is in memory. For a session that began
// before, it reads the earlier commits from the log.
func (s *sessionUsageCache) loadSessions(ctx context.Context, list []eventlog.Record) error {
	missing := map[sessionKey]eventlog.Record{} // the first commit in list of each missing session
	for _, rec := range list {
		k := sessionKey{rec.Subject.Tenant, rec.Subject.ID}
		if _, known := missing[k]; known || !isSessionSubject(rec.Subject) || len(rec.Events) == 0 || s.find(k) != nil {
			continue
		}
		missing[k] = rec
	}
	var mu sync.Mutex
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrentHistories)
	for k, first := range missing {
		_, created := first.Events[0].Data.(events.SessionCreated)
		if created || s.whole[first.Position.Shard] {
			s.lockAndPut(&mu, k, &budget.SessionUsage{})
			continue
		}
		g.Go(func() error {
			u, err := s.foldHistory(ctx, first)
			if err == nil {
				s.lockAndPut(&mu, k, u)
			}
			return err
		})
	}
	return g.Wait()
}

// lockAndPut locks mu and calls put.
func (s *sessionUsageCache) lockAndPut(mu *sync.Mutex, k sessionKey, u *budget.SessionUsage) {
	mu.Lock()
	defer mu.Unlock()
	s.put(k, u)
}

// foldHistory reads the commits of a session before a given commit from the log, and returns their usage.
func (s *sessionUsageCache) foldHistory(ctx context.Context, before eventlog.Record) (*budget.SessionUsage, error) {
	u := &budget.SessionUsage{}
	subject := events.Subject{Tenant: before.Subject.Tenant, ID: before.Subject.ID}
	list := readableCommits(ctx, eventlog.Position{Shard: before.Position.Shard}, func(after eventlog.Position) iter.Seq2[eventlog.Record, error] {
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

// foldCommit adds a commit to the usage of its session, and returns the usage by day that the commit adds to the
// tenant's usage. A commit that belongs to no session adds none.
func (s *sessionUsageCache) foldCommit(rec eventlog.Record) map[string]budget.Usage {
	if !isSessionSubject(rec.Subject) {
		return nil
	}
	u := s.find(sessionKey{rec.Subject.Tenant, rec.Subject.ID})
	before := u.EntryCount()
	usage := u.AddCommit(rec)
	s.size += u.EntryCount() - before
	return usage
}

// evict removes the sessions that were used least recently from memory, if there are too many.
func (s *sessionUsageCache) evict() {
	if s.size <= s.max/2 {
		return
	}
	if len(s.older) > 0 {
		clear(s.whole)
	}
	s.older, s.recent, s.size = s.recent, map[sessionKey]*budget.SessionUsage{}, 0
}
