package handling

import (
	"sync"
	"sync/atomic"
	"testing"
)

// TestSet_MissesNoAcknowledgedJob: of many deliveries for one session at once, one at a time handles it, and what was due when
// a delivery arrived is read afterwards, before the last delivery is acknowledged.
func TestSet_MissesNoAcknowledgedJob(t *testing.T) {
	t.Parallel()
	for range 200 {
		s := NewSet()
		var due, handlers, covered atomic.Int64
		var all sync.WaitGroup
		const jobs = 32
		for n := range uint64(jobs) {
			all.Go(func() {
				due.Add(1) // the log has the fact before the job is published
				b, ok := s.Begin("ses", Job{"JOBS", n}, func() bool { return true })
				if b == nil {
					if !ok {
						t.Error("a delivery is not covered by one that holds its job")
					}
					covered.Add(1)
					return
				}
				for done := false; !done; done = s.Finish("ses", b) {
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
			t.Fatalf("%d jobs were acknowledged, %d of them covered by others, and %d were not handled", jobs, covered.Load(), n)
		}
		if len(s.sessions) != 0 {
			t.Fatal("the session is still being handled")
		}
	}
}

// TestSet_CoversOnlyOtherJobsOfAHeldDelivery: a delivery is not acknowledged for an earlier delivery of the same job, nor for one
// that another executor may have by now. Each of them makes the handler read again what is due.
func TestSet_CoversOnlyOtherJobsOfAHeldDelivery(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		job     Job
		held    bool
		covered bool
	}{
		"another job":        {Job{"JOBS", 2}, true, true},
		"the same job again": {Job{"JOBS", 1}, true, false},
		"another job, when the delivery may be elsewhere": {Job{"JOBS", 2}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := NewSet()
			b, _ := s.Begin("ses", Job{"JOBS", 1}, func() bool { return test.held })
			if other, covered := s.Begin("ses", test.job, func() bool { return true }); other != nil || covered != test.covered {
				t.Errorf("handled: %v; covered: %v", other != nil, covered)
			}
			if len(b.changed) != 1 {
				t.Error("the handler is not woken")
			}
			if s.Finish("ses", b) {
				t.Error("finished without reading again what is due")
			}
			if !s.Finish("ses", b) {
				t.Error("not finished after reading again")
			}
		})
	}
}
