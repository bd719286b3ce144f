package jslog

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Limits of a batch. The server accepts at most 1,000 messages in a batch and 50 batches in flight on a stream; a
// batcher has one in flight.
const (
	minBatch      = 32
	maxBatch      = 1000
	maxBatchBytes = 4 << 20
	// maxShared is the size in bytes up to which a commit may share a batch. A larger commit is published singly.
	maxShared = 64 << 10
)

// atomicPause is the time for which a batcher publishes singly after the server refused a batch because the stream
// does not allow batches. An upgrade may allow them later.
const atomicPause = time.Minute

// batcher decides which appends to one stream share an atomic batch, and so one fsync. An append is published at once
// while fewer than minBatch publishes are in flight. Later ones wait for the publishes in flight, and then share a
// batch if at least minBatch wait. No append waits while nothing is in flight.
type batcher struct {
	log      *Log
	minBatch int
	forced   bool // set by tests: an append waits for a batch although nothing is in flight

	mu      sync.Mutex
	single  int       // single publishes in flight
	batch   bool      // a batch is in flight
	busy    bool      // the last publish was a batch: while one publish is in flight, all others wait for it
	paused  time.Time // until then, no batches
	waiting []*member // in order of arrival
}

// member is an append that waits in a batcher.
type member struct {
	a *appendAttempt
	// msg is prepared by the appending goroutine, which the batch would otherwise wait for. Only the batch changes it.
	msg *nats.Msg
	// state is guarded by batcher.mu.
	state memberState
	// done receives the outcome. It has a buffer of one, so that the batcher never blocks.
	done chan outcome
}

// memberState is where a member is on its way from join to its outcome.
type memberState int

const (
	memberWaiting  memberState = iota
	memberReleased             // it may be published singly
	memberSent                 // in a batch
	memberGone                 // its caller gave up while it was in a batch
)

// outcome is what a batcher reports to a member: an acknowledgement, an error of a batch whose outcome is unknown, or
// neither, which means that the member must be published singly.
type outcome struct {
	ack *jetstream.PubAck
	err error
	// maybeStored is set if the server refused the batch with an error after which it may have stored a part of it.
	maybeStored bool
}

// join returns nil if the append may be published singly at once; the caller must call leave afterwards. Otherwise it
// returns the member as which the append waits.
func (b *batcher) join(a *appendAttempt) *member {
	if b.enter() {
		return nil
	}
	m := &member{a: a, msg: a.message(), done: make(chan outcome, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting = append(b.waiting, m)
	b.startNext()
	return m
}

// enter reports whether an append may be published singly at once, and counts it.
func (b *batcher) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	idle := b.single == 0 && !b.batch
	if idle && !b.forced || !b.batch && !b.busy && len(b.waiting) == 0 && b.single < b.minBatch && !b.forced || b.isPaused() {
		b.single++
		return true
	}
	return false
}

// isPaused reports whether the stream did not allow batches recently. The caller must hold the lock.
func (b *batcher) isPaused() bool { return !b.paused.IsZero() && time.Now().Before(b.paused) }

// leave ends a publish that join or await permitted, and starts waiting appends.
func (b *batcher) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.single--
	b.startNext()
}

// abandon ends the wait of a member whose caller gave up. A member that is in a batch may still be stored.
func (b *batcher) abandon(m *member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch m.state {
	case memberWaiting:
		b.waiting = slices.DeleteFunc(b.waiting, func(other *member) bool { return other == m })
	case memberReleased:
		b.single--
		b.startNext()
	case memberSent:
		m.state = memberGone
	case memberGone:
	}
}

// startNext starts waiting appends, as a batch or singly, as far as the publishes in flight allow it. The caller must hold the lock.
func (b *batcher) startNext() {
	paused := b.isPaused()
	for len(b.waiting) > 0 && !b.batch {
		enough := len(b.waiting) >= b.minBatch && !paused
		if enough && b.single == 0 {
			b.start()
			return
		}
		if b.single > 0 && !paused && (enough || b.busy || b.single >= b.minBatch) {
			return
		}
		// A single append that arrives after a batch is probably the first of many that the batch woke.
		b.busy = b.busy && len(b.waiting) == 1
		m := b.waiting[0]
		b.waiting = b.waiting[1:]
		b.release(m, outcome{})
	}
}

// release lets a member publish singly. The caller must hold the lock.
func (b *batcher) release(m *member, o outcome) {
	m.state = memberReleased
	b.single++
	m.done <- o
}

// start sends waiting members as a batch. The server refuses a batch with two guarded messages of one subject, so a
// batch has at most one commit of a subject. The caller must hold the lock.
func (b *batcher) start() {
	var sent, rest []*member
	subjects := make(map[string]bool, len(b.waiting))
	size := 0
	for _, m := range b.waiting {
		s := m.a.head.Subject.String()
		if len(sent) == maxBatch || size+len(m.a.data) > maxBatchBytes || subjects[s] {
			rest = append(rest, m)
			continue
		}
		subjects[s] = true
		size += len(m.a.data)
		m.state = memberSent
		sent = append(sent, m)
	}
	b.waiting, b.batch, b.busy = rest, true, true
	// The goroutine ends with the answer, the timeout or the connection.
	go b.publishBatch(sent, subjects)
}

// publishBatch publishes a batch and reports the outcome to its members.
func (b *batcher) publishBatch(sent []*member, subjects map[string]bool) {
	last, err := b.log.publishBatch(sent)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.batch = false
	refused, maybeStored := batchRefused(err)
	if atomicUnsupported(err) {
		b.paused = time.Now().Add(atomicPause)
	}
	if refused {
		b.busy = false
		b.log.logger.Debug("publish the commits of a refused batch singly", "commits", len(sent), "error", err)
	}
	for i, m := range sent {
		switch {
		case m.state == memberGone:
		case refused:
			b.release(m, outcome{maybeStored: maybeStored})
		case err != nil:
			m.done <- outcome{err: err}
		default:
			m.done <- outcome{ack: &jetstream.PubAck{Sequence: last - uint64(len(sent)-1-i)}}
		}
	}
	// A second commit of a subject has lost against the first one, unless that was refused. In the next batch it
	// would have all others refused.
	b.waiting = slices.DeleteFunc(b.waiting, func(m *member) bool {
		rival := subjects[m.a.head.Subject.String()]
		if rival {
			b.release(m, outcome{})
		}
		return rival
	})
	b.startNext()
}

// await returns the outcome of a member, or the error of ctx, or nats.ErrTimeout.
func (b *batcher) await(ctx context.Context, m *member, timeout time.Duration) (outcome, error) {
	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case o := <-m.done:
		return o, o.err
	case <-ctx.Done():
		b.abandon(m)
		return outcome{}, ctx.Err()
	case <-t.C:
		b.abandon(m)
		return outcome{}, nats.ErrTimeout
	}
}
