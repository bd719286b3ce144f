package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestBudgets_LimitATenantsSessions tests that the usage of one session counts for the next session of its tenant. A
// turn that uses up the tenant's budget ends before its next model request, with the reason. The following turn does
// not reach an executor. With a higher budget the tenant continues. Deleting a session does not reduce the usage.
// With Docker the egress proxy counts, otherwise the agent reports its usage.
func TestBudgets_LimitATenantsSessions(t *testing.T) {
	t.Parallel()
	t.Run("local", func(t *testing.T) {
		t.Parallel()
		budgets(t, harness.New(t, harness.Options{}), false)
	})
	t.Run("docker", func(t *testing.T) {
		t.Parallel()
		harness.NeedDocker(t)
		budgets(t, harness.New(t, harness.Options{Docker: true}), true)
	})
}

// program is a query whose turn sends several model requests.
const program = "Write a program that prints the first ten primes and run it."

func budgets(t *testing.T, c *harness.Cluster, proxied bool) {
	spent := func() (list []struct {
		Period, Exceeded string
		Budget, Spent    struct{ Turns, Tokens, TimeMs float64 }
	}) {
		t.Helper()
		var out struct{ Budgets json.RawMessage }
		c.Call(0, "GET", "/api/budgets", nil, &out)
		if len(out.Budgets) > 0 {
			if err := json.Unmarshal(out.Budgets, &list); err != nil {
				t.Fatal(err)
			}
		}
		return list
	}
	set := func(bound string, n float64) {
		t.Helper()
		c.Call(0, "PUT", "/api/budgets/month", map[string]any{"budget": map[string]any{bound: n}}, nil)
	}
	ended := func(w events.WireEvent, code, says string) {
		t.Helper()
		var d events.ExecutionFailed
		if w.Type != d.EventType() {
			t.Fatalf("ended with %s %s", w.Type, w.Data)
		}
		if err := json.Unmarshal(w.Data, &d); err != nil {
			t.Fatal(err)
		}
		if d.Code != code || !strings.Contains(d.Message, says) {
			t.Errorf("the execution failed with %s: %s", d.Code, d.Message)
		}
	}
	set("tokens", 1<<40)
	first := c.CreateSession("spool", nil)
	if _, end := c.RunQuery(first, program, nil); end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("ended with %s %s", end.Type, end.Data)
	}
	calls := len(c.Model.Requests())
	if calls < 3 {
		t.Fatalf("the turn sent %d model requests, and this test needs more", calls)
	}
	var took float64
	harness.Eventually(t, "the usage of the turn is counted", func() bool {
		list := spent()
		took = list[0].Spent.Tokens
		return list[0].Spent.Turns == 1 && took > 0 && list[0].Spent.TimeMs > 0
	})

	second := c.CreateSession("spool", nil)
	if proxied {
		// The tenant has a second session. Its first model request uses up the budget, and is its last.
		set("tokens", took+1)
		s, end := c.RunQuery(second, program, nil)
		ended(end, "BUDGET_EXCEEDED", fmt.Sprintf("tokens, and its budget is %.0f", took+1))
		s.Close()
		if n := len(c.Model.Requests()) - calls; n != 1 {
			t.Errorf("the turn sent %d model requests", n)
		}
	}
	set("tokens", took)
	harness.Eventually(t, "a turn beyond the budget does not start", func() bool {
		calls = len(c.Model.Requests())
		s, end := c.RunQuery(second, program, nil)
		s.Close()
		if end.Type == (events.ExecutionCompleted{}).EventType() {
			return false // the usage is counted a moment after the turn
		}
		ended(end, "BUDGET_EXCEEDED", "tenant default since")
		return len(c.Model.Requests()) == calls
	})
	if list := spent(); list[0].Exceeded == "" {
		t.Errorf("the budget that is used up is shown as %+v", list)
	}
	before := spent()[0].Spent
	c.DeleteSession(first)
	if after := spent()[0].Spent; after != before {
		t.Errorf("after a session was deleted the usage is %+v, before %+v", after, before)
	}
	set("tokens", 1<<40)
	third := c.CreateSession("spool", map[string]any{"sessionOptions": map[string]any{"budget": map[string]any{"turns": 1}}})
	s, end := c.RunQuery(third, program, nil)
	if end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("with a higher budget it ended with %s %s", end.Type, end.Data)
	}
	_, end = c.RunQuery(third, program, s)
	ended(end, "BUDGET_EXCEEDED", "the session has had 1 turns, and its budget is 1")
	c.Call(0, "DELETE", "/api/budgets/month", nil, nil)
	if list := spent(); len(list) != 0 {
		t.Errorf("remaining budgets: %+v", list)
	}
}
