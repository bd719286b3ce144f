// Package commits collects the events of a running execution and stores them in the background, one commit at a time.
package commits

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// maxPending is the number of bytes of events that wait to be stored from which the executor reads no more lines of the runner's
// journal.
const maxPending = 4 << 20

// A Buffer holds the events of an execution that wait to be stored, and stores them in commits, at most one at a time. Nothing else
// may append to the execution's log while a commit is running. Only the goroutine of the execution's turn uses a Buffer.
type Buffer struct {
	execution *runlog.Execution
	window    time.Duration // least time from a stored commit to the next one

	pending []events.Event
	size    int // bytes of pending, encoded

	running   sync.WaitGroup
	inFlight  bool
	done      chan Result
	notBefore time.Time // of the next commit
	timer     *time.Timer
}

// A Result is the outcome of one commit of a Buffer.
type Result struct {
	stored *eventlog.SessionState // state after the last stored part, also with an error
	err    error
}

// New returns an empty Buffer. It starts a commit no sooner than window after the end of the previous one. The caller must call
// Close.
func New(x *runlog.Execution, window time.Duration) *Buffer {
	return &Buffer{execution: x, window: window, done: make(chan Result, 1), timer: time.NewTimer(time.Hour)}
}

// Add adds events to the next commit. It encodes each event once. If an event cannot be encoded, Add returns an error and adds
// neither that event nor those after it.
func (b *Buffer) Add(list ...events.Event) error {
	for _, e := range list {
		encoded, size, err := e.Encoded()
		if err != nil {
			return fmt.Errorf("add an event to the next commit: %w", err)
		}
		b.pending, b.size = append(b.pending, encoded), b.size+size
	}
	return nil
}

// AddFirst adds events to the next commit, in front of all other events.
func (b *Buffer) AddFirst(list ...events.Event) {
	b.pending = append(list, b.pending...)
}

// TakePending removes and returns the events that are neither stored nor part of the running commit.
func (b *Buffer) TakePending() []events.Event {
	list := b.pending
	b.pending, b.size = nil, 0
	return list
}

// IsFull reports whether so many events wait to be stored that the caller should add no more events.
func (b *Buffer) IsFull() bool { return b.size >= maxPending }

// IsIdle reports whether no commit is running.
func (b *Buffer) IsIdle() bool { return !b.inFlight }

// IsStored reports whether every event that was added to the Buffer is stored in the log.
func (b *Buffer) IsStored() bool { return !b.inFlight && len(b.pending) == 0 }

// Expedite allows the next commit to start at once, without the minimum time after the previous one.
func (b *Buffer) Expedite() { b.notBefore = time.Time{} }

// IsDue reports whether a commit can start now. If it is too early for a commit, the channel of DueTimer receives a value when one is
// due.
func (b *Buffer) IsDue() bool {
	if b.inFlight || len(b.pending) == 0 {
		return false
	}
	if early := time.Until(b.notBefore); early > 0 {
		b.timer.Reset(early)
		return false
	}
	return true
}

// DueTimer returns a channel that receives a value when a commit that was too early is due.
func (b *Buffer) DueTimer() <-chan time.Time { return b.timer.C }

// StartCommit starts a commit of the events that wait; IsDue must have returned true. After the commit, stored is called in another
// goroutine with the number of the last line of the runner's journal that the log has. The channel of Done receives the result.
func (b *Buffer) StartCommit(ctx context.Context, stored func(line uint64)) {
	list, l := b.TakePending(), b.execution.Session
	b.inFlight = true
	b.running.Go(func() {
		after, err := b.execution.AppendTo(ctx, l, list)
		if err == nil {
			stored(after.Run.Sandbox.N)
		}
		b.done <- Result{after, err}
	})
}

// Done returns a channel that receives the result of the running commit. The caller must pass the result to FinishCommit.
func (b *Buffer) Done() <-chan Result { return b.done }

// FinishCommit ends the running commit, and returns its error. It must be called with the result that the channel of Done has received.
func (b *Buffer) FinishCommit(r Result) error {
	b.notBefore = time.Now().Add(b.window)
	return b.applyResult(r)
}

// applyResult updates the execution's state with what the running commit has stored, and returns the commit's error.
func (b *Buffer) applyResult(r Result) error {
	b.inFlight = false
	b.execution.SetStored(r.stored)
	return r.err
}

// AwaitCommit blocks until no commit is running. Then the caller may append to the execution's log itself.
func (b *Buffer) AwaitCommit(ctx context.Context) error {
	if !b.inFlight {
		return nil
	}
	select {
	case r := <-b.done:
		return b.applyResult(r)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Flush waits for the running commit, and then stores all events that wait.
func (b *Buffer) Flush(ctx context.Context) error {
	if err := b.AwaitCommit(ctx); err != nil {
		return err
	}
	return b.execution.AppendEvents(ctx, b.TakePending())
}

// Close blocks until the running commit has ended. The caller must have cancelled the commit's context. Afterwards the execution's
// state includes what the commit has stored.
func (b *Buffer) Close() {
	b.timer.Stop()
	b.running.Wait()
	if b.inFlight {
		_ = b.applyResult(<-b.done) // the turn ends with an error of its own
	}
}
