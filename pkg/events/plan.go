package events

import "time"

// Plan is the whole plan of a conversation: what the agent intends to do, and how far it is.
type Plan struct {
	Title       string     `json:"title,omitempty"`
	Explanation string     `json:"explanation,omitempty"` // why the plan is as it is, in the agent's words
	Items       []PlanItem `json:"items,omitempty"`       // in the agent's order
}

// PlanItem is one item of a Plan.
type PlanItem struct {
	ItemID   string     `json:"id,omitempty"` // the agent's own id; absent if the agent has none
	Content  string     `json:"content"`
	Status   PlanStatus `json:"status"`             // pending, in_progress, completed or cancelled
	Priority string     `json:"priority,omitempty"` // high, medium or low, where the agent ranks its items
}

// PlanStatus is the status of an item of a plan.
type PlanStatus string

// The statuses of an item of a plan.
const (
	PlanPending    PlanStatus = "pending"
	PlanInProgress PlanStatus = "in_progress"
	PlanCompleted  PlanStatus = "completed"
	PlanCancelled  PlanStatus = "cancelled"
)

// ParsePlanStatus returns the status with the given name, and PlanPending for a name that is not a status.
func ParsePlanStatus(name string) PlanStatus {
	switch s := PlanStatus(name); s {
	case PlanInProgress, PlanCompleted, PlanCancelled:
		return s
	}
	return PlanPending
}

// todoItems returns the items in the form of a todo list. The result is not nil.
func (p Plan) todoItems() []TodoItem {
	list := make([]TodoItem, 0, len(p.Items))
	for _, item := range p.Items {
		list = append(list, TodoItem{Content: item.Content, Status: string(item.Status)})
	}
	return list
}

// TodoList returns the items of a block of kind todo or plan, or nil if the block has no list.
func (b Block) TodoList() []TodoItem {
	switch {
	case b.Kind == KindTodo:
		return b.Todos
	case b.Kind == KindPlan && b.Plan != nil:
		return b.Plan.todoItems()
	}
	return nil
}

// TodoList returns the items of the list that the updates set, or nil if the updates set no list.
func (u BlockUpdates) TodoList() []TodoItem {
	if u.Plan != nil {
		return u.Plan.todoItems()
	}
	return u.Todos
}

// Step is one step of a plan that is being executed. A plan that is only a list for the reader has no steps.
type Step struct {
	StepID            string     `json:"id"` // id of the plan's item, which DependsOn of other steps refers to
	Title             string     `json:"title"`
	Status            StepStatus `json:"status"`                   // pending, blocked, ready, running, completed, failed or skipped
	DependsOn         []string   `json:"dependsOn,omitempty"`      // ids of the steps that must be completed before
	SubConversationID string     `json:"conversationId,omitempty"` // conversation of the sub-agent that executes the step, if there is one
	SubExecutionID    string     `json:"executionId,omitempty"`    // execution of another session that executes the step, if there is one
	Result            string     `json:"result,omitempty"`
	ErrorCode         string     `json:"errorCode,omitempty"`    // failed
	ErrorMessage      string     `json:"errorMessage,omitempty"` // failed; blocked and skipped: why
	StartedAt         *time.Time `json:"startedAt,omitempty"`    // when the step began to run
	EndedAt           *time.Time `json:"endedAt,omitempty"`      // when the step was completed, failed or skipped
}

// StepStatus is the status of a step.
type StepStatus string

// The statuses of a step. Completed, failed and skipped are final.
const (
	StepPending   StepStatus = "pending"   // waits for steps that it depends on
	StepBlocked   StepStatus = "blocked"   // a step that it depends on failed
	StepReady     StepStatus = "ready"     // can run: all steps that it depends on are completed
	StepRunning   StepStatus = "running"   // runs
	StepCompleted StepStatus = "completed" // has a result
	StepFailed    StepStatus = "failed"    // has an error
	StepSkipped   StepStatus = "skipped"   // will not run
)

// LoadedSkill is a skill whose instructions the agent has read.
type LoadedSkill struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"` // SHA-256 of the ZIP; absent for a skill that was not pushed to Spool
	Path    string `json:"path,omitempty"`    // folder of the skill, where the agent names it or Spool knows it
}
