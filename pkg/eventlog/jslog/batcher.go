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
	minBatchCommits = 32
	maxBatchCommits = 1000
	maxBatchBytes   = 4 << 20
	// maxBatchedCommitBytes is the size in bytes up to which a commit may share a batch. A larger commit is published singly.
	maxBatchedCommitBytes = 64 << 10
)

// unsupportedPause is the time for which a batcher publishes singly after the server refused a batch because the stream
// does not allow batches. An upgrade may allow them later.
const unsupportedPause = time.Minute

// batcher decides which appends to one stream share an atomic batch, and so one fsync. An append is published at once
// while fewer than minBatchCommits publishes are in flight. Later appends wait for the publishes in flight, and then
// share a batch if at least minBatchCommits wait. No append waits while nothing is in flight.
type batcher struct {
	log      *Log
	minBatch int
	forced   bool // set by tests: an append waits for a batch although nothing is in flight

	mu      sync.Mutex
	single  int              // single publishes in flight
	batch   bool             // a batch is in flight
	busy    bool             // the last publish was a batch: while one publish is in flight, all others wait for it
	paused  time.Time        // until then, no batches
	waiting []*waitingAppend // in order of arrival
}

// waitingAppend is an append that waits in a batcher until it is published in a batch or singly.
type waitingAppend struct {
	a *appendAttempt
	// msg is prepared by the appending goroutine, which the batch would otherwise wait for. Only the batch changes it.
	msg *nats.Msg
	// state is guarded by batcher.mu.
	state waitingState
	// done receives the outcome. It has a buffer of one, so that the batcher never blocks.
	done chan batchOutcome
}

// waitingState is the progress of a waitingAppend between admit and its outcome.
type waitingState int

const (
	stateWaiting       waitingState = iota
	statePublishSingly              // it may be published singly
	stateInBatch                    // in a batch
	stateAbandoned                  // its caller gave up while it was in a batch
)

// batchOutcome is the result that a batcher sends to a waiting append: an acknowledgement, an error of a batch whose
// outcome is unknown, or neither, which means that the append must publish its commit singly.
type batchOutcome struct {
	ack *jetstream.PubAck
	err error
	// maybeStored is set if the server refused the batch with an error after which it may have stored a part of it.
	maybeStored bool
}

// admit returns nil if the append may be published singly at once; the caller must call finishSingle afterwards.
// Otherwise it adds the append to the waiting ones and returns its waitingAppend, for awaitOutcome.
func (b *batcher) admit(a *appendAttempt) *waitingAppend {
	if b.admitSingle() {
		return nil
	}
	m := &waitingAppend{a: a, msg: a.buildMessage(), done: make(chan batchOutcome, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting = append(b.waiting, m)
	b.startWaiting()
	return m
}

// admitSingle reports whether an append may be published singly at once. If so, it counts the publish as in flight.
func (b *batcher) admitSingle() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	idle := b.single == 0 && !b.batch
	if idle && !b.forced || !b.batch && !b.busy && len(b.waiting) == 0 && b.single < b.minBatch && !b.forced || b.isBatchingPaused() {
		b.single++
		return true
	}
	return false
}

// isBatchingPaused reports whether the stream refused batches within unsupportedPause. The caller must hold b.mu.
func (b *batcher) isBatchingPaused() bool { return !b.paused.IsZero() && time.Now().Before(b.paused) }

// finishSingle ends a single publish that admit or awaitOutcome permitted, and starts waiting appends.
func (b *batcher) finishSingle() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.single--
	b.startWaiting()
}

// abandon ends the wait of an append whose caller gave up. The commit of an append that is in a batch may still be
// stored.
func (b *batcher) abandon(m *waitingAppend) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch m.state {
	case stateWaiting:
		b.waiting = slices.DeleteFunc(b.waiting, func(other *waitingAppend) bool { return other == m })
	case statePublishSingly:
		b.single--
		b.startWaiting()
	case stateInBatch:
		m.state = stateAbandoned
	case stateAbandoned:
	}
}

// startWaiting starts waiting appends, as a batch or singly, as far as the publishes in flight allow it. The caller
// must hold b.mu.
func (b *batcher) startWaiting() {
	paused := b.isBatchingPaused()
	for len(b.waiting) > 0 && !b.batch {
		enough := len(b.waiting) >= b.minBatch && !paused
		if enough && b.single == 0 {
			b.startBatch()
			return
		}
		if b.single > 0 && !paused && (enough || b.busy || b.single >= b.minBatch) {
			return
		}
		// A single append that arrives after a batch is probably the first of many that the batch woke.
		b.busy = b.busy && len(b.waiting) == 1
		m := b.waiting[0]
		b.waiting = b.waiting[1:]
		b.publishSingly(m, batchOutcome{})
	}
}

// publishSingly sends an outcome to a waiting append, which then publishes its commit singly. The caller must hold
// b.mu.
func (b *batcher) publishSingly(m *waitingAppend, o batchOutcome) {
	m.state = statePublishSingly
	b.single++
	m.done <- o
}

// startBatch sends waiting appends as a batch, in a goroutine. The server refuses a batch with two guarded messages of
// one subject, so a batch has at most one commit of a subject. The caller must hold b.mu.
func (b *batcher) startBatch() {
	var sent, rest []*waitingAppend
	subjects := make(map[string]bool, len(b.waiting))
	size := 0
	for _, m := range b.waiting {
		s := m.a.head.Subject.String()
		if len(sent) == maxBatchCommits || size+len(m.a.data) > maxBatchBytes || subjects[s] {
			rest = append(rest, m)
			continue
		}
		subjects[s] = true
		size += len(m.a.data)
		m.state = stateInBatch
		sent = append(sent, m)
	}
	b.waiting, b.batch, b.busy = rest, true, true
	// The goroutine ends with the answer, the timeout or the connection.
	go b.publishBatch(sent, subjects)
}

// publishBatch publishes a batch and sends the outcome to each append in it.
func (b *batcher) publishBatch(sent []*waitingAppend, subjects map[string]bool) {
	last, err := b.log.publishBatch(sent)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.batch = false
	refused, maybeStored := isBatchRefused(err)
	if isBatchUnsupported(err) {
		b.paused = time.Now().Add(unsupportedPause)
	}
	if refused {
		b.busy = false
		b.log.logger.Debug("publish the commits of a refused batch singly", "commits", len(sent), "error", err)
	}
	for i, m := range sent {
		switch {
		case m.state == stateAbandoned:
		case refused:
			b.publishSingly(m, batchOutcome{maybeStored: maybeStored})
		case err != nil:
			m.done <- batchOutcome{err: err}
		default:
			m.done <- batchOutcome{ack: &jetstream.PubAck{Sequence: last - uint64(len(sent)-1-i)}}
		}
	}
	// A second commit of a subject has lost against the first one, unless that was refused. In the next batch it
	// would have all others refused.
	b.waiting = slices.DeleteFunc(b.waiting, func(m *waitingAppend) bool {
		rival := subjects[m.a.head.Subject.String()]
		if rival {
			b.publishSingly(m, batchOutcome{})
		}
		return rival
	})
	b.startWaiting()
}

// awaitOutcome blocks until the batcher sends the outcome of a waiting append. It returns the error of ctx or
// nats.ErrTimeout if that comes first.
func (b *batcher) awaitOutcome(ctx context.Context, m *waitingAppend, timeout time.Duration) (batchOutcome, error) {
	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case o := <-m.done:
		return o, o.err
	case <-ctx.Done():
		b.abandon(m)
		return batchOutcome{}, ctx.Err()
	case <-t.C:
		b.abandon(m)
		return batchOutcome{}, nats.ErrTimeout
	}
}
