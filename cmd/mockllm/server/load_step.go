package server

import (
	"fmt"
	"text/template"

	"go.yaml.in/yaml/v3"
)

// step reads a step. Its texts have the inherited pacing, unless the step has its own.
func (l *loader) step(n *yaml.Node, path string, inherited pacing) step {
	s := step{line: n.Line, pacing: inherited}
	is := func(kind stepKind, set field) field {
		return func(n *yaml.Node, path string) { s.kind = kind; set(n, path) }
	}
	one := func(n *yaml.Node, path string) { s.calls = append(s.calls, l.call(n, path)) }
	seen := l.readObject(n, path, map[string]field{
		"text":     is(stepText, l.pacedText(&s, "text")),
		"thinking": is(stepThinking, l.pacedText(&s, "text")),
		"endless":  is(stepEndless, l.pacedText(&s, "text")),
		"tool":     is(stepTools, one),
		"tools": is(stepTools, func(n *yaml.Node, path string) {
			l.list(n, path, one)
			if len(s.calls) == 0 {
				l.addError(n, path, "must hold at least one call")
			}
		}),
		"delay": is(stepDelay, l.duration(&s.delay)),
		"error": is(stepError, func(n *yaml.Node, path string) { l.loadFault(n, path, &s) }),
		"break": is(stepBreak, func(n *yaml.Node, path string) {
			if n.Value != "true" {
				l.addError(n, path, "must be true")
			}
		}),
		"stop": is(stepStop, l.oneOf(&s.stop, stopEnd, stopLength, stopRefusal)),
	})
	if seen != nil && len(seen) != 1 {
		l.addError(n, path, "must hold exactly one field, and holds %d", len(seen))
	}
	return s
}

// pacedText reads a text with its own pace, or a plain text.
func (l *loader) pacedText(s *step, name string) field {
	return func(n *yaml.Node, path string) {
		if n.Kind == yaml.ScalarNode {
			l.template(&s.text)(n, path)
			return
		}
		fields := l.pacing(&s.pacing)
		fields[name] = l.template(&s.text)
		if seen := l.readObject(n, path, fields); seen != nil && seen[name] == nil {
			l.addError(n, join(path, name), "is missing")
		}
	}
}

// template returns the field that stores a template in to.
func (l *loader) template(to **template.Template) field {
	return func(n *yaml.Node, path string) {
		var source string
		l.string(&source)(n, path)
		t, err := parseTemplate(source)
		if err != nil {
			l.addError(n, path, "%v", err)
			return
		}
		*to = t
	}
}

// loadFault reads a step of type error into s.
func (l *loader) loadFault(n *yaml.Node, path string, s *step) {
	s.fault = faultSpec{status: 500}
	s.text = template.Must(parseTemplate("scripted error"))
	seen := l.readObject(n, path, map[string]field{
		"status":      l.integer(&s.fault.status, 400, 599),
		"type":        l.string(&s.fault.kind),
		"message":     l.template(&s.text),
		"retry_after": l.duration(&s.fault.retryAfter),
	})
	if seen != nil && seen["status"] == nil {
		l.addError(n, path+".status", "is missing")
	}
}

// call reads the tool call of a step from the script.
func (l *loader) call(n *yaml.Node, path string) callSpec {
	var c callSpec
	seen := l.readObject(n, path, map[string]field{
		"name":  l.string(&c.name),
		"input": func(n *yaml.Node, path string) { c.input = l.input(n, path) },
	})
	if seen != nil && seen["name"] == nil {
		l.addError(n, path+".name", "is missing")
	}
	if c.input == nil {
		c.input = map[string]any{}
	}
	return c
}

// input reads a mapping whose strings are templates at any depth, or a single string.
func (l *loader) input(n *yaml.Node, path string) any {
	if n.Kind == yaml.MappingNode || n.Kind == yaml.ScalarNode && n.Tag == "!!str" {
		return l.value(n, path)
	}
	l.addError(n, path, "must be a mapping, or a text for a tool that takes free text")
	return nil
}

// value reads a value of any type, in which every string is a template.
func (l *loader) value(n *yaml.Node, path string) any {
	n = resolve(n)
	switch n.Kind {
	case yaml.MappingNode:
		m := map[string]any{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			m[n.Content[i].Value] = l.value(n.Content[i+1], join(path, n.Content[i].Value))
		}
		return m
	case yaml.SequenceNode:
		list := []any{}
		for i, item := range n.Content {
			list = append(list, l.value(item, fmt.Sprintf("%s[%d]", path, i)))
		}
		return list
	default:
		if n.Tag == "!!str" {
			t, err := parseTemplate(n.Value)
			if err != nil {
				l.addError(n, path, "%v", err)
				return nil
			}
			return t
		}
		var v any
		if err := n.Decode(&v); err != nil {
			l.addError(n, path, "%v", err)
		}
		return v
	}
}
