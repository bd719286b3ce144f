package layer

import (
	"context"
	"sync"
)

// Once lets one of those who want the same thing make it. It goes on as long as one
// of them waits, and ends with the last. The zero value works.
type Once struct {
	mu      sync.Mutex
	flights map[string]*flight
}

type flight struct {
	waiting int
	cancel  context.CancelFunc
	done    chan struct{} // closed when value and err are set
	value   string
	err     error
}

// Do gives what make gives, once for all who ask under the key meanwhile. It returns
// early when ctx ends; if nobody else waits, what is under way is cancelled, and Do
// returns when it has ended.
func (o *Once) Do(ctx context.Context, key string, work func(context.Context) (string, error)) (string, error) {
	f := o.join(ctx, key, work)
	select {
	case <-f.done:
		o.leave(key, f)
		return f.value, f.err
	case <-ctx.Done():
	}
	if o.leave(key, f) {
		<-f.done
	}
	return "", ctx.Err()
}

func (o *Once) join(ctx context.Context, key string, work func(context.Context) (string, error)) *flight {
	o.mu.Lock()
	defer o.mu.Unlock()
	if f := o.flights[key]; f != nil {
		f.waiting++
		return f
	}
	if o.flights == nil {
		o.flights = map[string]*flight{}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	f := &flight{waiting: 1, cancel: cancel, done: make(chan struct{})}
	o.flights[key] = f
	go func() {
		defer close(f.done)
		f.value, f.err = work(ctx)
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.flights[key] == f { // whoever comes now asks anew
			delete(o.flights, key)
		}
	}()
	return f
}

// leave tells whether the last one has left, and then cancels.
func (o *Once) leave(key string, f *flight) (last bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if f.waiting--; f.waiting > 0 {
		return false
	}
	f.cancel()
	if o.flights[key] == f {
		delete(o.flights, key)
	}
	return true
}
