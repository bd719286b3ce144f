package codex

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// Rules by which the adapter itself denies a request.
const (
	ruleUnreadable = "unreadable-request"
	ruleNoQuery    = "no-query" // its events would not be recorded
)

// Names of tools for the policy and in events.
const (
	toolShell      = "shell"
	toolPatch      = "apply_patch"
	toolPermission = "permissions"
	toolQuestion   = "request_user_input"
)

func denial(rule, reason string) *permission.Decision {
	return &permission.Decision{Action: events.PermissionDeny, Rule: rule, Reason: reason}
}

// answerQuestion answers a question of the CLI: at once if the policy decides, otherwise when a person has decided.
func (s *session) answerQuestion(l line, t *agent.Turn) error {
	q, err := decode[question](l.Params, l.Method)
	if err != nil {
		s.send(answer{ID: l.ID, Error: &rpcError{Code: -32602, Message: err.Error()}})
		return err
	}
	w := s.turn.items[itemKey(q.ThreadID, q.ItemID)]
	switch l.Method {
	case "item/commandExecution/requestApproval":
		s.permit(l, q, w, s.commandRequest(q, w), t, verdict)
	case "item/fileChange/requestApproval":
		s.permit(l, q, w, s.patchRequest(q, w), t, verdict)
	case "item/permissions/requestApproval":
		s.permit(l, q, w, permissionsRequest(q), t, func(a agent.PermissionAnswer) any {
			granted := any(map[string]any{})
			if a.Allowed() {
				granted = q.Permissions
			}
			return map[string]any{"permissions": granted, "scope": "turn"}
		})
	case "mcpServer/elicitation/request":
		if w = s.findCall(q); w != nil {
			q.ItemID = w.item.ID
		}
		s.permit(l, q, w, s.serverRequest(q), t, serverAnswer)
	case "item/tool/requestUserInput":
		s.permit(l, q, w, userRequest(q), t, func(a agent.PermissionAnswer) any { return userAnswer(q, a) })
	default:
		s.logf(t, "warn", "the agent asked for %q, which is not offered", l.Method)
		s.send(answer{ID: l.ID, Error: &rpcError{Code: -32601, Message: fmt.Sprintf("%q is not offered", l.Method)}})
	}
	return nil
}

// permit passes a request to the policy, and sends the result of the answer to the CLI when the policy or a person has
// decided. w is the item of the call, nil if it is not known.
func (s *session) permit(l line, q question, w *runningItem, r agent.PermissionRequest, t *agent.Turn, result func(agent.PermissionAnswer) any) {
	r.Key, r.ToolUseID = string(l.ID), q.ItemID
	if !s.pending {
		r.Decided = denial(ruleNoQuery, "No query is being answered.")
	}
	byPolicy := true // until Permit returns
	t.Permit(s.conversationOf(q.ThreadID), r, func(a agent.PermissionAnswer) {
		if w != nil && !a.Allowed() {
			w.denied, w.byPolicy = a.Message, byPolicy
		}
		s.send(answer{ID: l.ID, Result: result(a)})
	})
	byPolicy = false
}

// questionResolved handles the notification that the CLI does not wait for an answer any more: because it got one, or because
// it withdrew the question.
func (s *session) questionResolved(l line, t *agent.Turn) error {
	r, err := decode[struct {
		ID json.RawMessage `json:"requestId"`
	}](l.Params, l.Method)
	if err != nil {
		return err
	}
	t.Withdraw(string(r.ID))
	return nil
}

// commandRequest describes a request to run a command. The CLI asks for network access only when it uses its own sandbox,
// which is switched off here: a request for it means that the configuration was not applied.
func (s *session) commandRequest(q question, w *runningItem) agent.PermissionRequest {
	script := scriptOf(q.Command)
	r := agent.PermissionRequest{
		Call:    permission.Call{Tool: toolShell, Kind: permission.KindShell, Command: script},
		Title:   firstLine(script),
		Reason:  q.Reason,
		Preview: events.ApprovalPreview{Command: script},
		Input:   inputOf(w),
	}
	if q.Cwd != s.launch.Workspace {
		r.Preview.Cwd = q.Cwd
	}
	if q.Network != nil {
		r.Call.Kind, r.Call.Hosts = permission.KindNetwork, []string{q.Network.Host}
		r.Preview.URL = q.Network.Host
	}
	return r
}

// patchRequest describes a request to change files. The item of the call has the changes.
func (s *session) patchRequest(q question, w *runningItem) agent.PermissionRequest {
	r := agent.PermissionRequest{Call: permission.Call{Tool: toolPatch, Kind: permission.KindEdit}, Reason: q.Reason, Input: inputOf(w)}
	if w == nil || len(w.item.Changes) == 0 {
		r.Decided = denial(ruleUnreadable, "The request does not say which files are changed.")
		return r
	}
	r.Title = w.item.summary()
	add := func(path string) {
		r.Preview.Paths = append(r.Preview.Paths, path)
		r.Call.Paths = append(r.Call.Paths, agent.ResolvePath(s.launch.Workspace, path))
	}
	var diff strings.Builder
	for _, c := range w.item.Changes {
		add(c.Path)
		if c.Kind.MovePath != "" {
			add(c.Kind.MovePath)
		}
		diff.WriteString(c.text())
	}
	if q.GrantRoot != "" {
		add(q.GrantRoot)
	}
	r.Preview.Diff = diff.String()
	return r
}

// text returns the change as a diff. The CLI sends the whole content of added and deleted files in place of one.
func (c fileChange) text() string {
	before, after, sign := c.Path, cmp.Or(c.Kind.MovePath, c.Path), ""
	switch c.Kind.Type {
	case "add":
		before, sign = "/dev/null", "+"
	case "delete":
		after, sign = "/dev/null", "-"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "--- %s\n+++ %s\n", before, after)
	for line := range strings.Lines(c.Diff) {
		b.WriteString(sign + strings.TrimSuffix(line, "\n") + "\n")
	}
	return b.String()
}

// permissionsRequest describes a request for more permissions of the CLI's own sandbox.
func permissionsRequest(q question) agent.PermissionRequest {
	return agent.PermissionRequest{
		Call:  permission.Call{Tool: toolPermission, Kind: permission.KindUnknown},
		Title: "more permissions", Reason: q.Reason, Preview: events.ApprovalPreview{Text: string(q.Permissions)}, Input: q.Permissions,
	}
}

// serverRequest describes a question about an MCP server: either the CLI asks whether a tool may be called, or the server
// asks the user for data.
func (s *session) serverRequest(q question) agent.PermissionRequest {
	tool := "mcp__" + q.ServerName
	if q.Meta.Kind != toolApprovalKind {
		r := agent.PermissionRequest{
			Call: permission.Call{Tool: tool, Kind: permission.KindQuestion}, Kind: events.ApprovalElicitation,
			Title: firstLine(q.Message), Preview: events.ApprovalPreview{Text: q.Message, URL: q.URL}, Schema: q.Schema,
		}
		if q.Mode != "form" && q.Mode != "url" {
			r.Decided = denial(ruleUnreadable, fmt.Sprintf("The MCP server %s asks in the unknown form %q.", q.ServerName, q.Mode))
		}
		return r
	}
	tool += "__" + q.Meta.Tool
	r := agent.PermissionRequest{
		Call:    permission.Call{Tool: tool, Kind: permission.KindMCPTool, Destructive: q.Meta.Annotations.Destructive},
		Title:   q.ServerName + ": " + q.Meta.Tool,
		Preview: events.ApprovalPreview{Text: indented(q.Meta.Params)},
		Input:   q.Meta.Params,
	}
	if !hasTool(s.launch.MCPServers, q.ServerName, q.Meta.Tool) {
		r.Decided = denial(permission.RuleUnknownTool, "The workspace policy does not know the tool "+tool+" and so does not allow it.")
	}
	return r
}

// serverAnswer returns the answer of the protocol to a question about an MCP server.
func serverAnswer(a agent.PermissionAnswer) any {
	content := a.Content
	switch {
	case a.Outcome != events.OutcomeAnswered && !a.Allowed():
		return map[string]any{"action": "decline", "content": nil, "_meta": nil}
	case len(content) == 0:
		content = json.RawMessage("{}")
	}
	return map[string]any{"action": "accept", "content": content, "_meta": nil}
}

// userRequest describes questions of the agent to the user.
func userRequest(q question) agent.PermissionRequest {
	r := agent.PermissionRequest{Call: permission.Call{Tool: toolQuestion, Kind: permission.KindQuestion}, Kind: events.ApprovalQuestion}
	for _, ask := range q.Questions {
		e := events.Question{ID: ask.ID, Header: ask.Header, Question: ask.Question, Other: ask.IsOther || len(ask.Options) == 0, Secret: ask.IsSecret}
		for _, o := range ask.Options {
			e.Options = append(e.Options, events.QuestionOption{Label: o.Label, Description: o.Description})
		}
		r.Questions = append(r.Questions, e)
		r.Title = cmp.Or(r.Title, firstLine(ask.Question))
	}
	if len(r.Questions) == 0 {
		r.Decided = denial(ruleUnreadable, "The request has no question.")
	}
	return r
}

// userAnswer returns the answer of the protocol to questions to the user. If there are no answers, the model reads why in
// place of each.
func userAnswer(q question, a agent.PermissionAnswer) any {
	type texts struct {
		Answers []string `json:"answers"`
	}
	all := map[string]texts{}
	for _, ask := range q.Questions {
		switch given := a.Answers[ask.ID]; {
		case len(given) > 0:
			all[ask.ID] = texts{given}
		case a.Outcome != events.OutcomeAnswered && a.Message != "":
			all[ask.ID] = texts{[]string{a.Message}}
		}
	}
	return map[string]any{"answers": all}
}

// findCall returns the running call that a question about an MCP server is about, or nil. The question does not have the
// call's id, so findCall takes a call of the same server and tool.
func (s *session) findCall(q question) *runningItem {
	for _, w := range s.turn.items {
		if w.thread == q.ThreadID && w.item.Type == "mcpToolCall" && w.item.Server == q.ServerName && (q.Meta.Tool == "" || w.item.Tool == q.Meta.Tool) {
			return w
		}
	}
	return nil
}

// verdict returns the answer of the protocol to a request for approval. It accepts a call for this time only: with the other
// answers the CLI would not ask again.
func verdict(a agent.PermissionAnswer) any {
	if a.Allowed() {
		return map[string]string{"decision": "accept"}
	}
	return map[string]string{"decision": "decline"}
}

// explain sends the agent the reason of a denial as a note to the running turn, because an answer has no field for a
// reason. It sends the note after the call has ended: the agent would leave a running call to read the note. A note
// that comes too late for the turn is sent with the next query.
func (s *session) explain(thread, turn string, w *runningItem) {
	text := w.denied
	if w.byPolicy {
		text = "This was declined by policy, not by the user: " + text
	}
	note := "<system-reminder>" + text + "</system-reminder>"
	s.ask("turn/steer", map[string]any{
		"threadId": thread, "expectedTurnId": turn, "input": []any{textPart(note)},
	}, pendingRequest{thread: thread, note: note})
}

// inputOf returns the arguments of a call, as its tool_use block has them.
func inputOf(w *runningItem) json.RawMessage {
	if w == nil {
		return nil
	}
	call, _ := w.item.toolCall()
	return call.Input
}

// indented returns JSON for people.
func indented(raw json.RawMessage) string {
	var out bytes.Buffer
	if json.Indent(&out, raw, "", "  ") != nil {
		return string(raw)
	}
	return out.String()
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// shells are the programs that scriptOf takes for a shell. The model may name another one.
var shells = []string{"/bin/bash", "/bin/sh", "/bin/zsh", "/usr/bin/bash", "/usr/bin/sh", "/usr/bin/zsh"}

// scriptOf returns the script in a command of the form `/bin/bash -lc 'script'`, in which the CLI runs the model's script.
// It returns another command unchanged.
func scriptOf(command string) string {
	words, ok := splitWords(command)
	if ok && len(words) == 3 && slices.Contains(shells, words[0]) && (words[1] == "-lc" || words[1] == "-c") {
		return words[2]
	}
	return command
}

// splitWords splits a command into its words as a POSIX shell does. It reports false for a command that is more than words
// with quotes.
func splitWords(command string) (words []string, ok bool) {
	var word strings.Builder
	inWord := false
	for i := 0; i < len(command); i++ {
		switch c := command[i]; {
		case c == ' ':
			if inWord {
				words = append(words, word.String())
			}
			word.Reset()
			inWord = false
			continue
		case c == '\'':
			text, _, found := strings.Cut(command[i+1:], "'")
			if !found {
				return nil, false
			}
			word.WriteString(text)
			i += len(text) + 1
		case c == '"':
			n, closed := quoted(&word, command[i+1:])
			if !closed {
				return nil, false
			}
			i += n
		case strings.IndexByte("\\$`;&|<>()*?[]{}~#!\n\t\r", c) >= 0:
			return nil, false
		default:
			word.WriteByte(c)
		}
		inWord = true
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, true
}

// quoted appends the text in double quotes at the beginning of s to word, and returns the number of bytes up to and including
// the closing quote. It reports false if the text has expansions or no end.
func quoted(word *strings.Builder, s string) (n int, closed bool) {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '"':
			return i + 1, true
		case '$', '`':
			return 0, false
		case '\\':
			if i++; i == len(s) || strings.IndexByte("$`\"\\", s[i]) < 0 {
				return 0, false
			}
		}
		word.WriteByte(s[i])
	}
	return 0, false
}
