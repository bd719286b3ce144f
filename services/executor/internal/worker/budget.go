package worker

import (
	"context"
	"reflect"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// Budgets tells what tenants may take in all of their sessions, and have taken.
type Budgets interface {
	Of(ctx context.Context, tenant string) (budget.Tenant, error)
	// Limits returns a tenant's own limits, as far as they are known. It does not block.
	Limits(tenant string) events.TenantLimits
}

// Budget is what an execution is charged to: its own, its session's, its tenant's.
type Budget struct {
	Account string        // who has it; one account is charged by all that have it
	Whose   string        // the same in a sentence
	Limit   events.Budget // of turns those of an execution alone: requests to models. Of the others this one runs
	Spent   events.Spent  // by now, as far as is known
}

// bounds are the limits of a turn, and what others took of them.
type bounds struct {
	session events.Budget
	tenant  budget.Tenant
}

// boundsOf reads what bounds a turn by now.
func (t *turn) boundsOf(ctx context.Context, life session.State) (bounds, error) {
	b := bounds{session: life.Options.Budget}
	if t.w.d.Budgets == nil {
		return b, nil
	}
	var err error
	b.tenant, err = t.w.d.Budgets.Of(ctx, t.l.Tenant)
	return b, err
}

// share is what a tenant took of a budget, by what is told of all its sessions
// and by what this turn took since.
type share struct {
	known events.Spent
	own   events.Spent // of this turn, when known was last looked at
}

// budgets lists what the turn is charged to, by a state of its run.
func (t *turn) budgets(b bounds, s run.State, now time.Time) []Budget {
	var out []Budget
	add := func(account, whose string, limit events.Budget, spent events.Spent) {
		if limit != (events.Budget{}) {
			out = append(out, Budget{account, whose, limit, spent})
		}
	}
	own := s.Spent()
	if t.is != nil {
		l := t.is.agent.Limits
		limit, spent := events.Budget{Tokens: uint64(l.Tokens), CostUSD: l.BudgetUSD}, own
		if t.w.d.Egress != nil && !definition.CountsTurns(t.l.Life.Architecture) {
			limit.Turns, spent.Turns = l.Turns, s.Calls
		}
		add(t.execution, "the execution", limit, spent)
	}
	b.session.Turns = 0
	own.TimeMs = s.Ran(now)
	spent := s.SessionSpent()
	spent.TimeMs += own.TimeMs
	add(t.l.ID, "the session", b.session, spent)
	for _, x := range b.tenant.Budgets {
		x = x.At(now)
		account := "tenant/" + t.l.Tenant + "/" + string(x.Period) + "/" + x.From
		x.Limit.Turns = 0
		add(account, x.Whose(t.l.Tenant), x.Limit, t.shared(account, x.Spent, own))
	}
	return out
}

// shared is what a tenant took of a budget, as told, and not less than what this turn saw itself.
func (t *turn) shared(account string, told, own events.Spent) events.Spent {
	if t.shares == nil {
		t.shares = map[string]share{}
	}
	x, seen := t.shares[account]
	if !seen {
		// What the turn took before this holder's time is told, or soon is; its time is told at its end.
		x.own = events.Spent{Tokens: own.Tokens, CostUSD: own.CostUSD}
	}
	since := events.Spent{Tokens: own.Tokens - min(own.Tokens, x.own.Tokens), CostUSD: max(0, own.CostUSD-x.own.CostUSD)}
	x.known, x.own = x.known.Plus(since).Max(events.Spent{Tokens: told.Tokens, CostUSD: told.CostUSD, TimeMs: told.TimeMs}), own
	t.shares[account] = x
	return x.known.Plus(events.Spent{TimeMs: own.TimeMs})
}

// codeBudgetExceeded is the code of an execution that ended since a budget is used up.
const codeBudgetExceeded = "BUDGET_EXCEEDED"

// codeBudgetExhausted is of a request to a model that the proxy refused.
const codeBudgetExhausted = "BUDGET_EXHAUSTED"

// spend looks at what the execution took so far, by its events.
func (f *follower) spend(list []events.Event) {
	now := f.w.d.Now()
	for _, e := range list {
		if d, ok := e.Data.(events.EgressDenied); ok && d.Code == codeBudgetExhausted && e.ExecutionID == f.execution {
			f.stop.exhaust(codeBudgetExceeded, d.Message, now)
		}
	}
	if b, err := f.boundsOf(f.base, f.life); err == nil { // an error is told of at the next beat
		f.bounds = b
	}
	s := f.l.Run
	for _, e := range list {
		s = run.Evolve(s, e)
	}
	for _, b := range f.budgets(f.bounds, s, now) {
		b.Limit.Turns = 0 // the last of its requests may be the answer: the proxy refuses the next
		if why := b.Limit.Exceeded(b.Spent, b.Whose); why != "" {
			f.stop.exhaust(codeBudgetExceeded, why, now)
		}
	}
	if why := f.bounds.tenant.EventsExceeded(f.l.Tenant, now); why != "" {
		f.stop.exhaust(events.CodeTenantEvents, why, now)
	}
}

// rebound looks whether what bounds the turn has changed.
func (f *follower) rebound(ctx context.Context) {
	if _, err := f.boundsOf(ctx, f.life); err != nil {
		f.log.Warn("what the tenant may take cannot be read: what was known counts", "error", err)
	}
	f.spend(nil)
}

// regrant is what the egress proxy is to be told when others took of the tenant's
// budget, or a budget was changed; nil if it knows.
func (f *follower) regrant() *Grant {
	if f.w.d.Egress == nil || f.granted.session == f.bounds.session && reflect.DeepEqual(f.granted.tenant.Budgets, f.bounds.tenant.Budgets) {
		return nil
	}
	g := f.grants()
	return &g
}
