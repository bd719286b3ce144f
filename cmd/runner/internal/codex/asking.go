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

// policySettings returns the settings by which the CLI does not run a call that the policy would not allow and about which the
// CLI does not ask: it is not offered the tool. For the policy of an agent without permissions it returns none.
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
		out = append(out, resourceHook, `hooks.state={"`+resourceKey+`"={trusted_hash="`+resourceHookHash+`",enabled=true}}`)
	}
	policy, err := permission.New(l.Permissions, l.ExecutionPermissions)
	if err == nil && policy.Decide(permission.Call{Tool: toolQuestion, Kind: permission.KindQuestion}).Action != events.PermissionDeny {
		out = append(out, "features.default_mode_request_user_input=true", "suppress_unstable_features_warning=true")
	}
	return out
}
