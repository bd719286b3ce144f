package events

import (
	"encoding/json"
	"time"
)

// BlockKind says what a block is.
type BlockKind string

// The kinds of block.
const (
	KindUserMessage   BlockKind = "user_message"
	KindAssistantText BlockKind = "assistant_text"
	KindThinking      BlockKind = "thinking"
	KindToolUse       BlockKind = "tool_use"
	KindToolResult    BlockKind = "tool_result"
	KindSubagent      BlockKind = "subagent"
	KindTodo          BlockKind = "todo"
	KindSystem        BlockKind = "system"
	KindError         BlockKind = "error"
)

// BlockStatus says whether more is to come.
type BlockStatus string

// The statuses of a block. Complete and error are final.
const (
	StatusPending  BlockStatus = "pending"
	StatusComplete BlockStatus = "complete"
	StatusError    BlockStatus = "error"
)

// Block is a unit to render, discriminated by Kind. The fields behind the
// common ones belong to the kinds named beside them; the others are empty.
type Block struct {
	ID             string      `json:"id"`
	Kind           BlockKind   `json:"kind"`
	Status         BlockStatus `json:"status"`
	Time           time.Time   `json:"timestamp"`
	ExecutionID    string      `json:"executionId,omitempty"`
	ConversationID string      `json:"conversationId,omitempty"`

	Anchor string `json:"anchor,omitempty"` // the agent's own position directly after a whole block, where a fork can cut its conversation; absent where it cannot be cut, and in logs of earlier builds

	Content string `json:"content,omitempty"` // user_message, assistant_text, thinking: the whole text so far
	Parts   []Part `json:"parts,omitempty"`   // user_message with images, in place of content
	Model   string `json:"model,omitempty"`   // assistant_text
	Summary string `json:"summary,omitempty"` // thinking

	ToolName    string          `json:"toolName,omitempty"`    // tool_use
	ToolUseID   string          `json:"toolUseId,omitempty"`   // tool_use, tool_result, subagent: the agent's own id of the call
	Input       json.RawMessage `json:"input,omitempty"`       // tool_use, subagent: JSON, set when it is whole
	DisplayName string          `json:"displayName,omitempty"` // tool_use
	Description string          `json:"description,omitempty"` // tool_use
	Output      string          `json:"output,omitempty"`      // tool_result, subagent
	IsError     bool            `json:"isError,omitempty"`     // tool_result
	DurationMs  uint32          `json:"durationMs,omitempty"`  // tool_result, subagent

	SubagentID string `json:"subagentId,omitempty"` // subagent
	Name       string `json:"name,omitempty"`       // subagent

	Todos []TodoItem `json:"todos,omitempty"` // todo

	Subtype string `json:"subtype,omitempty"` // system
	Code    string `json:"code,omitempty"`    // error
	Message string `json:"message,omitempty"` // system, error
}

// Part is a piece of a message: text or an image.
type Part struct {
	Type      string `json:"type"` // text or image
	Text      string `json:"text,omitempty"`
	MediaType string `json:"mediaType,omitempty"`
	Data      string `json:"data,omitempty"` // base64
}

// TodoItem is a line of an agent's own list.
type TodoItem struct {
	Content string `json:"content"`
	Status  string `json:"status"` // pending, in_progress, completed
}

// BlockUpdates are the fields that a block_update sets; a nil one is left as it is.
type BlockUpdates struct {
	Input       json.RawMessage `json:"input,omitempty"`
	DisplayName *string         `json:"displayName,omitempty"`
	Description *string         `json:"description,omitempty"`
	Summary     *string         `json:"summary,omitempty"`
	Output      *string         `json:"output,omitempty"`
	Todos       []TodoItem      `json:"todos,omitempty"`
}
