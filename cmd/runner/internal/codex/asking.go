package codex

import (
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// anyCommand stands for an unknown shell command when the policy is asked whether it allows every command.
const anyCommand = "$SPOOL_ANY_COMMAND"

// mcpResourceTools are the CLI's tools that read resources of MCP servers, as a regular expression.
const mcpResourceTools = "list_mcp_resources|list_mcp_resource_templates|read_mcp_resource"

// denyResourcesHook is a hook that denies mcpResourceTools. The CLI runs a hook only if the configuration contains the hook's hash,
// which is denyResourcesHookHash.
const (
	denyResourcesHook    = `hooks.PreToolUse=[{matcher="` + mcpResourceTools + `",hooks=[{type="command",command="echo The permission policy does not allow this call. >&2; exit 2"}]}]`
	denyResourcesHookKey = `/<session-flags>/config.toml:pre_tool_use:0:0`
	// denyResourcesHookHash is the hash that the CLI of version TestedVersion computes.
	denyResourcesHookHash = "sha256:703cf345af3ad7c60c8eaa729acac6303f1404441f88f921e4e88e90a69f2f60"
)

// policySettings returns settings that take tools away from the CLI: those with calls that the policy might not allow
// although the CLI does not request a permission for them. It returns none for the policy of an agent without
// permissions.
func policySettings(l agent.Launch) []string {
	if !l.HasPolicy() {
		return nil
	}
	var out []string
	if !l.AllowsAll(permission.Call{Tool: toolShell, Kind: permission.KindShell, Command: anyCommand}) {
		out = append(out, "features.unified_exec_tty=false") // the input of a running shell is not asked about
	}
	outside := []permission.Path{{Path: "/", Outside: true}}
	if !l.AllowsAll(permission.Call{Tool: "view_image", Kind: permission.KindRead, Paths: outside}) {
		out = append(out, "features.view_image=false")
	}
	if !l.AllowsAll(permission.Call{Tool: "spawn_agent", Kind: permission.KindAgent}) {
		out = append(out, "agents.enabled=false")
	}
	if len(l.MCPServers) > 0 && !l.AllowsAll(permission.Call{Tool: "read_mcp_resource", Kind: permission.KindMCPTool}) {
		out = append(out, denyResourcesHook, `hooks.state={"`+denyResourcesHookKey+`"={trusted_hash="`+denyResourcesHookHash+`",enabled=true}}`)
	}
	policy, err := permission.New(l.Permissions, l.ExecutionPermissions)
	if err == nil && policy.Decide(permission.Call{Tool: toolQuestion, Kind: permission.KindQuestion}).Action != events.PermissionDeny {
		out = append(out, "features.default_mode_request_user_input=true", "suppress_unstable_features_warning=true")
	}
	return out
}
