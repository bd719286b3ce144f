package acp

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"strconv"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// rpcMessage is any JSON-RPC message. Only the types of the SDK are used: its connection starts goroutines, which a
// session must not do.
type rpcMessage struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *answerError    `json:"error"`
}

// requestNumber returns the number of the session's request that an answer names: as a number, or as a string with the number. It returns 0 if the
// id is neither.
func (m rpcMessage) requestNumber() int {
	var id any
	if json.Unmarshal(m.ID, &id) != nil {
		return 0
	}
	n, err := strconv.ParseFloat(fmt.Sprint(id), 64)
	if err != nil || n != math.Trunc(n) || math.Abs(n) > math.MaxInt32 {
		return 0
	}
	return int(n)
}

// answerError is the error of an answer. An error that is not an error object of JSON-RPC is Malformed, and its message has the JSON.
type answerError struct {
	sdk.RequestError
	Malformed bool
}

// UnmarshalJSON decodes any JSON value.
func (e *answerError) UnmarshalJSON(raw []byte) error {
	if json.Unmarshal(raw, &e.RequestError) != nil {
		*e = answerError{sdk.RequestError{Message: "malformed error: " + agent.Truncate(string(raw), maxQuotedError)}, true}
	}
	return nil
}

// needsLogin reports whether the agent requires authentication first.
func (e *answerError) needsLogin() bool { return e.Code == -32000 }

// maxQuotedError is the maximum number of bytes of a malformed error that a message quotes.
const maxQuotedError = 1 << 10

// rpcRequest is a JSON-RPC request that the session sends, or a notification if it has no id.
type rpcRequest struct {
	JSONRPC string `json:"jsonrpc"`
	ID      *int   `json:"id,omitempty"`
	Method  string `json:"method"`
	Params  any    `json:"params"`
}

// rpcReply is the session's JSON-RPC response to a request of the agent.
type rpcReply struct {
	JSONRPC string            `json:"jsonrpc"`
	ID      json.RawMessage   `json:"id"`
	Result  any               `json:"result,omitempty"`
	Error   *sdk.RequestError `json:"error,omitempty"`
}

// sessionUpdate is the parameters of session/update, with the update not decoded yet. The union type of the SDK is not
// used, because it takes an unknown kind for a known one of the same shape.
type sessionUpdate struct {
	SessionID sdk.SessionId   `json:"sessionId"`
	Update    json.RawMessage `json:"update"`
}

// updateKind decodes only the kind of an update.
type updateKind struct {
	Kind string `json:"sessionUpdate"`
}

// toolUpdate is a tool_call, a tool_call_update, or the call in a permission request. Input and output keep their
// bytes, and content of an unknown kind does not hide the rest.
type toolUpdate struct {
	ID        string                 `json:"toolCallId"`
	Title     *string                `json:"title"`
	Kind      *sdk.ToolKind          `json:"kind"`
	Status    *sdk.ToolCallStatus    `json:"status"`
	Locations []sdk.ToolCallLocation `json:"locations"`
	Content   []callContent          `json:"content"`
	RawInput  json.RawMessage        `json:"rawInput"`
	RawOutput json.RawMessage        `json:"rawOutput"`
}

// messageChunk is an update with a piece of a message or of a thought.
type messageChunk struct {
	MessageID string       `json:"messageId"`
	Content   contentBlock `json:"content"`
}

// contentBlock is a content block of the protocol, of any type.
type contentBlock struct {
	Type     string `json:"type"`
	Text     string `json:"text"`
	Name     string `json:"name"` // resource_link
	URI      string `json:"uri"`
	MimeType string `json:"mimeType"` // image, audio
	Resource struct {
		URI  string `json:"uri"`
		Text string `json:"text"`
	} `json:"resource"`
}

// String returns the text of the block.
func (c contentBlock) String() string {
	switch c.Type {
	case "text":
		return c.Text
	case "resource_link":
		return "[" + c.Name + "](" + c.URI + ")"
	case "resource":
		return cmp.Or(c.Resource.Text, "["+c.Resource.URI+"]")
	case "image", "audio":
		return "[" + c.MimeType + "]"
	}
	return "[" + c.Type + "]"
}

// callContent is an item of the content of a tool call: a content block, a diff or a terminal.
type callContent struct {
	Type       string       `json:"type"`
	Content    contentBlock `json:"content"`
	Path       string       `json:"path"` // diff
	OldText    *string      `json:"oldText"`
	NewText    string       `json:"newText"`
	TerminalID string       `json:"terminalId"`
}

// permissionRequest is the parameters of session/request_permission. It differs from the SDK's type only in the type of
// the call.
type permissionRequest struct {
	SessionID sdk.SessionId          `json:"sessionId"`
	Options   []sdk.PermissionOption `json:"options"`
	ToolCall  toolUpdate             `json:"toolCall"`
}

// decode decodes a part of a line as JSON. what names the part in the error.
func decode[T any](raw json.RawMessage, what string) (T, error) {
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, fmt.Errorf("%s: %w", what, err)
	}
	return v, nil
}

// hasValue reports whether an optional JSON value is set: null and {} are not.
func hasValue(raw json.RawMessage) bool {
	raw = bytes.TrimSpace(raw)
	return len(raw) > 0 && !bytes.Equal(raw, []byte("null")) && !bytes.Equal(raw, []byte("{}"))
}
