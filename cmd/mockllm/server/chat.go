package server

import (
	"encoding/json"
	"fmt"
	"net/http"
)

// chatDialect parses requests and encodes answers of the OpenAI Chat Completions API.
type chatDialect struct{}

func (chatDialect) parseRequest(body []byte) (*Conversation, error) {
	var req struct {
		Model         string `json:"model"`
		Stream        bool   `json:"stream"`
		StreamOptions struct {
			IncludeUsage bool `json:"include_usage"`
		} `json:"stream_options"`
		Messages []chatMessage `json:"messages"`
		Tools    []struct {
			Type     string          `json:"type"`
			Function json.RawMessage `json:"function"`
		} `json:"tools"`
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, fmt.Errorf("the body is not a Chat Completions request: %w", err)
	}
	c := &Conversation{API: Chat, Model: req.Model, Stream: req.Stream, Usage: req.StreamOptions.IncludeUsage}
	for i, m := range req.Messages {
		if err := m.addToConversation(c); err != nil {
			return nil, fmt.Errorf("messages[%d]: %w", i, err)
		}
	}
	for i, t := range req.Tools {
		if err := c.addTool(t.Function); err != nil {
			return nil, fmt.Errorf("tools[%d].function: %w", i, err)
		}
	}
	return c, nil
}

// chatMessage is a message in a request to the Chat Completions API.
type chatMessage struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCallID string          `json:"tool_call_id"`
	ToolCalls  []struct {
		ID       string `json:"id"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// addToConversation adds the message, its tool calls included, to the conversation.
func (m chatMessage) addToConversation(c *Conversation) error {
	all, err := textParts(m.Content)
	if err != nil {
		return fmt.Errorf("content: %w", err)
	}
	switch m.Role {
	case "system", "developer":
		for _, text := range all {
			c.addSystem(text)
		}
	case "user":
		for _, text := range all {
			if err := c.addUser(text); err != nil {
				return err
			}
		}
	case "assistant":
		for _, text := range all {
			c.addEntry(entryAssistantText, text)
		}
		for _, call := range m.ToolCalls {
			c.addToolCall(call.ID, call.Function.Name, call.Function.Arguments)
		}
	case "tool":
		text, err := joinTextParts(m.Content)
		if err != nil {
			return fmt.Errorf("content: %w", err)
		}
		return c.addToolResult(m.ToolCallID, text)
	default:
		return fmt.Errorf("role: must be system, developer, user, assistant or tool, not %q", m.Role)
	}
	return nil
}

func (chatDialect) newStream(w http.ResponseWriter, h answerHeader) answerSink {
	return &chatStream{out: sseWriter{w: w}, header: h, tool: -1}
}

func (chatDialect) encodeAnswer(h answerHeader, blocks []contentBlock, e answerEnd) any {
	var text, thinking string
	var calls []orderedObject
	for _, b := range blocks {
		switch b.kind {
		case stepThinking:
			thinking += b.text
		case stepToolCalls:
			calls = append(calls, orderedObject{"id", "call_" + b.id, "type", "function", "function", orderedObject{"name", b.name, "arguments", b.text}})
		default:
			text += b.text
		}
	}
	message := orderedObject{"role", "assistant", "content", nilIfEmpty(text), "refusal", nil}
	if thinking != "" {
		message = append(message, "reasoning_content", thinking)
	}
	if calls != nil {
		message = append(message, "tool_calls", calls)
	}
	return orderedObject{"id", "chatcmpl-" + h.id, "object", "chat.completion", "created", h.created, "model", h.model,
		"choices", []orderedObject{{"index", 0, "message", message, "logprobs", nil, "finish_reason", chatFinishReason(e.stop)}},
		"usage", chatUsage(h.input, e.output)}
}

// nilIfEmpty returns s, or nil, which is null in JSON, if s is empty.
func nilIfEmpty(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func (chatDialect) errorBody(f *apiError) any { return openaiErrorBody(f) }

// openaiErrorBody returns the body of an error response of the Chat Completions API and the Responses API.
func openaiErrorBody(f *apiError) orderedObject {
	kind := f.kind
	if kind == "" {
		kind = openaiErrorTypes[f.status]
	}
	if kind == "" {
		kind = "server_error"
	}
	return orderedObject{"error", orderedObject{"message", f.message, "type", kind, "param", nil, "code", nil}}
}

// openaiErrorTypes maps HTTP statuses to the error types of OpenAI's APIs.
var openaiErrorTypes = map[int]string{
	400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
	413: "invalid_request_error", 429: "rate_limit_exceeded",
}

// chatFinishReason converts a stop reason of a script to the finish_reason of Chat Completions.
func chatFinishReason(stop string) string {
	return map[string]string{stopReasonEnd: "stop", stopReasonLength: "length", stopReasonRefusal: "content_filter", stopReasonTools: "tool_calls"}[stop]
}

func chatUsage(input, output int) orderedObject {
	return orderedObject{"prompt_tokens", input, "completion_tokens", output, "total_tokens", input + output}
}

// chatStream streams an answer in the format of the Chat Completions API. It is an answerSink.
type chatStream struct {
	out    sseWriter
	header answerHeader
	begun  bool
	now    contentBlock
	tool   int // index of the last tool call
}

func (s *chatStream) sendChunk(choices []orderedObject, usage any) error {
	o := orderedObject{"id", "chatcmpl-" + s.header.id, "object", "chat.completion.chunk", "created", s.header.created,
		"model", s.header.model, "choices", choices}
	if s.header.usage {
		o = append(o, "usage", usage)
	}
	return s.out.sendJSON("", o)
}

func (s *chatStream) sendDelta(d orderedObject) error {
	if !s.begun {
		s.begun = true
		role := orderedObject{"role", "assistant", "content", ""}
		if err := s.sendChunk([]orderedObject{{"index", 0, "delta", role, "logprobs", nil, "finish_reason", nil}}, nil); err != nil {
			return err
		}
	}
	return s.sendChunk([]orderedObject{{"index", 0, "delta", d, "logprobs", nil, "finish_reason", nil}}, nil)
}

func (s *chatStream) openBlock(b contentBlock) error {
	s.now = b
	if b.kind != stepToolCalls {
		return nil
	}
	s.tool++
	return s.sendDelta(orderedObject{"tool_calls", []orderedObject{{"index", s.tool, "id", "call_" + b.id, "type", "function",
		"function", orderedObject{"name", b.name, "arguments", ""}}}})
}

func (s *chatStream) writeText(text string) error {
	switch s.now.kind {
	case stepThinking:
		return s.sendDelta(orderedObject{"reasoning_content", text})
	case stepToolCalls:
		return s.sendDelta(orderedObject{"tool_calls", []orderedObject{{"index", s.tool, "function", orderedObject{"arguments", text}}}})
	default:
		return s.sendDelta(orderedObject{"content", text})
	}
}

func (s *chatStream) closeBlock() error { return nil }

func (s *chatStream) endAnswer(e answerEnd) error {
	if e.fault != nil {
		return s.out.sendJSON("", openaiErrorBody(e.fault))
	}
	last := []orderedObject{{"index", 0, "delta", orderedObject{}, "logprobs", nil, "finish_reason", chatFinishReason(e.stop)}}
	if err := s.sendChunk(last, nil); err != nil {
		return err
	}
	if s.header.usage {
		if err := s.sendChunk([]orderedObject{}, chatUsage(s.header.input, e.output)); err != nil {
			return err
		}
	}
	return s.out.sendRaw("", "[DONE]")
}
