package worker

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
)

// joins has a job of a tenant wait, and reports on got that it has a permit.
func joins(t *testing.T, l *limit, tenant string, got func(release func())) {
	t.Helper()
	go func() {
		release, err := l.acquire(context.Background(), tenant)
		for errors.Is(err, errFull) || errors.Is(err, errCrowded) {
			release, err = l.acquire(context.Background(), tenant)
		}
		if err != nil {
			t.Error(err)
			return
		}
		got(release)
	}()
	synctest.Wait()
}

// TestLimit_SharesPermits: who has a permit after whom.
func TestLimit_SharesPermits(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		size, reserve int
		running       []string // tenants that have the permits first
		waiting       []string // tenants, in the order they come
		at            int      // how many of those that wait have a permit before any was given back
		want          []string // who has a permit after whom, as those that had one first give theirs back first
	}{
		"one tenant alone":                    {size: 2, running: []string{"a", "a"}, waiting: []string{"a", "a"}, want: []string{"a", "a"}},
		"the reserve is not for who has work": {size: 2, reserve: 1, running: []string{"a", "a"}, waiting: []string{"a", "b"}, at: 1, want: []string{"b", "a"}},
		"the reserve is one permit":           {size: 1, reserve: 1, running: []string{"a"}, waiting: []string{"b", "c"}, at: 1, want: []string{"b", "c"}},
		"a slot and the reserve":              {size: 2, reserve: 1, running: []string{"a"}, waiting: []string{"a", "a", "b"}, at: 2, want: []string{"a", "b", "a"}},
		"who has least work":                  {size: 3, running: []string{"a", "a", "b"}, waiting: []string{"a", "a", "b", "c"}, want: []string{"c", "a", "b", "a"}},
		"in turn among equals":                {size: 1, running: []string{"a"}, waiting: []string{"a", "a", "b", "b", "c"}, want: []string{"b", "c", "a", "b", "a"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := newLimit(test.size, test.reserve, nil)
				var mu sync.Mutex
				var held []func()
				var order []string
				for _, tenant := range append(slices.Clone(test.running), test.waiting...) {
					joins(t, l, tenant, func(release func()) {
						mu.Lock()
						defer mu.Unlock()
						order, held = append(order, tenant), append(held, release)
					})
				}
				if n := len(order) - len(test.running); n != test.at {
					t.Errorf("%d have a permit at once, want %d", n, test.at)
				}
				for i := 0; i < len(held); i++ {
					held[i]()
					synctest.Wait()
				}
				if got := order[len(test.running):]; !slices.Equal(got, test.want) {
					t.Errorf("%v have a permit in this order, want %v", got, test.want)
				}
				if l.held != 0 || len(l.working) != 0 || l.seats != 0 || len(l.waiting) != 0 {
					t.Errorf("at the end %d permits are out, %v work, %d seats are taken, %d tenants wait", l.held, l.working, l.seats, len(l.waiting))
				}
			})
		})
	}
}

// TestLimit_SeatsAreShared: tenants that take all seats lose some to tenants that have none.
func TestLimit_SeatsAreShared(t *testing.T) {
	t.Parallel()
	l := newLimit(1, 0, nil)
	permit := &waiter{done: make(chan struct{})}
	if err := l.join("z", permit); err != nil || !permit.ok {
		t.Fatalf("no permit: %v", err)
	}
	var refused int
	for i := range 40 {
		for range 5 {
			if err := l.join(string(rune('A'+i)), &waiter{done: make(chan struct{})}); err != nil {
				refused++
			}
		}
	}
	if l.seats != l.room || l.seats > 100 {
		t.Errorf("%d seats are taken, there are %d", l.seats, l.room)
	}
	for i := range 40 {
		tenant := string(rune('A' + i))
		if n := l.seated(tenant); n < 1 || n > l.size+2 {
			t.Errorf("tenant %s has %d seats", tenant, n)
		}
	}
	if refused == 0 {
		t.Error("nobody was refused a seat")
	}
}
