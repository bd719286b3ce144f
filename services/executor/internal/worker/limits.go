package worker

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
)

var (
	errFull    = errors.New("no slot is free")
	errTenant  = errors.New("the tenant runs as many executions as it may")
	errCrowded = errors.New("no slot is free, and enough jobs wait for one here")
)

// Waiting for a permit.
const (
	patience    = time.Second           // how long a job waits before it is given back, so that another executor may take it
	returnDelay = 20 * time.Millisecond // after which such a job comes again
	minSeats    = 64                    // jobs that may wait for one kind of permit, at least
	returnEvery = 10 * time.Millisecond // between the returns of two jobs of a tenant for which there is no seat
	maxReturn   = 30 * time.Second
	refuseFor   = 100 * time.Millisecond // how long, at least, a tenant is refused that has as much work as it may
)

// limit bounds how much of a kind of work is done at once, and shares it among tenants. A permit that is free goes to the
// waiting tenant that does the least of the work here, among equals to the one that had a permit the longest time ago;
// within a tenant it goes to the job that waits the longest. It is safe for concurrent use.
type limit struct {
	size    int                     // permits for every tenant
	reserve int                     // further permits, for tenants that do none of the work here
	room    int                     // seats, of which one tenant has at most half
	most    func(tenant string) int // the permits that a tenant may have; nil, or 0, is no bound

	mu      sync.Mutex
	closed  map[string]bool // tenants that have as much work on all executors as they may
	held    int             // permits that are out
	working map[string]int  // work of each tenant, with a permit or without
	granted map[string]int  // when a tenant had its last permit, by the count of grants
	grants  int
	came    int
	waiting map[string][]*waiter // in the order they came
	seats   int                  // waiters that have a seat
	returns map[string]time.Time // when the last job that was given back for want of a seat comes again
}

// waiter is a job that waits for a permit.
type waiter struct {
	came   int // its place among all that came
	seated bool
	done   chan struct{} // closed when it has a permit, or lost its seat to another tenant
	ok     bool          // it has a permit; guarded by the limit's lock
}

func newLimit(size, reserve int, most func(string) int) *limit {
	if most == nil {
		most = func(string) int { return 0 }
	}
	return &limit{
		size: size, reserve: reserve, room: max(minSeats, 2*(size+2)), most: most, working: map[string]int{}, closed: map[string]bool{}, granted: map[string]int{},
		waiting: map[string][]*waiter{}, returns: map[string]time.Time{},
	}
}

// acquire takes a permit for a tenant, which the caller gives back with release. A job that has to wait releases its place
// among the deliveries, so that jobs of others and jobs that need no permit are taken meanwhile. Seats to wait on are few,
// and shared: a tenant without one takes a seat from the tenant that has most. An error says that there is no permit, and
// after which time the job is to come again.
func (l *limit) acquire(ctx context.Context, tenant string) (release func(), err error) {
	w := &waiter{done: make(chan struct{})}
	if err := l.join(tenant, w); err != nil {
		return nil, err
	}
	select {
	case <-w.done: // a permit was free
		return l.granting(tenant, w)
	default:
	}
	bus.ReleaseSlot(ctx)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-w.done:
		return l.granting(tenant, w)
	case <-timer.C:
		err = bus.Later(errFull, returnDelay)
	case <-bus.Draining(ctx):
		err = errHandover
	case <-ctx.Done():
		err = ctx.Err()
	}
	if l.leave(tenant, w) {
		return func() { l.release(tenant) }, nil
	}
	return nil, err
}

// granting returns what a waiter got: a permit, or the news that it lost its seat.
func (l *limit) granting(tenant string, w *waiter) (release func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.ok {
		return func() { l.release(tenant) }, nil
	}
	return nil, l.crowded(tenant)
}

// wait takes a permit however long that lasts. Callers hold no delivery that others need.
func (l *limit) wait(ctx context.Context, tenant string) (release func(), err error) {
	w := &waiter{done: make(chan struct{})}
	l.mu.Lock()
	l.queue(tenant, w)
	l.mu.Unlock()
	select {
	case <-w.done:
	case <-ctx.Done():
		if !l.leave(tenant, w) {
			return nil, ctx.Err()
		}
	}
	return func() { l.release(tenant) }, nil
}

// refuse gives a tenant no permit for a while, because it has as much work on all executors as it may.
func (l *limit) refuse(tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed[tenant] = true
	// Executors that refused their tenant because of each other must not try again at the same time.
	time.AfterFunc(refuseFor+rand.N(refuseFor), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.closed, tenant)
		l.grant()
	})
}

// counts returns the work of each tenant that has any.
func (l *limit) counts() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.working)
}

// follow counts work of a tenant that needs no permit. The caller must call end.
func (l *limit) follow(tenant string) (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.working[tenant]++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.finish(tenant)
		l.grant()
	}
}

// try takes a permit, if there is one, for work that follow counts already. The caller gives it back with release, before it ends the work.
func (l *limit) try(tenant string) (release func(), ok bool) {
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
		l.grant()
	}, true
}

// join adds a waiter, and gives it a permit at once if one is free. It returns an error if there is no seat for it.
func (l *limit) join(tenant string, w *waiter) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue(tenant, w)
	if w.ok {
		return nil
	}
	own := l.seated(tenant)
	most, crowd := tenant, own
	for t := range l.waiting {
		if n := l.seated(t); n > crowd {
			most, crowd = t, n
		}
	}
	switch {
	case own >= l.size+2:
		l.remove(tenant, w)
		return l.crowded(tenant)
	case l.seats < l.room:
	case crowd <= own+1:
		l.remove(tenant, w)
		return l.crowded(tenant)
	default:
		l.unseat(most)
	}
	w.seated = true
	l.seats++
	return nil
}

// queue adds a waiter, and gives it a permit at once if it may have one. mu is held.
func (l *limit) queue(tenant string, w *waiter) {
	l.came++
	w.came = l.came
	l.waiting[tenant] = append(l.waiting[tenant], w)
	l.grant()
}

// crowded returns the error of a job for which there is no seat. The jobs of a tenant come again one after the other, since
// JetStream delivers what comes again before what is new: a tenant with a thousand jobs must not hold up another's new one. mu is held.
func (l *limit) crowded(tenant string) error {
	now := time.Now()
	for t, at := range l.returns {
		if at.Before(now) {
			delete(l.returns, t)
		}
	}
	at, ok := l.returns[tenant]
	if !ok {
		at = now.Add(fullDelay)
	}
	if at = at.Add(returnEvery); at.After(now.Add(maxReturn)) {
		at = now.Add(maxReturn)
	}
	l.returns[tenant] = at
	return bus.Later(errCrowded, at.Sub(now))
}

// leave removes a waiter, and reports whether it has a permit.
func (l *limit) leave(tenant string, w *waiter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !w.ok {
		l.remove(tenant, w)
	}
	return w.ok
}

// seated returns how many of a tenant's waiters have a seat. mu is held.
func (l *limit) seated(tenant string) (n int) {
	for _, w := range l.waiting[tenant] {
		if w.seated {
			n++
		}
	}
	return n
}

// unseat removes the waiter of a tenant that came last. mu is held.
func (l *limit) unseat(tenant string) {
	list := l.waiting[tenant]
	for i := len(list) - 1; i >= 0; i-- {
		if list[i].seated {
			w := list[i]
			l.remove(tenant, w)
			close(w.done)
			return
		}
	}
}

// remove removes a waiter, if it still waits. mu is held.
func (l *limit) remove(tenant string, w *waiter) {
	list := l.waiting[tenant]
	for i := range list {
		if list[i] != w {
			continue
		}
		if w.seated {
			w.seated = false
			l.seats--
		}
		if list = append(list[:i:i], list[i+1:]...); len(list) == 0 {
			delete(l.waiting, tenant)
		} else {
			l.waiting[tenant] = list
		}
		return
	}
}

// grant gives the permits that are free to those who wait. mu is held.
func (l *limit) grant() {
	for {
		next, found := "", false
		for t := range l.waiting {
			if l.may(t) && (!found || l.before(t, next)) {
				next, found = t, true
			}
		}
		if !found {
			return
		}
		w := l.waiting[next][0]
		l.remove(next, w)
		l.held++
		l.working[next]++
		l.grants++
		l.granted[next] = l.grants
		w.ok = true
		close(w.done)
	}
}

// may reports whether a tenant may have a permit now. mu is held.
func (l *limit) may(tenant string) bool {
	if l.closed[tenant] {
		return false
	}
	if most := l.most(tenant); most > 0 && l.working[tenant] >= most {
		return false
	}
	return l.held < l.size || l.held < l.size+l.reserve && l.working[tenant] == 0
}

// before reports whether a tenant is to have a permit before another. mu is held.
func (l *limit) before(a, b string) bool {
	if l.working[a] != l.working[b] {
		return l.working[a] < l.working[b]
	}
	if l.granted[a] != l.granted[b] {
		return l.granted[a] < l.granted[b]
	}
	return l.waiting[a][0].came < l.waiting[b][0].came
}

func (l *limit) release(tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held--
	l.finish(tenant)
	l.grant()
}

// finish counts the end of a tenant's work. mu is held.
func (l *limit) finish(tenant string) {
	if l.working[tenant]--; l.working[tenant] > 0 {
		return
	}
	delete(l.working, tenant)
	if len(l.working) == 0 && len(l.waiting) == 0 {
		clear(l.granted) // nobody is to be preferred to anybody
	}
}
