// Package model is the built-in agent's way to a language model: a
// conversation in, a streamed answer out. The loop knows only these types.
package model

import (
	"encoding/json"
	"fmt"
)

// Role of a message.
type Role string

// The roles. The system prompt is not part of the conversation: it belongs to a request.
const (
	User      Role = "user"
	Assistant Role = "assistant"
	Tool      Role = "tool"
)

// Message is one entry of a conversation, as it is kept in the transcript.
type Message struct {
	Role    Role   `json:"role"`
	Text    string `json:"text,omitempty"`
	Images  []URL  `json:"images,omitempty"`  // user
	Calls   []Call `json:"calls,omitempty"`   // assistant
	CallID  string `json:"callId,omitempty"`  // tool: the call it answers
	Partial bool   `json:"partial,omitempty"` // assistant: cut short by an interrupt or a broken stream
}

// URL of an image; data: URLs carry it whole.
type URL string

// Call is a tool call that a model asked for.
type Call struct {
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Arguments json.RawMessage `json:"arguments"` // valid JSON
}

// Offer is a tool that a model may call.
type Offer struct {
	Name        string
	Description string
	Schema      json.RawMessage // JSON schema of the arguments
}

// Request asks for one answer.
type Request struct {
	Model    string
	System   string
	Messages []Message
	Tools    []Offer
}

// Delta is a piece of an answer; one field is set, Call with Arguments or alone.
type Delta struct {
	Text     string
	Thinking string
	Call     *CallDelta
}

// CallDelta is a piece of a tool call. The first of an index has ID and Name.
type CallDelta struct {
	Index     int
	ID, Name  string
	Arguments string
}

// Usage counts tokens. Input includes what was read from the cache.
type Usage struct{ Input, Output, CacheRead uint32 }

// Answer is a whole answer, or with an error beside it what came of it.
type Answer struct {
	Message Message
	Usage   Usage
	Model   string // as the endpoint names it
	Cut     bool   // by the token limit
}

// Error is a failure of the model or its endpoint, with the code of the turn's end.
type Error struct {
	Code    string // MODEL_ERROR, MODEL_NOT_FOUND, MODEL_RATE_LIMITED, MODEL_UNAUTHORIZED
	Message string
	Err     error // its cause, if there is more to know
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Message) }

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }
