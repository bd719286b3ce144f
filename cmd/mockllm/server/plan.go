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
	stopReasonEnd     = "end"
	stopReasonLength  = "length"
	stopReasonRefusal = "refusal"
	stopReasonTools   = "tools" // never scripted: it follows from tool calls
)

// answerPlan is the answer to one request as the script defines it, with all templates executed.
type answerPlan struct {
	rule  string
	parts []planPart
	stop  string
}

// planPart is one part of the plan of an answer: a text, a tool call, a delay, an error or a cut connection.
type planPart struct {
	kind   scriptStepKind // stepToolCalls stands for one call here
	text   string
	pacing textPacing
	name   string // name of the called tool
	// namespace of the tool, "" for none
	namespace string
	custom    bool // the tool takes free text
	delay     time.Duration
	fault     *apiError
}

// apiError is an error with which the server answers a request.
type apiError struct {
	status     int
	kind       string
	message    string
	retryAfter time.Duration
}

// planAnswer returns the answer of the first rule that matches and has a reply left. It tries the newest text of the
// last turn first, because agent CLIs put a text that failed and the text after it into the same message.
func (s *Server) planAnswer(c *Conversation) (answerPlan, error) {
	v := &templateView{conversation: c, turns: c.turns()}
	texts := v.lastTurn().texts
	if len(texts) == 0 {
		texts = []string{""}
	}
	for _, text := range slices.Backward(texts) {
		for _, r := range s.script.rules {
			captures, ok := r.match.areMet(v, text)
			if !ok {
				continue
			}
			answer := r.replies[r.completedReplies(len(v.lastTurn().results))]
			if answer.tail || !s.counts.tryUseRule(r, c) {
				continue
			}
			v.captures = captures
			return r.fillReply(answer, v)
		}
	}
	return answerPlan{}, fmt.Errorf("no rule of the script matches this conversation (turn %d, last user text %q, %d tool results since)",
		len(v.turns), lastOrEmpty(texts), len(v.lastTurn().results))
}

// completedReplies returns the number of replies of the rule that the conversation already contains, from the number of
// tool results after the last text of the user. It depends on the conversation only, so concurrent conversations do not
// affect each other.
func (r *scriptRule) completedReplies(results int) int {
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

// areMet reports whether text and the conversation meet every condition, and returns the submatches of the condition on
// the user's text.
func (m *ruleConditions) areMet(v *templateView, text string) ([]string, bool) {
	c, last := v.conversation, v.lastTurn()
	switch {
	case len(m.apis) > 0 && !slices.Contains(m.apis, c.API),
		m.stream != nil && *m.stream != c.Stream,
		m.minTurns > 0 && len(v.turns) < m.minTurns,
		m.maxTurns > 0 && len(v.turns) > m.maxTurns,
		m.noTools && len(c.tools) > 0,
		slices.ContainsFunc(m.tools, func(name string) bool { return !c.offersTool(name) }),
		!meetsCondition(m.model, c.Model),
		!meetsCondition(m.system, c.System),
		m.toolResult != nil && (len(last.results) == 0 || !meetsCondition(m.toolResult, lastOrEmpty(last.results))):
		return nil, false
	case m.user == nil:
		return nil, true
	}
	return m.user.matchText(text)
}

// meetsCondition reports whether a text meets a condition. Every text meets a nil condition.
func meetsCondition(m *textCondition, text string) bool {
	if m == nil {
		return true
	}
	_, ok := m.matchText(text)
	return ok
}

func containsFold(text, part string) bool {
	return strings.Contains(strings.ToLower(text), strings.ToLower(part))
}

// fillReply executes the templates of a reply and returns the plan of the answer.
func (r *scriptRule) fillReply(answer ruleReply, v *templateView) (answerPlan, error) {
	p := answerPlan{rule: r.name, stop: stopReasonEnd}
	for _, s := range answer.steps {
		if err := p.addStep(s, v); err != nil {
			return answerPlan{}, fmt.Errorf("rule %q, line %d of the script: %w", r.name, s.line, err)
		}
	}
	return p, nil
}

// addStep executes the templates of a step and appends the parts to the plan.
func (p *answerPlan) addStep(s scriptStep, v *templateView) error {
	out := planPart{kind: s.kind, pacing: s.pacing, delay: s.delay}
	var err error
	switch s.kind {
	case stepText, stepThinking, stepEndlessText:
		out.text, err = v.execute(s.text)
		if out.text == "" {
			return err // the text of the template is empty
		}
		p.parts = append(p.parts, out)
	case stepToolCalls:
		p.stop = stopReasonTools
		for _, call := range s.calls {
			c, callErr := fillToolCall(call, s.pacing, v)
			if callErr != nil {
				return callErr
			}
			p.parts = append(p.parts, c)
		}
	case stepError:
		out.fault = &apiError{status: s.fault.status, kind: s.fault.kind, retryAfter: s.fault.retryAfter}
		out.fault.message, err = v.execute(s.text)
		p.parts = append(p.parts, out)
	case stepStopReason:
		p.stop = s.stop
	case stepDelay, stepCutConnection:
		p.parts = append(p.parts, out)
	}
	return err
}

// fillToolCall executes the templates of a tool call and returns the part of the plan. It returns an error for a call
// with free text unless the request declares a tool that takes free text.
func fillToolCall(call toolCallSpec, pace textPacing, v *templateView) (planPart, error) {
	out := planPart{kind: stepToolCalls, pacing: pace}
	out.namespace, out.name = v.conversation.splitToolName(call.name)
	if free, ok := call.input.(*template.Template); ok {
		if !v.conversation.customTools[call.name] {
			return out, fmt.Errorf("the request offers no tool %q that takes free text: its input must be a mapping", call.name)
		}
		out.custom = true
		var err error
		out.text, err = v.execute(free)
		return out, err
	}
	filled, err := v.executeAll(call.input)
	if err != nil {
		return out, fmt.Errorf("input of %s: %w", call.name, err)
	}
	input, err := marshalUnescaped(filled)
	if err != nil {
		return out, fmt.Errorf("input of %s: %w", call.name, err)
	}
	out.text = string(input)
	return out, nil
}
