package server

import (
	"fmt"
	"regexp"
	"strings"
	"text/template"
	"text/template/parse"
)

// view is the data on which the templates of a script are executed. It has functions and no fields, so that a misspelt
// name is an error when the script is loaded, not during a conversation.
type view struct {
	conversation *Conversation
	turns        []turn
	captures     []string
}

// last returns the last turn, or the zero turn if there is none.
func (v *view) last() turn {
	if len(v.turns) == 0 {
		return turn{}
	}
	return v.turns[len(v.turns)-1]
}

// functions returns the functions of templates.
func (v *view) functions() template.FuncMap {
	return template.FuncMap{
		"user":    func() string { return lastOf(v.last().texts) },
		"result":  func() string { return lastOf(v.last().results) },
		"results": func() []string { return v.last().results },
		"turn":    func() int { return len(v.turns) },
		"system":  func() string { return v.conversation.System },
		"model":   func() string { return v.conversation.Model },
		"api":     func() string { return string(v.conversation.API) },
		"tools":   func() []string { return v.conversation.tools },
		"match":   v.match,
		"recall":  v.recall,
		"context": v.context,
		"find":    firstCapture,
		"trim":    strings.TrimSpace,
		"json":    toJSON,
		"prefix":  func(p, s string) string { return p + strings.ReplaceAll(s, "\n", "\n"+p) },
	}
}

// match returns a submatch of the rule's user condition; 0 is the whole match.
func (v *view) match(n int) string {
	if n < 0 || n >= len(v.captures) {
		return ""
	}
	return v.captures[n]
}

// recall searches the texts of the user for a pattern, newest first, and returns the first submatch, or the whole match
// of a pattern without one.
func (v *view) recall(pattern string) (string, error) {
	for i := len(v.turns) - 1; i >= 0; i-- {
		for j := len(v.turns[i].texts) - 1; j >= 0; j-- {
			found, err := firstCapture(pattern, v.turns[i].texts[j])
			if found != "" || err != nil {
				return found, err
			}
		}
	}
	return "", nil
}

// context is recall over the system prompt and everything that was added to the texts of the user, such as a CLI's
// reminders.
func (v *view) context(pattern string) (string, error) {
	found, err := firstCapture(pattern, v.conversation.System)
	if found != "" || err != nil {
		return found, err
	}
	for _, e := range v.conversation.entries {
		if e.kind != userText {
			continue
		}
		if found, err := firstCapture(pattern, e.text); found != "" || err != nil {
			return found, err
		}
	}
	return "", nil
}

// firstCapture returns the first submatch of a pattern in a text, or the whole match of a pattern without one; "" if
// there is no match.
func firstCapture(pattern, text string) (string, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return "", fmt.Errorf("pattern %q: %w", pattern, err)
	}
	found := re.FindStringSubmatch(text)
	switch len(found) {
	case 0:
		return "", nil
	case 1:
		return found[0], nil
	default:
		return found[1], nil
	}
}

func toJSON(v any) (string, error) {
	b, err := marshal(v)
	return string(b), err
}

// lastOf returns the last element, or "" if there is none.
func lastOf(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[len(list)-1]
}

// parseTemplate parses a template and checks it as far as possible without a conversation.
func parseTemplate(source string) (*template.Template, error) {
	t, err := template.New("template").Funcs((&view{}).functions()).Parse(source)
	if err != nil {
		return nil, err
	}
	if err := checkNode(t.Root); err != nil {
		return nil, err
	}
	return t, nil
}

// checkNode returns an error for fields, which no value has, and for patterns that do not compile.
func checkNode(n parse.Node) error {
	switch n := n.(type) {
	case *parse.ListNode:
		if n == nil {
			return nil
		}
		return checkAll(n.Nodes)
	case *parse.ActionNode:
		return checkNode(n.Pipe)
	case *parse.IfNode:
		return checkAll([]parse.Node{n.Pipe, n.List, n.ElseList})
	case *parse.RangeNode:
		return checkAll([]parse.Node{n.Pipe, n.List, n.ElseList})
	case *parse.WithNode:
		return checkAll([]parse.Node{n.Pipe, n.List, n.ElseList})
	case *parse.PipeNode:
		for _, c := range n.Cmds {
			if err := checkCommand(c); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkAll returns the first error of checkNode.
func checkAll(nodes []parse.Node) error {
	for _, n := range nodes {
		if err := checkNode(n); err != nil {
			return err
		}
	}
	return nil
}

// checkCommand is checkNode for one command of a template.
func checkCommand(c *parse.CommandNode) error {
	name := ""
	for i, arg := range c.Args {
		switch arg := arg.(type) {
		case *parse.IdentifierNode:
			if i == 0 {
				name = arg.Ident
			}
		case *parse.StringNode:
			if name == "recall" || name == "context" {
				if _, err := regexp.Compile(arg.Text); err != nil {
					return err
				}
			}
		case *parse.FieldNode:
			return fmt.Errorf("%s: there are no fields, use a function such as user, match or result", arg)
		case *parse.PipeNode:
			if err := checkNode(arg); err != nil {
				return err
			}
		}
	}
	return nil
}

// text executes a template on the view and returns the result.
func (v *view) text(t *template.Template) (string, error) {
	// All requests share the template, but its functions are those of this request.
	own, err := t.Clone()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	if err := own.Funcs(v.functions()).Execute(&b, nil); err != nil {
		return "", err
	}
	return b.String(), nil
}

// value executes all templates in a tool's input.
func (v *view) value(in any) (any, error) {
	switch in := in.(type) {
	case *template.Template:
		return v.text(in)
	case map[string]any:
		out := make(map[string]any, len(in))
		for k, item := range in {
			filled, err := v.value(item)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", k, err)
			}
			out[k] = filled
		}
		return out, nil
	case []any:
		out := make([]any, len(in))
		for i, item := range in {
			filled, err := v.value(item)
			if err != nil {
				return nil, fmt.Errorf("[%d]: %w", i, err)
			}
			out[i] = filled
		}
		return out, nil
	default:
		return in, nil
	}
}
