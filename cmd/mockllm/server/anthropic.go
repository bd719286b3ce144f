package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// anthropicDialect parses requests and encodes answers of the Anthropic Messages API. counting is set for requests that
// only count tokens.
type anthropicDialect struct{ counting bool }

// anthropicBlock is a content block of a message in a request to the Anthropic Messages API.
type anthropicBlock struct {
	Type      string          `json:"type"`
	Text      string          `json:"text"`
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Input     json.RawMessage `json:"input"`
	ToolUseID string          `json:"tool_use_id"`
	Content   json.RawMessage `json:"content"`
}

func (a anthropicDialect) parseRequest(body []byte) (*Conversation, error) {
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
	system, err := joinTextParts(req.System)
	if err != nil {
		return nil, fmt.Errorf("system: %w", err)
	}
	c.addSystem(system)
	for i, m := range req.Messages {
		if m.Role != "user" && m.Role != "assistant" && m.Role != "system" {
			return nil, fmt.Errorf("messages.%d.role: must be user or assistant, not %q", i, m.Role)
		}
		if err := a.addMessage(c, m.Role, m.Content); err != nil {
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

func (anthropicDialect) addMessage(c *Conversation, role string, content json.RawMessage) error {
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
			c.addEntry(entryAssistantText, b.Text)
		case b.Type == "tool_use":
			c.addToolCall(b.ID, b.Name, string(b.Input))
		case b.Type == "tool_result":
			var text string
			if text, err = joinTextParts(b.Content); err == nil {
				err = c.addToolResult(b.ToolUseID, text)
			}
		}
		if err != nil {
			return fmt.Errorf("content.%d: %w", i, err)
		}
	}
	return nil
}

func (anthropicDialect) newStream(w http.ResponseWriter, h answerHeader) answerSink {
	return &anthropicStream{out: sseWriter{w: w}, header: h}
}

func (anthropicDialect) encodeAnswer(h answerHeader, blocks []contentBlock, e answerEnd) any {
	content := []orderedObject{}
	for _, b := range blocks {
		switch b.kind {
		case stepThinking:
			content = append(content, orderedObject{"type", "thinking", "thinking", b.text, "signature", thinkingSignature(b)})
		case stepToolCalls:
			content = append(content, orderedObject{"type", "tool_use", "id", "toolu_" + b.id, "name", b.name, "input", json.RawMessage(b.text)})
		default:
			content = append(content, orderedObject{"type", "text", "text", b.text})
		}
	}
	return orderedObject{"id", "msg_" + h.id, "type", "message", "role", "assistant", "model", h.model, "content", content,
		"stop_reason", anthropicStopReason(e.stop), "stop_sequence", nil, "usage", anthropicUsage(h.input, e.output)}
}

func (anthropicDialect) errorBody(f *apiError) any { return anthropicErrorBody(f) }

// anthropicErrorBody returns the body of an error response of the Anthropic API.
func anthropicErrorBody(f *apiError) orderedObject {
	kind := f.kind
	if kind == "" {
		kind = anthropicErrorTypes[f.status]
	}
	if kind == "" {
		kind = "api_error"
	}
	return orderedObject{"type", "error", "error", orderedObject{"type", kind, "message", f.message}}
}

// anthropicErrorTypes maps HTTP statuses to the error types of Anthropic's API.
var anthropicErrorTypes = map[int]string{
	400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error", 404: "not_found_error",
	413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 504: "timeout_error", 529: "overloaded_error",
}

// anthropicStopReason converts a stop reason of a script to the value that Anthropic's API has for it.
func anthropicStopReason(stop string) string {
	return map[string]string{stopReasonEnd: "end_turn", stopReasonLength: "max_tokens", stopReasonRefusal: "refusal", stopReasonTools: "tool_use"}[stop]
}

func anthropicUsage(input, output int) orderedObject {
	return orderedObject{"input_tokens", input, "cache_creation_input_tokens", 0, "cache_read_input_tokens", 0,
		"output_tokens", output, "service_tier", "standard"}
}

// thinkingSignature returns a placeholder for the signature that Anthropic adds to a thinking block. Clients must send
// it back unchanged, but the mock server does not check that.
func thinkingSignature(b contentBlock) string { return "mockllm-" + b.id }

// anthropicStream streams an answer in the format of the Anthropic Messages API. It is an answerSink.
type anthropicStream struct {
	out    sseWriter
	header answerHeader
	begun  bool
	index  int
	now    contentBlock
}

// sendMessageStart sends the event message_start before the first block of an answer. Later calls do nothing.
func (s *anthropicStream) sendMessageStart() error {
	if s.begun {
		return nil
	}
	s.begun = true
	err := s.out.sendJSON("message_start", orderedObject{"type", "message_start", "message", orderedObject{
		"id", "msg_" + s.header.id, "type", "message", "role", "assistant", "model", s.header.model, "content", []any{},
		"stop_reason", nil, "stop_sequence", nil, "usage", anthropicUsage(s.header.input, 0)}})
	if err != nil {
		return err
	}
	return s.out.sendJSON("ping", orderedObject{"type", "ping"})
}

func (s *anthropicStream) openBlock(b contentBlock) error {
	if err := s.sendMessageStart(); err != nil {
		return err
	}
	s.now = b
	var content orderedObject
	switch b.kind {
	case stepThinking:
		content = orderedObject{"type", "thinking", "thinking", "", "signature", ""}
	case stepToolCalls:
		content = orderedObject{"type", "tool_use", "id", "toolu_" + b.id, "name", b.name, "input", orderedObject{}}
	default:
		content = orderedObject{"type", "text", "text", ""}
	}
	return s.out.sendJSON("content_block_start", orderedObject{"type", "content_block_start", "index", s.index, "content_block", content})
}

func (s *anthropicStream) sendDelta(d orderedObject) error {
	return s.out.sendJSON("content_block_delta", orderedObject{"type", "content_block_delta", "index", s.index, "delta", d})
}

func (s *anthropicStream) writeText(text string) error {
	switch s.now.kind {
	case stepThinking:
		return s.sendDelta(orderedObject{"type", "thinking_delta", "thinking", text})
	case stepToolCalls:
		return s.sendDelta(orderedObject{"type", "input_json_delta", "partial_json", text})
	default:
		return s.sendDelta(orderedObject{"type", "text_delta", "text", text})
	}
}

func (s *anthropicStream) closeBlock() error {
	if s.now.kind == stepThinking {
		if err := s.sendDelta(orderedObject{"type", "signature_delta", "signature", thinkingSignature(s.now)}); err != nil {
			return err
		}
	}
	err := s.out.sendJSON("content_block_stop", orderedObject{"type", "content_block_stop", "index", s.index})
	s.index++
	return err
}

func (s *anthropicStream) endAnswer(e answerEnd) error {
	if err := s.sendMessageStart(); err != nil {
		return err
	}
	if e.fault != nil {
		return s.out.sendJSON("error", anthropicErrorBody(e.fault))
	}
	err := s.out.sendJSON("message_delta", orderedObject{"type", "message_delta",
		"delta", orderedObject{"stop_reason", anthropicStopReason(e.stop), "stop_sequence", nil}, "usage", anthropicUsage(s.header.input, e.output)})
	if err != nil {
		return err
	}
	return s.out.sendJSON("message_stop", orderedObject{"type", "message_stop"})
}
