package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// wireChunk is a chunk of a streamed answer, or a whole answer of an endpoint that does not stream.
type wireChunk struct {
	Model   string       `json:"model"`
	Choices []wireChoice `json:"choices"`
	Usage   wireUsage    `json:"usage"`
}

type wireChoice struct {
	Index   int        `json:"index"`
	Delta   *wireDelta `json:"delta"`
	Message *wireDelta `json:"message"` // of a whole answer
	Finish  string     `json:"finish_reason"`
}

// wireDelta is a piece of an answer. Endpoints send the model's thinking in fields that are not in the standard.
type wireDelta struct {
	Content          json.RawMessage `json:"content"` // a string or a list of wirePart
	Refusal          string          `json:"refusal"`
	ReasoningContent string          `json:"reasoning_content"`
	Reasoning        string          `json:"reasoning"`
	Calls            []wireCall      `json:"tool_calls"`
	Function         *wireFunction   `json:"function_call"` // of endpoints that know only one call in an answer
}

// wirePart is a part of a content that is a list.
type wirePart struct {
	Type     string          `json:"type"`
	Text     string          `json:"text"`
	Thinking json.RawMessage `json:"thinking"` // a string or a list of wirePart
	Refusal  string          `json:"refusal"`
}

// wireCall is a piece of a tool call.
type wireCall struct {
	Index    *int         `json:"index"`
	ID       string       `json:"id"`
	Function wireFunction `json:"function"`
}

type wireFunction struct {
	Name      string          `json:"name"`
	Arguments json.RawMessage `json:"arguments"` // a piece of JSON as a string; some endpoints send the object itself
}

type wireUsage struct {
	Prompt     float64 `json:"prompt_tokens"`
	Completion float64 `json:"completion_tokens"`
	Details    struct {
		Cached float64 `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// decodeChunk decodes the data of an event. It returns a *failure for an error that the endpoint reports. A field of an unexpected type counts as
// absent.
func decodeChunk(ev event) (wireChunk, error) {
	data := bytes.TrimSpace(ev.data)
	if f := reportedFailure(ev.kind, data); f != nil {
		return wireChunk{}, f
	}
	var c wireChunk
	if !bytes.HasPrefix(data, []byte("{")) {
		return c, fmt.Errorf("an event is not a JSON object: %.100q", data)
	}
	var mismatch *json.UnmarshalTypeError
	if err := json.Unmarshal(data, &c); err != nil && !errors.As(err, &mismatch) {
		return c, fmt.Errorf("an event is not valid JSON: %w", err)
	}
	return c, nil
}

// isEmpty reports whether the chunk has no part of an answer, so that the request can be sent again.
func (c wireChunk) isEmpty() bool {
	for _, choice := range c.Choices {
		if choice.Finish != "" {
			return false
		}
		if d := choice.delta(); len(d.pieces()) > 0 || len(d.Calls) > 0 || d.Function != nil {
			return false
		}
	}
	return true
}

// delta returns the piece of the answer that the choice has.
func (c wireChoice) delta() wireDelta {
	switch {
	case c.Delta != nil:
		return *c.Delta
	case c.Message != nil:
		return *c.Message
	}
	return wireDelta{}
}

// calls returns the pieces of tool calls in d.
func (d wireDelta) calls() []wireCall {
	if d.Function == nil || len(d.Calls) > 0 {
		return d.Calls
	}
	return []wireCall{{Index: new(int), Function: *d.Function}}
}

// pieces returns the thinking and the text in d, in their order.
func (d wireDelta) pieces() []Delta {
	var out []Delta
	if d.ReasoningContent != "" {
		out = append(out, Delta{Thinking: d.ReasoningContent})
	} else if d.Reasoning != "" {
		out = append(out, Delta{Thinking: d.Reasoning})
	}
	out = append(out, contentPieces(d.Content)...)
	if d.Refusal != "" {
		out = append(out, Delta{Text: d.Refusal})
	}
	return out
}

// contentPieces returns the thinking and the text of a content, which is a string, a list of parts, or one part.
func contentPieces(raw json.RawMessage) []Delta {
	raw = bytes.TrimSpace(raw)
	if bytes.HasPrefix(raw, []byte("{")) {
		raw = append(append([]byte("["), raw...), ']')
	}
	var out []Delta
	var parts []json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		if s := stringOf(raw); s != "" {
			out = append(out, Delta{Text: s})
		}
		return out
	}
	for _, one := range parts {
		var p wirePart
		if json.Unmarshal(one, &p) != nil && p.Text == "" {
			p = wirePart{Text: stringOf(one)}
		}
		switch p.Type {
		case "thinking", "reasoning":
			text := p.Text
			for _, d := range contentPieces(p.Thinking) {
				text += d.Text + d.Thinking
			}
			if text != "" {
				out = append(out, Delta{Thinking: text})
			}
		default: // text, refusal, and their names in other APIs
			if s := p.Text + p.Refusal; s != "" {
				out = append(out, Delta{Text: s})
			}
		}
	}
	return out
}

// stringOf returns the value of a JSON string, and "" for other JSON.
func stringOf(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// arguments returns the piece of the arguments as text.
func (f wireFunction) arguments() string {
	raw := bytes.TrimSpace(f.Arguments)
	if s := stringOf(raw); s != "" || bytes.HasPrefix(raw, []byte(`"`)) || string(raw) == "null" {
		return s
	}
	return string(raw)
}

// finish is the meaning of the finish_reason of an answer.
type finish int

const (
	finishUnknown finish = iota // the answer is not a success
	finishComplete
	finishCut
	finishFiltered
	finishContext
)

// finishOf returns the meaning of a finish_reason.
func finishOf(reason string) finish {
	switch strings.ToLower(reason) {
	case "stop", "tool_calls", "function_call", "end_turn", "stop_sequence", "eos", "eos_token":
		return finishComplete
	case "length", "max_tokens":
		return finishCut
	case "content_filter":
		return finishFiltered
	case "model_context_window_exceeded", "context_length_exceeded":
		return finishContext
	}
	return finishUnknown
}
