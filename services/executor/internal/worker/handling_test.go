package worker

import (
	"sync"
	"sync/atomic"
	"testing"
)

// TestHandling_NoAcknowledgedJobIsMissed: many deliveries for one session at once. At most one handles it, and whatever
// was due when a delivery came has been seen by a look that began later, before the last delivery is acknowledged.
func TestHandling_NoAcknowledgedJobIsMissed(t *testing.T) {
	t.Parallel()
	for range 200 {
		s := newHandling()
		var due, handlers, covered atomic.Int64
		var all sync.WaitGroup
		const jobs = 32
		for n := range uint64(jobs) {
			all.Go(func() {
				due.Add(1) // the log says so before the job is published
				b, ok := s.take("ses", job{"JOBS", n}, func() bool { return true })
				if b == nil {
					if !ok {
						t.Error("a delivery is not covered by one that holds its job")
					}
					covered.Add(1)
					return
				}
				for done := false; !done; done = s.release("ses", b) {
					if handlers.Add(1) != 1 {
						t.Error("two deliveries handle the session")
					}
					due.Store(0)
					handlers.Add(-1)
				}
			})
		}
		all.Wait()
		if n := due.Load(); n != 0 {
			t.Fatalf("%d jobs were acknowledged, %d of them for the work of others, and %d were not looked at", jobs, covered.Load(), n)
		}
		if len(s.sessions) != 0 {
			t.Fatal("the session is still being handled")
		}
	}
}

// TestHandling_CoversOnlyOtherJobsOfAHeldDelivery: a delivery is not acknowledged for the work of the same job's
// earlier delivery, nor for that of a delivery that may be with another executor; both make the handler look again.
func TestHandling_CoversOnlyOtherJobsOfAHeldDelivery(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		job     job
		held    bool
		covered bool
	}{
		"another job":                     {job{"JOBS", 2}, true, true},
		"the same job again":              {job{"JOBS", 1}, true, false},
		"another job, after a standstill": {job{"JOBS", 2}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newHandling()
			b, _ := s.take("ses", job{"JOBS", 1}, func() bool { return test.held })
			if other, covered := s.take("ses", test.job, func() bool { return true }); other != nil || covered != test.covered {
				t.Errorf("handled by itself: %v; covered: %v", other != nil, covered)
			}
			if len(b.poke) != 1 {
				t.Error("the handler is not woken")
			}
			if s.release("ses", b) {
				t.Error("released without a further look")
			}
			if !s.release("ses", b) {
				t.Error("not released after it")
			}
		})
	}
}
