package server

import (
	"fmt"
	"math"

	"go.yaml.in/yaml/v3"
)

// readScript decodes a whole script.
func (l *scriptLoader) readScript(n *yaml.Node) *Script {
	s := &Script{stream: textPacing{piece: 24}}
	var rules *yaml.Node
	seen := l.readObject(n, "", map[string]fieldReader{
		"models": l.stringsInto(&s.models),
		"stream": func(n *yaml.Node, path string) { l.readObject(n, path, l.pacingFields(&s.stream)) },
		"rules":  func(n *yaml.Node, _ string) { rules = n },
	})
	switch {
	case seen == nil:
	case rules == nil:
		l.addError(n, "rules", "is missing")
	default:
		// After the others, because a step inherits the script's pacing.
		l.readList(rules, "rules", func(n *yaml.Node, path string) { s.rules = append(s.rules, l.readRule(n, path, s)) })
		if len(rules.Content) == 0 {
			l.addError(rules, "rules", "must hold at least one rule")
		}
	}
	return s
}

// pacingFields returns the readers of the fields with which a script sets the pacing of text. They store the values in
// p.
func (l *scriptLoader) pacingFields(p *textPacing) map[string]fieldReader {
	return map[string]fieldReader{"piece": l.integerInto(&p.piece, 1, math.MaxInt32), "delay": l.durationInto(&p.delay)}
}

// readRule decodes a rule of a script. The rule's steps inherit the pacing of the script.
func (l *scriptLoader) readRule(n *yaml.Node, path string, s *Script) *scriptRule {
	r := &scriptRule{name: path}
	var steps []scriptStep
	var per string
	seen := l.readObject(n, path, map[string]fieldReader{
		"name":  l.stringInto(&r.name),
		"match": func(n *yaml.Node, path string) { l.readConditions(n, path, &r.match) },
		"times": l.integerInto(&r.times, 1, math.MaxInt32),
		"per":   l.oneOfInto(&per, "server", "conversation"),
		"steps": func(n *yaml.Node, path string) {
			l.readList(n, path, func(n *yaml.Node, path string) { steps = append(steps, l.readStep(n, path, s.stream)) })
			if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
				l.addError(n, path, "must hold at least one step")
			}
		},
	})
	if seen != nil && seen["steps"] == nil {
		l.addError(n, path+".steps", "is missing")
	}
	if seen["per"] != nil && seen["times"] == nil {
		l.addError(seen["per"], path+".per", "has no effect without times")
	}
	r.each = per == "conversation"
	r.replies = l.splitReplies(n, path, steps)
	if r.match.toolResult != nil && len(r.replies) > 2 {
		l.addError(n, path+".steps", "a rule that matches on tool_result answers one request: no step may follow its tool calls")
	}
	return r
}

// splitReplies divides the steps of a rule into replies: a reply ends after each step with tool calls. It records an
// error for steps that no request would reach.
func (l *scriptLoader) splitReplies(n *yaml.Node, path string, steps []scriptStep) []ruleReply {
	all := []ruleReply{{}}
	ended := false
	for i, s := range steps {
		last := &all[len(all)-1]
		if ended {
			l.addError(&yaml.Node{Line: s.line}, fmt.Sprintf("%s.steps[%d]", path, i), "is never reached: the step before it ends the answer")
			return all
		}
		last.steps = append(last.steps, s)
		switch s.kind {
		case stepToolCalls:
			last.calls = len(s.calls)
			all = append(all, ruleReply{})
		case stepError, stepCutConnection, stepEndlessText, stepStopReason:
			ended = true
		case stepText, stepThinking, stepDelay:
		}
	}
	if last := &all[len(all)-1]; len(last.steps) == 0 {
		last.tail = true
	}
	return all
}

// readConditions decodes the conditions of a rule into m.
func (l *scriptLoader) readConditions(n *yaml.Node, path string, m *ruleConditions) {
	var turns struct{ min, max int }
	var stream bool
	seen := l.readObject(n, path, map[string]fieldReader{
		"user":        l.textConditionInto(&m.user),
		"tool_result": l.textConditionInto(&m.toolResult),
		"system":      l.textConditionInto(&m.system),
		"model":       l.textConditionInto(&m.model),
		"api": func(n *yaml.Node, path string) {
			var api string
			one := l.oneOfInto(&api, string(Anthropic), string(Responses), string(Chat))
			if n.Kind != yaml.SequenceNode {
				one(n, path)
				m.apis = []API{API(api)}
				return
			}
			l.readList(n, path, func(n *yaml.Node, path string) { one(n, path); m.apis = append(m.apis, API(api)) })
		},
		"tools":    l.stringsInto(&m.tools),
		"no_tools": l.booleanInto(&m.noTools),
		"turns": func(n *yaml.Node, path string) {
			if n.Kind == yaml.ScalarNode {
				l.integerInto(&turns.min, 1, math.MaxInt32)(n, path)
				turns.max = turns.min
				return
			}
			l.readObject(n, path, map[string]fieldReader{
				"min": l.integerInto(&turns.min, 1, math.MaxInt32),
				"max": l.integerInto(&turns.max, 1, math.MaxInt32),
			})
		},
		"stream": l.booleanInto(&stream),
	})
	m.minTurns, m.maxTurns = turns.min, turns.max
	if seen["stream"] != nil {
		m.stream = &stream
	}
	if m.noTools && len(m.tools) > 0 {
		l.addError(seen["no_tools"], path+".no_tools", "contradicts tools")
	}
}

// textConditionInto returns a reader of a condition on a text, which it stores in to. A plain string is a condition
// that a text meets if it contains the string, ignoring case.
func (l *scriptLoader) textConditionInto(to **textCondition) fieldReader {
	return func(n *yaml.Node, path string) {
		m := &textCondition{}
		*to = m
		if n.Kind == yaml.ScalarNode {
			l.stringInto(&m.contains)(n, path)
			return
		}
		seen := l.readObject(n, path, map[string]fieldReader{"contains": l.stringInto(&m.contains), "regex": l.regexInto(&m.regex)})
		if seen != nil && len(seen) != 1 {
			l.addError(n, path, "must hold either contains or regex")
		}
	}
}
