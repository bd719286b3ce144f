package codex

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// outputLine is a line that the CLI prints: an answer (only id), a question (id and method) or a notification (only
// method).
type outputLine struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *rpcError       `json:"error"`
}

// rpcError is the error of a JSON-RPC response.
type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// rpcRequest is a JSON-RPC request that the session sends to the CLI, or a notification if it has no id.
type rpcRequest struct {
	ID     int    `json:"id,omitempty"`
	Method string `json:"method"`
	Params any    `json:"params,omitempty"`
}

// rpcAnswer is the session's JSON-RPC response to a question of the CLI.
type rpcAnswer struct {
	ID     json.RawMessage `json:"id"`
	Result any             `json:"result,omitempty"`
	Error  *rpcError       `json:"error,omitempty"`
}

// notification holds the parameters of all notifications of the CLI that are handled. The method determines which are
// present.
type notification struct {
	ThreadID string `json:"threadId"`
	TurnID   string `json:"turnId"`
	ItemID   string `json:"itemId"`

	Item         json.RawMessage `json:"item"`         // item/started, item/completed
	Delta        string          `json:"delta"`        // …/delta, …Delta
	SummaryIndex int             `json:"summaryIndex"` // item/reasoning/summary…
	Turn         turnInfo        `json:"turn"`         // turn/started, turn/completed
	Error        turnError       `json:"error"`        // error
	WillRetry    bool            `json:"willRetry"`    // error
	Explanation  string          `json:"explanation"`  // turn/plan/updated
	Plan         []planStep      `json:"plan"`         // turn/plan/updated
	TokenUsage   tokenUsage      `json:"tokenUsage"`   // thread/tokenUsage/updated
	Message      string          `json:"message"`      // warning, item/mcpToolCall/progress
	Summary      string          `json:"summary"`      // configWarning, deprecationNotice
	Details      string          `json:"details"`      // configWarning, deprecationNotice
	ToModel      string          `json:"toModel"`      // model/rerouted
}

// turnInfo is the state of a turn of a thread, as the CLI reports it.
type turnInfo struct {
	ID     string     `json:"id"`
	Status string     `json:"status"` // inProgress, completed, interrupted, failed
	Error  *turnError `json:"error"`
}

// turnError is the reason why a turn failed, as the CLI reports it.
type turnError struct {
	Message    string          `json:"message"`
	Info       json.RawMessage `json:"codexErrorInfo"`
	Additional string          `json:"additionalDetails"`
}

// codeAndStatus returns the CLI's word for the error and the HTTP status of the model API, each if known. The JSON is
// the word alone, or {"word":{"httpStatusCode":429}}.
func (e turnError) codeAndStatus() (word string, status int) {
	if json.Unmarshal(e.Info, &word) == nil {
		return word, 0
	}
	var detailed map[string]struct {
		Status int `json:"httpStatusCode"`
	}
	if json.Unmarshal(e.Info, &detailed) != nil {
		return "", 0
	}
	for w, d := range detailed {
		word, status = w, d.Status
	}
	return word, status
}

// planStep is a step of the agent's plan.
type planStep struct {
	Step   string `json:"step"`
	Status string `json:"status"` // pending, inProgress, completed
}

// tokenUsage is the number of tokens that a thread has used.
type tokenUsage struct {
	Total tokenCounts `json:"total"` // of the thread
	Last  tokenCounts `json:"last"`  // of the last request
}

// tokenCounts counts tokens by kind.
type tokenCounts struct {
	Input      uint64 `json:"inputTokens"` // including cached tokens
	Cached     uint64 `json:"cachedInputTokens"`
	CacheWrite uint64 `json:"cacheWriteInputTokens"`
	Output     uint64 `json:"outputTokens"`
}

// threadInfo describes a thread in the messages thread/start, thread/resume and thread/started.
type threadInfo struct {
	ID     string `json:"id"`
	Parent string `json:"parentThreadId"`
	Model  string `json:"model"`
	Path   string `json:"path"`
}

// threadItem is an item of a thread, such as a message or a command. The field Type determines which other fields are
// present.
type threadItem struct {
	Type        string `json:"type"`
	ID          string `json:"id"`
	Status      string `json:"status"` // inProgress, completed, failed, declined
	StartedAt   int64  `json:"startedAtMs"`
	CompletedAt int64  `json:"completedAtMs"`
	DurationMs  int64  `json:"durationMs"`

	Text    string          `json:"text"`    // agentMessage, plan
	Summary []string        `json:"summary"` // reasoning
	Content json.RawMessage `json:"content"` // reasoning: texts; userMessage: parts

	Command string          `json:"command"` // commandExecution
	Cwd     string          `json:"cwd"`
	Actions []commandAction `json:"commandActions"`
	Output  *string         `json:"aggregatedOutput"`
	Exit    *int            `json:"exitCode"`
	Source  string          `json:"source"`

	Changes []fileChange `json:"changes"` // fileChange

	Server    string          `json:"server"` // mcpToolCall
	Tool      string          `json:"tool"`   // mcpToolCall, dynamicToolCall, collabAgentToolCall
	Arguments json.RawMessage `json:"arguments"`
	Result    *mcpResult      `json:"result"`
	Error     *rpcError       `json:"error"`

	Query  string          `json:"query"` // webSearch
	Action json.RawMessage `json:"action"`
	Path   string          `json:"path"`   // imageView
	Review string          `json:"review"` // enteredReviewMode, exitedReviewMode

	Receivers   []string        `json:"receiverThreadIds"` // collabAgentToolCall
	Prompt      string          `json:"prompt"`
	AgentStates json.RawMessage `json:"agentsStates"`
	Kind        string          `json:"kind"` // subAgentActivity: started, interacted, interrupted, completed
	AgentThread string          `json:"agentThreadId"`
	AgentPath   string          `json:"agentPath"`
}

// commandAction is a part of a command, as the CLI has parsed it.
type commandAction struct {
	Command string `json:"command"`
}

// fileChange is the change of one file by a patch.
type fileChange struct {
	Path string     `json:"path"`
	Kind changeKind `json:"kind"`
	Diff string     `json:"diff"`
}

// changeKind is the kind of a fileChange.
type changeKind struct {
	Type     string `json:"type"` // add, delete, update
	MovePath string `json:"move_path,omitempty"`
}

// mcpResult is the result of a tool of an MCP server.
type mcpResult struct {
	Content []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	} `json:"content"`
	Structured json.RawMessage `json:"structuredContent"`
}

// contentTexts returns the text parts of the item's content.
func (i threadItem) contentTexts() []string {
	var plain []string
	if json.Unmarshal(i.Content, &plain) == nil {
		return plain
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if json.Unmarshal(i.Content, &parts) != nil {
		return nil
	}
	for _, p := range parts {
		if p.Text != "" {
			plain = append(plain, p.Text)
		}
	}
	return plain
}

// questionParams holds the parameters of all requests of the CLI, called questions, that ask for a permission or an
// answer. The method determines which are present.
type questionParams struct {
	ThreadID    string          `json:"threadId"`
	ItemID      string          `json:"itemId"`
	TurnID      string          `json:"turnId"`
	Reason      string          `json:"reason"`
	Command     string          `json:"command"` // item/commandExecution/requestApproval
	Cwd         string          `json:"cwd"`
	GrantRoot   string          `json:"grantRoot"`              // item/fileChange/requestApproval
	Network     *networkContext `json:"networkApprovalContext"` // item/commandExecution/requestApproval
	Permissions json.RawMessage `json:"permissions"`            // item/permissions/requestApproval
	Questions   []userQuestion  `json:"questions"`              // item/tool/requestUserInput

	ServerName string          `json:"serverName"` // mcpServer/elicitation/request
	Mode       string          `json:"mode"`
	Message    string          `json:"message"`
	URL        string          `json:"url"`
	Schema     json.RawMessage `json:"requestedSchema"`
	Meta       struct {
		Kind        string          `json:"codex_approval_kind"`
		Tool        string          `json:"tool_name"`
		Params      json.RawMessage `json:"tool_params"`
		Annotations struct {
			Destructive bool `json:"destructiveHint"`
		} `json:"tool_annotations"`
	} `json:"_meta"`
}

// networkContext is the host to which a command wants to connect.
type networkContext struct {
	Host string `json:"host"`
}

// userQuestion is a question of the agent to the user.
type userQuestion struct {
	ID       string `json:"id"`
	Header   string `json:"header"`
	Question string `json:"question"`
	IsOther  bool   `json:"isOther"`
	IsSecret bool   `json:"isSecret"`
	Options  []struct {
		Label       string `json:"label"`
		Description string `json:"description"`
	} `json:"options"`
}

// toolApprovalKind is the value of codex_approval_kind in a question of the CLI itself whether a tool of an MCP server
// may be called.
const toolApprovalKind = "mcp_tool_call"

// decode parses a part of a line. what names the part in errors.
func decode[T any](raw json.RawMessage, what string) (T, error) {
	var v T
	if len(bytes.TrimSpace(raw)) == 0 {
		return v, nil
	}
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, fmt.Errorf("%s: %w", what, err)
	}
	return v, nil
}
