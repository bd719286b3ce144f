package opencode

import (
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// reportAsksVariable is the environment variable that makes plugin.js, the adapter's plugin in the CLI, report the
// permission requests of sub-agents, because the CLI does not pass them on.
const reportAsksVariable = "SPOOL_AGENT_ASKS"

// restrictSubagentRules returns the permission rules rs of a sub-agent, changed so that the CLI requests a permission
// for each tool of which the policy might forbid a call or ask a person about one.
func restrictSubagentRules(l agent.Launch, rs permissionRules) permissionRules {
	if !l.HasPolicy() {
		return rs
	}
	rs = slices.Clone(rs)
	for i, r := range rs {
		if r.action != "deny" && !mayRunUnasked(l, r.permission) {
			rs[i].action = "ask"
		}
	}
	return rs
}

// mayRunUnasked reports whether the policy allows every call for which the CLI checks the permission name.
func mayRunUnasked(l agent.Launch, name string) bool {
	tools := []string{name}
	if name == "edit" {
		tools = editTools
	}
	if prefix, ok := strings.CutSuffix(name, "*"); ok {
		return allowsAllServerTools(l, prefix)
	}
	for _, tool := range tools {
		known, ok := toolKinds[tool]
		c := permission.Call{Tool: tool, Kind: known.Kind, Command: "$SPOOL_ANY_COMMAND"}
		if !ok {
			c.Kind = permission.KindMCPTool
		}
		if known.Kind == permission.KindRead || known.Kind == permission.KindEdit {
			c.Paths = []permission.Path{{Path: "any"}} // others are outside of the workspace, which the CLI denies a sub-agent
		}
		if !l.AllowsAll(c) {
			return false
		}
	}
	return true
}

// allowsAllServerTools reports whether the policy allows all tools of the MCP server whose tools' names have the
// prefix.
func allowsAllServerTools(l agent.Launch, prefix string) bool {
	concerns := func(glob, then string) bool {
		return then != events.PermissionAllow && (strings.HasPrefix(glob, prefix) || strings.ContainsAny(glob, "*?[\\"))
	}
	for _, r := range slices.Concat(l.Permissions.Rules, l.ExecutionPermissions.Rules) {
		if concerns(r.Tool, r.Then) {
			return false
		}
	}
	for tool, then := range l.Permissions.Tools {
		if concerns(tool, then) {
			return false
		}
	}
	return l.AllowsAll(permission.Call{Tool: prefix + "any", Kind: permission.KindMCPTool})
}
