package worker

import (
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
)

// checkBudgets stops the turn if a budget is used up once these events, which are not stored yet, are. If the limits cannot be read,
// those last read apply, and the error of reading them is returned.
func (f *follower) checkBudgets(unstored []events.Event) error {
	err := f.meter.Update(f.ctx, f.life.Options.Budget)
	if code, message := f.meter.Exceeded(unstored); code != "" {
		f.stop.Exceed(code, message, f.w.deps.Now())
	}
	return err
}

// meterOutput returns the meter of the agent's output in this execution.
func (t *turn) meterOutput() budgets.OutputMeter {
	limits := budgets.OutputLimits{Execution: t.w.cfg.Output, Session: t.w.cfg.SessionOutput}
	if t.resolved != nil {
		limits = limits.ForAgent(t.resolved.Definition.Limits)
	}
	return budgets.NewOutputMeter(limits, t.Session.Run.OutputBefore, t.Session.Run.Output)
}

// keepsEvent reports whether an event of the journal is kept. The first one over a limit stops the turn.
func (f *follower) keepsEvent(e events.Event) bool {
	keep, message := f.output.Event(e, func() bool { return f.stop.IsStopping() && f.w.deps.Room.Low() })
	f.cutOutput(message)
	return keep
}

// keepsText reports whether a piece of text in flight is published.
func (f *follower) keepsText(bytes int) bool {
	keep, message := f.output.Text(bytes)
	f.cutOutput(message)
	return keep
}

// cutOutput stops the turn because of an exceeded output limit, and says so in the log; "" is no limit.
func (f *follower) cutOutput(message string) {
	if message == "" {
		return
	}
	f.stop.Exceed(budgets.CodeOutput, message, f.w.deps.Now())
	if err := f.commits.Add(f.NewEvents(events.Error{Code: budgets.CodeOutput, Message: message})...); err != nil {
		f.Log.Error("the log does not say that the output is cut", "error", err)
	}
}
