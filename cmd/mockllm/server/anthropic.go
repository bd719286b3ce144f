package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// anthropic is the dialect of the Anthropic Messages API.
type anthropic struct{ counting bool }

// anthropicBlock is a content block of a message in a request of Anthropic Messages.
type anthropicBlock struct {
	Type      string          `json:"type"`
	Text      string          `json:"text"`
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Input     json.RawMessage `json:"input"`
	ToolUseID string          `json:"tool_use_id"`
	Content   json.RawMessage `json:"content"`
}

func (a anthropic) parse(body []byte) (*Conversation, error) {
	var req struct {
		Model     string          `json:"model"`
		System    json.RawMessage `json:"system"`
		MaxTokens int             `json:"max_tokens"`
		Stream    bool            `json:"stream"`
		Messages  []struct {
			Role    string          `json:"role"`
			Content json.RawMessage `json:"content"`
		} `json:"messages"`
		Tools []json.RawMessage `json:"tools"`
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, fmt.Errorf("the body is not a Messages request: %w", err)
	}
	if req.MaxTokens < 1 && !a.counting {
		return nil, errors.New("max_tokens: Field required")
	}
	c := &Conversation{API: Anthropic, Model: req.Model, Stream: req.Stream}
	system, err := joinedText(req.System)
	if err != nil {
		return nil, fmt.Errorf("system: %w", err)
	}
	c.addSystem(system)
	for i, m := range req.Messages {
		if m.Role != "user" && m.Role != "assistant" && m.Role != "system" {
			return nil, fmt.Errorf("messages.%d.role: must be user or assistant, not %q", i, m.Role)
		}
		if err := a.message(c, m.Role, m.Content); err != nil {
			return nil, fmt.Errorf("messages.%d: %w", i, err)
		}
	}
	for i, t := range req.Tools {
		if err := c.addTool(t); err != nil {
			return nil, fmt.Errorf("tools.%d: %w", i, err)
		}
	}
	return c, nil
}

func (anthropic) message(c *Conversation, role string, content json.RawMessage) error {
	var blocks []anthropicBlock
	if trimmed := bytes.TrimSpace(content); len(trimmed) > 0 && trimmed[0] == '"' {
		blocks = []anthropicBlock{{Type: "text"}}
		if err := json.Unmarshal(content, &blocks[0].Text); err != nil {
			return err
		}
	} else if err := json.Unmarshal(content, &blocks); err != nil {
		return fmt.Errorf("content: %w", err)
	}
	for i, b := range blocks {
		var err error
		switch {
		case b.Type == "text" && role == "system":
			c.addSystem(b.Text)
		case b.Type == "text" && role == "user":
			err = c.addUser(b.Text)
		case b.Type == "text":
			c.add(assistantText, b.Text)
		case b.Type == "tool_use":
			c.addCall(b.ID, b.Name, string(b.Input))
		case b.Type == "tool_result":
			var text string
			if text, err = joinedText(b.Content); err == nil {
				err = c.addResult(b.ToolUseID, text)
			}
		}
		if err != nil {
			return fmt.Errorf("content.%d: %w", i, err)
		}
	}
	return nil
}

func (anthropic) stream(w http.ResponseWriter, h answerHeader) sink {
	return &anthropicStream{out: sseWriter{w: w}, header: h}
}

func (anthropic) whole(h answerHeader, blocks []block, e ending) any {
	content := []object{}
	for _, b := range blocks {
		switch b.kind {
		case stepThinking:
			content = append(content, object{"type", "thinking", "thinking", b.text, "signature", signature(b)})
		case stepTools:
			content = append(content, object{"type", "tool_use", "id", "toolu_" + b.id, "name", b.name, "input", json.RawMessage(b.text)})
		default:
			content = append(content, object{"type", "text", "text", b.text})
		}
	}
	return object{"id", "msg_" + h.id, "type", "message", "role", "assistant", "model", h.model, "content", content,
		"stop_reason", anthropicStopReason(e.stop), "stop_sequence", nil, "usage", anthropicUsage(h.input, e.output)}
}

func (anthropic) fault(f *fault) any { return anthropicFault(f) }

// anthropicFault returns the body of an error.
func anthropicFault(f *fault) object {
	kind := f.kind
	if kind == "" {
		kind = anthropicKinds[f.status]
	}
	if kind == "" {
		kind = "api_error"
	}
	return object{"type", "error", "error", object{"type", kind, "message", f.message}}
}

// anthropicKinds maps HTTP statuses to the values that Anthropic's API has for the type of an error.
var anthropicKinds = map[int]string{
	400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error", 404: "not_found_error",
	413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 504: "timeout_error", 529: "overloaded_error",
}

// anthropicStopReason returns the stop reason in Anthropic's words.
func anthropicStopReason(stop string) string {
	return map[string]string{stopEnd: "end_turn", stopLength: "max_tokens", stopRefusal: "refusal", stopTools: "tool_use"}[stop]
}

func anthropicUsage(input, output int) object {
	return object{"input_tokens", input, "cache_creation_input_tokens", 0, "cache_read_input_tokens", 0,
		"output_tokens", output, "service_tier", "standard"}
}

// signature returns a value for the service's signature of thinking. Clients must send it back unchanged; it is not
// checked.
func signature(b block) string { return "mockllm-" + b.id }

// anthropicStream is the sink of an answer that is streamed in the format of Anthropic Messages.
type anthropicStream struct {
	out    sseWriter
	header answerHeader
	begun  bool
	index  int
	now    block
}

// begin sends the event message_start, once.
func (s *anthropicStream) begin() error {
	if s.begun {
		return nil
	}
	s.begun = true
	err := s.out.send("message_start", object{"type", "message_start", "message", object{
		"id", "msg_" + s.header.id, "type", "message", "role", "assistant", "model", s.header.model, "content", []any{},
		"stop_reason", nil, "stop_sequence", nil, "usage", anthropicUsage(s.header.input, 0)}})
	if err != nil {
		return err
	}
	return s.out.send("ping", object{"type", "ping"})
}

func (s *anthropicStream) open(b block) error {
	if err := s.begin(); err != nil {
		return err
	}
	s.now = b
	var content object
	switch b.kind {
	case stepThinking:
		content = object{"type", "thinking", "thinking", "", "signature", ""}
	case stepTools:
		content = object{"type", "tool_use", "id", "toolu_" + b.id, "name", b.name, "input", object{}}
	default:
		content = object{"type", "text", "text", ""}
	}
	return s.out.send("content_block_start", object{"type", "content_block_start", "index", s.index, "content_block", content})
}

func (s *anthropicStream) sendDelta(d object) error {
	return s.out.send("content_block_delta", object{"type", "content_block_delta", "index", s.index, "delta", d})
}

func (s *anthropicStream) piece(text string) error {
	switch s.now.kind {
	case stepThinking:
		return s.sendDelta(object{"type", "thinking_delta", "thinking", text})
	case stepTools:
		return s.sendDelta(object{"type", "input_json_delta", "partial_json", text})
	default:
		return s.sendDelta(object{"type", "text_delta", "text", text})
	}
}

func (s *anthropicStream) close() error {
	if s.now.kind == stepThinking {
		if err := s.sendDelta(object{"type", "signature_delta", "signature", signature(s.now)}); err != nil {
			return err
		}
	}
	err := s.out.send("content_block_stop", object{"type", "content_block_stop", "index", s.index})
	s.index++
	return err
}

func (s *anthropicStream) finish(e ending) error {
	if err := s.begin(); err != nil {
		return err
	}
	if e.fault != nil {
		return s.out.send("error", anthropicFault(e.fault))
	}
	err := s.out.send("message_delta", object{"type", "message_delta",
		"delta", object{"stop_reason", anthropicStopReason(e.stop), "stop_sequence", nil}, "usage", anthropicUsage(s.header.input, e.output)})
	if err != nil {
		return err
	}
	return s.out.send("message_stop", object{"type", "message_stop"})
}
