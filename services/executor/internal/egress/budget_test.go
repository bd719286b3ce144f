package egress_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// counted returns a model whose every answer takes ten tokens.
func counted(t *testing.T, model string) (func(*egress.Config, *egress.Deps), *atomic.Int32) {
	t.Helper()
	var calls atomic.Int32
	return models(t, func(w http.ResponseWriter, _ *http.Request) {
		calls.Add(1)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"model":"`+model+`","usage":{"input_tokens":7,"output_tokens":3}}`)
	}), &calls
}

const priced = "claude-sonnet-4-5"

// A call after the budget is used up is refused, and the journal has the reason. Another execution starts with a new budget.
func TestBudget_RefusesTheCallAfterTheLimit(t *testing.T) {
	t.Parallel()
	const cost = (7*3.0 + 3*15.0) / 1e6 // of one answer, by the price table
	for name, c := range map[string]struct {
		model  string
		budget events.Budget
		spent  uint64 // tokens, as the executor reports
		calls  int32
		says   string
	}{
		"tokens":              {priced, events.Budget{Tokens: 25}, 0, 3, "the execution has used 30 tokens, and its budget is 25"},
		"tokens, exactly":     {priced, events.Budget{Tokens: 20}, 0, 2, "the execution has used 20 tokens, and its budget is 20"},
		"what is known":       {priced, events.Budget{Tokens: 20}, 15, 1, "the execution has used 25 tokens"},
		"requests":            {priced, events.Budget{Turns: 3}, 0, 3, "the execution has had 3 turns, and its budget is 3"},
		"dollars":             {priced, events.Budget{CostUSD: 1.5 * cost}, 0, 2, "and its budget is $"},
		"a model of no price": {"nobody-knows-it", events.Budget{CostUSD: 1}, 0, 1, "no price for model nobody-knows-it"},
		"none":                {"nobody-knows-it", events.Budget{}, 0, 5, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			change, calls := counted(t, c.model)
			w := newWorld(t, change)
			b := w.box()
			b.reg.Token = ""
			b.reg.Budgets = []api.Budget{{Account: b.reg.Execution, Whose: "the execution", Limit: c.budget, Spent: events.BudgetUsage{Tokens: c.spent}}}
			if _, err := b.client.Register(t.Context(), b.id, b.reg); err != nil {
				t.Fatal(err)
			}
			ask := func() (int, string) {
				status, _, body := b.post("/anthropic/v1/messages", `{"model":"`+c.model+`"}`)
				return status, body
			}
			for i := range 5 {
				status, body := ask()
				if over := int32(i) >= c.calls; over != (status == http.StatusPaymentRequired) || over && !strings.Contains(body, c.says) {
					t.Errorf("call %d: %d %s", i, status, body)
				}
			}
			if n := calls.Load(); n != c.calls {
				t.Errorf("the model was called %d times, want %d", n, c.calls)
			}
			if c.says == "" {
				return
			}
			d := b.denied(b.lines(uint64(c.calls), 1)[0]) //nolint:gosec // a count
			if d.Code != "BUDGET_EXHAUSTED" || !strings.Contains(d.Message, c.says) {
				t.Errorf("journaled %+v", d)
			}
			// Requests that are not model calls are still allowed.
			if status, _, _ := b.post("/anthropic/v1/messages/count_tokens", "{}"); status != http.StatusOK {
				t.Errorf("count_tokens: %d", status)
			}
			if c.spent > 0 {
				return
			}
			b.reg.Execution = mint(t, events.KindExecution)
			b.reg.Budgets[0].Account = b.reg.Execution
			if _, err := b.client.Register(t.Context(), b.id, b.reg); err != nil {
				t.Fatal(err)
			}
			if status, body := ask(); status != http.StatusOK {
				t.Errorf("the next execution: %d %s", status, body)
			}
		})
	}
}

// Usage on an account counts for all sandboxes that have it, including the reported usage of other engines. An account without
// sandboxes is forgotten.
func TestBudget_IsSharedByAllSandboxesOfAnAccount(t *testing.T) {
	t.Parallel()
	change, calls := counted(t, priced)
	w := newWorld(t, change)
	of := func(account string, limit uint64, spent uint64) api.Budget {
		return api.Budget{Account: account, Whose: account, Limit: events.Budget{Tokens: limit}, Spent: events.BudgetUsage{Tokens: spent}}
	}
	boxes := []*box{w.box(), w.box()}
	register := func(b *box, list ...api.Budget) {
		t.Helper()
		b.reg.Token, b.reg.Budgets = "", list
		if _, err := b.client.Register(t.Context(), b.id, b.reg); err != nil {
			t.Fatal(err)
		}
	}
	ask := func(b *box, want int, says string) {
		t.Helper()
		if status, _, body := b.post("/anthropic/v1/messages", `{"model":"`+priced+`"}`); status != want || !strings.Contains(body, says) {
			t.Errorf("%d %s, want %d %q", status, body, want, says)
		}
	}
	for _, b := range boxes {
		register(b, of("session "+b.id, 100, 0), of("tenant acme", 45, 5))
	}
	for i := range 4 {
		ask(boxes[i%2], http.StatusOK, "")
	}
	for _, b := range boxes {
		ask(b, http.StatusPaymentRequired, "tenant acme has used 45 tokens, and its budget is 45")
	}
	// Usage that the executor reports back does not count twice, and a higher limit applies at once.
	register(boxes[0], of("session "+boxes[0].id, 100, 20), of("tenant acme", 55, 45))
	ask(boxes[0], http.StatusOK, "")
	ask(boxes[0], http.StatusPaymentRequired, "tenant acme has used 55 tokens")
	// Sandboxes of other engines used more.
	register(boxes[1], of("tenant acme", 1000, 1000))
	ask(boxes[1], http.StatusPaymentRequired, "tenant acme has used 1000 tokens")
	// The account of a session keeps its usage.
	register(boxes[0], of("session "+boxes[0].id, 40, 0))
	ask(boxes[0], http.StatusOK, "")
	ask(boxes[0], http.StatusPaymentRequired, "has used 40 tokens")
	// No sandbox has the tenant's account any more, so its usage begins at zero.
	register(boxes[1])
	register(boxes[1], of("tenant acme", 10, 0))
	ask(boxes[1], http.StatusOK, "")
	if n := calls.Load(); n != 7 {
		t.Errorf("the model was called %d times", n)
	}
	b := boxes[0]
	for field, bad := range map[string]api.Budget{"budgets[0].account": of("", 1, 0), "budgets[0].limit.costUsd": {Account: "a", Limit: events.Budget{CostUSD: -1}}} {
		b.reg.Budgets = []api.Budget{bad}
		var refused *api.Error
		if _, err := b.client.Register(t.Context(), b.id, b.reg); !errors.As(err, &refused) || refused.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// Settled lines include a call whose answer has just ended, and counted denials.
func TestLines_SettledIncludesCallsThatEnd(t *testing.T) {
	t.Parallel()
	change, _ := counted(t, priced)
	w := newWorld(t, change)
	b := w.box()
	for i := range 40 {
		b.post("/anthropic/v1/messages", `{"model":"`+priced+`"}`)
		list, err := b.client.JournalLines(t.Context(), b.id, "", 0, true)
		if err != nil || len(list) != i+1 {
			t.Fatalf("after %d calls there are %d lines, %v", i+1, len(list), err)
		}
	}
	b.reg.Token, b.reg.Budgets = "", []api.Budget{{Account: "a", Limit: events.Budget{Tokens: 1}, Spent: events.BudgetUsage{Tokens: 1}}}
	if _, err := b.client.Register(t.Context(), b.id, b.reg); err != nil {
		t.Fatal(err)
	}
	b.post("/anthropic/v1/messages", `{"model":"`+priced+`"}`)
	if list, err := b.client.JournalLines(t.Context(), b.id, "", 40, true); err != nil || len(list) != 1 || b.denied(list[0]).Code != "BUDGET_EXHAUSTED" {
		t.Errorf("of what was denied there is %+v, %v", list, err)
	}
}

// Lines does not wait for a request that continues.
func TestLines_DoesNotWaitForOpenCalls(t *testing.T) {
	t.Parallel()
	asked, answer := make(chan struct{}), make(chan struct{})
	w := newWorld(t, models(t, func(w http.ResponseWriter, _ *http.Request) {
		close(asked)
		<-answer
		_, _ = io.WriteString(w, "{}")
	}))
	b := w.box()
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.post("/anthropic/v1/messages", `{"model":"`+priced+`"}`)
	}()
	<-asked
	if list, err := b.client.JournalLines(t.Context(), b.id, "", 0, true); err != nil || len(list) != 0 {
		t.Errorf("%d lines, %v", len(list), err)
	}
	close(answer)
	<-done
	if list, err := b.client.JournalLines(t.Context(), b.id, "", 0, true); err != nil || len(list) != 1 {
		t.Errorf("%d lines at its end, %v", len(list), err)
	}
}
