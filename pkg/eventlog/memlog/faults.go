package memlog

import (
	"context"
	"fmt"
	"slices"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Faults are hooks with which a test injects failures into the log. A nil hook does nothing. Hooks are called
// without a lock, possibly by several goroutines at once. They may call the log, for example to append a concurrent
// commit.
type Faults struct {
	// BeforeAppend runs before a commit is stored. If it returns an error, Append returns that error and stores
	// nothing: for example eventlog.ErrUnavailable, to simulate a server that was not reached.
	BeforeAppend func(ctx context.Context, head eventlog.Head, draft events.Draft) error
	// AfterAppend runs after a commit was stored. Append returns its error instead of the acknowledgement:
	// for example eventlog.ErrUnavailable, to simulate a writer that died or gave up before it knew the outcome.
	AfterAppend func(ctx context.Context, stored eventlog.Head) error
	// BeforeRead runs before Last and CommitAt, which return its error.
	BeforeRead func(ctx context.Context) error
	// Behind returns how many of the newest commits of a subject a lagging replica does not have. Such a replica
	// answers Last with freshness AnyReplica.
	Behind func(s events.Subject) int
}

// SetFaults replaces the faults. The zero Faults removes them.
func (l *Log) SetFaults(f Faults) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.faults = f
}

// currentFaults returns the faults that SetFaults has set.
func (l *Log) currentFaults() Faults {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.faults
}

// TamperCommit modifies the stored commit at a position, as an attacker with access to the disk could. It returns
// eventlog.ErrNotFound if there is no commit at p.
func (l *Log) TamperCommit(p eventlog.Position, change func(*events.Commit)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.Shard < 0 || p.Shard >= len(l.shards) || p.Seq == 0 || p.Seq > uint64(len(l.shards[p.Shard].stored)) {
		return fmt.Errorf("tamper with %s: %w", p, eventlog.ErrNotFound)
	}
	// Readers may hold the old message; a new slice keeps it unchanged for them.
	stored := slices.Clone(l.shards[p.Shard].stored)
	c, err := events.DecodeCommit(stored[p.Seq-1].data)
	if err != nil {
		return fmt.Errorf("tamper with %s: %w", p, err)
	}
	change(&c)
	data, err := c.Encode()
	if err != nil {
		return fmt.Errorf("tamper with %s: %w", p, err)
	}
	stored[p.Seq-1].data = data
	l.shards[p.Shard].stored = stored
	return nil
}

// SetPayload replaces the object with the given digest. nil removes it.
func (l *Log) SetPayload(digest string, data []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if data == nil {
		delete(l.payloads, digest)
		return
	}
	l.payloads[digest] = slices.Clone(data)
}

// Payloads returns the sorted digests of the objects in the object store.
func (l *Log) Payloads() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var list []string
	for d := range l.payloads {
		list = append(list, d)
	}
	slices.Sort(list)
	return list
}

// objectStore is the object store in which a Log keeps the payloads of large events.
type objectStore struct{ l *Log }

func (o objectStore) Put(_ context.Context, _ events.Subject, digest string, data []byte) error {
	o.l.SetPayload(digest, data)
	return nil
}

func (o objectStore) Get(_ context.Context, _ events.Subject, digest string) ([]byte, error) {
	o.l.mu.Lock()
	defer o.l.mu.Unlock()
	data, ok := o.l.payloads[digest]
	if !ok {
		return nil, eventlog.ErrNotFound
	}
	return slices.Clone(data), nil
}
