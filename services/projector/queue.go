package projector

import (
	"context"
	"sync"
)

// queue passes items from one goroutine to another, in order. push blocks while the queued items have more than a
// maximum number of bytes.
type queue[T any] struct {
	max   int
	ready chan struct{} // has a token while items may be queued
	space chan struct{} // has a token after items were taken

	mu    sync.Mutex
	items []T
	sizes []int
	bytes int
}

// newQueue returns an empty queue of up to maxBytes bytes.
func newQueue[T any](maxBytes int) *queue[T] {
	return &queue[T]{max: maxBytes, ready: make(chan struct{}, 1), space: make(chan struct{}, 1)}
}

// push adds an item of the given size. It returns an error only if ctx ends. Only one goroutine may push at a time.
func (q *queue[T]) push(ctx context.Context, item T, bytes int) error {
	for {
		q.mu.Lock()
		if len(q.items) == 0 || q.bytes+bytes <= q.max {
			q.items, q.sizes = append(q.items, item), append(q.sizes, bytes)
			q.bytes += bytes
			q.mu.Unlock()
			trySignal(q.ready)
			return nil
		}
		q.mu.Unlock()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-q.space:
		}
	}
}

// take removes up to n items from the queue and returns them. more reports whether the queue has further items.
func (q *queue[T]) take(n int) (items []T, more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n = min(n, len(q.items))
	items = q.items[:n:n]
	for _, size := range q.sizes[:n] {
		q.bytes -= size
	}
	q.items, q.sizes = q.items[n:], q.sizes[n:]
	if n > 0 {
		trySignal(q.space)
	}
	if len(q.items) > 0 {
		trySignal(q.ready)
	}
	return items, len(q.items) > 0
}

// trySignal puts a token into the channel c, which has a buffer of one, unless a token is already there.
func trySignal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
