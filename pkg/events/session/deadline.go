package session

import "time"

// TurnGrace is how long after the turn limit an executor may take to end the
// turn itself, before the session service asks whether it still lives.
const TurnGrace = 30 * time.Second

// Deadline is the session's earliest one; false if it has none.
func (s State) Deadline(r RunView) (time.Time, bool) {
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

// sessionDeadline is when the session closes.
func (s State) sessionDeadline() (time.Time, bool) {
	return s.CreatedAt.Add(ms(s.Options.SessionLimitMs)), s.Status == Open
}

// idleDeadline is when the sandbox is given up.
func (s State) idleDeadline(r RunView) (time.Time, bool) {
	rests := s.Status == Open && !s.running(r.ActiveEnded) && len(s.Queue) == 0
	return s.touched(r).Add(ms(s.Options.IdleTimeoutMs)), rests && r.HasSandbox && !s.Idle
}

// TurnDeadline is when an execution that was dispatched must have ended; false if none is to end, or it is paused.
func (s State) TurnDeadline(r RunView) (time.Time, bool) {
	if !s.running(r.ActiveEnded) {
		return time.Time{}, false
	}
	if s.PausedNow(s.Active.ExecutionID) && (r.Paused || !r.ActiveClaimed) {
		return time.Time{}, false // its clock stands still
	}
	return s.Active.At.Add(ms(s.Options.TurnLimitMs) + r.PausedFor + TurnGrace), true
}

// touched is when anything last happened in the session.
func (s State) touched(r RunView) time.Time {
	if r.EndedAt.After(s.TouchedAt) {
		return r.EndedAt
	}
	return s.TouchedAt
}

func ms(n uint32) time.Duration { return time.Duration(n) * time.Millisecond }
