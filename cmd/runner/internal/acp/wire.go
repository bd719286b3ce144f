package acp

import (
	"bytes"
	"encoding/json"
	"fmt"

	sdk "github.com/coder/acp-go-sdk"
)

// message is any JSON-RPC message. The SDK's own connection reads and writes in
// goroutines of its own, which a session may not have: its types are used alone.
type message struct {
	ID     json.RawMessage   `json:"id"`
	Method string            `json:"method"`
	Params json.RawMessage   `json:"params"`
	Result json.RawMessage   `json:"result"`
	Error  *sdk.RequestError `json:"error"`
}

// request is one of ours, or a notification when it has no id.
type request struct {
	JSONRPC string `json:"jsonrpc"`
	ID      *int   `json:"id,omitempty"`
	Method  string `json:"method"`
	Params  any    `json:"params"`
}

// reply answers a request of the agent.
type reply struct {
	JSONRPC string            `json:"jsonrpc"`
	ID      json.RawMessage   `json:"id"`
	Result  any               `json:"result,omitempty"`
	Error   *sdk.RequestError `json:"error,omitempty"`
}

// update is the part of a session/update that says of which kind it is. The
// SDK's union takes an unknown kind for a known one of the same shape.
type update struct {
	SessionID sdk.SessionId   `json:"sessionId"`
	Update    json.RawMessage `json:"update"`
}

type updateKind struct {
	Kind string `json:"sessionUpdate"`
}

// toolUpdate is a tool_call, a tool_call_update or the call of a permission
// request. Input and output stay as they were written, and content is decoded
// piece by piece, so that one unknown kind does not hide the rest.
type toolUpdate struct {
	ID        string                 `json:"toolCallId"`
	Title     *string                `json:"title"`
	Kind      *sdk.ToolKind          `json:"kind"`
	Status    *sdk.ToolCallStatus    `json:"status"`
	Locations []sdk.ToolCallLocation `json:"locations"`
	Content   []json.RawMessage      `json:"content"`
	RawInput  json.RawMessage        `json:"rawInput"`
	RawOutput json.RawMessage        `json:"rawOutput"`
}

// permissionRequest is the SDK's, with the call in our shape.
type permissionRequest struct {
	SessionID sdk.SessionId          `json:"sessionId"`
	Options   []sdk.PermissionOption `json:"options"`
	ToolCall  toolUpdate             `json:"toolCall"`
}

// decode reads a part of a line; what says which.
func decode[T any](raw json.RawMessage, what string) (T, error) {
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, fmt.Errorf("%s: %w", what, err)
	}
	return v, nil
}

// given tells whether an optional value says something: null and {} do not.
func given(raw json.RawMessage) bool {
	raw = bytes.TrimSpace(raw)
	return len(raw) > 0 && !bytes.Equal(raw, []byte("null")) && !bytes.Equal(raw, []byte("{}"))
}
