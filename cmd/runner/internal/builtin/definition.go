package builtin

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/mcptool"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/pkg/events"
)

// setupDigestVariable is an environment variable of the agent's process that holds the hash of the MCP servers. The
// process keeps connections to its servers, so a change of the servers needs another process.
const setupDigestVariable = "SPOOL_AGENT_SETUP_SHA256"

// serversDigest returns the hash of the MCP servers of a launch, "" without servers. The rest of the agent's definition
// is sent with each query.
func serversDigest(l agent.Launch) string {
	if len(l.MCPServers) == 0 {
		return ""
	}
	raw, err := json.Marshal(l.MCPServers)
	if err != nil {
		return "" // strings always marshal
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// filterTools returns the tools in all that the agent's definition allows. The agent has all tools of an MCP server,
// unless the definition allows some of that server's tools by name.
func filterTools(all []tool.Tool, c events.ToolChoice) []tool.Tool {
	return slices.DeleteFunc(slices.Clone(all), func(t tool.Tool) bool {
		name := t.Name()
		if slices.Contains(c.Deny, name) {
			return true
		}
		if len(c.Allow) == 0 || slices.Contains(c.Allow, name) {
			return false
		}
		if !strings.HasPrefix(name, mcptool.ToolNamePrefix) {
			return true
		}
		server, _, _ := strings.Cut(strings.TrimPrefix(name, mcptool.ToolNamePrefix), "__")
		return slices.ContainsFunc(c.Allow, func(a string) bool { return strings.HasPrefix(a, mcptool.ToolNamePrefix+server+"__") })
	})
}

// expandCommand returns the query content, in which /name and the arguments at the beginning are replaced by the prompt
// of the command of that name.
func expandCommand(content string, commands []events.CommandSpec) string {
	rest, ok := strings.CutPrefix(content, "/")
	if !ok {
		return content
	}
	name, arguments := rest, ""
	if end := strings.IndexAny(rest, " \t\n"); end >= 0 {
		name, arguments = rest[:end], strings.TrimSpace(rest[end:])
	}
	i := slices.IndexFunc(commands, func(c events.CommandSpec) bool { return c.Name == name })
	if i < 0 {
		return content
	}
	prompt := commands[i].Prompt
	if arguments != "" && !strings.Contains(prompt, argumentsPlaceholder) {
		return prompt + "\n\nARGUMENTS: " + arguments
	}
	return strings.ReplaceAll(prompt, argumentsPlaceholder, arguments)
}

// argumentsPlaceholder is the text in a command's prompt that is replaced by the text after the command's name.
const argumentsPlaceholder = "$ARGUMENTS"
