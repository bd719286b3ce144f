package admission

import (
	"context"
	"slices"
	"time"
)

// waiter is a request that waits for bytes.
type waiter struct {
	request *Request
	bytes   int64
	granted chan struct{} // closed when the request holds the bytes
}

// Wait is Take for a request that may wait until the deadline for others to return bytes. Requests of one tenant get theirs in the
// order in which they came. A request that waits must hold nothing that others could wait for. The error is that of Take at the
// deadline, or the cause of ctx.
func (r *Request) Wait(ctx context.Context, n int64, deadline time.Time) error {
	w := r.of.enter(r, n)
	if w == nil {
		return nil
	}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-w.granted:
		return nil
	case <-ctx.Done():
		_ = r.of.leave(w) // the request is over
		return context.Cause(ctx)
	case <-timer.C:
		return r.of.leave(w)
	}
}

// enter takes bytes for a request, and returns nil; or makes the request wait for them.
func (a *Admission) enter(r *Request, n int64) *waiter {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting[r.tenant]) == 0 && r.take(n) == nil {
		return nil
	}
	w := &waiter{request: r, bytes: n, granted: make(chan struct{})}
	a.waiting[r.tenant] = append(a.waiting[r.tenant], w)
	return w
}

// leave ends a wait. It returns nil if the request holds the bytes, else the error of Take.
func (a *Admission) leave(w *waiter) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-w.granted:
		return nil
	default:
	}
	err := w.request.take(w.bytes)
	a.remove(w)
	a.grant() // to those who waited behind
	return err
}

// grant takes bytes for requests that wait, for one of each tenant at a time, until there is no room for the first of any. a.mu is held.
func (a *Admission) grant() {
	for again := true; again; {
		again = false
		for _, list := range a.waiting {
			if w := list[0]; w.request.take(w.bytes) == nil {
				again = true
				a.remove(w)
				close(w.granted)
			}
		}
	}
}

// remove takes a waiter off its tenant's list. a.mu is held.
func (a *Admission) remove(w *waiter) {
	tenant := w.request.tenant
	a.waiting[tenant] = slices.DeleteFunc(a.waiting[tenant], func(other *waiter) bool { return other == w })
	if len(a.waiting[tenant]) == 0 {
		delete(a.waiting, tenant)
	}
}
