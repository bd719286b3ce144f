package worker

import (
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
)

// step is what has to be done to stop a turn.
type step int

const (
	doNothing step = iota
	doInterrupt
	doKill
	doTerminate
)

// stopper decides how hard a turn has to be stopped. It is pure. Times are
// those at which this holder saw a reason, so that another machine's clock does
// not shorten anybody's grace.
type escalation struct {
	killAfter time.Duration

	control session.Control
	limit   time.Time // zero for none

	overLimit   bool
	exhausted   string    // what a budget, or a limit of output, says once it is used up
	code        string    // of the failure then
	hardSince   time.Time // a cancel or the limit was seen
	interrupted bool
	killedAt    time.Time
	killing     bool
}

// aim takes the control in force and the turn's limit.
func (s *escalation) aim(c session.Control, limit, now time.Time) {
	s.control, s.limit = c, limit
	if c.N > 0 && c.Kind != session.Interrupt {
		s.hard(now)
	}
}

// exhaust says that the execution has used up what it may, by a code of failures and a sentence.
func (s *escalation) exhaust(code, why string, now time.Time) {
	if s.exhausted == "" {
		s.exhausted, s.code = why, code
		s.hard(now)
	}
}

// stopping reports whether there is a reason to stop the turn.
func (s *escalation) stopping() bool { return s.control.N > 0 || s.overLimit || s.exhausted != "" }

func (s *escalation) hard(now time.Time) {
	if s.hardSince.IsZero() {
		s.hardSince = now
	}
}

// next gives what is due. running says that the runner has taken the query.
func (s *escalation) next(now time.Time, running bool) step {
	if !s.limit.IsZero() && !now.Before(s.limit) && !s.overLimit {
		s.overLimit = true
		s.hard(now)
	}
	if !s.stopping() {
		return doNothing
	}
	if s.control.Kind == session.Terminate && s.control.N > 0 {
		return doTerminate
	}
	if running && !s.interrupted {
		s.interrupted = true
		return doInterrupt
	}
	if s.hardSince.IsZero() || now.Sub(s.hardSince) < s.killAfter {
		return doNothing
	}
	if s.killedAt.IsZero() {
		s.killedAt = now
	}
	if now.Sub(s.killedAt) >= s.killAfter {
		return doTerminate
	}
	if !s.killing {
		s.killing = true
		return doKill
	}
	return doNothing
}

// missed says that a command did not reach the runner: it is due again.
func (s *escalation) missed(op runner.Op) {
	switch op {
	case runner.OpInterrupt:
		s.interrupted = false
	case runner.OpKill:
		s.killing = false
	}
}

// again says that the stream is a new one, on which everything is told once more.
func (s *escalation) again() { s.interrupted, s.killing = false, false }

// reason is the terminal event of a turn that was stopped; nil if nobody asked for it.
func (s *escalation) reason(u events.Usage) events.Payload {
	switch {
	case s.control.N > 0:
		return events.ExecutionCancelled{Reason: s.control.Reason, Usage: u}
	case s.exhausted != "":
		return events.ExecutionFailed{Code: s.code, Message: s.exhausted, Usage: u}
	case s.overLimit:
		return events.ExecutionFailed{Code: "TURN_LIMIT_EXCEEDED", Message: fmt.Sprintf("the turn did not end before its limit at %s", s.limit.UTC().Format(time.RFC3339)), Usage: u}
	}
	return nil
}
