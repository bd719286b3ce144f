package claudecode

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
)

// Rules of the policy `workspace`, as permission_decided names them.
const (
	ruleInside     = "workspace-path"     // allow: a file inside the workspace
	ruleOutside    = "outside-workspace"  // deny
	ruleShell      = "sandboxed-shell"    // allow: the sandbox limits what a command can reach
	ruleAgent      = "sub-agent"          // allow: its own calls are asked for as well
	ruleBooks      = "bookkeeping"        // allow: the agent's own lists and notes
	ruleServer     = "mcp-server"         // allow: a tool of one of the agent's MCP servers
	ruleSkill      = "skill-file"         // allow: reading a file of one of the agent's skills
	ruleNamed      = "named-tool"         // allow: the agent's definition names it
	ruleLeftOut    = "left-out"           // deny: the agent's definition excludes it
	ruleNetwork    = "network"            // deny
	ruleUnknown    = "unknown-tool"       // deny
	ruleUnreadable = "unreadable-request" // deny
	ruleNoQuery    = "no-query"           // deny: its events would not be recorded
)

// paths names for each file tool the argument with the path. A search tool's argument is optional: without it the tool searches the workspace.
var paths = map[string]struct {
	argument string
	optional bool
}{
	"Read": {"file_path", false}, "Write": {"file_path", false}, "Edit": {"file_path", false}, "MultiEdit": {"file_path", false},
	"NotebookEdit": {"notebook_path", false}, "NotebookRead": {"notebook_path", false},
	"Glob": {"path", true}, "Grep": {"path", true}, "LS": {"path", true},
}

var (
	readers = []string{"Read", "Glob", "Grep", "LS", "NotebookRead"}
	shells  = []string{"Bash", "BashOutput", "KillBash", "KillShell"}
	books   = []string{
		"TodoWrite", "TodoRead", "TaskCreate", "TaskGet", "TaskList", "TaskUpdate", "TaskOutput", "TaskStop",
		"Skill", "SlashCommand", "ToolSearch", "ReportFindings", "WaitForMcpServers",
	}
	network = []string{"WebFetch", "WebSearch"}
)

// decision is the answer to a permission request.
type decision struct {
	allow  bool
	rule   string
	reason string
	input  json.RawMessage // the input of the tool, if allowed
}

// decide returns the decision of the policy `workspace` on a permission request. It allows files inside the workspace, commands, which the sandbox
// limits, sub-agents, MCP servers of the agent, and tools that the agent's definition names. It denies everything else.
func decide(q question, s scope) decision {
	var input map[string]json.RawMessage
	if len(q.Input) == 0 || json.Unmarshal(q.Input, &input) != nil || input == nil {
		return decision{rule: ruleUnreadable, reason: "the request has no readable input"}
	}
	allow := func(rule string) decision { return decision{allow: true, rule: rule, input: bytes.Clone(q.Input)} }
	where, isFile := paths[q.ToolName]
	served, has := s.belongsToServer(q.ToolName)
	switch {
	case slices.Contains(s.deny, q.ToolName), served && !has:
		return decision{rule: ruleLeftOut, reason: fmt.Sprintf("The tool %q is not one that this agent has. Go on without it.", q.ToolName)}
	case served:
		return allow(ruleServer)
	case isFile:
		return decidePath(q, input, where.argument, where.optional, s)
	case slices.Contains(shells, q.ToolName):
		return allow(ruleShell)
	case isAgent(q.ToolName):
		return allow(ruleAgent)
	case slices.Contains(books, q.ToolName):
		return allow(ruleBooks)
	case slices.Contains(s.allow, q.ToolName):
		return allow(ruleNamed)
	case slices.Contains(network, q.ToolName):
		return decision{rule: ruleNetwork, reason: q.ToolName + " reaches the network, which the workspace policy does not allow. Go on without it."}
	}
	return decision{rule: ruleUnknown, reason: fmt.Sprintf("The workspace policy does not know the tool %q and so does not allow it. Go on without it.", q.ToolName)}
}

// decidePath returns the decision on a call of a file tool: it allows a path inside the workspace, and reading a file of a skill. The input of an
// allowed call has the path that was checked. argument names the path's argument, which may be absent if optional is true.
func decidePath(q question, input map[string]json.RawMessage, argument string, optional bool, s scope) decision {
	root := s.root
	var path string
	if raw, ok := input[argument]; ok && json.Unmarshal(raw, &path) != nil {
		return decision{rule: ruleUnreadable, reason: argument + " is not a text"}
	}
	if pattern, ok := input["pattern"]; ok && q.ToolName == "Glob" {
		// A pattern can contain a path.
		var p string
		if json.Unmarshal(pattern, &p) != nil || filepath.IsAbs(p) || strings.HasPrefix(p, "~") || slices.Contains(strings.Split(p, "/"), "..") {
			return outside(string(pattern), root)
		}
	}
	path = strings.TrimFunc(path, isSpace)
	if path == "" {
		if optional {
			return decision{allow: true, rule: ruleInside, input: bytes.Clone(q.Input)}
		}
		return decision{rule: ruleUnreadable, reason: argument + " is missing"}
	}
	rule, judged := ruleInside, ""
	if rel, ok := inside(root, path); ok {
		judged = filepath.Join(root, rel)
	} else if real, ok := s.skillFile(path); ok && slices.Contains(readers, q.ToolName) {
		rule, judged = ruleSkill, real
	} else {
		return outside(path, root)
	}
	// The CLI expands and trims paths by rules of its own, so it gets the path that was checked.
	raw, err := json.Marshal(judged)
	if err != nil {
		return decision{rule: ruleUnreadable, reason: argument + " cannot be written as JSON"}
	}
	input[argument] = raw
	changed, err := json.Marshal(input)
	if err != nil {
		return decision{rule: ruleUnreadable, reason: "the input cannot be written as JSON"}
	}
	return decision{allow: true, rule: rule, input: changed}
}

// outside returns the denial of a path outside the workspace.
func outside(path, root string) decision {
	return decision{rule: ruleOutside, reason: fmt.Sprintf("%s is outside of the workspace %s, and the workspace policy allows files inside it only.", path, root)}
}

// inside returns a path relative to the root of the workspace. The bool is false if the path, with its symbolic links resolved, is outside the
// workspace.
func inside(root, path string) (string, bool) {
	if strings.HasPrefix(path, "~") {
		return "", false // the CLI takes it for the home folder
	}
	if filepath.IsAbs(path) {
		// Aliases of the workspace, such as /mnt/workspace, would be other folders for the CLI.
		real, err := filepath.EvalSymlinks(root)
		if err != nil || !isWithin(root, path) && !isWithin(real, path) {
			return "", false
		}
	}
	rel, err := workspace.Inside(root, path)
	return rel, err == nil
}

func isWithin(root, path string) bool {
	rel, err := filepath.Rel(root, path)
	return err == nil && filepath.IsLocal(rel)
}

// isSpace reports whether the trim function of JavaScript removes r.
func isSpace(r rune) bool {
	return r == '\uFEFF' || strings.ContainsRune(" \t\n\v\f\r\u00a0\u1680\u2028\u2029\u202f\u205f\u3000", r) || r >= '\u2000' && r <= '\u200a'
}

// answerPermission answers a permission request of the CLI at once. No person is asked.
func (s *session) answerPermission(l line, t *agent.Turn) error {
	reply := func(r response) error {
		r.RequestID = l.RequestID
		return s.in.Send(controlResponse{Type: "control_response", Response: r})
	}
	q, err := decode[question](l.Request, "control_request")
	if err == nil && q.Subtype != "can_use_tool" {
		logf(t, "warn", "the agent asked for %q, which is not offered", q.Subtype)
		return reply(response{Subtype: "error", Error: fmt.Sprintf("%q is not offered", q.Subtype)})
	}
	d := decision{rule: ruleNoQuery, reason: "No query is being answered."}
	switch {
	case err != nil:
		d = decision{rule: ruleUnreadable, reason: "the request cannot be read"}
	case s.pending:
		d = decide(q, s.scope)
	}
	conv := events.MainConversation
	if c := s.turn.calls[q.ToolUseID]; c != nil {
		conv = c.conv
	} else if sub := s.turn.conversations[s.turn.agents[q.AgentID]]; q.AgentID != "" && sub != nil {
		conv = sub.id // the question came before the call's own line
	}
	v, word := verdict{Behavior: "deny", Message: d.reason}, "deny"
	if d.allow {
		v, word = verdict{Behavior: "allow", UpdatedInput: d.input}, "allow"
	}
	t.Emit(conv, events.PermissionDecided{ToolName: q.ToolName, ToolUseID: q.ToolUseID, Decision: word, Rule: d.rule, Reason: d.reason})
	return reply(response{Subtype: "success", Response: v})
}
