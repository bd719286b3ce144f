package session

import "time"

// TurnGracePeriod is the time after the turn limit in which the executor may end the turn itself. After it the session
// service checks whether the executor is alive.
const TurnGracePeriod = 30 * time.Second

// NextDeadline returns the session's earliest deadline, and false if there is none.
func (s *State) NextDeadline(r RunView) (time.Time, bool) {
	var best time.Time
	offer := func(at time.Time, ok bool) {
		if ok && (best.IsZero() || at.Before(best)) {
			best = at
		}
	}
	offer(s.sessionDeadline())
	offer(s.TurnDeadline(r))
	offer(s.idleDeadline(r))
	return best, !best.IsZero()
}

// sessionDeadline returns when the session closes, and false if it is closed or deleted.
func (s *State) sessionDeadline() (time.Time, bool) {
	return s.CreatedAt.Add(milliseconds(s.Options.SessionLimitMs)), s.Status == Open
}

// idleDeadline returns when the sandbox is released because the session is idle. It returns false if an execution runs
// or waits, or if there is no sandbox to release.
func (s *State) idleDeadline(r RunView) (time.Time, bool) {
	rests := s.Status == Open && !s.isRunning(r.ActiveEnded) && len(s.Queue) == 0
	return s.lastActivity(r).Add(milliseconds(s.Options.IdleTimeoutMs)), rests && r.HasSandbox && !s.Idle
}

// TurnDeadline returns when a dispatched execution must have ended, and false if none runs or the execution is
// paused.
func (s *State) TurnDeadline(r RunView) (time.Time, bool) {
	if !s.isRunning(r.ActiveEnded) {
		return time.Time{}, false
	}
	if r.Waiting || s.ShouldBePaused(s.Active.ExecutionID) && (r.Paused || !r.ActiveClaimed) {
		return time.Time{}, false // the turn limit does not run during a pause
	}
	return s.Active.At.Add(milliseconds(s.Options.TurnLimitMs) + r.PausedFor + TurnGracePeriod), true
}

// lastActivity returns the time of the last message or the end of the last execution, whichever is later.
func (s *State) lastActivity(r RunView) time.Time {
	if r.EndedAt.After(s.TouchedAt) {
		return r.EndedAt
	}
	return s.TouchedAt
}

// milliseconds returns n milliseconds as a duration.
func milliseconds(n uint32) time.Duration { return time.Duration(n) * time.Millisecond }
