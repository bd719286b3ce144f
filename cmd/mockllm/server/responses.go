package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
)

// responsesDialect parses requests and encodes answers of the OpenAI Responses API.
type responsesDialect struct{}

// responsesItem is an item of the input of a request to the Responses API.
type responsesItem struct {
	Type      string          `json:"type"`
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	CallID    string          `json:"call_id"`
	Name      string          `json:"name"`
	Arguments string          `json:"arguments"`
	Input     string          `json:"input"`
	Output    json.RawMessage `json:"output"`

	Recipient string            `json:"recipient"` // agent_message
	Namespace string            `json:"namespace"`
	Tools     []json.RawMessage `json:"tools"` // additional_tools
}

func (responsesDialect) parseRequest(body []byte) (*Conversation, error) {
	var req struct {
		Model        string            `json:"model"`
		Stream       bool              `json:"stream"`
		Instructions string            `json:"instructions"`
		Previous     string            `json:"previous_response_id"`
		Input        json.RawMessage   `json:"input"`
		Tools        []json.RawMessage `json:"tools"`
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, fmt.Errorf("the body is not a Responses request: %w", err)
	}
	if req.Previous != "" {
		return nil, errors.New("previous_response_id: nothing is stored here, send the whole input")
	}
	c := &Conversation{API: Responses, Model: req.Model, Stream: req.Stream}
	c.addSystem(req.Instructions)
	var items []responsesItem
	var text string
	if json.Unmarshal(req.Input, &text) == nil {
		c.addEntry(entryUserText, text)
	} else if err := json.Unmarshal(req.Input, &items); err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	for i, item := range items {
		if err := item.addToConversation(c); err != nil {
			return nil, fmt.Errorf("input[%d]: %w", i, err)
		}
	}
	for i, t := range req.Tools {
		if err := c.addTool(t); err != nil {
			return nil, fmt.Errorf("tools[%d]: %w", i, err)
		}
	}
	return c, nil
}

// addToConversation adds the item to the conversation. Items of types without content that a script can match, such as
// reasoning, are ignored.
func (i responsesItem) addToConversation(c *Conversation) error {
	switch i.Type {
	case "", "message":
		return i.addMessage(c)
	case "additional_tools":
		// For some models Codex declares its tools in the input.
		for n, t := range i.Tools {
			if err := c.addTool(t); err != nil {
				return fmt.Errorf("tools[%d]: %w", n, err)
			}
		}
	case "agent_message":
		return i.addAgentMessage(c)
	case "function_call":
		c.addToolCall(i.CallID, i.toolName(), i.Arguments)
	case "custom_tool_call":
		c.addToolCall(i.CallID, i.toolName(), i.Input)
	case "function_call_output", "custom_tool_call_output":
		text, err := joinTextParts(i.Output)
		if err != nil {
			return fmt.Errorf("output: %w", err)
		}
		return c.addToolResult(i.CallID, text)
	}
	return nil
}

// addAgentMessage adds a message from one agent of Codex to another. A message to a sub-agent is added as text of the
// user; a message to the root agent is ignored.
func (i responsesItem) addAgentMessage(c *Conversation) error {
	var parts []struct {
		Text      string `json:"text"`
		Encrypted string `json:"encrypted_content"` // the text of the tool call, which is not encrypted here
	}
	if err := json.Unmarshal(i.Content, &parts); err != nil {
		return fmt.Errorf("content: %w", err)
	}
	var said string
	for _, p := range parts {
		said += p.Text + p.Encrypted
	}
	if i.Recipient == "" || i.Recipient == "/root" {
		c.inputBytes += len(said)
		return nil
	}
	if _, payload, ok := strings.Cut(said, "Payload:\n"); ok {
		said = payload
	}
	return c.addUser(said)
}

// toolName returns the name of the called tool as scripts spell it.
func (i responsesItem) toolName() string {
	if i.Namespace == "" || i.Namespace == implicitNamespace {
		return i.Name
	}
	return i.Namespace + "." + i.Name
}

// addMessage adds an input item of type message to the conversation.
func (i responsesItem) addMessage(c *Conversation) error {
	all, err := textParts(i.Content)
	if err != nil {
		return fmt.Errorf("content: %w", err)
	}
	for _, text := range all {
		switch i.Role {
		case "system", "developer":
			c.addSystem(text)
		case "user":
			if err := c.addUser(text); err != nil {
				return err
			}
		case "assistant":
			c.addEntry(entryAssistantText, text)
		default:
			return fmt.Errorf("role: must be system, developer, user or assistant, not %q", i.Role)
		}
	}
	return nil
}

func (responsesDialect) newStream(w http.ResponseWriter, h answerHeader) answerSink {
	return &responsesStream{out: sseWriter{w: w}, header: h, index: -1}
}

func (responsesDialect) encodeAnswer(h answerHeader, blocks []contentBlock, e answerEnd) any {
	output := []orderedObject{}
	for _, b := range blocks {
		output = append(output, responsesOutputItem(b, b.text, "completed"))
	}
	return newResponseObject(h, output, &e)
}

func (responsesDialect) errorBody(f *apiError) any { return openaiErrorBody(f) }

// responsesOutputItem returns the JSON of an output item for a content block. text is the part of the block's text that
// was sent so far.
func responsesOutputItem(b contentBlock, text, status string) orderedObject {
	switch {
	case b.kind == stepThinking:
		summary := []orderedObject{}
		if text != "" {
			summary = append(summary, orderedObject{"type", "summary_text", "text", text})
		}
		return orderedObject{"id", "rs_" + b.id, "type", "reasoning", "summary", summary}
	case b.kind == stepToolCalls && b.custom:
		return b.addNamespace(orderedObject{"id", "ctc_" + b.id, "type", "custom_tool_call", "status", status,
			"call_id", "call_" + b.id, "name", b.name, "input", text})
	case b.kind == stepToolCalls:
		return b.addNamespace(orderedObject{"id", "fc_" + b.id, "type", "function_call", "status", status,
			"call_id", "call_" + b.id, "name", b.name, "arguments", text})
	default:
		content := []orderedObject{}
		if text != "" {
			content = append(content, responsesTextPart(text))
		}
		return orderedObject{"id", "msg_" + b.id, "type", "message", "status", status, "role", "assistant", "content", content}
	}
}

// addNamespace adds the namespace of the called tool to the JSON of a tool call, if the tool has one.
func (b contentBlock) addNamespace(call orderedObject) orderedObject {
	if b.namespace == "" {
		return call
	}
	return append(call, "namespace", b.namespace)
}

// responsesTextPart returns the JSON of a text part of an output message.
func responsesTextPart(text string) orderedObject {
	return orderedObject{"type", "output_text", "text", text, "annotations", []any{}, "logprobs", []any{}}
}

// newResponseObject returns the response object of the Responses API. Its status is in_progress if e is nil.
func newResponseObject(h answerHeader, output []orderedObject, e *answerEnd) orderedObject {
	status := "in_progress"
	var fail, incomplete, usage any
	if e != nil {
		status = "completed"
		usage = orderedObject{"input_tokens", h.input, "input_tokens_details", orderedObject{"cached_tokens", 0},
			"output_tokens", e.output, "output_tokens_details", orderedObject{"reasoning_tokens", 0}, "total_tokens", h.input + e.output}
		switch {
		case e.fault != nil:
			status = "failed"
			fail = orderedObject{"code", responsesErrorCode(e.fault), "message", e.fault.message}
		case e.stop == stopReasonLength:
			status, incomplete = "incomplete", orderedObject{"reason", "max_output_tokens"}
		case e.stop == stopReasonRefusal:
			status, incomplete = "incomplete", orderedObject{"reason", "content_filter"}
		}
	}
	return orderedObject{"id", "resp_" + h.id, "object", "response", "created_at", h.created, "status", status, "error", fail,
		"incomplete_details", incomplete, "instructions", nil, "metadata", orderedObject{}, "model", h.model, "output", output,
		"parallel_tool_calls", true, "temperature", nil, "tool_choice", "auto", "tools", []any{}, "top_p", nil, "usage", usage}
}

// responsesErrorCode returns the error code of the Responses API for an answer that failed.
func responsesErrorCode(f *apiError) string {
	switch {
	case f.kind != "":
		return f.kind
	case f.status == http.StatusTooManyRequests:
		return "rate_limit_exceeded"
	case f.status < 500:
		return "invalid_prompt"
	default:
		return "server_error"
	}
}

// responsesStream streams an answer in the format of the Responses API. It is an answerSink.
type responsesStream struct {
	out      sseWriter
	header   answerHeader
	begun    bool
	sequence int
	index    int // of the current output item
	now      contentBlock
	text     string
	done     []orderedObject
}

// sendEvent sends a server-sent event of the given type, with the next sequence number.
func (s *responsesStream) sendEvent(kind string, fields ...any) error {
	data := append(orderedObject{"type", kind, "sequence_number", s.sequence}, fields...)
	s.sequence++
	return s.out.sendJSON(kind, data)
}

// sendFirstEvents sends the events that precede the first output item of a response. Later calls do nothing.
func (s *responsesStream) sendFirstEvents() error {
	if s.begun {
		return nil
	}
	s.begun = true
	if err := s.sendEvent("response.created", "response", newResponseObject(s.header, []orderedObject{}, nil)); err != nil {
		return err
	}
	return s.sendEvent("response.in_progress", "response", newResponseObject(s.header, []orderedObject{}, nil))
}

// sendItemEvent sends a server-sent event about the output item that is being written.
func (s *responsesStream) sendItemEvent(kind string, fields ...any) error {
	id := responsesOutputItem(s.now, "", "")[1]
	at := []any{"item_id", id, "output_index", s.index}
	return s.sendEvent(kind, append(at, fields...)...)
}

func (s *responsesStream) openBlock(b contentBlock) error {
	if err := s.sendFirstEvents(); err != nil {
		return err
	}
	s.now, s.text = b, ""
	s.index++
	if err := s.sendEvent("response.output_item.added", "output_index", s.index, "item", responsesOutputItem(b, "", "in_progress")); err != nil {
		return err
	}
	switch b.kind {
	case stepThinking:
		return s.sendItemEvent("response.reasoning_summary_part.added", "summary_index", 0, "part", orderedObject{"type", "summary_text", "text", ""})
	case stepToolCalls:
		return nil
	default:
		return s.sendItemEvent("response.content_part.added", "content_index", 0, "part", responsesTextPart(""))
	}
}

func (s *responsesStream) writeText(text string) error {
	s.text += text
	switch {
	case s.now.kind == stepThinking:
		return s.sendItemEvent("response.reasoning_summary_text.delta", "summary_index", 0, "delta", text)
	case s.now.kind == stepToolCalls && s.now.custom:
		return s.sendItemEvent("response.custom_tool_call_input.delta", "delta", text)
	case s.now.kind == stepToolCalls:
		return s.sendItemEvent("response.function_call_arguments.delta", "delta", text)
	default:
		return s.sendItemEvent("response.output_text.delta", "content_index", 0, "delta", text, "logprobs", []any{})
	}
}

func (s *responsesStream) closeBlock() error {
	var err error
	switch {
	case s.now.kind == stepThinking:
		err = errors.Join(
			s.sendItemEvent("response.reasoning_summary_text.done", "summary_index", 0, "text", s.text),
			s.sendItemEvent("response.reasoning_summary_part.done", "summary_index", 0, "part", orderedObject{"type", "summary_text", "text", s.text}))
	case s.now.kind == stepToolCalls && s.now.custom:
		err = s.sendItemEvent("response.custom_tool_call_input.done", "input", s.text)
	case s.now.kind == stepToolCalls:
		err = s.sendItemEvent("response.function_call_arguments.done", "arguments", s.text)
	default:
		err = errors.Join(
			s.sendItemEvent("response.output_text.done", "content_index", 0, "text", s.text, "logprobs", []any{}),
			s.sendItemEvent("response.content_part.done", "content_index", 0, "part", responsesTextPart(s.text)))
	}
	item := responsesOutputItem(s.now, s.text, "completed")
	s.done = append(s.done, item)
	return errors.Join(err, s.sendEvent("response.output_item.done", "output_index", s.index, "item", item))
}

func (s *responsesStream) endAnswer(e answerEnd) error {
	if err := s.sendFirstEvents(); err != nil {
		return err
	}
	kind := "response.completed"
	switch {
	case e.fault != nil:
		kind = "response.failed"
	case e.stop == stopReasonLength || e.stop == stopReasonRefusal:
		kind = "response.incomplete"
	}
	return s.sendEvent(kind, "response", newResponseObject(s.header, append([]orderedObject{}, s.done...), &e))
}
