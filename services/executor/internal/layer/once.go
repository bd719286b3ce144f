package layer

import (
	"context"
	"sync"
)

// SingleFlight makes concurrent callers with the same key share one call of a function. The call continues while at least
// one caller waits, and is cancelled when the last one has left. The zero value is ready for use.
type SingleFlight struct {
	mu      sync.Mutex
	flights map[string]*sharedCall
}

// sharedCall is a running call of the function, for one key.
type sharedCall struct {
	waiting int
	cancel  context.CancelFunc
	done    chan struct{} // closed when value and err are set
	value   string
	err     error
}

// Do returns the result of work, which it calls once for all concurrent callers with the same key. It returns early
// when ctx ends; if no other caller waits, it cancels work and returns when work has ended.
func (o *SingleFlight) Do(ctx context.Context, key string, work func(context.Context) (string, error)) (string, error) {
	f := o.joinCall(ctx, key, work)
	select {
	case <-f.done:
		o.leaveCall(key, f)
		return f.value, f.err
	case <-ctx.Done():
	}
	if o.leaveCall(key, f) {
		<-f.done
	}
	return "", ctx.Err()
}

// joinCall adds a caller to the running call for a key. If there is none, it starts one.
func (o *SingleFlight) joinCall(ctx context.Context, key string, work func(context.Context) (string, error)) *sharedCall {
	o.mu.Lock()
	defer o.mu.Unlock()
	if f := o.flights[key]; f != nil {
		f.waiting++
		return f
	}
	if o.flights == nil {
		o.flights = map[string]*sharedCall{}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	f := &sharedCall{waiting: 1, cancel: cancel, done: make(chan struct{})}
	o.flights[key] = f
	go func() {
		defer close(f.done)
		f.value, f.err = work(ctx)
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.flights[key] == f { // later callers start another call
			delete(o.flights, key)
		}
	}()
	return f
}

// leaveCall removes a caller from a running call. If it was the last caller, leaveCall cancels the call and returns true.
func (o *SingleFlight) leaveCall(key string, f *sharedCall) (last bool) {
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
