// Package permits limits the work that runs at once in an executor, and shares it fairly among tenants.
package permits

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
)

// Errors of a Limiter.
var (
	// ErrNoPermit is returned when a job has waited for a permit and none became free.
	ErrNoPermit = errors.New("no slot is free")
	// ErrQueueFull is returned when too many jobs already wait for a permit, so that another job cannot wait too.
	ErrQueueFull = errors.New("no slot is free, and enough jobs wait for one here")
	// ErrStopping is returned when the executor began to stop while a job waited for a permit.
	ErrStopping = errors.New("this executor is stopping")
)

const (
	maxPermitWait     = time.Second            // time after which a waiting job is returned to the queue, so that another executor may take it
	noPermitDelay     = 20 * time.Millisecond  // delay of a job that was returned because no permit became free
	queueFullDelay    = 100 * time.Millisecond // delay of the first job of a tenant that may not wait
	minQueueLimit     = 64                     // minimum value of Limiter.queueLimit
	redeliverInterval = 10 * time.Millisecond  // time between two redelivered jobs of a tenant that may not wait
	maxRedeliverDelay = 30 * time.Second       // maximum delay of a job that may not wait
	refusalTime       = 100 * time.Millisecond // minimum time for which RefuseTenant refuses a tenant
)

// A Limiter limits how much work of one kind runs at the same time, and shares its permits fairly among tenants. A free permit
// goes to the waiting tenant with the least work in this executor; among tenants with equal work, to the tenant whose last
// permit is the oldest; within a tenant, to the job that has waited the longest. It is safe for concurrent use.
type Limiter struct {
	size       int                     // permits for all tenants
	reserve    int                     // additional permits, for tenants without work here
	queueLimit int                     // maximum number of waiting jobs; one tenant has at most half of them
	maxOf      func(tenant string) int // returns the most permits of a tenant; 0 is no limit

	mu          sync.Mutex
	refused     map[string]bool // tenants to which RefuseTenant applies
	held        int             // permits in use
	working     map[string]int  // work of each tenant, with a permit or without
	lastGrant   map[string]int  // value of grants when a tenant got its last permit
	grants      int
	arrivals    int
	waiting     map[string][]*waitingJob // in order of arrival
	queued      int                      // waiting jobs that count against queueLimit
	redeliverAt map[string]time.Time     // by tenant: when its last job that could not wait is delivered again
}

// A waitingJob is a job that waits for a permit.
type waitingJob struct {
	arrival int           // number in order of arrival
	limited bool          // it counts against Limiter.queueLimit
	done    chan struct{} // closed when it has a permit, or has lost its place in the queue to another tenant
	granted bool          // it has a permit; guarded by Limiter.mu
}

// New returns a Limiter with size permits, and reserve additional ones for tenants that have no work in this executor. maxOf
// returns the maximum number of permits of a tenant; 0, or a nil maxOf, means no limit.
func New(size, reserve int, maxOf func(string) int) *Limiter {
	if maxOf == nil {
		maxOf = func(string) int { return 0 }
	}
	return &Limiter{
		size: size, reserve: reserve, queueLimit: max(minQueueLimit, 2*(size+2)), maxOf: maxOf, working: map[string]int{}, refused: map[string]bool{}, lastGrant: map[string]int{},
		waiting: map[string][]*waitingJob{}, redeliverAt: map[string]time.Time{},
	}
}

// Acquire takes a permit for a tenant. It waits for at most a second, and meanwhile lets the bus deliver other jobs. The
// caller must call release. Only a limited number of jobs may wait: if that is reached, a waiting job of the tenant that has
// the most is returned to the queue. The error wraps ErrNoPermit, ErrQueueFull or ErrStopping, or is that of ctx. The first
// two contain the delay after which the job is to be delivered again.
func (l *Limiter) Acquire(ctx context.Context, tenant string) (release func(), err error) {
	w := &waitingJob{done: make(chan struct{})}
	if err := l.enqueueLimited(tenant, w); err != nil {
		return nil, err
	}
	select {
	case <-w.done:
		return l.awaitedPermit(tenant, w)
	default:
	}
	bus.ReleaseSlot(ctx)
	timer := time.NewTimer(maxPermitWait)
	defer timer.Stop()
	select {
	case <-w.done:
		return l.awaitedPermit(tenant, w)
	case <-timer.C:
		err = bus.RetryAfter(ErrNoPermit, noPermitDelay)
	case <-bus.Draining(ctx):
		err = ErrStopping
	case <-ctx.Done():
		err = ctx.Err()
	}
	if l.abandonWait(tenant, w) {
		return func() { l.releasePermit(tenant) }, nil
	}
	return nil, err
}

// awaitedPermit returns the function that releases the permit of a job that no longer waits. If the job has no permit, because
// another one took its place in the queue, it returns an error.
func (l *Limiter) awaitedPermit(tenant string, w *waitingJob) (release func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.granted {
		return func() { l.releasePermit(tenant) }, nil
	}
	return nil, l.queueFullError(tenant)
}

// AcquireBlocking takes a permit for a tenant, and blocks until there is one or ctx ends. The caller must call release, and
// must not hold a delivery of the bus that other jobs need.
func (l *Limiter) AcquireBlocking(ctx context.Context, tenant string) (release func(), err error) {
	w := &waitingJob{done: make(chan struct{})}
	l.mu.Lock()
	l.enqueue(tenant, w)
	l.mu.Unlock()
	select {
	case <-w.done:
	case <-ctx.Done():
		if !l.abandonWait(tenant, w) {
			return nil, ctx.Err()
		}
	}
	return func() { l.releasePermit(tenant) }, nil
}

// RefuseTenant makes the Limiter grant no permit to a tenant for a short time. It is called when the tenant has reached its
// limit over all executors.
func (l *Limiter) RefuseTenant(tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused[tenant] = true
	// The random part keeps executors that refused a tenant because of each other from trying again at the same time.
	time.AfterFunc(refusalTime+rand.N(refusalTime), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.refused, tenant)
		l.grantPermits()
	})
}

// HasReachedLimit reports whether a tenant has so much work that it gets no further permit, even if one is free. It also
// returns the amount of its work in this executor.
func (l *Limiter) HasReachedLimit(tenant string) (work int, reached bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	work, most := l.working[tenant], l.maxOf(tenant)
	return work, most > 0 && work >= most
}

// WorkByTenant returns the number of jobs that work in this executor, by tenant.
func (l *Limiter) WorkByTenant() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.working)
}

// CountWork counts work of a tenant that needs no permit, until the caller calls end.
func (l *Limiter) CountWork(tenant string) (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.working[tenant]++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.endWork(tenant)
		l.grantPermits()
	}
}

// TryAcquire takes a permit for work that CountWork already counts, and reports whether one was free. It does not block. The
// caller must call release before it ends the work.
func (l *Limiter) TryAcquire(tenant string) (release func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held >= l.size && (l.held >= l.size+l.reserve || l.working[tenant] > 1) {
		return nil, false
	}
	l.held++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.held--
		l.grantPermits()
	}, true
}

// enqueueLimited adds a job to those that wait for a permit, or grants it a permit at once. It returns an error if too many
// jobs already wait.
func (l *Limiter) enqueueLimited(tenant string, w *waitingJob) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.enqueue(tenant, w)
	if w.granted {
		return nil
	}
	own := l.queueLength(tenant)
	busiest, held := tenant, own
	for t := range l.waiting {
		if n := l.queueLength(t); n > held {
			busiest, held = t, n
		}
	}
	switch {
	case own >= l.size+2:
		l.removeWaiting(tenant, w)
		return l.queueFullError(tenant)
	case l.queued < l.queueLimit:
	case held <= own+1:
		l.removeWaiting(tenant, w)
		return l.queueFullError(tenant)
	default:
		l.evictLastQueued(busiest)
	}
	w.limited = true
	l.queued++
	return nil
}

// enqueue adds a job to those that wait for a permit, and grants it a permit if one is free. The caller holds mu.
func (l *Limiter) enqueue(tenant string, w *waitingJob) {
	l.arrivals++
	w.arrival = l.arrivals
	l.waiting[tenant] = append(l.waiting[tenant], w)
	l.grantPermits()
}

// queueFullError returns the error of a job that cannot wait because too many jobs wait. It contains a delay that grows with
// each such job of the tenant: JetStream delivers returned jobs before new ones, and a thousand returned jobs of one tenant
// must not delay the new job of another tenant. The caller holds mu.
func (l *Limiter) queueFullError(tenant string) error {
	now := time.Now()
	for t, at := range l.redeliverAt {
		if at.Before(now) {
			delete(l.redeliverAt, t)
		}
	}
	at, ok := l.redeliverAt[tenant]
	if !ok {
		at = now.Add(queueFullDelay)
	}
	if at = at.Add(redeliverInterval); at.After(now.Add(maxRedeliverDelay)) {
		at = now.Add(maxRedeliverDelay)
	}
	l.redeliverAt[tenant] = at
	return bus.RetryAfter(ErrQueueFull, at.Sub(now))
}

// abandonWait removes a waiting job, unless the job was granted a permit, and reports whether it was.
func (l *Limiter) abandonWait(tenant string, w *waitingJob) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !w.granted {
		l.removeWaiting(tenant, w)
	}
	return w.granted
}

// queueLength returns the number of a tenant's waiting jobs that count against the limit of waiting jobs. The caller holds mu.
func (l *Limiter) queueLength(tenant string) (n int) {
	for _, w := range l.waiting[tenant] {
		if w.limited {
			n++
		}
	}
	return n
}

// evictLastQueued removes the tenant's last waiting job that counts against the limit of waiting jobs. The caller holds mu.
func (l *Limiter) evictLastQueued(tenant string) {
	list := l.waiting[tenant]
	for i := len(list) - 1; i >= 0; i-- {
		if list[i].limited {
			w := list[i]
			l.removeWaiting(tenant, w)
			close(w.done)
			return
		}
	}
}

// removeWaiting removes a waiting job, if it still waits. The caller holds mu.
func (l *Limiter) removeWaiting(tenant string, w *waitingJob) {
	list := l.waiting[tenant]
	for i := range list {
		if list[i] != w {
			continue
		}
		if w.limited {
			w.limited = false
			l.queued--
		}
		if list = append(list[:i:i], list[i+1:]...); len(list) == 0 {
			delete(l.waiting, tenant)
		} else {
			l.waiting[tenant] = list
		}
		return
	}
}

// grantPermits grants free permits to waiting jobs. The caller holds mu.
func (l *Limiter) grantPermits() {
	for {
		next, found := "", false
		for t := range l.waiting {
			if l.canGrant(t) && (!found || l.hasPriority(t, next)) {
				next, found = t, true
			}
		}
		if !found {
			return
		}
		w := l.waiting[next][0]
		l.removeWaiting(next, w)
		l.held++
		l.working[next]++
		l.grants++
		l.lastGrant[next] = l.grants
		w.granted = true
		close(w.done)
	}
}

// canGrant reports whether a permit may be granted to a tenant now. The caller holds mu.
func (l *Limiter) canGrant(tenant string) bool {
	if l.refused[tenant] {
		return false
	}
	if most := l.maxOf(tenant); most > 0 && l.working[tenant] >= most {
		return false
	}
	return l.held < l.size || l.held < l.size+l.reserve && l.working[tenant] == 0
}

// hasPriority reports whether tenant a gets a permit before tenant b. The caller holds mu.
func (l *Limiter) hasPriority(a, b string) bool {
	if l.working[a] != l.working[b] {
		return l.working[a] < l.working[b]
	}
	if l.lastGrant[a] != l.lastGrant[b] {
		return l.lastGrant[a] < l.lastGrant[b]
	}
	return l.waiting[a][0].arrival < l.waiting[b][0].arrival
}

// releasePermit releases a permit of a tenant, and grants it to a waiting job.
func (l *Limiter) releasePermit(tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held--
	l.endWork(tenant)
	l.grantPermits()
}

// endWork counts the end of a tenant's work. The caller holds mu.
func (l *Limiter) endWork(tenant string) {
	if l.working[tenant]--; l.working[tenant] > 0 {
		return
	}
	delete(l.working, tenant)
	if len(l.working) == 0 && len(l.waiting) == 0 {
		clear(l.lastGrant) // no tenant has waited, so none takes precedence
	}
}
