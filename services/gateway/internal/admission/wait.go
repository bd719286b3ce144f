package admission

import (
	"context"
	"slices"
	"time"
)

// waiter is a request that waits until other requests return bytes to the limits.
type waiter struct {
	request *Request
	bytes   int64
	granted chan struct{} // closed when the request holds the bytes
}

// ReserveBytesBefore is like ReserveBytes, but waits until the deadline for other requests to return bytes. Requests of one tenant get
// their bytes in order of arrival. A waiting request must hold nothing that others may wait for, or they would block
// each other. The error is that of ReserveBytes at the deadline, or the cause of ctx.
func (r *Request) ReserveBytesBefore(ctx context.Context, n int64, deadline time.Time) error {
	w := r.admission.takeOrQueue(r, n)
	if w == nil {
		return nil
	}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-w.granted:
		return nil
	case <-ctx.Done():
		_ = r.admission.endWait(w) // the request is over
		return context.Cause(ctx)
	case <-timer.C:
		return r.admission.endWait(w)
	}
}

// takeOrQueue takes n bytes for a request and returns nil, or adds the request to the waiting ones and returns its
// waiter.
func (a *Admission) takeOrQueue(r *Request, n int64) *waiter {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting[r.tenant]) == 0 && r.reserveBytesLocked(n) == nil {
		return nil
	}
	w := &waiter{request: r, bytes: n, granted: make(chan struct{})}
	a.waiting[r.tenant] = append(a.waiting[r.tenant], w)
	return w
}

// endWait removes a waiter whose request stops waiting for bytes. It returns nil if the request got the bytes, else
// the error of ReserveBytes.
func (a *Admission) endWait(w *waiter) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-w.granted:
		return nil
	default:
	}
	err := w.request.reserveBytesLocked(w.bytes)
	a.removeWaiter(w)
	a.grantWaiters() // for requests that waited behind this one
	return err
}

// grantWaiters takes bytes for waiting requests, one of each tenant in turn, until the first waiting request of no
// tenant fits into the limits. a.mu must be held.
func (a *Admission) grantWaiters() {
	for again := true; again; {
		again = false
		for _, list := range a.waiting {
			if w := list[0]; w.request.reserveBytesLocked(w.bytes) == nil {
				again = true
				a.removeWaiter(w)
				close(w.granted)
			}
		}
	}
}

// removeWaiter removes a waiter from its tenant's list. a.mu must be held.
func (a *Admission) removeWaiter(w *waiter) {
	tenant := w.request.tenant
	a.waiting[tenant] = slices.DeleteFunc(a.waiting[tenant], func(other *waiter) bool { return other == w })
	if len(a.waiting[tenant]) == 0 {
		delete(a.waiting, tenant)
	}
}
