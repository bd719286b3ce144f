package permits

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
)

// startAcquire starts a job that acquires a permit, again until it has one, and calls got with the release.
func startAcquire(t *testing.T, l *Limiter, tenant string, got func(release func())) {
	t.Helper()
	go func() {
		release, err := l.Acquire(context.Background(), tenant)
		for errors.Is(err, ErrNoPermit) || errors.Is(err, ErrQueueFull) {
			release, err = l.Acquire(context.Background(), tenant)
		}
		if err != nil {
			t.Error(err)
			return
		}
		got(release)
	}()
	synctest.Wait()
}

// TestLimiter_GrantsToTheTenantWithTheLeastWork: permits are granted in the documented order.
func TestLimiter_GrantsToTheTenantWithTheLeastWork(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		size, reserve int
		running       []string // tenants that take the first permits
		waiting       []string // tenants, in order of arrival
		atOnce        int      // waiting jobs that get a permit before one is released
		want          []string // tenants in the order of their permits, when the oldest permit is released first
	}{
		"one tenant alone":                          {size: 2, running: []string{"a", "a"}, waiting: []string{"a", "a"}, want: []string{"a", "a"}},
		"no reserved permit for a tenant with work": {size: 2, reserve: 1, running: []string{"a", "a"}, waiting: []string{"a", "b"}, atOnce: 1, want: []string{"b", "a"}},
		"the reserve is one permit":                 {size: 1, reserve: 1, running: []string{"a"}, waiting: []string{"b", "c"}, atOnce: 1, want: []string{"b", "c"}},
		"a slot and the reserve":                    {size: 2, reserve: 1, running: []string{"a"}, waiting: []string{"a", "a", "b"}, atOnce: 2, want: []string{"a", "b", "a"}},
		"the tenant with the least work is first":   {size: 3, running: []string{"a", "a", "b"}, waiting: []string{"a", "a", "b", "c"}, want: []string{"c", "a", "b", "a"}},
		"tenants with equal work take turns":        {size: 1, running: []string{"a"}, waiting: []string{"a", "a", "b", "b", "c"}, want: []string{"b", "c", "a", "b", "a"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := New(test.size, test.reserve, nil)
				var mu sync.Mutex
				var held []func()
				var order []string
				for _, tenant := range append(slices.Clone(test.running), test.waiting...) {
					startAcquire(t, l, tenant, func(release func()) {
						mu.Lock()
						defer mu.Unlock()
						order, held = append(order, tenant), append(held, release)
					})
				}
				if n := len(order) - len(test.running); n != test.atOnce {
					t.Errorf("%d jobs have a permit at once, want %d", n, test.atOnce)
				}
				for i := 0; i < len(held); i++ {
					held[i]()
					synctest.Wait()
				}
				if got := order[len(test.running):]; !slices.Equal(got, test.want) {
					t.Errorf("permits were granted to %v, want %v", got, test.want)
				}
				if l.held != 0 || len(l.working) != 0 || l.queued != 0 || len(l.waiting) != 0 {
					t.Errorf("at the end %d permits are in use, %v have work, %d jobs are queued, %d tenants wait", l.held, l.working, l.queued, len(l.waiting))
				}
			})
		})
	}
}

// TestLimiter_SharesSeats tests that tenants that fill the queue lose places to tenants without a waiting job.
func TestLimiter_SharesSeats(t *testing.T) {
	t.Parallel()
	l := New(1, 0, nil)
	permit := &waitingJob{done: make(chan struct{})}
	if err := l.enqueueLimited("z", permit); err != nil || !permit.granted {
		t.Fatalf("no permit: %v", err)
	}
	var refused int
	for i := range 40 {
		for range 5 {
			if err := l.enqueueLimited(string(rune('A'+i)), &waitingJob{done: make(chan struct{})}); err != nil {
				refused++
			}
		}
	}
	if l.queued != l.queueLimit || l.queued > 100 {
		t.Errorf("%d jobs are queued, the limit is %d", l.queued, l.queueLimit)
	}
	for i := range 40 {
		tenant := string(rune('A' + i))
		if n := l.queueLength(tenant); n < 1 || n > l.size+2 {
			t.Errorf("tenant %s has %d queued jobs", tenant, n)
		}
	}
	if refused == 0 {
		t.Error("no job was refused")
	}
}

// TestLimiter_Refuse: a refused tenant gets no permit for a while, and other tenants do.
func TestLimiter_Refuse(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := New(2, 0, nil)
		l.RefuseTenant("a")
		got := make(chan string, 2)
		startAcquire(t, l, "a", func(func()) { got <- "a" })
		startAcquire(t, l, "b", func(func()) { got <- "b" })
		if first := <-got; first != "b" {
			t.Errorf("the first permit is for tenant %s, want b", first)
		}
		if second := <-got; second != "a" {
			t.Errorf("the second permit is for tenant %s, want a", second)
		}
	})
}

// TestLimiter_MaxOfTenant: maxOf bounds the permits of one tenant.
func TestLimiter_MaxOfTenant(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := New(3, 0, func(string) int { return 1 })
		release, err := l.Acquire(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Acquire(t.Context(), "a"); !errors.Is(err, ErrNoPermit) {
			t.Errorf("a second permit of the tenant: %v, want %v", err, ErrNoPermit)
		}
		release()
		release, err = l.Acquire(t.Context(), "a")
		if err != nil {
			t.Fatalf("no permit after the release: %v", err)
		}
		release()
	})
}

// TestLimiter_TryAcquire: counted work gets a free permit without waiting, and none when all are in use.
func TestLimiter_TryAcquire(t *testing.T) {
	t.Parallel()
	l := New(1, 0, nil)
	end := l.CountWork("a")
	release, ok := l.TryAcquire("a")
	if !ok || l.WorkByTenant()["a"] != 1 {
		t.Fatalf("permit %v, work %v", ok, l.WorkByTenant())
	}
	if _, ok := l.TryAcquire("a"); ok {
		t.Error("two permits of one")
	}
	release()
	end()
	if n := len(l.WorkByTenant()); n != 0 {
		t.Errorf("%d tenants have work at the end", n)
	}
}
