package holder

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
)

// Budget is what an execution may take of models; 0 is no bound.
type Budget struct {
	Tokens  uint64 // in and out, those of a cache too
	CostUSD float64
	Used    run.Spent // what is known by now
}

// budget of the turn, nil if the agent has none.
func (t *turn) budget() *Budget {
	if t.is == nil {
		return nil
	}
	l := t.is.agent.Limits
	if l.Tokens == 0 && l.BudgetUSD == 0 {
		return nil
	}
	return &Budget{Tokens: uint64(l.Tokens), CostUSD: l.BudgetUSD, Used: t.l.Run.Spent()}
}

// over says what of the budget is used up, "" for nothing.
func (b *Budget) over() string {
	switch {
	case b == nil:
	case b.Tokens > 0 && b.Used.Tokens >= b.Tokens:
		return fmt.Sprintf("the execution has used %d tokens, and its budget is %d", b.Used.Tokens, b.Tokens)
	case b.CostUSD > 0 && b.Used.CostUSD >= b.CostUSD:
		return fmt.Sprintf("the execution has cost $%.4f, and its budget is $%.4f", b.Used.CostUSD, b.CostUSD)
	}
	return ""
}

// codeBudgetExhausted is of a request to a model that the proxy refused.
const codeBudgetExhausted = "BUDGET_EXHAUSTED"

// spend looks at what the execution took so far, by its events.
func (f *follower) spend(list []events.Event) {
	for _, e := range list {
		if d, ok := e.Data.(events.EgressDenied); ok && d.Code == codeBudgetExhausted && e.ExecutionID == f.execution {
			f.stop.exhaust(d.Message, f.h.d.Now())
		}
	}
	b := f.budget()
	if b == nil {
		return
	}
	s := f.l.Run
	for _, e := range list {
		s = run.Evolve(s, e)
	}
	b.Used = s.Spent()
	if why := b.over(); why != "" {
		f.stop.exhaust(why, f.h.d.Now())
	}
}
