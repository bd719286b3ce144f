package main

import (
	"math/rand/v2"
	"time"
)

// fault is a signal to one process of the cluster, and the time at which it is sent.
type fault struct {
	after  time.Duration // time since the previous fault
	part   int
	freeze bool          // SIGSTOP, and SIGCONT after length; otherwise SIGKILL, and a restart after length
	length time.Duration // time until SIGCONT or the restart
}

// schedule is an endless pseudo-random sequence of faults. The same seed results in the same sequence.
type schedule struct {
	r     *rand.Rand
	parts int
}

func newSchedule(seed uint64, parts int) *schedule {
	return &schedule{rand.New(rand.NewPCG(seed, 1)), parts} //nolint:gosec // runs must be repeatable
}

func (s *schedule) next() fault {
	f := fault{after: 500*time.Millisecond + time.Duration(s.r.IntN(2500))*time.Millisecond, part: s.r.IntN(s.parts), freeze: s.r.IntN(2) == 0}
	f.length = time.Duration(s.r.IntN(2000)) * time.Millisecond
	if f.freeze {
		f.length = 500*time.Millisecond + time.Duration(s.r.IntN(6000))*time.Millisecond // a lease lasts three seconds
	}
	return f
}
