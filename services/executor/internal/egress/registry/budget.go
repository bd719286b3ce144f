package registry

import (
	"context"
	"fmt"
	"math"
	"sync"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// maxBudgets is the maximum number of budgets in a registration.
const maxBudgets = 16

func checkBudgets(list []api.Budget) error {
	if len(list) > maxBudgets {
		return api.Invalid("budgets", "budgets: there are %d, the limit is %d", len(list), maxBudgets)
	}
	for i, b := range list {
		field := fmt.Sprintf("budgets[%d]", i)
		switch {
		case b.Account == "" || len(b.Account) > 256:
			return api.Invalid(field+".account", "%s.account: it is empty, or longer than 256 bytes", field)
		case b.Limit.CostUSD < 0 || math.IsNaN(b.Limit.CostUSD) || math.IsInf(b.Limit.CostUSD, 0):
			return api.Invalid(field+".limit.costUsd", "%s.limit.costUsd: it is not a number of dollars from 0 upward", field)
		}
	}
	return nil
}

// account holds the usage that counts against a budget, as far as the proxy has metered it or executors have reported
// it.
type account struct {
	refs int // charges that use it; guarded by the registry

	mu      sync.Mutex
	spent   events.BudgetUsage
	running uint32        // open requests that count as a turn if they are answered
	ended   chan struct{} // closed when one of them ends; nil while none is open
}

// beginTurn counts an open request, unless the answers to the open requests will use up the limit of turns. In that
// case it returns a channel that is closed when an open request ends, or is closed already if none is open.
func (a *account) beginTurn(turns uint32) (wait <-chan struct{}) {
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
func (a *account) endTurn() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.ended)
	a.ended = nil
	if a.running--; a.running > 0 {
		a.ended = make(chan struct{})
	}
}

// raise sets the usage to what an executor reports, if that is more. A report includes the usage on other engines, and
// may be older than what the proxy has metered.
func (a *account) raise(s events.BudgetUsage) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spent = a.spent.Max(s)
}

func (a *account) add(s events.BudgetUsage) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spent = a.spent.Plus(s)
}

func (a *account) total() events.BudgetUsage {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.spent
}

// charge is a budget of a sandbox, with the account whose usage counts against it.
type charge struct {
	api.Budget
	account *account
}

// Charges are the budgets that a model call is charged to: those of the sandbox when the call began.
type Charges struct {
	list     []charge
	unpriced *unpricedModel
}

// unpricedModel is the name of a model without a known price that the execution has called, "" for none.
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

// Spend charges the usage of a call. It records a model without a price, since its usage cannot be counted in dollars.
func (c Charges) Spend(model string, usage events.BudgetUsage, priced bool) {
	for _, x := range c.list {
		x.account.add(usage)
	}
	if !priced && usage.Tokens > 0 && c.unpriced != nil {
		c.unpriced.set(model)
	}
}

// Begin reserves a turn of each budget with a limit of turns. It blocks while the open requests would use up a limit once they
// are answered, so that concurrent requests cannot pass a limit together. It returns a function that the caller calls after
// Spend, or the reason why nothing more may be spent. The error is ctx's.
func (c Charges) Begin(ctx context.Context) (end func(), reason string, err error) {
	for {
		if reason := c.Exhausted(); reason != "" {
			return nil, reason, nil
		}
		reserved, wait := c.reserve()
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

// reserve reserves a turn of each account with a limit of turns, up to the first account without one left.
func (c Charges) reserve() (reserved []*account, wait <-chan struct{}) {
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

// Exhausted returns which budget is used up, in a sentence, "" if none is.
func (c Charges) Exhausted() string {
	for _, x := range c.list {
		limit := x.Limit
		limit.TimeMs = 0
		if reason := limit.ExceededLimit(x.account.total(), x.Whose); reason != "" {
			return reason
		}
		if limit.CostUSD > 0 && c.unpriced.get() != "" {
			return fmt.Sprintf("%s has a budget of $%.4f, and the price table has no price for model %.100s", x.Whose, limit.CostUSD, c.unpriced.get())
		}
	}
	return ""
}

// openAccounts returns charges for budgets, with the accounts of all sandboxes that share them. The registry's lock is held.
func (r *Registry) openAccounts(list []api.Budget) []charge {
	out := make([]charge, 0, len(list))
	for _, b := range list {
		a := r.accounts[b.Account]
		if a == nil {
			a = &account{}
			r.accounts[b.Account] = a
		}
		a.refs++
		a.raise(b.Spent)
		out = append(out, charge{b, a})
	}
	return out
}

// closeAccounts removes the accounts that no sandbox has any more. The registry's lock is held.
func (r *Registry) closeAccounts(list []charge) {
	for _, c := range list {
		if c.account.refs--; c.account.refs == 0 {
			delete(r.accounts, c.Account)
		}
	}
}
