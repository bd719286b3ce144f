package session

import "time"

// DeadlineKind says what is due at a deadline.
type DeadlineKind string

// The deadlines of a session.
const (
	DeadlineIdle    DeadlineKind = "idle"    // session_idle
	DeadlineTurn    DeadlineKind = "turn"    // the turn limit and its grace passed: is anybody still running it?
	DeadlineSession DeadlineKind = "session" // session_closed
)

// TurnGrace is how long after the turn limit an executor may take to end the
// turn itself, before the session service asks whether it still lives.
const TurnGrace = 30 * time.Second

// Deadline is a moment at which something becomes due.
type Deadline struct {
	At   time.Time
	Kind DeadlineKind
}

// Deadline is the session's earliest one; false if it has none.
func (s State) Deadline(r RunView) (Deadline, bool) {
	var best Deadline
	offer := func(at time.Time, kind DeadlineKind) {
		if best.At.IsZero() || at.Before(best.At) {
			best = Deadline{at, kind}
		}
	}
	if s.Status == Open {
		offer(s.CreatedAt.Add(ms(s.Options.SessionLimitMs)), DeadlineSession)
	}
	if s.running(r.ActiveEnded) {
		offer(s.Active.At.Add(ms(s.Options.TurnLimitMs)+TurnGrace), DeadlineTurn)
	} else if s.Status == Open && len(s.Queue) == 0 && r.HasSandbox && !s.Idle {
		offer(s.touched(r).Add(ms(s.Options.IdleTimeoutMs)), DeadlineIdle)
	}
	return best, !best.At.IsZero()
}

// touched is when anything last happened in the session.
func (s State) touched(r RunView) time.Time {
	if r.EndedAt.After(s.TouchedAt) {
		return r.EndedAt
	}
	return s.TouchedAt
}

func ms(n uint32) time.Duration { return time.Duration(n) * time.Millisecond }
