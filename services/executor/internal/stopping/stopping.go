// Package stopping decides how a turn is stopped: an interrupt first, then a kill of the agent, then the end of its sandbox.
package stopping

import (
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
)

// A Step is an action by which an executor stops a turn: an interrupt, a kill of the agent, or the end of the sandbox.
type Step int

// The steps, in the order in which they are taken.
const (
	StepNone Step = iota
	StepInterrupt
	StepKill
	StepTerminate
)

// A Plan decides when a turn is interrupted, its agent is killed and its sandbox is terminated. Its methods only return the
// decision. It uses the times at which this executor noticed a reason to stop, so that the clock of another machine does not
// shorten a grace period. It is not safe for concurrent use.
type Plan struct {
	killAfter time.Duration // from the interrupt to the kill, and from the kill to the termination

	control session.Control
	limit   time.Time // zero for none

	overLimit     bool
	exceeded      string    // message of the first budget or limit that is used up
	code          string    // its code
	killFrom      time.Time // when the first reason was seen that allows a kill
	interruptSent bool
	killedAt      time.Time // when the kill was due
	killSent      bool
}

// New returns a Plan that kills the agent killAfter after the interrupt, and terminates the sandbox killAfter after the kill.
func New(killAfter time.Duration) Plan { return Plan{killAfter: killAfter} }

// Control returns the control that stops the turn. The control's N is 0 if there is none.
func (p *Plan) Control() session.Control { return p.control }

// SetControl sets the control that stops the turn, and the time limit by which the turn must end, zero for none.
func (p *Plan) SetControl(c session.Control, limit, now time.Time) {
	p.control, p.limit = c, limit
	if c.N > 0 && c.Kind != session.Interrupt {
		p.startGracePeriod(now)
	}
}

// RecordExceeded records that the execution has exceeded a budget or a limit, so that the turn is stopped. Only the first
// call has an effect.
func (p *Plan) RecordExceeded(code, message string, now time.Time) {
	if p.exceeded == "" {
		p.exceeded, p.code = message, code
		p.startGracePeriod(now)
	}
}

// IsStopping reports whether there is a reason to stop the turn.
func (p *Plan) IsStopping() bool { return p.control.N > 0 || p.overLimit || p.exceeded != "" }

// startGracePeriod records the time from which the grace period before a kill counts, if it is not recorded yet.
func (p *Plan) startGracePeriod(now time.Time) {
	if p.killFrom.IsZero() {
		p.killFrom = now
	}
}

// NextStep returns the step to stop the turn that is due now, and records it as done. accepted reports whether the runner has
// accepted the query.
func (p *Plan) NextStep(now time.Time, accepted bool) Step {
	if !p.limit.IsZero() && !now.Before(p.limit) && !p.overLimit {
		p.overLimit = true
		p.startGracePeriod(now)
	}
	if !p.IsStopping() {
		return StepNone
	}
	if p.control.Kind == session.Terminate && p.control.N > 0 {
		return StepTerminate
	}
	if accepted && !p.interruptSent {
		p.interruptSent = true
		return StepInterrupt
	}
	if p.killFrom.IsZero() || now.Sub(p.killFrom) < p.killAfter {
		return StepNone
	}
	if p.killedAt.IsZero() {
		p.killedAt = now
	}
	if now.Sub(p.killedAt) >= p.killAfter {
		return StepTerminate
	}
	if !p.killSent {
		p.killSent = true
		return StepKill
	}
	return StepNone
}

// RecordUndelivered records that the command of a step did not reach the runner, so that NextStep returns the step again.
func (p *Plan) RecordUndelivered(op runner.Op) {
	switch op {
	case runner.OpInterrupt:
		p.interruptSent = false
	case runner.OpKill:
		p.killSent = false
	}
}

// RecordReconnected records that the executor has a new stream to the runner, so that NextStep returns the steps again.
func (p *Plan) RecordReconnected() { p.interruptSent, p.killSent = false, false }

// TerminalEvent returns the terminal event of a turn that was stopped, or nil if there was no reason to stop the turn.
func (p *Plan) TerminalEvent(u events.Usage) events.Payload {
	switch {
	case p.control.N > 0:
		return events.ExecutionCancelled{Reason: p.control.Reason, Usage: u}
	case p.exceeded != "":
		return events.ExecutionFailed{Code: p.code, Message: p.exceeded, Usage: u}
	case p.overLimit:
		return events.ExecutionFailed{Code: "TURN_LIMIT_EXCEEDED", Message: fmt.Sprintf("the turn did not end before its limit at %s", p.limit.UTC().Format(time.RFC3339)), Usage: u}
	}
	return nil
}
