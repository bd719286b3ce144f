package claudecode

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// outputLine is a line that the CLI prints. The field Type determines which other fields are set.
type outputLine struct {
	Type      string  `json:"type"`
	Subtype   string  `json:"subtype"`
	SessionID string  `json:"session_id"`
	UUID      string  `json:"uuid"`
	Parent    *string `json:"parent_tool_use_id"` // in lines of a sub-agent: the call that began it

	Event         json.RawMessage `json:"event"`           // stream_event
	Message       json.RawMessage `json:"message"`         // assistant, user
	Error         json.RawMessage `json:"error"`           // assistant: why the CLI answered in place of the model
	ToolUseResult json.RawMessage `json:"tool_use_result"` // user: the result in the tool's own format
	IsReplay      bool            `json:"isReplay"`        // user: acknowledges a line of the session

	FilePath string          `json:"filePath"` // transcript_mirror: the transcript
	Entries  json.RawMessage `json:"entries"`  // transcript_mirror: the lines that the CLI has written to it

	RequestID string          `json:"request_id"` // control_request, control_cancel_request
	Request   json.RawMessage `json:"request"`
	Response  json.RawMessage `json:"response"` // control_response

	Model   string `json:"model"`               // system/init
	Version string `json:"claude_code_version"` // system/init
}

// isOfSubagent reports whether the line belongs to a sub-agent. The CLI prints what the line contains once more, as a line of the sub-agent's
// transcript.
func (l outputLine) isOfSubagent() bool { return l.Parent != nil && *l.Parent != "" }

// blockAnchor returns the anchor of the block for part i of message m, or "". The anchor is the id of the line. A fork
// can cut a transcript only after a whole line, so only the last part of a line has an anchor.
func (l outputLine) blockAnchor(m apiMessage, i int) string {
	if i < len(m.Content)-1 {
		return ""
	}
	return l.UUID
}

// apiMessage is a message of the model or of the user, in the format of the Messages API.
type apiMessage struct {
	ID      string       `json:"id"`
	Model   string       `json:"model"`
	Content contentParts `json:"content"`
	Usage   apiUsage     `json:"usage"`
}

// contentParts is the content of a message: a list of parts. The CLI writes a single text as a string.
type contentParts []contentPart

func (c *contentParts) UnmarshalJSON(raw []byte) error {
	switch raw = bytes.TrimSpace(raw); {
	case bytes.HasPrefix(raw, []byte(`"`)):
		*c = contentParts{{Type: "text"}}
		return json.Unmarshal(raw, &(*c)[0].Text)
	case bytes.HasPrefix(raw, []byte(`{`)):
		*c = make(contentParts, 1)
		return json.Unmarshal(raw, &(*c)[0])
	}
	return json.Unmarshal(raw, (*[]contentPart)(c))
}

// text returns the texts of all parts, one after the other.
func (c contentParts) text() string {
	var out []string
	for _, p := range c {
		switch p.Type {
		case "text":
			out = append(out, p.Text)
		case "tool_reference":
			out = append(out, p.ToolName)
		default:
			out = append(out, "["+p.Type+"]")
		}
	}
	return strings.Join(out, "\n")
}

// contentPart is a content block of the Messages API, of any type.
type contentPart struct {
	Type     string          `json:"type"`
	Text     string          `json:"text"`
	Thinking string          `json:"thinking"`
	ID       string          `json:"id"` // tool_use
	Name     string          `json:"name"`
	Input    json.RawMessage `json:"input"`

	ToolUseID string       `json:"tool_use_id"` // tool_result
	Content   contentParts `json:"content"`
	IsError   bool         `json:"is_error"`

	ToolName string `json:"tool_name"` // tool_reference
}

// streamEvent is an event of a streamed answer of the Messages API.
type streamEvent struct {
	Type    string      `json:"type"`
	Index   int         `json:"index"`
	Message apiMessage  `json:"message"`       // message_start
	Block   contentPart `json:"content_block"` // content_block_start
	Delta   struct {
		Type     string `json:"type"`
		Text     string `json:"text"`
		Thinking string `json:"thinking"`
		JSON     string `json:"partial_json"`
	} `json:"delta"` // content_block_delta
	Usage apiUsage `json:"usage"` // message_delta
}

// apiUsage is the number of tokens that the Messages API counted for one message.
type apiUsage struct {
	Input      uint32 `json:"input_tokens"`
	Output     uint32 `json:"output_tokens"`
	CacheRead  uint32 `json:"cache_read_input_tokens"`
	CacheWrite uint32 `json:"cache_creation_input_tokens"`
}

// resultLine is the line with which the CLI ends a turn.
type resultLine struct {
	Subtype        string                `json:"subtype"`
	IsError        bool                  `json:"is_error"`
	APIErrorStatus int                   `json:"api_error_status"`
	Result         string                `json:"result"`
	Errors         []string              `json:"errors"`
	TerminalReason string                `json:"terminal_reason"`
	Usage          apiUsage              `json:"usage"`          // of this turn, without sub-agents
	ModelUsage     map[string]modelUsage `json:"modelUsage"`     // since the process began, with them
	TotalCostUSD   float64               `json:"total_cost_usd"` // since the process began
}

// modelUsage is the number of tokens that a process of the CLI has used with one model.
type modelUsage struct {
	Input      uint64 `json:"inputTokens"`
	Output     uint64 `json:"outputTokens"`
	CacheRead  uint64 `json:"cacheReadInputTokens"`
	CacheWrite uint64 `json:"cacheCreationInputTokens"`
}

// cliRequest is the content of a control_request of the CLI. The field Subtype determines which other fields are set.
type cliRequest struct {
	Subtype string `json:"subtype"`

	ToolName  string          `json:"tool_name"` // can_use_tool
	ToolUseID string          `json:"tool_use_id"`
	AgentID   string          `json:"agent_id"`        // id of the sub-agent, from task_started
	Input     json.RawMessage `json:"input"`           // can_use_tool: of the call; hook_callback: a hookInput
	Reason    string          `json:"decision_reason"` // why the CLI asks

	Server  string          `json:"mcp_server_name"` // elicitation
	Message string          `json:"message"`
	Schema  json.RawMessage `json:"requested_schema"`
	URL     string          `json:"url"`
}

// cliResponse is the content of the CLI's control_response to a request of the session.
type cliResponse struct {
	Subtype   string          `json:"subtype"`
	RequestID string          `json:"request_id"`
	Error     string          `json:"error"`
	Response  json.RawMessage `json:"response"`
}

// mcpStatus is the CLI's answer to the control request mcp_status: the MCP servers with the annotations of their tools.
type mcpStatus struct {
	Servers []struct {
		Name  string `json:"name"`
		Tools []struct {
			Name        string `json:"name"`
			Annotations struct {
				Destructive bool `json:"destructive"`
			} `json:"annotations"`
		} `json:"tools"`
	} `json:"mcpServers"`
}

// controlRequest is a control_request that the session sends to the CLI.
type controlRequest struct {
	Type      string         `json:"type"`
	RequestID string         `json:"request_id"`
	Request   map[string]any `json:"request"`
}

// controlResponse is the line with which the session answers a control_request of the CLI.
type controlResponse struct {
	Type     string       `json:"type"`
	Response responseBody `json:"response"`
}

// responseBody is the content of a controlResponse.
type responseBody struct {
	Subtype   string `json:"subtype"`
	RequestID string `json:"request_id"`
	Response  any    `json:"response,omitempty"`
	Error     string `json:"error,omitempty"`
}

// permissionResult is the session's answer to a permission request of the CLI.
type permissionResult struct {
	Behavior     string          `json:"behavior"` // allow, deny
	UpdatedInput json.RawMessage `json:"updatedInput,omitempty"`
	Message      string          `json:"message,omitempty"`

	UpdatedPermissions []permissionModeChange `json:"updatedPermissions,omitempty"`
}

// permissionModeChange is a change of the CLI's permission mode, as a part of a permissionResult.
type permissionModeChange struct {
	Type        string `json:"type"` // setMode
	Mode        string `json:"mode"`
	Destination string `json:"destination"`
}

// elicitationResult is the session's answer to an elicitation, the request of an MCP server for data of the user.
type elicitationResult struct {
	Action  string          `json:"action"` // accept, decline, cancel
	Content json.RawMessage `json:"content,omitempty"`
}

// transcriptLine is a line of the transcript of a sub-agent.
type transcriptLine struct {
	Type string `json:"type"` // assistant, user, agent_metadata, and others

	Message       json.RawMessage `json:"message"`       // assistant, user
	IsMeta        bool            `json:"isMeta"`        // user: the CLI wrote the message for the model
	Error         json.RawMessage `json:"error"`         // assistant: why the CLI answered in place of the model
	ToolUseResult json.RawMessage `json:"toolUseResult"` // user

	ToolUseID  string `json:"toolUseId"`  // agent_metadata: the call that has started the sub-agent
	SpawnDepth uint32 `json:"spawnDepth"` // agent_metadata
}

// hookInput describes the call for which the CLI calls the hook of the handshake.
type hookInput struct {
	ToolName  string `json:"tool_name"`
	ToolUseID string `json:"tool_use_id"`
	AgentID   string `json:"agent_id"` // the sub-agent that makes the call; "" for the main agent
}

// hookOutput is the session's answer to a call of the hook that the handshake has registered.
type hookOutput struct {
	Output *hookDecision `json:"hookSpecificOutput,omitempty"` // nil leaves the decision to the CLI
}

// hookDecision is the decision on a call in a hookOutput.
type hookDecision struct {
	Event    string `json:"hookEventName"`
	Decision string `json:"permissionDecision"` // ask, deny
	Reason   string `json:"permissionDecisionReason,omitempty"`
}

// userLine is the line on the CLI's standard input that begins a turn with a user's message.
type userLine struct {
	Type      string      `json:"type"`
	SessionID string      `json:"session_id"`
	Message   userMessage `json:"message"`
	Parent    *string     `json:"parent_tool_use_id"`
}

// userMessage is the message of the user in a userLine.
type userMessage struct {
	Role    string `json:"role"`
	Content any    `json:"content"`
}

// decode decodes a part of a line as JSON. what names the part in the error.
func decode[T any](raw json.RawMessage, what string) (T, error) {
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, fmt.Errorf("%s: %w", what, err)
	}
	return v, nil
}
