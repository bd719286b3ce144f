package permission

import (
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// argumentMeaning is the meaning of the argument in parentheses of a tool call that a person wrote, as in Bash(rm -rf
// x).
type argumentMeaning int

const (
	noArgument argumentMeaning = iota
	commandArgument
	pathArgument
	optionalPathArgument // without it the tool uses the whole workspace
	urlArgument
	anyArgument // has no meaning for a policy
)

// knownTool describes a built-in tool of an architecture: what its calls do, and the meaning of its argument.
type knownTool struct {
	kind     CallKind
	argument argumentMeaning
}

// architectureTools returns the built-in tools of the agents of all architectures, by name.
func architectureTools() map[string]knownTool {
	out := map[string]knownTool{}
	for _, l := range []struct {
		tool  knownTool
		names string
	}{
		{knownTool{KindShell, commandArgument}, "Bash shell bash run_code execute"},
		{knownTool{KindShell, anyArgument}, "BashOutput KillBash KillShell"},
		{knownTool{KindRead, pathArgument}, "Read NotebookRead read read_file"},
		{knownTool{KindRead, optionalPathArgument}, "Glob Grep LS glob grep list list_directory"},
		{knownTool{KindEdit, pathArgument}, "Write Edit MultiEdit NotebookEdit write edit multiedit patch apply_patch write_file"},
		{knownTool{KindNetwork, urlArgument}, "WebFetch webfetch fetch"},
		{knownTool{KindNetwork, anyArgument}, "WebSearch websearch web_search"},
		{knownTool{KindAgent, anyArgument}, "Task Agent task spawn_agent"},
		{knownTool{KindQuestion, anyArgument}, "AskUserQuestion ExitPlanMode request_user_input question"},
		{knownTool{KindBookkeeping, anyArgument}, "TodoWrite TodoRead TaskCreate TaskGet TaskList TaskUpdate TaskOutput TaskStop Skill SlashCommand ToolSearch todowrite todoread skill update_plan"},
	} {
		for _, name := range strings.Fields(l.names) {
			out[name] = l.tool
		}
	}
	return out
}

// ParseCall parses a call of a tool of an agent as people write it: Tool, or Tool(argument). The argument is the command of a
// shell, the path of a file tool, relative to the workspace or absolute, or the URL or host of a request. ParseCall knows the
// tools of all architectures, and those of the agent's MCP servers.
func ParseCall(text string, agent events.AgentSpec) (Call, error) {
	text = strings.TrimSpace(text)
	name, rest, hasArgument := strings.Cut(text, "(")
	argument, closed := strings.CutSuffix(rest, ")")
	switch {
	case hasArgument && !closed:
		return Call{}, fmt.Errorf("%.100q has no closing parenthesis", text)
	case name == "" || strings.ContainsAny(name, " \t\n)"):
		return Call{}, fmt.Errorf("%.100q is not a call; write Tool or Tool(argument)", text)
	}
	c := Call{Tool: name, Kind: KindUnknown, Named: slices.Contains(agent.Tools.Allow, name), LeftOut: slices.Contains(agent.Tools.Deny, name)}
	tool, known := architectureTools()[name]
	if server, of := serverOfTool(agent.MCPServers, name); server != nil {
		tool, known = knownTool{KindMCPTool, anyArgument}, true
		c.LeftOut = c.LeftOut || len(server.Tools) > 0 && !slices.Contains(server.Tools, of)
	}
	if !known && hasArgument {
		return Call{}, fmt.Errorf("the arguments of %.100q are not known; write the name of the tool alone", name)
	}
	if known {
		c.Kind = tool.kind
	}
	return c, c.setArgument(tool.argument, strings.TrimSpace(argument))
}

// setArgument sets the field of the call that corresponds to the meaning of the argument s.
func (c *Call) setArgument(meaning argumentMeaning, s string) error {
	switch {
	case s == "" && (meaning == commandArgument || meaning == pathArgument || meaning == urlArgument):
		return fmt.Errorf("%s needs an argument; write %s(%s)", c.Tool, c.Tool, map[argumentMeaning]string{commandArgument: "command", pathArgument: "path", urlArgument: "URL"}[meaning])
	case s == "":
	case meaning == commandArgument:
		c.Command = s
	case meaning == pathArgument, meaning == optionalPathArgument:
		c.Paths = []Path{parsePath(s)}
	case meaning == urlArgument:
		if !strings.Contains(s, "://") {
			s = "https://" + s
		}
		u, err := url.Parse(s)
		if err != nil || u.Hostname() == "" {
			return fmt.Errorf("%.100q is not a URL or a host", s)
		}
		c.Hosts = []string{u.Hostname()}
	}
	return nil
}

// parsePath returns the path that a person wrote, relative to the workspace if it is inside.
func parsePath(s string) Path {
	if strings.HasPrefix(s, "~") {
		return Path{Path: s, Outside: true}
	}
	if !path.IsAbs(s) {
		s = path.Join(workspaceRoot, s)
	}
	s = path.Clean(s)
	if s == workspaceRoot {
		return Path{Path: "."}
	}
	if rel, ok := strings.CutPrefix(s, workspaceRoot+"/"); ok {
		return Path{Path: rel}
	}
	return Path{Path: s, Outside: true}
}

// serverOfTool returns the MCP server to which a tool belongs and the server's own name of the tool, or nil. Agents
// call the tool mcp__server__tool, server__tool or server_tool.
func serverOfTool(servers []events.MCPServer, tool string) (*events.MCPServer, string) {
	var found *events.MCPServer
	own := ""
	for i, s := range servers {
		for _, prefix := range []string{"mcp__" + s.Name + "__", s.Name + "__", s.Name + "_"} {
			// A server's name may be the beginning of another's.
			if rest, ok := strings.CutPrefix(tool, prefix); ok && (found == nil || len(s.Name) > len(found.Name)) {
				found, own = &servers[i], rest
				break
			}
		}
	}
	return found, own
}
