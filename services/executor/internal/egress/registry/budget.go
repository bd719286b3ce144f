package registry

import (
	"context"
	"fmt"
	"math"
	"sync"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// maxBudgets is the maximum number of budgets in the registration of a sandbox.
const maxBudgets = 16

// checkBudgets returns an *api.Error if the budgets of a registration are not valid.
func checkBudgets(list []api.Budget) error {
	if len(list) > maxBudgets {
		return api.InvalidFieldError("budgets", "budgets: there are %d, the limit is %d", len(list), maxBudgets)
	}
	for i, b := range list {
		field := fmt.Sprintf("budgets[%d]", i)
		switch {
		case b.Account == "" || len(b.Account) > 256:
			return api.InvalidFieldError(field+".account", "%s.account: it is empty, or longer than 256 bytes", field)
		case b.Limit.CostUSD < 0 || math.IsNaN(b.Limit.CostUSD) || math.IsInf(b.Limit.CostUSD, 0):
			return api.InvalidFieldError(field+".limit.costUsd", "%s.limit.costUsd: it is not a number of dollars from 0 upward", field)
		}
	}
	return nil
}

// budgetAccount holds the usage that counts against one budget: what the proxy has metered or, if that is more, what an executor has
// reported.
type budgetAccount struct {
	refs int // charges that use it; guarded by the registry

	mu      sync.Mutex
	spent   events.BudgetUsage
	running uint32        // open requests that count as a turn if they are answered
	ended   chan struct{} // closed when one of them ends; nil while none is open
}

// beginTurn counts an open request and returns nil. If the open requests already reach the limit turns, it counts nothing, and
// returns a channel that is closed when an open request ends. The channel is already closed if no request is open.
func (a *budgetAccount) beginTurn(turns uint32) (wait <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.spent.Turns+a.running >= turns {
		if a.running > 0 {
			return a.ended
		}
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	if a.running++; a.ended == nil {
		a.ended = make(chan struct{})
	}
	return nil
}

// endTurn counts the end of a request that beginTurn counted.
func (a *budgetAccount) endTurn() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.ended)
	a.ended = nil
	if a.running--; a.running > 0 {
		a.ended = make(chan struct{})
	}
}

// raiseUsage sets the usage to what an executor reports, if that is more. The report includes usage on other engines, but may be
// older than what the proxy has metered.
func (a *budgetAccount) raiseUsage(s events.BudgetUsage) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spent = a.spent.Max(s)
}

// addUsage adds metered usage to the account.
func (a *budgetAccount) addUsage(s events.BudgetUsage) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spent = a.spent.Plus(s)
}

// totalUsage returns the usage of the account.
func (a *budgetAccount) totalUsage() events.BudgetUsage {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.spent
}

// chargedBudget is a budget in the registration of a sandbox, with the account of its usage.
type chargedBudget struct {
	api.Budget
	account *budgetAccount
}

// ChargedBudgets are the budgets to which a model call is charged: those of the sandbox at the time when the call began.
type ChargedBudgets struct {
	list     []chargedBudget
	unpriced *unpricedModel
}

// unpricedModel holds the name of a model without a known price that the execution has used, or "" if there is none.
type unpricedModel struct {
	mu   sync.Mutex
	name string
}

func (u *unpricedModel) get() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.name
}

func (u *unpricedModel) set(name string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.name = name
}

// ChargeUsage adds the usage of a model call to the accounts of all budgets. If priced is false, it records the model, because its
// usage cannot be counted in dollars.
func (c ChargedBudgets) ChargeUsage(model string, usage events.BudgetUsage, priced bool) {
	for _, x := range c.list {
		x.account.addUsage(usage)
	}
	if !priced && usage.Tokens > 0 && c.unpriced != nil {
		c.unpriced.set(model)
	}
}

// ReserveTurns reserves a turn of each budget that limits turns, so that concurrent model requests cannot exceed a limit together. It
// blocks while the open requests may use up a limit. It returns the function end, which the caller must call after ChargeUsage, or
// the reason why a budget allows no further request. The error is that of ctx.
func (c ChargedBudgets) ReserveTurns(ctx context.Context) (end func(), reason string, err error) {
	for {
		if reason := c.ExhaustedBudget(); reason != "" {
			return nil, reason, nil
		}
		reserved, wait := c.tryReserveTurns()
		end := func() {
			for _, a := range reserved {
				a.endTurn()
			}
		}
		if wait == nil {
			return end, "", nil
		}
		end()
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, "", ctx.Err()
		}
	}
}

// tryReserveTurns reserves a turn of each account whose budget limits turns. It stops at the first account without a free turn, and
// returns the channel to wait for.
func (c ChargedBudgets) tryReserveTurns() (reserved []*budgetAccount, wait <-chan struct{}) {
	for _, x := range c.list {
		if x.Limit.Turns == 0 {
			continue
		}
		if wait := x.account.beginTurn(x.Limit.Turns); wait != nil {
			return reserved, wait
		}
		reserved = append(reserved, x.account)
	}
	return reserved, nil
}

// ExhaustedBudget returns a sentence that names a budget that is used up, or "" if there is none.
func (c ChargedBudgets) ExhaustedBudget() string {
	for _, x := range c.list {
		limit := x.Limit
		limit.TimeMs = 0
		if reason := limit.ExceededLimit(x.account.totalUsage(), x.Whose); reason != "" {
			return reason
		}
		if limit.CostUSD > 0 && c.unpriced.get() != "" {
			return fmt.Sprintf("%s has a budget of $%.4f, and the price table has no price for model %.100s", x.Whose, limit.CostUSD, c.unpriced.get())
		}
	}
	return ""
}

// openAccounts returns the budgets with their accounts, which all sandboxes with the same budgets share. The caller holds the
// registry's lock.
func (r *Registry) openAccounts(list []api.Budget) []chargedBudget {
	out := make([]chargedBudget, 0, len(list))
	for _, b := range list {
		a := r.accounts[b.Account]
		if a == nil {
			a = &budgetAccount{}
			r.accounts[b.Account] = a
		}
		a.refs++
		a.raiseUsage(b.Spent)
		out = append(out, chargedBudget{b, a})
	}
	return out
}

// closeAccounts removes the accounts that no other sandbox uses. The caller holds the registry's lock.
func (r *Registry) closeAccounts(list []chargedBudget) {
	for _, c := range list {
		if c.account.refs--; c.account.refs == 0 {
			delete(r.accounts, c.Account)
		}
	}
}
