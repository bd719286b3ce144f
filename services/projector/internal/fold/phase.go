package fold

import "time"

// addExecutionChange adds the change of one execution's row to the session's totals: open approval requests, tokens
// and cost.
func (s *Session) addExecutionChange(before, after *Execution) {
	s.OpenApprovals += after.OpenApprovals - before.OpenApprovals
	s.Input += after.Input - before.Input
	s.Output += after.Output - before.Output
	s.CacheRead += after.CacheRead - before.CacheRead
	s.CacheWrite += after.CacheWrite - before.CacheWrite
	if after.CostUSD != before.CostUSD {
		s.CostUSD = clampFinite(s.CostUSD + after.CostUSD - before.CostUSD)
	}
}

// updatePhase sets the session's phase after an event of the execution x, which had not ended before the event. The
// session's other columns must already count the event. The phase depends on the two rows only, so that a fold does
// not have to look up other executions.
func (s *Session) updatePhase(x *Execution, at time.Time) {
	if x.hasEnded() {
		s.FailedExecution = ""
		if x.Phase == phaseFailed {
			s.FailedExecution = x.ID
		}
	}
	phase := s.Phase
	switch {
	case s.ActiveExecution == x.ID:
		phase = phaseOfActive(x.Phase)
	case s.ActiveExecution != "": // the phase is that of the active execution
	case s.Queued > 0:
		phase = phaseQueued
	case s.FailedExecution != "":
		phase = phaseFailed
	default:
		phase = phaseIdle
	}
	if phase != s.Phase {
		s.Phase, s.PhaseSince = phase, at
	}
}

// phaseOfActive returns the phase of a session whose active execution has the given phase. An execution that was
// dispatched and that no executor has claimed is still queued.
func phaseOfActive(execution string) string {
	switch execution {
	case phaseQueued, phaseWaiting:
		return execution
	}
	return phaseRunning
}
