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
	ruleShell      = "sandboxed-shell"    // allow: what a command can reach is the sandbox's to limit
	ruleServer     = "mcp-server"         // allow: a tool of an MCP server that the agent has
	ruleNetwork    = "network"            // deny
	ruleUnknown    = "unknown-tool"       // deny
	ruleUnreadable = "unreadable-request" // deny
	ruleNoQuery    = "no-query"           // deny: nobody would record it
)

// decision is how a question is answered.
type decision struct {
	allow  bool
	rule   string
	reason string
}

// command decides on a command. The CLI asks for network access only within a
// sandbox of its own, which it has not: then something is not as it was told.
func decideCommand(q question) decision {
	if len(q.Network) > 0 && string(q.Network) != "null" {
		return decision{rule: ruleNetwork, reason: "The network is not open to this command by the workspace policy. Go on without it."}
	}
	return decision{allow: true, rule: ruleShell}
}

// decidePatch allows a change of files if every one of them is inside the workspace.
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

// inside tells whether a path, as the CLI will use it, stays in the workspace whatever links there are.
func inside(root, path string) bool {
	if path == "" {
		return false
	}
	if filepath.IsAbs(path) {
		// The names that the workspace has elsewhere would be other folders to the CLI.
		real, err := filepath.EvalSymlinks(root)
		if err != nil || !under(root, path) && !under(real, path) {
			return false
		}
	}
	_, err := workspace.Inside(root, path)
	return err == nil
}

func under(root, path string) bool {
	rel, err := filepath.Rel(root, path)
	return err == nil && filepath.IsLocal(rel)
}

// question answers a question of the CLI, at once: there is nobody to wait for.
func (s *session) question(l line, t *agent.Turn) error {
	q, err := decode[question](l.Params, l.Method)
	if err != nil {
		s.send(answer{ID: l.ID, Error: &rpcError{Code: -32602, Message: err.Error()}})
		return err
	}
	w := s.turn.items[key(q.ThreadID, q.ItemID)]
	reply := func(result any) { s.send(answer{ID: l.ID, Result: result}) }
	switch l.Method {
	case "item/commandExecution/requestApproval":
		reply(verdict(s.decided("shell", q, w, decideCommand(q), t)))
	case "item/fileChange/requestApproval":
		var changes []fileChange
		if w != nil {
			changes = w.item.Changes
		}
		reply(verdict(s.decided("apply_patch", q, w, decidePatch(q, changes, s.launch.Workspace), t)))
	case "item/permissions/requestApproval":
		s.decided("permissions", q, w, decision{rule: ruleUnknown, reason: "The workspace policy grants no further permissions."}, t)
		reply(map[string]any{"permissions": map[string]any{}, "scope": "turn"})
	case "mcpServer/elicitation/request":
		reply(s.served(q, t))
	case "item/tool/requestUserInput":
		s.logf(t, "warn", "the agent asked the user something, and nobody is there to answer")
		reply(map[string]any{"answers": map[string]any{}})
	default:
		s.logf(t, "warn", "the agent asked for %q, which is not offered", l.Method)
		s.send(answer{ID: l.ID, Error: &rpcError{Code: -32601, Message: fmt.Sprintf("%q is not offered", l.Method)}})
	}
	return nil
}

// served answers a question about an MCP server: of the CLI, whether a tool may be
// called, or of the server itself, for somebody who is not there.
func (s *session) served(q question, t *agent.Turn) map[string]any {
	tool := "mcp__" + q.ServerName
	d := decision{rule: ruleUnknown, reason: "Nobody is there to answer the MCP server " + q.ServerName + "."}
	if q.Meta.Kind == approvesTool {
		tool += "__" + q.Meta.Tool
		d.reason = "The workspace policy does not know the tool " + tool + " and so does not allow it."
		if serves(s.launch.MCPServers, q.ServerName, q.Meta.Tool) {
			d = decision{allow: true, rule: ruleServer}
		}
	}
	w := s.calling(q)
	if w != nil {
		q.ItemID = w.item.ID
	}
	if d = s.decided(tool, q, w, d, t); d.allow {
		return map[string]any{"action": "accept", "content": map[string]any{}, "_meta": nil}
	}
	return map[string]any{"action": "decline", "content": nil, "_meta": nil}
}

// calling finds the call that such a question is about, which does not name it.
func (s *session) calling(q question) *work {
	for _, w := range s.turn.items {
		if w.thread == q.ThreadID && w.item.Type == "mcpToolCall" && w.item.Server == q.ServerName && (q.Meta.Tool == "" || w.item.Tool == q.Meta.Tool) {
			return w
		}
	}
	return nil
}

func verdict(d decision) map[string]string {
	if d.allow {
		return map[string]string{"decision": "accept"}
	}
	return map[string]string{"decision": "decline"}
}

// decided records a decision.
func (s *session) decided(tool string, q question, w *work, d decision, t *agent.Turn) decision {
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

// explain tells the agent why something was declined, for which an answer has
// no room: by a note to the turn that runs. It comes when the call is over: one
// that is at work would be left by the agent, to look at the note. A note that comes
// too late for the turn goes with the next query.
func (s *session) explain(thread, turn, reason string) {
	note := "<system-reminder>This was declined by policy, not by the user: " + reason + "</system-reminder>"
	s.ask("turn/steer", map[string]any{
		"threadId": thread, "expectedTurnId": turn, "input": []any{textPart(note)},
	}, asked{thread: thread, note: note})
}
