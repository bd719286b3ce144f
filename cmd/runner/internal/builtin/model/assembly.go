package model

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// answerAssembly assembles an answer of the model from the chunks of a stream.
type answerAssembly struct {
	each  func(Delta) // is called with every piece of the answer
	used  map[string]bool
	text  strings.Builder
	calls []*callAssembly
	usage Usage
	model string

	choice   *int // the index of the first choice; others are ignored
	finished bool
	cut      bool
	failed   *Error
}

// callAssembly is a tool call that is being assembled.
type callAssembly struct {
	id     string // unique; set when the call is reported
	sentID string // of the endpoint, "" for none
	name   string
	index  *int // of the endpoint, nil for none
	args   strings.Builder
}

// newAnswerAssembly returns an answerAssembly for an answer to the messages, whose calls get other ids than the calls in the messages.
func newAnswerAssembly(messages []Message, each func(Delta)) *answerAssembly {
	a := &answerAssembly{each: each, used: map[string]bool{}}
	for _, m := range messages {
		for _, c := range m.Calls {
			a.used[c.ID] = true
		}
	}
	return a
}

// addChunk adds a chunk of the stream to the answer.
func (a *answerAssembly) addChunk(c wireChunk) {
	a.model = cmp.Or(c.Model, a.model)
	if u := c.Usage; u.Prompt > 0 || u.Completion > 0 {
		a.usage = Usage{Input: tokens(u.Prompt), Output: tokens(u.Completion), CacheRead: tokens(u.Details.Cached)}
	}
	for _, choice := range c.Choices {
		if a.choice == nil {
			a.choice = &choice.Index
		}
		if choice.Index != *a.choice {
			continue
		}
		d := choice.delta()
		for _, piece := range d.pieces() {
			a.text.WriteString(piece.Text)
			a.each(piece)
		}
		for _, p := range d.calls() {
			a.addCallPiece(p, choice.Delta == nil)
		}
		if choice.Finish != "" {
			a.addFinish(choice.Finish)
		}
	}
}

// tokens converts a number of tokens that an endpoint reports.
func tokens(n float64) uint32 { return uint32(max(0, min(n, math.MaxUint32))) }

// addFinish notes why the answer ends.
func (a *answerAssembly) addFinish(reason string) {
	switch finishOf(reason) {
	case finishComplete:
		a.finished = true
	case finishCut:
		a.finished, a.cut = true, true
	case finishFiltered:
		a.failed = &Error{Code: "MODEL_ERROR", Message: "the model's provider withheld the answer (" + reason + ")"}
	case finishContext:
		a.failed = &Error{Code: agent.CodeContextExceeded, Message: contextExceededHelp + " (" + reason + ")"}
	case finishUnknown:
		a.failed = &Error{Code: "MODEL_ERROR", Message: fmt.Sprintf("the model's answer ended with the reason %.100q, which is not a success", reason)}
	}
}

// addCallPiece adds a piece of a tool call to the answer. It reports the call when its name is known. whole reports whether the piece is a whole call,
// of an answer that is not streamed.
func (a *answerAssembly) addCallPiece(p wireCall, whole bool) {
	piece := p.Function.arguments()
	c := a.callOf(p)
	if c != nil && (whole || c.isEndedBy(p, piece)) {
		c = nil
	}
	if c == nil {
		c = &callAssembly{index: p.Index}
		a.calls = append(a.calls, c)
	}
	c.sentID = cmp.Or(c.sentID, p.ID)
	reported := c.name != ""
	c.name = cmp.Or(c.name, p.Function.Name)
	c.args.WriteString(piece)
	switch {
	case reported:
		a.each(Delta{Call: &CallDelta{Index: slices.Index(a.calls, c), Arguments: piece}})
	case c.name != "":
		a.report(c)
	}
}

// report calls each with all that is known of a call, and sets the call's id.
func (a *answerAssembly) report(c *callAssembly) {
	i := slices.Index(a.calls, c)
	c.id = uniqueID(cmp.Or(c.sentID, fmt.Sprintf("call_%d", i+1)), a.used)
	a.each(Delta{Call: &CallDelta{Index: i, ID: c.id, Name: c.name, Arguments: c.args.String()}})
}

// callOf returns the call that a piece seems to belong to, or nil. Endpoints leave out the index or the id, use one index for all calls, send the id
// or the name late, or repeat them with every piece. Therefore the id counts more than the index, and a later call more than an earlier one.
func (a *answerAssembly) callOf(p wireCall) *callAssembly {
	latest := func(is func(*callAssembly) bool) *callAssembly {
		for _, c := range slices.Backward(a.calls) {
			if is(c) {
				return c
			}
		}
		return nil
	}
	atIndex := func(c *callAssembly) bool { return p.Index == nil || c.index != nil && *c.index == *p.Index }
	if p.ID == "" {
		if c := latest(atIndex); c != nil || p.Function.Name != "" {
			return c
		}
		return latest(func(c *callAssembly) bool { return !c.isWhole() })
	}
	c := latest(func(c *callAssembly) bool { return c.sentID == p.ID && (c.index == nil || atIndex(c)) })
	if c == nil && p.Function.Name == "" {
		c = latest(func(c *callAssembly) bool { return c.sentID == p.ID && !c.isWhole() })
	}
	if c == nil {
		if c = latest(atIndex); c != nil && c.sentID != "" {
			return nil
		}
	}
	return c
}

// isEndedBy reports whether a piece that seems to belong to the call begins another one. arguments are those of the piece.
func (c *callAssembly) isEndedBy(p wireCall, arguments string) bool {
	if p.Function.Name == "" || c.name == "" {
		return false
	}
	return p.Function.Name != c.name || strings.TrimSpace(arguments) != "" && c.isWhole()
}

// isWhole reports whether the arguments are a whole JSON object.
func (c *callAssembly) isWhole() bool {
	return strings.HasSuffix(strings.TrimSpace(c.args.String()), "}") && isObject(json.RawMessage(c.args.String()))
}

// finish reports the calls that have no name, and returns the answer as received so far.
func (a *answerAssembly) finish() Answer {
	whole := a.finished && a.failed == nil
	m := Message{Role: RoleAssistant, Text: a.text.String(), Partial: !whole}
	for _, c := range a.calls {
		if c.id == "" {
			a.report(c)
		}
		raw := json.RawMessage(strings.TrimSpace(c.args.String()))
		switch {
		case len(raw) == 0 && whole && !a.cut:
			raw = json.RawMessage("{}")
		case json.Valid(raw):
		case !whole:
			continue // the call is incomplete
		default:
			raw, _ = json.Marshal(string(raw)) //nolint:errchkjson // a string
		}
		m.Calls = append(m.Calls, Call{ID: c.id, Name: c.name, Arguments: raw})
	}
	return Answer{Message: m, Usage: a.usage, Model: a.model, Cut: a.cut}
}

// isObject reports whether raw is a JSON object.
func isObject(raw json.RawMessage) bool {
	return bytes.HasPrefix(bytes.TrimSpace(raw), []byte("{")) && json.Valid(raw)
}
