package server

import (
	"fmt"
	"regexp"
	"strings"
	"text/template"
	"text/template/parse"
)

// templateView is the data on which the templates of a script are executed. It has functions and no fields, so that a
// misspelt name is an error when the script is loaded, not during a conversation.
type templateView struct {
	conversation *Conversation
	turns        []userTurn
	captures     []string
}

// lastTurn returns the last turn of the conversation, or the zero userTurn if there is none.
func (v *templateView) lastTurn() userTurn {
	if len(v.turns) == 0 {
		return userTurn{}
	}
	return v.turns[len(v.turns)-1]
}

// templateFunctions returns the functions that templates of a script can call.
func (v *templateView) templateFunctions() template.FuncMap {
	return template.FuncMap{
		"user":    func() string { return lastOrEmpty(v.lastTurn().texts) },
		"result":  func() string { return lastOrEmpty(v.lastTurn().results) },
		"results": func() []string { return v.lastTurn().results },
		"turn":    func() int { return len(v.turns) },
		"system":  func() string { return v.conversation.System },
		"model":   func() string { return v.conversation.Model },
		"api":     func() string { return string(v.conversation.API) },
		"tools":   func() []string { return v.conversation.tools },
		"match":   v.submatch,
		"recall":  v.searchUserTexts,
		"context": v.searchContext,
		"find":    firstCapture,
		"trim":    strings.TrimSpace,
		"json":    toJSON,
		"prefix":  func(p, s string) string { return p + strings.ReplaceAll(s, "\n", "\n"+p) },
	}
}

// submatch returns a submatch of the regular expression in the rule's condition on the user's text; 0 is the whole
// match.
func (v *templateView) submatch(n int) string {
	if n < 0 || n >= len(v.captures) {
		return ""
	}
	return v.captures[n]
}

// searchUserTexts searches the texts of the user for a pattern, newest first. It returns the first submatch, or the
// whole match of a pattern without groups. Templates call it as recall.
func (v *templateView) searchUserTexts(pattern string) (string, error) {
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

// searchContext searches the system prompt and the sections that agent CLIs insert into the user's texts for a pattern.
// It returns the first submatch, or the whole match of a pattern without groups. Templates call it as context.
func (v *templateView) searchContext(pattern string) (string, error) {
	found, err := firstCapture(pattern, v.conversation.System)
	if found != "" || err != nil {
		return found, err
	}
	for _, e := range v.conversation.entries {
		if e.kind != entryUserText {
			continue
		}
		if found, err := firstCapture(pattern, e.text); found != "" || err != nil {
			return found, err
		}
	}
	return "", nil
}

// firstCapture returns the first submatch of a pattern in a text, or the whole match of a pattern without groups. It
// returns "" if there is no match.
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

// toJSON returns the JSON of v; it is the template function json.
func toJSON(v any) (string, error) {
	b, err := marshalUnescaped(v)
	return string(b), err
}

// lastOrEmpty returns the last element of a list, or "" if the list is empty.
func lastOrEmpty(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[len(list)-1]
}

// parseTemplate parses a template of a script, and checks the names and patterns in it as far as that is possible
// without a conversation.
func parseTemplate(source string) (*template.Template, error) {
	t, err := template.New("template").Funcs((&templateView{}).templateFunctions()).Parse(source)
	if err != nil {
		return nil, err
	}
	if err := checkTemplateNode(t.Root); err != nil {
		return nil, err
	}
	return t, nil
}

// checkTemplateNode returns an error if a node of a template accesses a field, which no template value has, or contains
// a pattern that does not compile.
func checkTemplateNode(n parse.Node) error {
	switch n := n.(type) {
	case *parse.ListNode:
		if n == nil {
			return nil
		}
		return checkTemplateNodes(n.Nodes)
	case *parse.ActionNode:
		return checkTemplateNode(n.Pipe)
	case *parse.IfNode:
		return checkTemplateNodes([]parse.Node{n.Pipe, n.List, n.ElseList})
	case *parse.RangeNode:
		return checkTemplateNodes([]parse.Node{n.Pipe, n.List, n.ElseList})
	case *parse.WithNode:
		return checkTemplateNodes([]parse.Node{n.Pipe, n.List, n.ElseList})
	case *parse.PipeNode:
		for _, c := range n.Cmds {
			if err := checkTemplateCommand(c); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkTemplateNodes returns the first error that checkTemplateNode returns for the nodes.
func checkTemplateNodes(nodes []parse.Node) error {
	for _, n := range nodes {
		if err := checkTemplateNode(n); err != nil {
			return err
		}
	}
	return nil
}

// checkTemplateCommand checks one command of a template as checkTemplateNode does.
func checkTemplateCommand(c *parse.CommandNode) error {
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
			if err := checkTemplateNode(arg); err != nil {
				return err
			}
		}
	}
	return nil
}

// execute executes a template with the view as its data and returns the text.
func (v *templateView) execute(t *template.Template) (string, error) {
	// All requests share the template, but its functions are those of this request.
	own, err := t.Clone()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	if err := own.Funcs(v.templateFunctions()).Execute(&b, nil); err != nil {
		return "", err
	}
	return b.String(), nil
}

// executeAll returns a copy of a tool's input in which every template is replaced by its text.
func (v *templateView) executeAll(in any) (any, error) {
	switch in := in.(type) {
	case *template.Template:
		return v.execute(in)
	case map[string]any:
		out := make(map[string]any, len(in))
		for k, item := range in {
			filled, err := v.executeAll(item)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", k, err)
			}
			out[k] = filled
		}
		return out, nil
	case []any:
		out := make([]any, len(in))
		for i, item := range in {
			filled, err := v.executeAll(item)
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
