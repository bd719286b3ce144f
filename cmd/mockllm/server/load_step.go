package server

import (
	"fmt"
	"text/template"

	"go.yaml.in/yaml/v3"
)

// readStep decodes a step of a rule. The texts of the step have the inherited pacing unless the step sets its own.
func (l *scriptLoader) readStep(n *yaml.Node, path string, inherited textPacing) scriptStep {
	s := scriptStep{line: n.Line, pacing: inherited}
	is := func(kind scriptStepKind, set fieldReader) fieldReader {
		return func(n *yaml.Node, path string) { s.kind = kind; set(n, path) }
	}
	one := func(n *yaml.Node, path string) { s.calls = append(s.calls, l.readToolCall(n, path)) }
	seen := l.readObject(n, path, map[string]fieldReader{
		"text":     is(stepText, l.pacedTextInto(&s, "text")),
		"thinking": is(stepThinking, l.pacedTextInto(&s, "text")),
		"endless":  is(stepEndlessText, l.pacedTextInto(&s, "text")),
		"tool":     is(stepToolCalls, one),
		"tools": is(stepToolCalls, func(n *yaml.Node, path string) {
			l.readList(n, path, one)
			if len(s.calls) == 0 {
				l.addError(n, path, "must hold at least one call")
			}
		}),
		"delay": is(stepDelay, l.durationInto(&s.delay)),
		"error": is(stepError, func(n *yaml.Node, path string) { l.readErrorStep(n, path, &s) }),
		"break": is(stepCutConnection, func(n *yaml.Node, path string) {
			if n.Value != "true" {
				l.addError(n, path, "must be true")
			}
		}),
		"stop": is(stepStopReason, l.oneOfInto(&s.stop, stopReasonEnd, stopReasonLength, stopReasonRefusal)),
	})
	if seen != nil && len(seen) != 1 {
		l.addError(n, path, "must hold exactly one field, and holds %d", len(seen))
	}
	return s
}

// pacedTextInto returns a reader of a text, with or without its own pacing, which it stores in s.
func (l *scriptLoader) pacedTextInto(s *scriptStep, name string) fieldReader {
	return func(n *yaml.Node, path string) {
		if n.Kind == yaml.ScalarNode {
			l.templateInto(&s.text)(n, path)
			return
		}
		fields := l.pacingFields(&s.pacing)
		fields[name] = l.templateInto(&s.text)
		if seen := l.readObject(n, path, fields); seen != nil && seen[name] == nil {
			l.addError(n, joinPath(path, name), "is missing")
		}
	}
}

// templateInto returns a reader of a template, which it parses and stores in to.
func (l *scriptLoader) templateInto(to **template.Template) fieldReader {
	return func(n *yaml.Node, path string) {
		var source string
		l.stringInto(&source)(n, path)
		t, err := parseTemplate(source)
		if err != nil {
			l.addError(n, path, "%v", err)
			return
		}
		*to = t
	}
}

// readErrorStep decodes a step that answers with an error into s.
func (l *scriptLoader) readErrorStep(n *yaml.Node, path string, s *scriptStep) {
	s.fault = errorSpec{status: 500}
	s.text = template.Must(parseTemplate("scripted error"))
	seen := l.readObject(n, path, map[string]fieldReader{
		"status":      l.integerInto(&s.fault.status, 400, 599),
		"type":        l.stringInto(&s.fault.kind),
		"message":     l.templateInto(&s.text),
		"retry_after": l.durationInto(&s.fault.retryAfter),
	})
	if seen != nil && seen["status"] == nil {
		l.addError(n, path+".status", "is missing")
	}
}

// readToolCall decodes a tool call of a step.
func (l *scriptLoader) readToolCall(n *yaml.Node, path string) toolCallSpec {
	var c toolCallSpec
	seen := l.readObject(n, path, map[string]fieldReader{
		"name":  l.stringInto(&c.name),
		"input": func(n *yaml.Node, path string) { c.input = l.readToolInput(n, path) },
	})
	if seen != nil && seen["name"] == nil {
		l.addError(n, path+".name", "is missing")
	}
	if c.input == nil {
		c.input = map[string]any{}
	}
	return c
}

// readToolInput decodes the input of a tool call: a mapping whose strings at any depth are templates, or a single
// string.
func (l *scriptLoader) readToolInput(n *yaml.Node, path string) any {
	if n.Kind == yaml.MappingNode || n.Kind == yaml.ScalarNode && n.Tag == "!!str" {
		return l.readTemplates(n, path)
	}
	l.addError(n, path, "must be a mapping, or a text for a tool that takes free text")
	return nil
}

// readTemplates decodes a YAML value of any type, and parses every string in it as a template.
func (l *scriptLoader) readTemplates(n *yaml.Node, path string) any {
	n = resolveAlias(n)
	switch n.Kind {
	case yaml.MappingNode:
		m := map[string]any{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			m[n.Content[i].Value] = l.readTemplates(n.Content[i+1], joinPath(path, n.Content[i].Value))
		}
		return m
	case yaml.SequenceNode:
		list := []any{}
		for i, item := range n.Content {
			list = append(list, l.readTemplates(item, fmt.Sprintf("%s[%d]", path, i)))
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
