package egress_test

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress"
)

// counted is a model whose every answer takes ten tokens.
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

// The call that would come after the budget is used up is not made, and the journal says why; another execution begins anew.
func TestBudget(t *testing.T) {
	t.Parallel()
	const cost = (7*3.0 + 3*15.0) / 1e6 // of ten tokens, by the price table
	for name, c := range map[string]struct {
		model  string
		budget egress.Budget
		calls  int32
		says   string
	}{
		"tokens":              {priced, egress.Budget{Tokens: 25}, 3, "the execution has used 30 tokens, and its budget is 25"},
		"tokens, exactly":     {priced, egress.Budget{Tokens: 20}, 2, "the execution has used 20 tokens, and its budget is 20"},
		"what is known":       {priced, egress.Budget{Tokens: 20, UsedTokens: 15}, 1, "the execution has used 25 tokens"},
		"dollars":             {priced, egress.Budget{CostUSD: 1.5 * cost}, 2, "and its budget is $"},
		"a model of no price": {"nobody-knows-it", egress.Budget{CostUSD: 1}, 1, "no price for model nobody-knows-it"},
		"none":                {"nobody-knows-it", egress.Budget{}, 5, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			change, calls := counted(t, c.model)
			w := newWorld(t, change)
			b := w.box()
			b.reg.Token, b.reg.Budget = "", &c.budget
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
			// What is no call of a model goes on.
			if status, _, _ := b.post("/anthropic/v1/messages/count_tokens", "{}"); status != http.StatusOK {
				t.Errorf("count_tokens: %d", status)
			}
			if c.budget.UsedTokens > 0 {
				return
			}
			b.reg.Execution = mint(t, events.KindExecution)
			if _, err := b.client.Register(t.Context(), b.id, b.reg); err != nil {
				t.Fatal(err)
			}
			if status, body := ask(); status != http.StatusOK {
				t.Errorf("the next execution: %d %s", status, body)
			}
		})
	}
}
