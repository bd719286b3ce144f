package registry

import (
	"context"
	"fmt"
	"math"
	"sync"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// maxBudgets bounds those of a registration.
const maxBudgets = 16

func checkBudgets(list []api.Budget) error {
	if len(list) > maxBudgets {
		return api.Invalid("budgets", "budgets: there are %d; at most %d are taken", len(list), maxBudgets)
	}
	for i, b := range list {
		field := fmt.Sprintf("budgets[%d]", i)
		switch {
		case b.Account == "" || len(b.Account) > 256:
			return api.Invalid(field+".account", "%s.account: it is empty, or longer than 256 bytes", field)
		case b.Limit.CostUSD < 0 || math.IsNaN(b.Limit.CostUSD) || math.IsInf(b.Limit.CostUSD, 0):
			return api.Invalid(field+".limit.costUsd", "%s.limit.costUsd: it is not a number of dollars from 0 on", field)
		}
	}
	return nil
}

// account is what was taken on one, as far as the proxy and whoever registers know.
type account struct {
	refs int // guarded by the registry

	mu      sync.Mutex
	spent   events.Spent
	running uint32        // requests that count as a turn if they are answered
	ended   chan struct{} // closed when one of them ends; nil while none runs
}

// enter counts a request that runs, unless no turn is left for it. Then it returns what is closed when one that runs ends, or at once if
// none runs: the budget was used up a moment ago.
func (a *account) enter(turns uint32) (wait <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.spent.Turns+a.running >= turns {
		if a.running > 0 {
			return a.ended
		}
		now := make(chan struct{})
		close(now)
		return now
	}
	if a.running++; a.ended == nil {
		a.ended = make(chan struct{})
	}
	return nil
}

func (a *account) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.ended)
	a.ended = nil
	if a.running--; a.running > 0 {
		a.ended = make(chan struct{})
	}
}

// report takes what somebody else knows, which may be more, or lag.
func (a *account) report(s events.Spent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spent = a.spent.Max(s)
}

func (a *account) add(s events.Spent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spent = a.spent.Plus(s)
}

func (a *account) now() events.Spent {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.spent
}

// charge is a budget of a sandbox with its account.
type charge struct {
	api.Budget
	account *account
}

// Bill is what a sandbox's calls are charged to: its budgets at one time.
type Bill struct {
	charges  []charge
	unpriced *unpriced
}

// unpriced is a model without a price that an execution has called.
type unpriced struct {
	mu    sync.Mutex
	model string
}

func (u *unpriced) get() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.model
}

// Spend charges what a call took. A model without a price cannot be counted in dollars.
func (b Bill) Spend(model string, took events.Spent, priced bool) {
	for _, c := range b.charges {
		c.account.add(took)
	}
	if !priced && took.Tokens > 0 && b.unpriced != nil {
		b.unpriced.mu.Lock()
		b.unpriced.model = model
		b.unpriced.mu.Unlock()
	}
}

// Begin blocks while requests that run would, once they are answered, use up a limit of turns; so requests that are made at once cannot pass
// a limit together. It returns a function that the caller calls after Spend, or why nothing more may be spent. The error is ctx's.
func (b Bill) Begin(ctx context.Context) (end func(), why string, err error) {
	for {
		if why := b.Exhausted(); why != "" {
			return nil, why, nil
		}
		entered, wait := b.enter()
		leave := func() {
			for _, a := range entered {
				a.leave()
			}
		}
		if wait == nil {
			return leave, "", nil
		}
		leave()
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, "", ctx.Err()
		}
	}
}

// enter counts a request on each account whose turns are limited, up to the first that has no room.
func (b Bill) enter() (entered []*account, wait <-chan struct{}) {
	for _, c := range b.charges {
		if c.Limit.Turns == 0 {
			continue
		}
		if wait := c.account.enter(c.Limit.Turns); wait != nil {
			return entered, wait
		}
		entered = append(entered, c.account)
	}
	return entered, nil
}

// Exhausted says what of which budget is used up, "" for nothing.
func (b Bill) Exhausted() string {
	for _, c := range b.charges {
		limit := c.Limit
		limit.TimeMs = 0
		if why := limit.Exceeded(c.account.now(), c.Whose); why != "" {
			return why
		}
		if limit.CostUSD > 0 && b.unpriced.get() != "" {
			return fmt.Sprintf("%s has a budget of $%.4f, and the price table has no price for model %.100s", c.Whose, limit.CostUSD, b.unpriced.get())
		}
	}
	return ""
}

// charges opens the accounts of budgets. The registry's lock is held.
func (r *Registry) charges(list []api.Budget) []charge {
	out := make([]charge, 0, len(list))
	for _, b := range list {
		a := r.accounts[b.Account]
		if a == nil {
			a = &account{}
			r.accounts[b.Account] = a
		}
		a.refs++
		a.report(b.Spent)
		out = append(out, charge{b, a})
	}
	return out
}

// settled closes accounts that no sandbox has any more. The registry's lock is held.
func (r *Registry) settled(list []charge) {
	for _, c := range list {
		if c.account.refs--; c.account.refs == 0 {
			delete(r.accounts, c.Account)
		}
	}
}
