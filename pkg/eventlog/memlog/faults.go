package memlog

import (
	"context"
	"fmt"
	"slices"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Faults are hooks by which a test breaks the log; a nil one does nothing. They
// are called without a lock held and may call the log, to let another writer in
// between for instance. They may be called at once by several goroutines.
type Faults struct {
	// BeforeAppend runs before a commit is stored. Its error is Append's, and
	// nothing is stored: eventlog.ErrUnavailable is a server that was not reached.
	BeforeAppend func(ctx context.Context, head eventlog.Head, draft events.Draft) error
	// AfterAppend runs when a commit is stored. Its error is Append's in place of
	// the acknowledgement: with eventlog.ErrUnavailable the writer died, or gave up,
	// before it could know.
	AfterAppend func(ctx context.Context, stored eventlog.Head) error
	// BeforeRead runs before Last and At; its error is theirs.
	BeforeRead func(ctx context.Context) error
	// Behind is how many commits of a subject a lagging replica, which answers
	// Last with freshness Any, does not know yet.
	Behind func(s events.Subject) int
}

// SetFaults replaces the faults; the zero Faults heals the log.
func (l *Log) SetFaults(f Faults) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.faults = f
}

func (l *Log) currentFaults() Faults {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.faults
}

// Tamper changes a stored commit, as someone with access to the disk could. It
// reports eventlog.ErrNotFound if there is none at p.
func (l *Log) Tamper(p eventlog.Position, change func(*events.Commit)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.Shard < 0 || p.Shard >= len(l.shards) || p.Seq == 0 || p.Seq > uint64(len(l.shards[p.Shard].stored)) {
		return fmt.Errorf("tamper with %s: %w", p, eventlog.ErrNotFound)
	}
	// Readers hold the old message; a new slice keeps them from seeing it change.
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

// SetPayload replaces what the object store holds under a digest; nil removes it.
func (l *Log) SetPayload(digest string, data []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if data == nil {
		delete(l.payloads, digest)
		return
	}
	l.payloads[digest] = slices.Clone(data)
}

// Payloads lists the digests in the object store, sorted.
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

// objects is the object store of a log.
type objects struct{ l *Log }

func (o objects) Put(_ context.Context, _ events.Subject, digest string, data []byte) error {
	o.l.SetPayload(digest, data)
	return nil
}

func (o objects) Get(_ context.Context, _ events.Subject, digest string) ([]byte, error) {
	o.l.mu.Lock()
	defer o.l.mu.Unlock()
	data, ok := o.l.payloads[digest]
	if !ok {
		return nil, eventlog.ErrNotFound
	}
	return slices.Clone(data), nil
}
