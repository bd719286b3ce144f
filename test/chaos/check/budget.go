package check

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// CheckBudgets returns a description of each execution that was started after the budget of its session was used up.
// budgets holds the budget of each session that has one; turns and tokens are checked. An execution whose agent is
// started again is one turn.
func CheckBudgets(budgets map[string]events.Budget, log map[string][]Event) []string {
	var wrong []string
	for _, session := range slices.Sorted(maps.Keys(budgets)) {
		var used events.BudgetUsage
		started := map[string]bool{}
		for _, ev := range log[session] {
			switch {
			case ev.Type == (events.ExecutionStarted{}).EventType() && !started[ev.ExecutionID]:
				if why := budgets[session].ExceededLimit(used, "session "+session); why != "" {
					wrong = append(wrong, fmt.Sprintf("execution %s was started at seq %d, although %s", ev.ExecutionID, ev.Seq, why))
				}
				started[ev.ExecutionID] = true
				used.Turns++
			case events.IsTerminal(ev.Type):
				var end struct{ Usage events.Usage }
				if err := json.Unmarshal([]byte(ev.Data), &end); err != nil {
					wrong = append(wrong, fmt.Sprintf("the end of execution %s at seq %d: %v", ev.ExecutionID, ev.Seq, err))
				}
				used.Tokens += end.Usage.Tokens()
			}
		}
	}
	return wrong
}

// HasRefusals reports whether each of the sessions has an execution that failed because a budget was used up.
func HasRefusals(budgets map[string]events.Budget, log map[string][]Event) bool {
	for session := range budgets {
		if !slices.ContainsFunc(log[session], func(ev Event) bool {
			var failed events.ExecutionFailed
			return ev.Type == failed.EventType() && json.Unmarshal([]byte(ev.Data), &failed) == nil && failed.Code == "BUDGET_EXCEEDED"
		}) {
			return false
		}
	}
	return true
}
