package codex

import (
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// anyCommand is a command that the policy cannot know.
const anyCommand = "$SPOOL_ANY_COMMAND"

// resourceTools are the CLI's tools that read resources of MCP servers.
const resourceTools = "list_mcp_resources|list_mcp_resource_templates|read_mcp_resource"

// resourceHook is a hook that denies resourceTools. The CLI runs a hook only if the configuration contains the hook's hash,
// which is resourceHookHash.
const (
	resourceHook = `hooks.PreToolUse=[{matcher="` + resourceTools + `",hooks=[{type="command",command="echo The permission policy does not allow this call. >&2; exit 2"}]}]`
	resourceKey  = `/<session-flags>/config.toml:pre_tool_use:0:0`
	// resourceHookHash is the hash that version Tested of the CLI computes.
	resourceHookHash = "sha256:703cf345af3ad7c60c8eaa729acac6303f1404441f88f921e4e88e90a69f2f60"
)

// isPlain reports whether the permission policy decides as that of an agent without permissions.
func isPlain(l agent.Launch) bool {
	p := l.Permissions
	return (p.Preset == "" || p.Preset == events.PresetWorkspace) && len(p.Rules)+len(p.Tools)+len(l.ExecutionPermissions.Rules) == 0 && p.Default == ""
}

// policySettings returns the settings by which the CLI does not run a call that the policy would not allow and about which the
// CLI does not ask: it is not offered the tool. For the policy of an agent without permissions it returns none.
func policySettings(l agent.Launch) []string {
	if isPlain(l) {
		return nil
	}
	policy, err := permission.New(l.Permissions, l.ExecutionPermissions)
	decides := func(c permission.Call) string {
		if err != nil {
			return events.PermissionDeny // the supervisor refuses the query
		}
		return policy.Decide(c).Action
	}
	var out []string
	if decides(permission.Call{Tool: toolShell, Kind: permission.Shell, Command: anyCommand}) != events.PermissionAllow {
		out = append(out, "features.unified_exec_tty=false") // the input of a running shell is not asked about
	}
	outside := []permission.Path{{Path: "/", Outside: true}}
	if decides(permission.Call{Tool: "view_image", Kind: permission.Read, Paths: outside}) != events.PermissionAllow {
		out = append(out, "features.view_image=false")
	}
	if decides(permission.Call{Tool: "spawn_agent", Kind: permission.Agent}) != events.PermissionAllow {
		out = append(out, "agents.enabled=false")
	}
	if len(l.MCPServers) > 0 && decides(permission.Call{Tool: "read_mcp_resource", Kind: permission.Server}) != events.PermissionAllow {
		out = append(out, resourceHook, `hooks.state={"`+resourceKey+`"={trusted_hash="`+resourceHookHash+`",enabled=true}}`)
	}
	if decides(permission.Call{Tool: toolQuestion, Kind: permission.Question}) != events.PermissionDeny {
		out = append(out, "features.default_mode_request_user_input=true", "suppress_unstable_features_warning=true")
	}
	return out
}
