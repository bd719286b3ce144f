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

// maxPending is the size in bytes of unstored events from which the executor reads no more lines of the runner's
// journal.
const maxPending = 4 << 20

// A Buffer holds the events of an execution that are not stored yet. At most one commit is in flight; nothing else may append to the
// execution's log meanwhile. Only the goroutine of the execution's turn uses a Buffer.
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

// A Result is the outcome of a commit of a Buffer.
type Result struct {
	stored *eventlog.SessionState // state after the last stored part, also with an error
	err    error
}

// New returns an empty Buffer, which starts a commit no sooner than window after the end of the last one. The caller must call Close.
func New(x *runlog.Execution, window time.Duration) *Buffer {
	return &Buffer{execution: x, window: window, done: make(chan Result, 1), timer: time.NewTimer(time.Hour)}
}

// Add encodes events and adds them to the next commit, which does not encode them again. After an error, the event that
// cannot be encoded and those after it were not added.
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

// AddFirst adds events to the next commit, before all others.
func (b *Buffer) AddFirst(list ...events.Event) {
	b.pending = append(list, b.pending...)
}

// Take removes and returns the events that are neither stored nor part of the commit in flight.
func (b *Buffer) Take() []events.Event {
	list := b.pending
	b.pending, b.size = nil, 0
	return list
}

// IsFull reports whether so many events wait to be stored that the caller should add no more.
func (b *Buffer) IsFull() bool { return b.size >= maxPending }

// IsIdle reports whether no commit is in flight.
func (b *Buffer) IsIdle() bool { return !b.inFlight }

// IsStored reports whether every event that was added to the buffer is stored.
func (b *Buffer) IsStored() bool { return !b.inFlight && len(b.pending) == 0 }

// Expedite allows the next commit to start at once, without the minimum time since the last one.
func (b *Buffer) Expedite() { b.notBefore = time.Time{} }

// IsDue reports whether a commit can start now. If it is too early, Timer is signalled later.
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

// Timer is signalled when a commit that was too early is due.
func (b *Buffer) Timer() <-chan time.Time { return b.timer.C }

// Start starts a commit of the events; IsDue must have returned true. After it, stored is called from another goroutine with the
// number of the last line of the runner's journal that the log has. Done receives the result.
func (b *Buffer) Start(ctx context.Context, stored func(line uint64)) {
	list, l := b.Take(), b.execution.Session
	b.inFlight = true
	b.running.Go(func() {
		after, err := b.execution.AppendTo(ctx, l, list)
		if err == nil {
			stored(after.Run.Sandbox.N)
		}
		b.done <- Result{after, err}
	})
}

// Done receives the result of the commit in flight, which the caller must pass to Finish.
func (b *Buffer) Done() <-chan Result { return b.done }

// Finish must be called with the result that Done has received. It ends the commit in flight and returns its error.
func (b *Buffer) Finish(r Result) error {
	b.notBefore = time.Now().Add(b.window)
	return b.settle(r)
}

// settle updates the execution's state by what the commit in flight has stored, and returns the commit's error.
func (b *Buffer) settle(r Result) error {
	b.inFlight = false
	b.execution.SetStored(r.stored)
	return r.err
}

// Await blocks until no commit is in flight. Then the caller may append to the execution's log itself.
func (b *Buffer) Await(ctx context.Context) error {
	if !b.inFlight {
		return nil
	}
	select {
	case r := <-b.done:
		return b.settle(r)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Flush waits for the commit in flight and stores all events.
func (b *Buffer) Flush(ctx context.Context) error {
	if err := b.Await(ctx); err != nil {
		return err
	}
	return b.execution.Append(ctx, b.Take())
}

// Close blocks until the commit in flight has ended, whose context the caller must have cancelled. What it has stored is part of the
// execution's state afterwards.
func (b *Buffer) Close() {
	b.timer.Stop()
	b.running.Wait()
	if b.inFlight {
		_ = b.settle(<-b.done) // the turn ends with an error of its own
	}
}
