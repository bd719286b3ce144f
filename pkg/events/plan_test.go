package events_test

import (
	"slices"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

func TestParsePlanStatus(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]events.PlanStatus{
		"pending": events.PlanPending, "in_progress": events.PlanInProgress, "completed": events.PlanCompleted, "cancelled": events.PlanCancelled,
		"": events.PlanPending, "Completed": events.PlanPending, "done\x00": events.PlanPending,
	} {
		if got := events.ParsePlanStatus(name); got != want {
			t.Errorf("%q is %s, want %s", name, got, want)
		}
	}
}

func TestTodoList(t *testing.T) {
	t.Parallel()
	todos := []events.TodoItem{{Content: "a", Status: "pending"}}
	plan := &events.Plan{Title: "t", Items: []events.PlanItem{{ItemID: "1", Content: "b", Status: events.PlanCancelled, Priority: "high"}}}
	fromPlan := []events.TodoItem{{Content: "b", Status: "cancelled"}}
	for name, test := range map[string]struct{ got, want []events.TodoItem }{
		"a todo list":                  {events.Block{Kind: events.KindTodo, Todos: todos}.TodoList(), todos},
		"a plan":                       {events.Block{Kind: events.KindPlan, Plan: plan, Todos: todos}.TodoList(), fromPlan},
		"an empty plan":                {events.Block{Kind: events.KindPlan, Plan: &events.Plan{}}.TodoList(), []events.TodoItem{}},
		"a plan block without a plan":  {events.Block{Kind: events.KindPlan}.TodoList(), nil},
		"a block of another kind":      {events.Block{Kind: events.KindToolUse, Todos: todos, Plan: plan}.TodoList(), nil},
		"an update of a todo list":     {events.BlockUpdates{Todos: todos}.TodoList(), todos},
		"an update of a plan":          {events.BlockUpdates{Plan: plan}.TodoList(), fromPlan},
		"an update that empties it":    {events.BlockUpdates{Plan: &events.Plan{}}.TodoList(), []events.TodoItem{}},
		"an update of something other": {events.BlockUpdates{}.TodoList(), nil},
	} {
		if !slices.Equal(test.got, test.want) || (test.got == nil) != (test.want == nil) {
			t.Errorf("%s: %#v, want %#v", name, test.got, test.want)
		}
	}
}

// TestOutputSizeOf_CountsPlansAndSteps tests that a tenant pays for the text of plans and steps as for that of todo lists.
func TestOutputSizeOf_CountsPlansAndSteps(t *testing.T) {
	t.Parallel()
	size := func(b events.Block, u events.BlockUpdates) uint64 {
		return events.OutputSizeOf(events.Event{Data: events.BlockStart{Block: b}}).Bytes + events.OutputSizeOf(events.Event{Data: events.BlockUpdate{Updates: u}}).Bytes
	}
	empty := size(events.Block{}, events.BlockUpdates{})
	plan := &events.Plan{Title: "12", Explanation: "345", Items: []events.PlanItem{{Content: "6"}, {Content: "7890"}}}
	if got := size(events.Block{Plan: plan}, events.BlockUpdates{Plan: plan}) - empty; got != 20 {
		t.Errorf("a plan of 10 bytes, twice, counts %d bytes", got)
	}
	step := &events.Step{Title: "12", Result: "345", ErrorMessage: "67890"}
	if got := size(events.Block{Step: step}, events.BlockUpdates{Step: step}) - empty; got != 20 {
		t.Errorf("a step of 10 bytes, twice, counts %d bytes", got)
	}
}
