package modelstreamtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// request is the part of a Chat Completions request that CheckRequest validates.
type request struct {
	Stream   bool      `json:"stream"`
	Messages []message `json:"messages"`
	Tools    []struct {
		Function struct {
			Name       string `json:"name"`
			Parameters struct {
				Type       string                     `json:"type"`
				Properties map[string]json.RawMessage `json:"properties"`
			} `json:"parameters"`
		} `json:"function"`
	} `json:"tools"`
}

type message struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCallID string          `json:"tool_call_id"`
	ToolCalls  []struct {
		ID       string `json:"id"`
		Type     string `json:"type"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// functionName matches the names of functions that OpenAI accepts.
var functionName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// CheckRequest returns an error for the body of a Chat Completions request that a strict model server refuses. The names of tools and the ids of
// calls must be unique, arguments must be JSON objects, a message must have content or calls, a text must not be white space alone, and each call
// must have exactly one result, in the messages that follow it.
func CheckRequest(body []byte) error {
	var r request
	if err := json.Unmarshal(body, &r); err != nil {
		return err
	}
	if len(r.Messages) == 0 || !r.Stream {
		return errors.New("no messages, or stream is not set")
	}
	if err := r.checkTools(); err != nil {
		return err
	}
	known, open := map[string]bool{}, map[string]bool{}
	for i, m := range r.Messages {
		if m.Role == "tool" {
			if !open[m.ToolCallID] {
				return fmt.Errorf("messages[%d]: a result for %q, which is no open call of the message before", i, m.ToolCallID)
			}
			delete(open, m.ToolCallID)
			continue
		}
		if len(open) > 0 {
			return fmt.Errorf("messages[%d]: calls without a result: %v", i, open)
		}
		if err := m.check(known, open); err != nil {
			return fmt.Errorf("messages[%d]: %w", i, err)
		}
	}
	if len(open) > 0 {
		return fmt.Errorf("calls without a result: %v", open)
	}
	return nil
}

// checkTools returns an error if two tools have one name, or a tool's name or schema is not accepted.
func (r request) checkTools() error {
	names := map[string]bool{}
	for i, t := range r.Tools {
		f := t.Function
		switch {
		case !functionName.MatchString(f.Name):
			return fmt.Errorf("tools[%d]: name %q", i, f.Name)
		case names[f.Name]:
			return fmt.Errorf("tools[%d]: tool names must be unique: %s", i, f.Name)
		case f.Parameters.Type != "object" || f.Parameters.Properties == nil:
			return fmt.Errorf("tools[%d] (%s): the schema is not an object with properties", i, f.Name)
		}
		names[f.Name] = true
	}
	return nil
}

// check returns an error if the message, which is not a result, is not accepted. It adds the ids of its calls to known and open.
func (m message) check(known, open map[string]bool) error {
	var text string
	isText := len(m.Content) > 0 && json.Unmarshal(m.Content, &text) == nil // null is an empty text
	empty := len(m.Content) == 0 || isText && strings.TrimSpace(text) == "" || string(m.Content) == "[]"
	switch {
	case empty && text != "":
		return fmt.Errorf("a message of the %s has white space alone as its text", m.Role)
	case m.Role != "system" && m.Role != "user" && m.Role != "assistant":
		return fmt.Errorf("role %q", m.Role)
	case empty && len(m.ToolCalls) == 0:
		return fmt.Errorf("a message of the %s must have content or tool calls", m.Role)
	case len(m.ToolCalls) > 0 && m.Role != "assistant":
		return fmt.Errorf("tool calls of the %s", m.Role)
	}
	for _, c := range m.ToolCalls {
		var object map[string]json.RawMessage
		switch {
		case c.ID == "" || known[c.ID]:
			return fmt.Errorf("call id %q is empty or not unique", c.ID)
		case !functionName.MatchString(c.Function.Name):
			return fmt.Errorf("call %s: name %q", c.ID, c.Function.Name)
		case json.Unmarshal([]byte(c.Function.Arguments), &object) != nil || object == nil:
			return fmt.Errorf("call %s: arguments are not a JSON object: %.100q", c.ID, c.Function.Arguments)
		}
		known[c.ID], open[c.ID] = true, true
	}
	return nil
}
