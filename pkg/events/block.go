package events

import (
	"encoding/json"
	"time"
)

// BlockKind is the kind of a block: it decides which fields of the block are set and how a client renders it.
type BlockKind string

// The kinds of blocks.
const (
	KindUserMessage   BlockKind = "user_message"
	KindAssistantText BlockKind = "assistant_text"
	KindThinking      BlockKind = "thinking"
	KindToolUse       BlockKind = "tool_use"
	KindToolResult    BlockKind = "tool_result"
	KindSubagent      BlockKind = "subagent"
	KindTodo          BlockKind = "todo" // in logs of earlier builds; agents write KindPlan
	KindPlan          BlockKind = "plan"
	KindStep          BlockKind = "step"
	KindSkillLoad     BlockKind = "skill_load"
	KindSystem        BlockKind = "system"
	KindError         BlockKind = "error"
)

// BlockStatus is the status of a block: pending, complete or error.
type BlockStatus string

// The statuses of a block. A pending block may still change; complete and error are final.
const (
	StatusPending  BlockStatus = "pending"
	StatusComplete BlockStatus = "complete"
	StatusError    BlockStatus = "error"
)

// Block is one unit that a client renders: a message, a tool call, a plan. Kind discriminates: a field
// with kinds in its comment is set for these kinds only.
type Block struct {
	ID             string      `json:"id"`
	Kind           BlockKind   `json:"kind"`
	Status         BlockStatus `json:"status"`
	Time           time.Time   `json:"timestamp"`
	ExecutionID    string      `json:"executionId,omitempty"`
	ConversationID string      `json:"conversationId,omitempty"`

	Anchor string `json:"anchor,omitempty"` // the agent's own position directly after the complete block, at which a fork can cut the conversation; absent if the conversation cannot be cut there, and in logs of earlier builds

	Content string `json:"content,omitempty"` // user_message, assistant_text, thinking: the complete text so far
	Parts   []Part `json:"parts,omitempty"`   // user_message with images: replaces content
	Model   string `json:"model,omitempty"`   // assistant_text
	Summary string `json:"summary,omitempty"` // thinking

	ToolName    string          `json:"toolName,omitempty"`    // tool_use
	ToolUseID   string          `json:"toolUseId,omitempty"`   // tool_use, tool_result, subagent, skill_load: the agent's own id of the tool call
	Input       json.RawMessage `json:"input,omitempty"`       // tool_use, subagent: JSON; set when it is complete
	DisplayName string          `json:"displayName,omitempty"` // tool_use
	Description string          `json:"description,omitempty"` // tool_use
	Output      string          `json:"output,omitempty"`      // tool_result, subagent
	IsError     bool            `json:"isError,omitempty"`     // tool_result
	DurationMs  uint32          `json:"durationMs,omitempty"`  // tool_result, subagent

	SubagentID string `json:"subagentId,omitempty"` // subagent
	Name       string `json:"name,omitempty"`       // subagent

	Todos []TodoItem   `json:"todos,omitempty"` // todo; plan: the items of the plan, which the reducer sets and the log does not have
	Plan  *Plan        `json:"plan,omitempty"`  // plan: the whole plan
	Step  *Step        `json:"step,omitempty"`  // step
	Skill *LoadedSkill `json:"skill,omitempty"` // skill_load

	Subtype string `json:"subtype,omitempty"` // system
	Code    string `json:"code,omitempty"`    // error
	Message string `json:"message,omitempty"` // system, error
}

// Part is one part of a user message: text or an image.
type Part struct {
	Type      string `json:"type"` // text or image
	Text      string `json:"text,omitempty"`
	MediaType string `json:"mediaType,omitempty"`
	Data      string `json:"data,omitempty"` // base64
}

// TodoItem is one entry of a list of tasks, in a block of kind todo. A PlanItem has more fields.
type TodoItem struct {
	Content string `json:"content"`
	Status  string `json:"status"` // pending, in_progress, completed
}

// BlockUpdates holds the fields that a block_update sets. A nil field stays unchanged.
type BlockUpdates struct {
	Input       json.RawMessage `json:"input,omitempty"`
	DisplayName *string         `json:"displayName,omitempty"`
	Description *string         `json:"description,omitempty"`
	Summary     *string         `json:"summary,omitempty"`
	Output      *string         `json:"output,omitempty"`
	Todos       []TodoItem      `json:"todos,omitempty"`
	Plan        *Plan           `json:"plan,omitempty"` // replaces the whole plan
	Step        *Step           `json:"step,omitempty"` // replaces the whole step
}
