package server

import (
	"fmt"
	"math"

	"go.yaml.in/yaml/v3"
)

// script reads a whole script.
func (l *loader) script(n *yaml.Node) *Script {
	s := &Script{stream: pacing{piece: 24}}
	var rules *yaml.Node
	seen := l.readObject(n, "", map[string]field{
		"models": l.strings(&s.models),
		"stream": func(n *yaml.Node, path string) { l.readObject(n, path, l.pacing(&s.stream)) },
		"rules":  func(n *yaml.Node, _ string) { rules = n },
	})
	switch {
	case seen == nil:
	case rules == nil:
		l.addError(n, "rules", "is missing")
	default:
		// After the others, because a step inherits the script's pacing.
		l.list(rules, "rules", func(n *yaml.Node, path string) { s.rules = append(s.rules, l.rule(n, path, s)) })
		if len(rules.Content) == 0 {
			l.addError(rules, "rules", "must hold at least one rule")
		}
	}
	return s
}

// pacing returns the fields of a pacing, which store its values in p.
func (l *loader) pacing(p *pacing) map[string]field {
	return map[string]field{"piece": l.integer(&p.piece, 1, math.MaxInt32), "delay": l.duration(&p.delay)}
}

// rule reads a rule. Its steps inherit the pacing of the script.
func (l *loader) rule(n *yaml.Node, path string, s *Script) *rule {
	r := &rule{name: path}
	var steps []step
	var per string
	seen := l.readObject(n, path, map[string]field{
		"name":  l.string(&r.name),
		"match": func(n *yaml.Node, path string) { l.match(n, path, &r.match) },
		"times": l.integer(&r.times, 1, math.MaxInt32),
		"per":   l.oneOf(&per, "server", "conversation"),
		"steps": func(n *yaml.Node, path string) {
			l.list(n, path, func(n *yaml.Node, path string) { steps = append(steps, l.step(n, path, s.stream)) })
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
	r.replies = l.replies(n, path, steps)
	if r.match.toolResult != nil && len(r.replies) > 2 {
		l.addError(n, path+".steps", "a rule that matches on tool_result answers one request: no step may follow its tool calls")
	}
	return r
}

// replies splits the steps after each tool step, and refuses steps that no request would reach.
func (l *loader) replies(n *yaml.Node, path string, steps []step) []reply {
	all := []reply{{}}
	ended := false
	for i, s := range steps {
		last := &all[len(all)-1]
		if ended {
			l.addError(&yaml.Node{Line: s.line}, fmt.Sprintf("%s.steps[%d]", path, i), "is never reached: the step before it ends the answer")
			return all
		}
		last.steps = append(last.steps, s)
		switch s.kind {
		case stepTools:
			last.calls = len(s.calls)
			all = append(all, reply{})
		case stepError, stepBreak, stepEndless, stepStop:
			ended = true
		case stepText, stepThinking, stepDelay:
		}
	}
	if last := &all[len(all)-1]; len(last.steps) == 0 {
		last.tail = true
	}
	return all
}

// match reads the conditions of a rule into m.
func (l *loader) match(n *yaml.Node, path string, m *match) {
	var turns struct{ min, max int }
	var stream bool
	seen := l.readObject(n, path, map[string]field{
		"user":        l.readText(&m.user),
		"tool_result": l.readText(&m.toolResult),
		"system":      l.readText(&m.system),
		"model":       l.readText(&m.model),
		"api": func(n *yaml.Node, path string) {
			var api string
			one := l.oneOf(&api, string(Anthropic), string(Responses), string(Chat))
			if n.Kind != yaml.SequenceNode {
				one(n, path)
				m.apis = []API{API(api)}
				return
			}
			l.list(n, path, func(n *yaml.Node, path string) { one(n, path); m.apis = append(m.apis, API(api)) })
		},
		"tools":    l.strings(&m.tools),
		"no_tools": l.boolean(&m.noTools),
		"turns": func(n *yaml.Node, path string) {
			if n.Kind == yaml.ScalarNode {
				l.integer(&turns.min, 1, math.MaxInt32)(n, path)
				turns.max = turns.min
				return
			}
			l.readObject(n, path, map[string]field{
				"min": l.integer(&turns.min, 1, math.MaxInt32),
				"max": l.integer(&turns.max, 1, math.MaxInt32),
			})
		},
		"stream": l.boolean(&stream),
	})
	m.minTurns, m.maxTurns = turns.min, turns.max
	if seen["stream"] != nil {
		m.stream = &stream
	}
	if m.noTools && len(m.tools) > 0 {
		l.addError(seen["no_tools"], path+".no_tools", "contradicts tools")
	}
}

// readText reads a condition: a plain string matches as a substring, ignoring case.
func (l *loader) readText(to **textMatch) field {
	return func(n *yaml.Node, path string) {
		m := &textMatch{}
		*to = m
		if n.Kind == yaml.ScalarNode {
			l.string(&m.contains)(n, path)
			return
		}
		seen := l.readObject(n, path, map[string]field{"contains": l.string(&m.contains), "regex": l.regex(&m.regex)})
		if seen != nil && len(seen) != 1 {
			l.addError(n, path, "must hold either contains or regex")
		}
	}
}
