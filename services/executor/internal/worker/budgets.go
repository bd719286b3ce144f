package worker

import (
	"context"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// Budgets returns the budgets and limits of tenants.
type Budgets interface {
	// Of returns a tenant's budgets and limits, and what all its sessions have used.
	Of(ctx context.Context, tenant string) (budget.Tenant, error)
	// Limits returns a tenant's own limits, as far as they are known. It does not block.
	Limits(tenant string) events.TenantLimits
}

// currentLimits returns the limits that apply to the turn now.
func (t *turn) currentLimits(ctx context.Context, life session.State) (budgets.Limits, error) {
	l := budgets.Limits{Session: life.Options.Budget}
	if t.w.deps.Budgets == nil {
		return l, nil
	}
	var err error
	l.Tenant, err = t.w.deps.Budgets.Of(ctx, t.Session.Tenant)
	return l, err
}

// charged returns the turn's execution as it is charged. The egress proxy counts the model requests of agents that do not.
func (t *turn) charged() budgets.Execution {
	e := budgets.Execution{Tenant: t.Session.Tenant, Session: t.Session.ID, ID: t.ID}
	if t.resolved == nil {
		return e
	}
	l := t.resolved.Definition.Limits
	e.Own = events.Budget{Tokens: uint64(l.Tokens), CostUSD: l.BudgetUSD}
	if t.w.deps.Egress != nil && !definition.CountsTurns(t.Session.Life.Architecture) {
		e.Own.Turns = l.Turns
	}
	return e
}

// budgets returns the budgets that the turn is charged to, as last known.
func (t *turn) budgets() []api.Budget {
	return t.usage.Budgets(t.charged(), t.limits, t.Session.Run, t.w.deps.Now())
}

// codeModelRefused is the code of a model request that the egress proxy refused because a budget is used up.
const codeModelRefused = "BUDGET_EXHAUSTED"

// checkBudgets stops the turn if a budget is used up once these events, which are not stored yet, are.
func (f *follower) checkBudgets(unstored []events.Event) {
	now := f.w.deps.Now()
	for _, e := range unstored {
		if d, ok := e.Data.(events.EgressDenied); ok && d.Code == codeModelRefused && e.ExecutionID == f.ID {
			f.stop.Exceed(budgets.CodeExceeded, d.Message, now)
		}
	}
	if l, err := f.currentLimits(f.ctx, f.life); err == nil { // updateLimits logs an error
		f.limits = l
	}
	s := f.Session.Run
	for _, e := range unstored {
		s = run.Evolve(s, e)
	}
	if code, message := f.usage.Exceeded(f.charged(), f.limits, s, now); code != "" {
		f.stop.Exceed(code, message, now)
	}
}

// updateLimits reads the limits of the turn again.
func (f *follower) updateLimits(ctx context.Context) {
	if _, err := f.currentLimits(ctx, f.life); err != nil {
		f.Log.Warn("the tenant's budgets cannot be read: those last known apply", "error", err)
	}
	f.checkBudgets(nil)
}

// changedRegistration returns the registration that the egress proxy needs because other executions have used some of the tenant's
// budgets, or a budget has changed; nil if the proxy has it.
func (f *follower) changedRegistration() *api.Registration {
	if f.w.deps.Egress == nil || f.registered.SameBudgets(f.limits) {
		return nil
	}
	r := f.registration()
	return &r
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
	f.pending = append(f.pending, f.NewEvents(events.Error{Code: budgets.CodeOutput, Message: message})...)
}
