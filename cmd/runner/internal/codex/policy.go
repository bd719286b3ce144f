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
	"github.com/spoolhq/spool/pkg/visible"
)

// Rules by which the adapter itself denies a request.
const (
	ruleUnreadableRequest = "unreadable-request"
	ruleOutsideTurn       = "no-query" // its events would not be recorded
	ruleTooDeep           = "subagent-depth"
)

// Names of tools for the policy and in events.
const (
	toolShell      = "shell"
	toolPatch      = "apply_patch"
	toolPermission = "permissions"
	toolQuestion   = "request_user_input"
)

// newDenial returns a decision that denies a call by a rule of the adapter, for the given reason.
func newDenial(rule, reason string) *permission.Decision {
	return &permission.Decision{Action: events.PermissionDeny, Rule: rule, Reason: reason}
}

// answerQuestion answers a request of the CLI for a permission or for an answer of the user: at once if the policy decides, otherwise when a person
// has decided.
func (s *session) answerQuestion(l outputLine, t *agent.Turn) error {
	q, err := decode[questionParams](l.Params, l.Method)
	if err != nil {
		s.sendJSON(rpcAnswer{ID: l.ID, Error: &rpcError{Code: -32602, Message: err.Error()}})
		return err
	}
	w := s.turn.items[itemKey(q.ThreadID, q.ItemID)]
	switch l.Method {
	case "item/commandExecution/requestApproval":
		s.requestPermission(l, q, w, s.commandRequest(q, w), t, approvalAnswer)
	case "item/fileChange/requestApproval":
		s.requestPermission(l, q, w, s.patchRequest(q, w), t, approvalAnswer)
	case "item/permissions/requestApproval":
		s.requestPermission(l, q, w, sandboxPermissionsRequest(q), t, func(a agent.PermissionAnswer) any {
			granted := any(map[string]any{})
			if a.IsAllowed() {
				granted = q.Permissions
			}
			return map[string]any{"permissions": granted, "scope": "turn"}
		})
	case "mcpServer/elicitation/request":
		if w = s.findMCPCall(q); w != nil {
			q.ItemID = w.item.ID
		}
		s.requestPermission(l, q, w, s.mcpServerRequest(q), t, mcpServerAnswer)
	case "item/tool/requestUserInput":
		s.requestPermission(l, q, w, userQuestionRequest(q), t, func(a agent.PermissionAnswer) any { return userQuestionAnswer(q, a) })
	default:
		s.logf(t, "warn", "the agent asked for %q, which is not offered", l.Method)
		s.sendJSON(rpcAnswer{ID: l.ID, Error: &rpcError{Code: -32601, Message: fmt.Sprintf("%q is not offered", l.Method)}})
	}
	return nil
}

// requestPermission lets the turn decide the request r. When the policy or a person has decided, it sends result(answer) to the CLI. w is the item
// of the call, nil if it is not known.
func (s *session) requestPermission(l outputLine, q questionParams, w *runningItem, r agent.PermissionRequest, t *agent.Turn, result func(agent.PermissionAnswer) any) {
	r.Key, r.ToolUseID = string(l.ID), q.ItemID
	switch {
	case !s.pending:
		r.Decided = newDenial(ruleOutsideTurn, "No query is being answered.")
	case s.isTooDeep(q.ThreadID):
		r.Decided = newDenial(ruleTooDeep, fmt.Sprintf("Sub-agents may be started %d levels below the agent (limits.subagentDepth).", s.turn.maxDepth))
	}
	byPolicy := true // until RequestPermission returns
	t.RequestPermission(s.conversationID(q.ThreadID), r, func(a agent.PermissionAnswer) {
		if w != nil && !a.IsAllowed() {
			w.denied, w.byPolicy = a.Message, byPolicy
		}
		s.sendJSON(rpcAnswer{ID: l.ID, Result: result(a)})
	})
	byPolicy = false
}

// handleQuestionResolved handles the notification that the CLI no longer waits for an answer: because it got one, or because it withdrew the
// question.
func (s *session) handleQuestionResolved(l outputLine, t *agent.Turn) error {
	r, err := decode[struct {
		ID json.RawMessage `json:"requestId"`
	}](l.Params, l.Method)
	if err != nil {
		return err
	}
	t.WithdrawRequest(string(r.ID))
	return nil
}

// commandRequest returns the permission request for a command. The CLI requests network access only when it uses its own sandbox, which is switched
// off here: a request for network access means that the configuration was not applied.
func (s *session) commandRequest(q questionParams, w *runningItem) agent.PermissionRequest {
	script := unwrapShellScript(q.Command)
	r := agent.PermissionRequest{
		Call:    permission.Call{Tool: toolShell, Kind: permission.KindShell, Command: script},
		Title:   agent.FirstLine(script),
		Reason:  q.Reason,
		Preview: events.ApprovalPreview{Command: script},
		Input:   callArguments(w),
	}
	if q.Cwd != s.launch.Workspace {
		r.Preview.Cwd = q.Cwd
	}
	if q.Command == "" && q.Network == nil {
		r.Decided = newDenial(ruleUnreadableRequest, "The request does not say which command is run.")
	}
	if q.Network != nil {
		r.Call.Kind, r.Call.Hosts = permission.KindNetwork, []string{q.Network.Host}
		r.Preview.URL = q.Network.Host
	}
	return r
}

// patchRequest returns the permission request for changes of files. The item of the call has the changes.
func (s *session) patchRequest(q questionParams, w *runningItem) agent.PermissionRequest {
	r := agent.PermissionRequest{Call: permission.Call{Tool: toolPatch, Kind: permission.KindEdit}, Reason: q.Reason, Input: callArguments(w)}
	if w == nil || len(w.item.Changes) == 0 {
		r.Decided = newDenial(ruleUnreadableRequest, "The request does not say which files are changed.")
		return r
	}
	r.Title = w.item.patchSummary()
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
		diff.WriteString(c.diffText())
	}
	if q.GrantRoot != "" {
		add(q.GrantRoot)
	}
	r.Preview.Diff = diff.String()
	return r
}

// diffText returns the change of a file as a diff. For added and deleted files the CLI sends the whole content instead of a diff.
func (c fileChange) diffText() string {
	before, after, sign := c.Path, cmp.Or(c.Kind.MovePath, c.Path), ""
	switch c.Kind.Type {
	case "add":
		before, sign = "/dev/null", "+"
	case "delete":
		after, sign = "/dev/null", "-"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "--- %s\n+++ %s\n", visible.Line(before), visible.Line(after))
	for line := range strings.Lines(c.Diff) {
		b.WriteString(sign + strings.TrimSuffix(line, "\n") + "\n")
	}
	return b.String()
}

// sandboxPermissionsRequest returns the permission request for more permissions in the CLI's own sandbox.
func sandboxPermissionsRequest(q questionParams) agent.PermissionRequest {
	return agent.PermissionRequest{
		Call:  permission.Call{Tool: toolPermission, Kind: permission.KindUnknown},
		Title: "more permissions", Reason: q.Reason, Preview: events.ApprovalPreview{Text: string(q.Permissions)}, Input: q.Permissions,
	}
}

// mcpServerRequest returns the permission request for a question about an MCP server: either the CLI asks whether a tool may be called, or the
// server asks the user for data.
func (s *session) mcpServerRequest(q questionParams) agent.PermissionRequest {
	tool := "mcp__" + q.ServerName
	if q.Meta.Kind != toolApprovalKind {
		r := agent.PermissionRequest{
			Call: permission.Call{Tool: tool, Kind: permission.KindQuestion}, Kind: events.ApprovalElicitation,
			Title: agent.FirstLine(q.Message), Preview: events.ApprovalPreview{Text: q.Message, URL: q.URL}, Schema: q.Schema,
		}
		if q.Mode != "form" && q.Mode != "url" {
			r.Decided = newDenial(ruleUnreadableRequest, fmt.Sprintf("The MCP server %s asks in the unknown form %q.", q.ServerName, q.Mode))
		}
		return r
	}
	tool += "__" + q.Meta.Tool
	r := agent.PermissionRequest{
		Call:    permission.Call{Tool: tool, Kind: permission.KindMCPTool, Destructive: q.Meta.Annotations.Destructive},
		Title:   q.ServerName + ": " + q.Meta.Tool,
		Preview: events.ApprovalPreview{Text: indentJSON(q.Meta.Params)},
		Input:   q.Meta.Params,
	}
	if !hasMCPTool(s.launch.MCPServers, q.ServerName, q.Meta.Tool) {
		r.Decided = newDenial(permission.RuleUnknownTool, "The workspace policy does not know the tool "+tool+" and so does not allow it.")
	}
	return r
}

// mcpServerAnswer converts a permission answer to the CLI's format for questions about an MCP server.
func mcpServerAnswer(a agent.PermissionAnswer) any {
	content := a.Content
	switch {
	case a.Outcome != events.OutcomeAnswered && !a.IsAllowed():
		return map[string]any{"action": "decline", "content": nil, "_meta": nil}
	case len(content) == 0:
		content = json.RawMessage("{}")
	}
	return map[string]any{"action": "accept", "content": content, "_meta": nil}
}

// userQuestionRequest returns the request for the agent's questions to the user.
func userQuestionRequest(q questionParams) agent.PermissionRequest {
	r := agent.PermissionRequest{Call: permission.Call{Tool: toolQuestion, Kind: permission.KindQuestion}, Kind: events.ApprovalQuestion}
	for _, ask := range q.Questions {
		e := events.Question{ID: ask.ID, Header: ask.Header, Question: ask.Question, Other: ask.IsOther || len(ask.Options) == 0, Secret: ask.IsSecret}
		for _, o := range ask.Options {
			e.Options = append(e.Options, events.QuestionOption{Label: o.Label, Description: o.Description})
		}
		r.Questions = append(r.Questions, e)
		r.Title = cmp.Or(r.Title, agent.FirstLine(ask.Question))
	}
	if len(r.Questions) == 0 {
		r.Decided = newDenial(ruleUnreadableRequest, "The request has no question.")
	}
	return r
}

// userQuestionAnswer converts an answer to the CLI's format for questions to the user. If there are no answers, the model reads the reason in place
// of each.
func userQuestionAnswer(q questionParams, a agent.PermissionAnswer) any {
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

// findMCPCall returns the running call that a question about an MCP server refers to, or nil. The question does not have the id of the call, so
// findMCPCall returns a call of the same server and tool.
func (s *session) findMCPCall(q questionParams) *runningItem {
	for _, w := range s.turn.items {
		if w.thread == q.ThreadID && w.item.Type == "mcpToolCall" && w.item.Server == q.ServerName && (q.Meta.Tool == "" || w.item.Tool == q.Meta.Tool) {
			return w
		}
	}
	return nil
}

// approvalAnswer converts a permission answer to the CLI's format for requests for approval. It accepts a call for this time only, because the CLI
// would not ask again after the other answers.
func approvalAnswer(a agent.PermissionAnswer) any {
	if a.IsAllowed() {
		return map[string]string{"decision": "accept"}
	}
	return map[string]string{"decision": "decline"}
}

// sendDenialReason sends the agent the reason of a denial as a note to the running turn, because an answer has no field for a reason. It sends the
// note after the call has ended, because the agent would leave a running call to read the note. A note that is too late for the turn is sent with
// the next query.
func (s *session) sendDenialReason(thread, turn string, w *runningItem) {
	text := w.denied
	if w.byPolicy {
		text = "This was declined by policy, not by the user: " + text
	}
	note := "<system-reminder>" + text + "</system-reminder>"
	s.sendRequest("turn/steer", map[string]any{
		"threadId": thread, "expectedTurnId": turn, "input": []any{textPart(note)},
	}, pendingRequest{thread: thread, note: note})
}

// callArguments returns the arguments of a tool call, as the call's tool_use block has them.
func callArguments(w *runningItem) json.RawMessage {
	if w == nil {
		return nil
	}
	call, _ := w.item.toolCallBlock()
	return call.Input
}

// indentJSON returns a JSON value with indentation, for people to read.
func indentJSON(raw json.RawMessage) string {
	var out bytes.Buffer
	if json.Indent(&out, raw, "", "  ") != nil {
		return string(raw)
	}
	return out.String()
}

// shellPrograms are the paths of the programs that unwrapShellScript recognises as a shell. The model may use another one.
var shellPrograms = []string{"/bin/bash", "/bin/sh", "/bin/zsh", "/usr/bin/bash", "/usr/bin/sh", "/usr/bin/zsh"}

// unwrapShellScript returns the script in a command of the form `/bin/bash -lc 'script'`, in which the CLI runs the model's script. It returns
// another command unchanged.
func unwrapShellScript(command string) string {
	words, ok := splitWords(command)
	if ok && len(words) == 3 && slices.Contains(shellPrograms, words[0]) && (words[1] == "-lc" || words[1] == "-c") {
		return words[2]
	}
	return command
}

// splitWords splits a command into its words as a POSIX shell does. It returns false for a command with anything other than words and quotes, such
// as an expansion.
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
			n, closed := appendDoubleQuoted(&word, command[i+1:])
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

// appendDoubleQuoted appends the text in double quotes at the beginning of s to word, and returns the number of bytes of s up to and including the
// closing quote. It returns false if the text has expansions or no closing quote.
func appendDoubleQuoted(word *strings.Builder, s string) (n int, closed bool) {
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
