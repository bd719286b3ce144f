package check_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/chaos/check"
)

// turn returns the events of an execution that is started so many times and uses tokens.
func turn(execution string, starts int, tokens string) []check.Event {
	var list []check.Event
	for range starts {
		list = append(list, check.Event{Type: (events.ExecutionStarted{}).EventType(), ExecutionID: execution, Data: `{"attempt":1}`})
	}
	return append(list, check.Event{Type: (events.ExecutionCompleted{}).EventType(), ExecutionID: execution, Data: `{"usage":{"inputTokens":` + tokens + `,"outputTokens":0}}`})
}

// refusal returns the end of an execution that was not started because of a budget.
func refusal(execution string) []check.Event {
	return []check.Event{{Type: (events.ExecutionFailed{}).EventType(), ExecutionID: execution, Data: `{"code":"BUDGET_EXCEEDED"}`}}
}

// TestCheckBudgets_FindsTurnsBeyondTheBudget tests each limit, and that repeated attempts and refused executions do not
// count as turns.
func TestCheckBudgets_FindsTurnsBeyondTheBudget(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		budget events.Budget
		log    [][]check.Event
		want   string
	}{
		"as many turns as the budget has":       {events.Budget{Turns: 2}, [][]check.Event{turn("a", 3, "1"), turn("b", 1, "1"), refusal("c")}, ""},
		"one turn more":                         {events.Budget{Turns: 2}, [][]check.Event{turn("a", 1, "1"), turn("b", 1, "1"), refusal("c"), turn("d", 1, "1")}, "execution d"},
		"the last turn uses more than is left":  {events.Budget{Tokens: 10}, [][]check.Event{turn("a", 1, "9"), turn("b", 2, "9"), refusal("c")}, ""},
		"a turn after the tokens are used up":   {events.Budget{Tokens: 10}, [][]check.Event{turn("a", 1, "10"), turn("b", 1, "1")}, "execution b"},
		"an end that cannot be read":            {events.Budget{Tokens: 10}, [][]check.Event{turn("a", 1, "x")}, "the end of execution a"},
		"two sessions whose usage is not added": {events.Budget{Turns: 1}, [][]check.Event{turn("a", 1, "1")}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := map[string][]check.Event{"other": turn("o", 1, "1")}
			for _, list := range c.log {
				log["s"] = append(log["s"], list...)
			}
			wrong := check.CheckBudgets(map[string]events.Budget{"s": c.budget}, log)
			if (c.want == "") != (len(wrong) == 0) || !strings.Contains(strings.Join(wrong, ", "), c.want) {
				t.Errorf("found %q, want %q", wrong, c.want)
			}
		})
	}
}

// TestHasRefusals_NeedsOneOfEachSession tests that a session without a refused execution is found.
func TestHasRefusals_NeedsOneOfEachSession(t *testing.T) {
	t.Parallel()
	log := map[string][]check.Event{"a": refusal("x"), "b": turn("y", 1, "1")}
	if !check.HasRefusals(map[string]events.Budget{"a": {}}, log) {
		t.Error("the refusal was not found")
	}
	if check.HasRefusals(map[string]events.Budget{"a": {}, "b": {}}, log) {
		t.Error("session b has no refusal")
	}
}
