package main

import (
	"math/rand/v2"
	"time"
)

// plannedFault is a fault that the test will inject: a kill or a freeze of one process, and the time at which it
// happens.
type plannedFault struct {
	after  time.Duration // time since the previous fault
	part   int
	freeze bool          // SIGSTOP, and SIGCONT after length; otherwise SIGKILL, and a restart after length
	length time.Duration // time until SIGCONT or the restart
}

// faultSchedule is an endless pseudo-random sequence of faults. The same seed results in the same sequence.
type faultSchedule struct {
	r     *rand.Rand
	parts int
}

// newFaultSchedule returns the schedule of a seed, for an installation of a number of processes that faults can hit.
func newFaultSchedule(seed uint64, parts int) *faultSchedule {
	return &faultSchedule{rand.New(rand.NewPCG(seed, 1)), parts} //nolint:gosec // runs must be repeatable
}

// next returns the next fault of the sequence.
func (s *faultSchedule) next() plannedFault {
	f := plannedFault{after: 500*time.Millisecond + time.Duration(s.r.IntN(2500))*time.Millisecond, part: s.r.IntN(s.parts), freeze: s.r.IntN(2) == 0}
	f.length = time.Duration(s.r.IntN(2000)) * time.Millisecond
	if f.freeze {
		f.length = 500*time.Millisecond + time.Duration(s.r.IntN(6000))*time.Millisecond // a lease lasts three seconds
	}
	return f
}
