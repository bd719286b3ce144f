// Package model is the built-in agent's client of language models: it sends a conversation and streams the answer. The
// loop uses only these types.
package model

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// CodeEmptyAnswer is the code of a turn in which the model answered with neither text nor a tool call.
const CodeEmptyAnswer = "MODEL_EMPTY_ANSWER"

// Role is the author of a message.
type Role string

// The roles. The system prompt is not part of the conversation: it belongs to a request.
const (
	RoleUser      Role = "user"
	RoleAssistant Role = "assistant"
	RoleTool      Role = "tool"
)

// Message is one message of a conversation with the model, in the form in which the transcript stores it.
type Message struct {
	Role    Role       `json:"role"`
	Text    string     `json:"text,omitempty"`
	Images  []ImageURL `json:"images,omitempty"`  // of a user
	Calls   []Call     `json:"calls,omitempty"`   // assistant
	CallID  string     `json:"callId,omitempty"`  // tool: the call it answers
	Partial bool       `json:"partial,omitempty"` // of an assistant: cut short by an interrupt or a broken stream
}

// ImageURL is the ImageURL of an image. A data: ImageURL holds the whole image.
type ImageURL string

// IsEmpty reports whether the message has neither text, images nor calls. White space is no text.
func (m Message) IsEmpty() bool {
	return strings.TrimSpace(m.Text) == "" && len(m.Images) == 0 && len(m.Calls) == 0
}

// Call is a tool call that the model requests in an answer. The transcript stores what the model really sent: Arguments
// that are not valid JSON are a JSON string with their text.
type Call struct {
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Arguments json.RawMessage `json:"arguments"` // valid JSON
}

// HasObject reports whether the arguments are a JSON object. A call with other arguments must not be run.
func (c Call) HasObject() bool { return isObject(c.Arguments) }

// ArgumentsError returns why the call cannot be run, for the model, or nil if its arguments are a JSON object. The
// message has the end of the arguments, because a request has an empty object in their place. cut reports whether the
// token limit cut the answer.
func (c Call) ArgumentsError(cut bool) error {
	if c.HasObject() {
		return nil
	}
	sent, isText := string(c.Arguments), bytes.HasPrefix(c.Arguments, []byte(`"`))
	if isText {
		sent = stringOf(c.Arguments)
	}
	end := strings.ToValidUTF8(sent[max(0, len(sent)-maxShownArguments):], "")
	var value any
	switch err := json.Unmarshal([]byte(sent), &value); {
	case isText && cut:
		return fmt.Errorf("arguments: the token limit cut the answer before they were complete, so the call was not run; they end with %q: send the call again with complete arguments, in smaller parts if they are long", end)
	case isText && err != nil:
		return fmt.Errorf("arguments: %w, so the call was not run; they end with %q", err, end)
	}
	return fmt.Errorf("arguments: not a JSON object, so the call was not run; they end with %q", end)
}

// maxShownArguments is the number of bytes of invalid arguments that the model is shown.
const maxShownArguments = 300

// ToolOffer is the name, description and schema of a tool that the model may call.
type ToolOffer struct {
	Name        string
	Description string
	Schema      json.RawMessage // JSON schema of the arguments
}

// Request is a request for one answer of the model.
type Request struct {
	Model    string
	System   string
	Messages []Message
	Tools    []ToolOffer
}

// Delta is a piece of an answer of the model. Exactly one field is set, except that Arguments may come with Call.
type Delta struct {
	Text     string
	Thinking string
	Call     *CallDelta
}

// CallDelta is a piece of a tool call in an answer. Index is the position of the call in the answer. The first piece for an
// index has the ID, which is unique in the conversation, and the Name.
type CallDelta struct {
	Index     int
	ID, Name  string
	Arguments string
}

// Usage counts tokens. Input includes tokens that were read from the cache.
type Usage struct{ Input, Output, CacheRead uint32 }

// Answer is a complete answer of the model, or, if it is returned with an error, the part of the answer that arrived
// before.
type Answer struct {
	Message Message
	Usage   Usage
	Model   string // as the endpoint names it
	Cut     bool   // the token limit cut the answer
}

// Error is a failure of the model or its API, with the error code for the turn.
type Error struct {
	Code    string // MODEL_CONTEXT_EXCEEDED, MODEL_ERROR, MODEL_NOT_FOUND, MODEL_RATE_LIMITED, MODEL_UNAUTHORIZED
	Message string
	Err     error // the cause, or nil
	Lost    bool  // the connection was lost within the answer: the same request may succeed now
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Message) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }
