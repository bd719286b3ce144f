package codex

import (
	"fmt"
	"path/filepath"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
)

// Rules of the policy `workspace`, as permission_decided names them.
const (
	ruleInside     = "workspace-path"     // allow: files inside the workspace
	ruleOutside    = "outside-workspace"  // deny
	ruleShell      = "sandboxed-shell"    // allow: the sandbox limits what a command can reach
	ruleServer     = "mcp-server"         // allow: a tool of one of the agent's MCP servers
	ruleNetwork    = "network"            // deny
	ruleUnknown    = "unknown-tool"       // deny
	ruleUnreadable = "unreadable-request" // deny
	ruleNoQuery    = "no-query"           // deny: its events would not be recorded
)

// decision is the answer to a permission request.
type decision struct {
	allow  bool
	rule   string
	reason string
}

// decideCommand decides on a command. The CLI asks for network access only when it uses its own sandbox, which is
// switched off here: a request for it means that the configuration was not applied.
func decideCommand(q question) decision {
	if len(q.Network) > 0 && string(q.Network) != "null" {
		return decision{rule: ruleNetwork, reason: "The network is not open to this command by the workspace policy. Go on without it."}
	}
	return decision{allow: true, rule: ruleShell}
}

// decidePatch allows a change of files if all of them are inside the workspace.
func decidePatch(q question, changes []fileChange, root string) decision {
	if len(changes) == 0 {
		return decision{rule: ruleUnreadable, reason: "The request does not say which files are changed."}
	}
	paths := []string{}
	for _, c := range changes {
		paths = append(paths, c.Path)
		if c.Kind.MovePath != "" {
			paths = append(paths, c.Kind.MovePath)
		}
	}
	if q.GrantRoot != "" {
		paths = append(paths, q.GrantRoot)
	}
	for _, p := range paths {
		if !inside(root, p) {
			return decision{rule: ruleOutside, reason: fmt.Sprintf(
				"%s is outside of the workspace %s, and the workspace policy allows changes of files inside it only.", p, root)}
		}
	}
	return decision{allow: true, rule: ruleInside}
}

// inside reports whether a path, as the CLI will use it, is in the workspace, with all links resolved.
func inside(root, path string) bool {
	if path == "" {
		return false
	}
	if filepath.IsAbs(path) {
		// The other names of the workspace, such as /workspace, can be other folders for the CLI.
		real, err := filepath.EvalSymlinks(root)
		if err != nil || !isWithin(root, path) && !isWithin(real, path) {
			return false
		}
	}
	_, err := workspace.Inside(root, path)
	return err == nil
}

// isWithin reports whether path is root itself or below it.
func isWithin(root, path string) bool {
	rel, err := filepath.Rel(root, path)
	return err == nil && filepath.IsLocal(rel)
}

// answerQuestion answers a question of the CLI at once: no user is there to wait for.
func (s *session) answerQuestion(l line, t *agent.Turn) error {
	q, err := decode[question](l.Params, l.Method)
	if err != nil {
		s.send(answer{ID: l.ID, Error: &rpcError{Code: -32602, Message: err.Error()}})
		return err
	}
	w := s.turn.items[itemKey(q.ThreadID, q.ItemID)]
	reply := func(result any) { s.send(answer{ID: l.ID, Result: result}) }
	switch l.Method {
	case "item/commandExecution/requestApproval":
		reply(verdict(s.recordDecision("shell", q, w, decideCommand(q), t)))
	case "item/fileChange/requestApproval":
		var changes []fileChange
		if w != nil {
			changes = w.item.Changes
		}
		reply(verdict(s.recordDecision("apply_patch", q, w, decidePatch(q, changes, s.launch.Workspace), t)))
	case "item/permissions/requestApproval":
		s.recordDecision("permissions", q, w, decision{rule: ruleUnknown, reason: "The workspace policy grants no further permissions."}, t)
		reply(map[string]any{"permissions": map[string]any{}, "scope": "turn"})
	case "mcpServer/elicitation/request":
		reply(s.answerServerQuestion(q, t))
	case "item/tool/requestUserInput":
		s.logf(t, "warn", "the agent asked the user a question, which no one can answer")
		reply(map[string]any{"answers": map[string]any{}})
	default:
		s.logf(t, "warn", "the agent asked for %q, which is not offered", l.Method)
		s.send(answer{ID: l.ID, Error: &rpcError{Code: -32601, Message: fmt.Sprintf("%q is not offered", l.Method)}})
	}
	return nil
}

// answerServerQuestion answers a question about an MCP server: either the CLI asks whether a tool may be called, or the
// server asks the user, who is not there.
func (s *session) answerServerQuestion(q question, t *agent.Turn) map[string]any {
	tool := "mcp__" + q.ServerName
	d := decision{rule: ruleUnknown, reason: "Nobody is there to answer the MCP server " + q.ServerName + "."}
	if q.Meta.Kind == approvesTool {
		tool += "__" + q.Meta.Tool
		d.reason = "The workspace policy does not know the tool " + tool + " and so does not allow it."
		if hasTool(s.launch.MCPServers, q.ServerName, q.Meta.Tool) {
			d = decision{allow: true, rule: ruleServer}
		}
	}
	w := s.findCall(q)
	if w != nil {
		q.ItemID = w.item.ID
	}
	if d = s.recordDecision(tool, q, w, d, t); d.allow {
		return map[string]any{"action": "accept", "content": map[string]any{}, "_meta": nil}
	}
	return map[string]any{"action": "decline", "content": nil, "_meta": nil}
}

// findCall returns the running call that a question about an MCP server is about, or nil. The question does not have the call's id, so findCall
// takes a call of the same server and tool.
func (s *session) findCall(q question) *runningItem {
	for _, w := range s.turn.items {
		if w.thread == q.ThreadID && w.item.Type == "mcpToolCall" && w.item.Server == q.ServerName && (q.Meta.Tool == "" || w.item.Tool == q.Meta.Tool) {
			return w
		}
	}
	return nil
}

// verdict returns the answer of the protocol for a decision.
func verdict(d decision) map[string]string {
	if d.allow {
		return map[string]string{"decision": "accept"}
	}
	return map[string]string{"decision": "decline"}
}

// recordDecision journals a decision about a tool and returns it. Without a running turn it changes the decision to a denial. w is the item of
// the call, nil if it is not known.
func (s *session) recordDecision(tool string, q question, w *runningItem, d decision, t *agent.Turn) decision {
	if !s.pending {
		d = decision{rule: ruleNoQuery, reason: "No query is being answered."}
	}
	word := "allow"
	if !d.allow {
		word = "deny"
		if w != nil {
			w.denied = d.reason
		}
	}
	t.Emit(s.conversationOf(q.ThreadID), events.PermissionDecided{ToolName: tool, ToolUseID: q.ItemID, Decision: word, Rule: d.rule, Reason: d.reason})
	return d
}

// explain sends the agent the reason of a denial as a note to the running turn, because an answer has no field for a
// reason. It sends the note after the call has ended: the agent would leave a running call to read the note. A note
// that comes too late for the turn is sent with the next query.
func (s *session) explain(thread, turn, reason string) {
	note := "<system-reminder>This was declined by policy, not by the user: " + reason + "</system-reminder>"
	s.ask("turn/steer", map[string]any{
		"threadId": thread, "expectedTurnId": turn, "input": []any{textPart(note)},
	}, pendingRequest{thread: thread, note: note})
}
