package main

import (
	"math/rand/v2"
	"time"
)

// faultKind is the effect of a fault.
type faultKind int

const (
	// faultKill sends SIGKILL to a process, and starts it again after the fault's length.
	faultKill faultKind = iota
	// faultFreeze sends SIGSTOP to a process, and SIGCONT after the fault's length.
	faultFreeze
	// faultStalledStart kills a service and freezes NATS while the service starts again.
	faultStalledStart
	// faultFrozenSessions freezes all session services at once: nobody decides about the budgets of sessions.
	faultFrozenSessions
)

// firstService is the number of the first process that is a service. NATS and Postgres are before it.
const firstService = 2

// plannedFault is a fault that the test will inject, and the time at which it happens.
type plannedFault struct {
	after  time.Duration // time since the previous fault
	part   int           // number of the process that is hit; not used by faultFrozenSessions
	kind   faultKind
	length time.Duration // time until the process continues or is started again
	delay  time.Duration // of faultStalledStart: time from the service's connection to NATS to the freeze of NATS
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
	f := plannedFault{after: 500*time.Millisecond + time.Duration(s.r.IntN(2500))*time.Millisecond, part: s.r.IntN(s.parts), length: time.Duration(s.r.IntN(2000)) * time.Millisecond}
	switch s.r.IntN(10) {
	case 0: // longer than a request of a service waits
		f.kind, f.part = faultStalledStart, firstService+s.r.IntN(s.parts-firstService)
		f.length, f.delay = 6*time.Second+2*f.length, time.Duration(s.r.IntN(5000))*time.Microsecond
	case 1:
		f.kind = faultFrozenSessions
	case 2, 3, 4, 5:
		f.kind = faultFreeze
	}
	if f.kind == faultFreeze || f.kind == faultFrozenSessions {
		f.length = 500*time.Millisecond + 3*f.length // a lease lasts three seconds
	}
	return f
}
