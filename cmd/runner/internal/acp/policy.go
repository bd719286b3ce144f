package acp

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
)

// Class is the kind of a call for the policy.
type Class string

// The classes of calls.
const (
	ClassFile    Class = "file"    // reads or changes files
	ClassShell   Class = "shell"   // runs commands
	ClassAgent   Class = "agent"   // a sub-agent
	ClassBooks   Class = "books"   // the agent's own lists and notes
	ClassNetwork Class = "network" // reaches the network
	ClassServer  Class = "server"  // a tool of one of the agent's MCP servers
	ClassNamed   Class = "named"   // the agent's definition names it
	ClassLeftOut Class = "leftout" // the agent's definition excludes it
	ClassUnknown Class = "unknown"
)

// Rules of the policy `workspace`, as permission_decided names them.
const (
	ruleInside     = "workspace-path"     // allow: files inside the workspace
	ruleSkill      = "skill-file"         // allow: reading a file of one of the agent's skills
	ruleOutside    = "outside-workspace"  // deny
	ruleShell      = "sandboxed-shell"    // allow: the sandbox limits what a command can reach
	ruleAgent      = "sub-agent"          // allow
	ruleBooks      = "bookkeeping"        // allow
	ruleServer     = "mcp-server"         // allow
	ruleNamed      = "named-tool"         // allow
	ruleLeftOut    = "left-out"           // deny
	ruleNetwork    = "network"            // deny
	ruleUnknown    = "unknown-tool"       // deny
	ruleUnreadable = "unreadable-request" // deny
	ruleNoQuery    = "no-query"           // deny: its events would not be recorded
	ruleNoOption   = "no-option"          // deny: the agent offers no answer of that kind
)

// decision is the answer to a permission request.
type decision struct {
	allow  bool
	rule   string
	reason string
}

// classify returns a Tool with the Class for a tool kind of the protocol. The policy decides by that Class.
func classify(k sdk.ToolKind) Tool {
	switch k {
	case sdk.ToolKindRead, sdk.ToolKindEdit, sdk.ToolKindDelete, sdk.ToolKindMove:
		return Tool{Class: ClassFile}
	case sdk.ToolKindSearch:
		return Tool{Class: ClassFile, Search: true}
	case sdk.ToolKindExecute:
		return Tool{Class: ClassShell}
	case sdk.ToolKindThink:
		return Tool{Class: ClassBooks}
	case sdk.ToolKindFetch:
		return Tool{Class: ClassNetwork}
	default:
		return Tool{Class: ClassUnknown}
	}
}

// decide returns the decision of the policy `workspace` on a call: it allows what stays inside the workspace, root, and reading files of the
// skills, and denies everything else.
func decide(c Call, tool Tool, root string, skills []string) decision {
	switch tool.Class {
	case ClassFile:
		return decidePaths(c, tool, root, skills)
	case ClassShell:
		return decision{allow: true, rule: ruleShell}
	case ClassAgent:
		return decision{allow: true, rule: ruleAgent}
	case ClassBooks:
		return decision{allow: true, rule: ruleBooks}
	case ClassServer:
		return decision{allow: true, rule: ruleServer}
	case ClassNamed:
		return decision{allow: true, rule: ruleNamed}
	case ClassLeftOut:
		return decision{rule: ruleLeftOut, reason: fmt.Sprintf("The tool %q is not one that this agent has.", c.Name)}
	case ClassNetwork:
		return decision{rule: ruleNetwork, reason: c.Name + " reaches the network, which the workspace policy does not allow."}
	default:
		return decision{rule: ruleUnknown, reason: fmt.Sprintf("The workspace policy does not know the tool %q and so does not allow it.", c.Name)}
	}
}

// pathKeys are the arguments in which agents name files.
var pathKeys = []string{
	"path", "paths", "file", "files", "filePath", "filepath", "file_path", "absolute_path", "abs_path", "notebook_path",
	"dir", "directory", "dir_path", "parentDir", "source", "destination", "from", "to", "old_path", "new_path", "target_file",
}

// decidePaths allows a call if every path that it names is inside the workspace.
func decidePaths(c Call, tool Tool, root string, skills []string) decision {
	paths := c.Paths
	if isSet(c.Input) {
		more, ok := inputPaths(c.Input)
		if !ok {
			return decision{rule: ruleUnreadable, reason: "the request's input cannot be read"}
		}
		paths = append(slices.Clone(paths), more...)
	}
	reads := tool.Search || c.Kind == sdk.ToolKindRead
	rule := ruleInside
	for _, p := range paths {
		if reads && isInSkill(skills, p) {
			rule = ruleSkill
			continue
		}
		if !inside(root, p) {
			return decision{rule: ruleOutside, reason: fmt.Sprintf("%s is outside of the workspace %s, and the workspace policy allows files inside it only.", p, root)}
		}
	}
	if len(paths) == 0 && !tool.Search {
		return decision{rule: ruleUnreadable, reason: "the request names no file"}
	}
	return decision{allow: true, rule: rule}
}

// isInSkill reports whether a path is inside the folder of a skill, with symbolic links resolved.
func isInSkill(skills []string, path string) bool {
	real, err := filepath.EvalSymlinks(path)
	if err != nil || !filepath.IsAbs(path) {
		return false
	}
	return slices.ContainsFunc(skills, func(dir string) bool {
		dir, err := filepath.EvalSymlinks(dir)
		return err == nil && isWithin(dir, real)
	})
}

// inputPaths returns the paths among the arguments of a call. A glob pattern counts as a path if it could match files
// outside of its folder. The bool is false if the arguments cannot be decoded.
func inputPaths(input json.RawMessage) ([]string, bool) {
	var all map[string]json.RawMessage
	if json.Unmarshal(input, &all) != nil {
		return nil, false
	}
	var paths []string
	for _, key := range pathKeys {
		raw, ok := all[key]
		if !ok || string(raw) == "null" {
			continue
		}
		var one string
		var many []string
		switch {
		case json.Unmarshal(raw, &one) == nil:
			if one != "" {
				paths = append(paths, one)
			}
		case json.Unmarshal(raw, &many) == nil:
			paths = append(paths, many...)
		default:
			return nil, false
		}
	}
	for _, key := range []string{"pattern", "glob", "include"} {
		var p string
		if json.Unmarshal(all[key], &p) == nil && (strings.HasPrefix(p, "~") || slices.Contains(strings.Split(p, "/"), "..")) {
			paths = append(paths, p)
		}
	}
	return paths, true
}

// inside reports whether a path, absolute or relative to the workspace, is inside the workspace, with symbolic links
// resolved.
func inside(root, path string) bool {
	path = strings.TrimPrefix(path, "file://")
	if strings.HasPrefix(path, "~") {
		return false // an agent may take it for the home folder
	}
	if filepath.IsAbs(path) {
		// Aliases of the workspace, such as /mnt/workspace, would be other folders for the agent.
		real, err := filepath.EvalSymlinks(root)
		if err != nil || !isWithin(root, path) && !isWithin(real, path) {
			return false
		}
	}
	_, err := workspace.Inside(root, path)
	return err == nil
}

// isWithin reports whether path is root itself or below it. Both are clean absolute paths.
func isWithin(root, path string) bool {
	rel, err := filepath.Rel(root, path)
	return err == nil && filepath.IsLocal(rel)
}

// answerPermission answers a permission request at once. No person is asked.
func (s *session) answerPermission(m message, t *agent.Turn) error {
	answer := func(o sdk.RequestPermissionOutcome) error {
		return s.in.Send(reply{JSONRPC: "2.0", ID: m.ID, Result: sdk.RequestPermissionResponse{Outcome: o}})
	}
	q, err := decode[permissionRequest](m.Params, "session/request_permission")
	if err != nil {
		// The id is known, so the agent gets an answer.
		if sendErr := answer(sdk.NewRequestPermissionOutcomeCancelled()); sendErr != nil {
			return sendErr
		}
		t.Emit(events.MainConversation, events.PermissionDecided{Decision: "deny", Rule: ruleUnreadable, Reason: "the request cannot be read"})
		return err
	}
	flow := s.flow(q.SessionID)
	c := Call{ID: q.ToolCall.ID}
	if known := s.calls[q.ToolCall.ID]; known != nil {
		c = known.Call
	}
	c = c.with(q.ToolCall)
	if q.ToolCall.Title != nil {
		c.Asks = *q.ToolCall.Title
	}
	d := decision{rule: ruleNoQuery, reason: "No query is being answered."}
	if s.pending && flow != nil {
		d = decide(c, s.tool(c), s.place.Workspace, s.d.Skills)
	}
	outcome := chooseOption(q.Options, &d)
	if s.isInterrupted() {
		// The protocol demands this answer to every request after a cancellation.
		outcome = sdk.NewRequestPermissionOutcomeCancelled()
		d = decision{rule: d.rule, reason: "The turn was interrupted."}
	}
	conv, word := events.MainConversation, "deny"
	if flow != nil {
		conv = flow.conv
	}
	if d.allow {
		word = "allow"
	}
	t.Emit(conv, events.PermissionDecided{ToolName: c.Name, ToolUseID: c.ID, Decision: word, Rule: d.rule, Reason: d.reason})
	return answer(outcome)
}

// chooseOption returns the answer to a permission request: the option that expresses d. It allows a call only by an option for this call alone,
// because after "always" the agent would not ask again. If the agent offers no such option, chooseOption changes d to a denial.
func chooseOption(options []sdk.PermissionOption, d *decision) sdk.RequestPermissionOutcome {
	wanted := []sdk.PermissionOptionKind{sdk.PermissionOptionKindRejectOnce, sdk.PermissionOptionKindRejectAlways}
	if d.allow {
		wanted = []sdk.PermissionOptionKind{sdk.PermissionOptionKindAllowOnce}
	}
	for _, kind := range wanted {
		for _, o := range options {
			if o.Kind == kind {
				return sdk.NewRequestPermissionOutcomeSelected(o.OptionId)
			}
		}
	}
	if d.allow {
		*d = decision{rule: ruleNoOption, reason: "The agent offers no answer that allows this once."}
	}
	return sdk.NewRequestPermissionOutcomeCancelled()
}
