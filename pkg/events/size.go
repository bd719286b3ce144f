package events

import (
	"bytes"
	"encoding/json"
)

// eventOverheadBytes is the approximate size in bytes of an event without its text and data.
const eventOverheadBytes = 256

// OutputSize is the amount of an agent's output: the number of events of its runner's journal, and their size in bytes.
type OutputSize struct {
	Events uint64 `json:"events,omitempty"`
	Bytes  uint64 `json:"bytes,omitempty"`
}

// Plus returns the sum of o and p.
func (o OutputSize) Plus(p OutputSize) OutputSize {
	return OutputSize{o.Events + p.Events, o.Bytes + p.Bytes}
}

// Exceeds reports whether o exceeds a field of limit. A limit of 0 means no limit.
func (o OutputSize) Exceeds(limit OutputSize) bool {
	return limit.Events > 0 && o.Events > limit.Events || limit.Bytes > 0 && o.Bytes > limit.Bytes
}

// OutputSizeOf returns the amount of output that an event counts as: one event, and the bytes of its text and data plus
// eventOverheadBytes. A stored event that is read again counts the same.
func OutputSizeOf(e Event) OutputSize {
	return OutputSize{1, uint64(eventOverheadBytes + payloadSize(e.Data))} //nolint:gosec // lengths
}

// payloadSize returns the size in bytes of the text and data of a payload.
func payloadSize(p Payload) int {
	switch d := p.(type) {
	case BlockStart:
		return d.Block.size()
	case BlockComplete:
		return d.Block.size()
	case BlockUpdate:
		return d.Updates.size()
	case Log:
		return len(d.Message)
	case Error:
		return len(d.Message)
	case OpaquePayload:
		return jsonSize(d.Raw)
	}
	return 0
}

// jsonSize returns the length of raw in its stored form, which does not depend on the original spaces and escapes.
func jsonSize(raw json.RawMessage) int {
	switch {
	case raw == nil:
		return len("null")
	case isCompact(raw) && bytes.IndexByte(raw, '<') < 0 && bytes.IndexByte(raw, '>') < 0 && bytes.IndexByte(raw, '&') < 0 && bytes.IndexByte(raw, 0xe2) < 0:
		return len(raw) // json.Marshal escapes these characters, U+2028 and U+2029, which begin with 0xe2
	}
	stored, err := json.Marshal(raw)
	if err != nil {
		return len(raw)
	}
	return len(stored)
}

func todosSize(list []TodoItem) (n int) {
	for _, t := range list {
		n += len(t.Content)
	}
	return n
}

// size returns the size in bytes of the text and data of the block.
func (b Block) size() int {
	n := len(b.Content) + len(b.Summary) + jsonSize(b.Input) + len(b.DisplayName) + len(b.Description) + len(b.Output) + len(b.Message)
	for _, p := range b.Parts {
		n += len(p.Text) + len(p.Data)
	}
	return n + todosSize(b.Todos) + b.Plan.size() + b.Step.size()
}

// size returns the size in bytes of the text of the plan; 0 for nil.
func (p *Plan) size() (n int) {
	if p == nil {
		return 0
	}
	n = len(p.Title) + len(p.Explanation)
	for _, item := range p.Items {
		n += len(item.Content)
	}
	return n
}

// size returns the size in bytes of the text of the step; 0 for nil.
func (s *Step) size() int {
	if s == nil {
		return 0
	}
	return len(s.Title) + len(s.Result) + len(s.ErrorMessage)
}

// size returns the size in bytes of the text and data of the updates.
func (u BlockUpdates) size() int {
	n := jsonSize(u.Input) + todosSize(u.Todos) + u.Plan.size() + u.Step.size()
	for _, s := range []*string{u.DisplayName, u.Description, u.Summary, u.Output} {
		if s != nil {
			n += len(*s)
		}
	}
	return n
}
