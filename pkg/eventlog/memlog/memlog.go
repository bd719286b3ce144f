// Package memlog implements the event log in memory, for tests. It has the same guarantees as jslog, and can simulate
// the failures of a real log.
package memlog

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Config configures a Log. The zero value is one shard without a limit that uses the system clock.
type Config struct {
	// Partitions is the number of partitions; 0 means 64 in 8 groups.
	Partitions events.Partitioning
	Shards     int              // 1, 2, 4 or 8; 0 means 1
	MaxCommits int              // maximum per shard, above which Append returns eventlog.ErrFull; 0 means no limit
	Now        func() time.Time // returns the time at which a commit is stored; nil means time.Now
}

// Log is an event log in memory. It is safe for concurrent use.
type Log struct {
	cfg Config

	mu       sync.Mutex
	shards   []shard
	heads    map[events.Subject][]eventlog.Head // all heads that a subject ever had, oldest first
	payloads map[string][]byte
	faults   Faults
}

// shard holds the commits of one shard of the log in memory, in order.
type shard struct {
	stored []storedCommit
	grew   chan struct{} // closed when a message is added
}

// storedCommit is a commit in a shard's list. Its stream sequence is its index + 1.
type storedCommit struct {
	subject string
	at      time.Time
	data    []byte
}

var _ eventlog.Log = (*Log)(nil)

// New returns an empty log.
func New(cfg Config) (*Log, error) {
	if cfg.Shards == 0 {
		cfg.Shards = 1
	}
	if cfg.Shards < 0 || cfg.Shards > 8 || 8%cfg.Shards != 0 {
		return nil, fmt.Errorf("shards: %d must be 1, 2, 4 or 8", cfg.Shards)
	}
	if cfg.MaxCommits < 0 {
		return nil, fmt.Errorf("max commits: %d is negative", cfg.MaxCommits)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	l := &Log{cfg: cfg, heads: map[events.Subject][]eventlog.Head{}, payloads: map[string][]byte{}}
	for range cfg.Shards {
		l.shards = append(l.shards, shard{grew: make(chan struct{})})
	}
	return l, nil
}

// Shards returns the number of shards.
func (l *Log) Shards() int { return l.cfg.Shards }

// Partitioning returns how the log distributes subjects over partitions and projector groups.
func (l *Log) Partitioning() events.Partitioning { return l.cfg.Partitions }

// Append stores a commit; see eventlog.Appender.
func (l *Log) Append(ctx context.Context, head eventlog.Head, draft events.Draft) (eventlog.Head, error) {
	if err := ctx.Err(); err != nil {
		return eventlog.Head{}, unavailableError(err)
	}
	c, data, err := eventlog.SealDraft(ctx, head, draft, objectStore{l})
	if err != nil {
		return eventlog.Head{}, err
	}
	f := l.currentFaults()
	if f.BeforeAppend != nil {
		if err := f.BeforeAppend(ctx, head, draft); err != nil {
			return eventlog.Head{}, err
		}
	}
	next, err := l.storeCommit(head, c, data)
	if err != nil {
		return eventlog.Head{}, err
	}
	if f.AfterAppend != nil {
		if err := f.AfterAppend(ctx, next); err != nil {
			return eventlog.Head{}, err
		}
	}
	return next, nil
}

// storeCommit checks the expected sequence and appends the commit. If the same commit is already stored after head, store
// returns it.
func (l *Log) storeCommit(head eventlog.Head, c events.Commit, data []byte) (eventlog.Head, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	heads := l.heads[head.Subject]
	if i := sort.Search(len(heads), func(i int) bool { return heads[i].Seq > head.Seq }); i < len(heads) {
		if heads[i].Commit.ID == c.ID {
			return heads[i], nil
		}
		return eventlog.Head{}, &eventlog.ConflictError{Subject: head.Subject, Expected: head.Seq}
	}
	if last := l.lastBehind(head.Subject, 0); last.Seq != head.Seq {
		return eventlog.Head{}, &eventlog.ConflictError{Subject: head.Subject, Expected: head.Seq}
	}
	s := &l.shards[head.Subject.Partition()%l.cfg.Shards]
	if l.cfg.MaxCommits > 0 && len(s.stored) >= l.cfg.MaxCommits {
		return eventlog.Head{}, fmt.Errorf("append to %s: %w", head.Subject, eventlog.ErrFull)
	}
	s.stored = append(s.stored, storedCommit{head.Subject.String(), l.cfg.Now(), data})
	next := eventlog.Head{Subject: head.Subject, Seq: uint64(len(s.stored)), Hash: c.Hash, Commit: c}
	l.heads[head.Subject] = append(l.heads[head.Subject], next)
	close(s.grew)
	s.grew = make(chan struct{})
	return next, nil
}

// lastBehind returns the head that a subject had the given number of commits ago. The caller must hold the lock.
func (l *Log) lastBehind(s events.Subject, behind int) eventlog.Head {
	list := l.heads[s]
	if i := len(list) - 1 - behind; i >= 0 {
		return list[i]
	}
	return eventlog.Head{Subject: s}
}

// Last returns the head of a subject; see eventlog.Reader.
func (l *Log) Last(ctx context.Context, s events.Subject, f eventlog.Freshness) (eventlog.Head, error) {
	if err := s.Check(); err != nil {
		return eventlog.Head{}, fmt.Errorf("read last commit: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return eventlog.Head{}, unavailableError(err)
	}
	faults, behind := l.currentFaults(), 0
	if faults.BeforeRead != nil {
		if err := faults.BeforeRead(ctx); err != nil {
			return eventlog.Head{}, err
		}
	}
	if f == eventlog.AnyReplica && faults.Behind != nil {
		behind = max(faults.Behind(s), 0)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastBehind(s, behind), nil
}

// ChangedAmong returns those of the given subjects that changed; see eventlog.ChangeReader.
func (l *Log) ChangedAmong(ctx context.Context, after eventlog.Position, subjects []events.Subject) (eventlog.Changes, error) {
	c := eventlog.Changes{Through: after, Last: map[string]uint64{}}
	if len(subjects) == 0 {
		return c, nil
	}
	if err := ctx.Err(); err != nil {
		return c, unavailableError(err)
	}
	f := l.currentFaults()
	if f.BeforeRead != nil {
		if err := f.BeforeRead(ctx); err != nil {
			return c, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	end := uint64(len(l.shards[after.Shard].stored))
	if f.Behind != nil {
		for _, s := range subjects {
			if list, behind := l.heads[s], f.Behind(s); behind > 0 && len(list) > 0 {
				end = min(end, list[max(0, len(list)-behind)].Seq-1)
			}
		}
	}
	c.Through.Seq = max(after.Seq, end)
	for _, s := range subjects {
		for _, h := range l.heads[s] {
			if h.Seq > after.Seq && h.Seq <= end {
				c.Last[s.String()] = h.Seq
			}
		}
	}
	return c, nil
}

// CommitAt returns the commit at a position; see eventlog.Reader.
func (l *Log) CommitAt(ctx context.Context, p eventlog.Position) (eventlog.Record, error) {
	if err := ctx.Err(); err != nil {
		return eventlog.Record{}, unavailableError(err)
	}
	if f := l.currentFaults(); f.BeforeRead != nil {
		if err := f.BeforeRead(ctx); err != nil {
			return eventlog.Record{}, err
		}
	}
	if p.Shard < 0 || p.Shard >= l.cfg.Shards || p.Seq == 0 {
		return eventlog.Record{}, fmt.Errorf("read %s: %w", p, eventlog.ErrNotFound)
	}
	m, _, ok := l.commitAt(p)
	if !ok {
		return eventlog.Record{}, fmt.Errorf("read %s: %w", p, eventlog.ErrNotFound)
	}
	return l.openRecord(ctx, p, m)
}

// commitAt returns the commit at a position, or, if there is none, a channel that is closed when the shard grows.
func (l *Log) commitAt(p eventlog.Position) (storedCommit, <-chan struct{}, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.shards[p.Shard]
	if p.Seq > uint64(len(s.stored)) {
		return storedCommit{}, s.grew, false
	}
	return s.stored[p.Seq-1], nil, true
}

// openRecord decodes a stored commit and fetches the data that it refers to; see eventlog.OpenRecord.
func (l *Log) openRecord(ctx context.Context, p eventlog.Position, m storedCommit) (eventlog.Record, error) {
	return eventlog.OpenRecord(ctx, m.subject, p, m.at, m.data, objectStore{l})
}

// Read yields commits up to the current end; see eventlog.Reader.
func (l *Log) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return l.readRecords(ctx, after, f, false)
}

// Tail yields commits until ctx ends; see eventlog.Reader.
func (l *Log) Tail(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return l.readRecords(ctx, after, f, true)
}

// readRecords yields commits after a position. With wait it waits for new ones until ctx ends; otherwise it ends with the last one.
func (l *Log) readRecords(ctx context.Context, after eventlog.Position, f eventlog.Filter, wait bool) iter.Seq2[eventlog.Record, error] {
	f.Partitions = slices.Clone(f.Partitions)
	return func(yield func(eventlog.Record, error) bool) {
		if err := f.Check(l.cfg.Partitions, after.Shard, l.cfg.Shards); err != nil {
			yield(eventlog.Record{}, err)
			return
		}
		for p := (eventlog.Position{Shard: after.Shard, Seq: after.Seq + 1}); ; p.Seq++ {
			m, grew, ok := l.commitAt(p)
			for !ok {
				if !wait {
					return
				}
				select {
				case <-ctx.Done():
					return
				case <-grew:
				}
				m, grew, ok = l.commitAt(p)
			}
			if ctx.Err() != nil {
				if !wait {
					yield(eventlog.Record{}, unavailableError(ctx.Err()))
				}
				return
			}
			if s, err := events.ParseSubject(m.subject); err == nil && !f.Match(l.cfg.Partitions, s) {
				continue
			}
			rec, err := l.openRecord(ctx, p, m)
			if !yield(rec, err) || err != nil {
				return
			}
		}
	}
}

// Changed returns the subjects that changed; see eventlog.ChangeReader.
func (l *Log) Changed(ctx context.Context, after eventlog.Position, maxSubjects int) (eventlog.Changes, error) {
	c := eventlog.Changes{Through: after, Last: map[string]uint64{}}
	if err := (eventlog.Filter{}).Check(l.cfg.Partitions, after.Shard, l.cfg.Shards); err != nil {
		return c, err
	}
	for p := (eventlog.Position{Shard: after.Shard, Seq: after.Seq + 1}); ; p.Seq++ {
		if err := ctx.Err(); err != nil {
			return c, unavailableError(err)
		}
		m, _, ok := l.commitAt(p)
		if !ok || !c.Add(m.subject, p.Seq, maxSubjects) {
			return c, nil
		}
	}
}

// unavailableError wraps the error of a context that has ended in eventlog.ErrUnavailable.
func unavailableError(err error) error { return fmt.Errorf("%w: %w", eventlog.ErrUnavailable, err) }
