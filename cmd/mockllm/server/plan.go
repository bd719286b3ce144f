package server

import (
	"fmt"
	"slices"
	"strings"
	"text/template"
	"time"
)

// The reasons for the end of an answer, as scripts spell them; each dialect has its own words.
const (
	stopEnd     = "end"
	stopLength  = "length"
	stopRefusal = "refusal"
	stopTools   = "tools" // never scripted: it follows from tool calls
)

// plan is the answer to one request, with every template of the script filled in.
type plan struct {
	rule  string
	parts []part
	stop  string
}

// part is one piece of a plan: a text, a tool call, a delay, an error or a break.
type part struct {
	kind   stepKind // stepTools stands for one call here
	text   string
	pacing pacing
	name   string // of the tool
	// namespace of the tool, "" for none
	namespace string
	custom    bool // the tool takes free text
	delay     time.Duration
	fault     *fault
}

// fault is an error with which the server answers a request.
type fault struct {
	status     int
	kind       string
	message    string
	retryAfter time.Duration
}

// plan returns the answer of the first rule that matches and has a reply left. It tries the newest text of the last
// turn first: after an error, CLIs put the text that failed and the next one into the same message.
func (s *Server) plan(c *Conversation) (plan, error) {
	v := &view{conversation: c, turns: c.turns()}
	texts := v.last().texts
	if len(texts) == 0 {
		texts = []string{""}
	}
	for _, text := range slices.Backward(texts) {
		for _, r := range s.script.rules {
			captures, ok := r.match.holds(v, text)
			if !ok {
				continue
			}
			answer := r.replies[r.completedReplies(len(v.last().results))]
			if answer.tail || !s.counts.useRule(r, c) {
				continue
			}
			v.captures = captures
			return r.fill(answer, v)
		}
	}
	return plan{}, fmt.Errorf("no rule of the script matches this conversation (turn %d, last user text %q, %d tool results since)",
		len(v.turns), lastOf(texts), len(v.last().results))
}

// completedReplies returns the number of replies that the tool results after the last user text have completed. It depends on
// the conversation only, so concurrent conversations do not affect each other.
func (r *rule) completedReplies(results int) int {
	if r.match.toolResult != nil {
		return 0
	}
	i := 0
	for i < len(r.replies)-1 && results >= r.replies[i].calls {
		results -= r.replies[i].calls
		i++
	}
	return i
}

// holds reports whether text and the conversation meet every condition, and returns the submatches of the user pattern.
func (m *match) holds(v *view, text string) ([]string, bool) {
	c, last := v.conversation, v.last()
	switch {
	case len(m.apis) > 0 && !slices.Contains(m.apis, c.API),
		m.stream != nil && *m.stream != c.Stream,
		m.minTurns > 0 && len(v.turns) < m.minTurns,
		m.maxTurns > 0 && len(v.turns) > m.maxTurns,
		m.noTools && len(c.tools) > 0,
		slices.ContainsFunc(m.tools, func(name string) bool { return !c.offers(name) }),
		!matches(m.model, c.Model),
		!matches(m.system, c.System),
		m.toolResult != nil && (len(last.results) == 0 || !matches(m.toolResult, lastOf(last.results))):
		return nil, false
	case m.user == nil:
		return nil, true
	}
	return m.user.find(text)
}

// matches reports whether a text meets a condition. Every text meets the nil condition.
func matches(m *textMatch, text string) bool {
	if m == nil {
		return true
	}
	_, ok := m.find(text)
	return ok
}

func containsFold(text, part string) bool {
	return strings.Contains(strings.ToLower(text), strings.ToLower(part))
}

// fill returns the plan of a reply with the templates filled in.
func (r *rule) fill(answer reply, v *view) (plan, error) {
	p := plan{rule: r.name, stop: stopEnd}
	for _, s := range answer.steps {
		if err := p.add(s, v); err != nil {
			return plan{}, fmt.Errorf("rule %q, line %d of the script: %w", r.name, s.line, err)
		}
	}
	return p, nil
}

// add appends the parts of a step.
func (p *plan) add(s step, v *view) error {
	out := part{kind: s.kind, pacing: s.pacing, delay: s.delay}
	var err error
	switch s.kind {
	case stepText, stepThinking, stepEndless:
		out.text, err = v.text(s.text)
		if out.text == "" {
			return err // the text of the template is empty
		}
		p.parts = append(p.parts, out)
	case stepTools:
		p.stop = stopTools
		for _, call := range s.calls {
			c, callErr := fillCall(call, s.pacing, v)
			if callErr != nil {
				return callErr
			}
			p.parts = append(p.parts, c)
		}
	case stepError:
		out.fault = &fault{status: s.fault.status, kind: s.fault.kind, retryAfter: s.fault.retryAfter}
		out.fault.message, err = v.text(s.text)
		p.parts = append(p.parts, out)
	case stepStop:
		p.stop = s.stop
	case stepDelay, stepBreak:
		p.parts = append(p.parts, out)
	}
	return err
}

// fillCall returns the part of a tool call. A call of free text is an error unless the request offers such a tool.
func fillCall(call callSpec, pace pacing, v *view) (part, error) {
	out := part{kind: stepTools, pacing: pace}
	out.namespace, out.name = v.conversation.splitName(call.name)
	if free, ok := call.input.(*template.Template); ok {
		if !v.conversation.customTools[call.name] {
			return out, fmt.Errorf("the request offers no tool %q that takes free text: its input must be a mapping", call.name)
		}
		out.custom = true
		var err error
		out.text, err = v.text(free)
		return out, err
	}
	filled, err := v.value(call.input)
	if err != nil {
		return out, fmt.Errorf("input of %s: %w", call.name, err)
	}
	input, err := marshal(filled)
	if err != nil {
		return out, fmt.Errorf("input of %s: %w", call.name, err)
	}
	out.text = string(input)
	return out, nil
}
