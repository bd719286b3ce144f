package permission

import (
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// argument is what the text in parentheses means, as in Bash(rm -rf x).
type argument int

const (
	noArgument argument = iota
	commandArgument
	pathArgument
	optionalPath // without it the tool uses the whole workspace
	urlArgument
	freeArgument // has no meaning for a policy
)

// knownTool is a tool of one of the architectures.
type knownTool struct {
	kind     Kind
	argument argument
}

// knownTools are the tools that the agents of the architectures have by themselves.
func knownTools() map[string]knownTool {
	out := map[string]knownTool{}
	for _, l := range []struct {
		tool  knownTool
		names string
	}{
		{knownTool{Shell, commandArgument}, "Bash shell bash run_code execute"},
		{knownTool{Shell, freeArgument}, "BashOutput KillBash KillShell"},
		{knownTool{Read, pathArgument}, "Read NotebookRead read read_file"},
		{knownTool{Read, optionalPath}, "Glob Grep LS glob grep list list_directory"},
		{knownTool{Edit, pathArgument}, "Write Edit MultiEdit NotebookEdit write edit multiedit patch apply_patch write_file"},
		{knownTool{Network, urlArgument}, "WebFetch webfetch fetch"},
		{knownTool{Network, freeArgument}, "WebSearch websearch web_search"},
		{knownTool{Agent, freeArgument}, "Task Agent task spawn_agent"},
		{knownTool{Question, freeArgument}, "AskUserQuestion ExitPlanMode request_user_input question"},
		{knownTool{Bookkeeping, freeArgument}, "TodoWrite TodoRead TaskCreate TaskGet TaskList TaskUpdate TaskOutput TaskStop Skill SlashCommand ToolSearch todowrite todoread skill update_plan"},
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
	c := Call{Tool: name, Kind: Unknown, Named: slices.Contains(agent.Tools.Allow, name), LeftOut: slices.Contains(agent.Tools.Deny, name)}
	tool, known := knownTools()[name]
	if server, of := serverOf(agent.MCPServers, name); server != nil {
		tool, known = knownTool{Server, freeArgument}, true
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

// setArgument sets what the argument of a call means.
func (c *Call) setArgument(meaning argument, s string) error {
	switch {
	case s == "" && (meaning == commandArgument || meaning == pathArgument || meaning == urlArgument):
		return fmt.Errorf("%s needs an argument; write %s(%s)", c.Tool, c.Tool, map[argument]string{commandArgument: "command", pathArgument: "path", urlArgument: "URL"}[meaning])
	case s == "":
	case meaning == commandArgument:
		c.Command = s
	case meaning == pathArgument, meaning == optionalPath:
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

// parsePath returns a path in a sandbox.
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

// serverOf returns the MCP server of a tool and the server's own name of the tool, or nil. Agents call it mcp__server__tool,
// server__tool or server_tool.
func serverOf(servers []events.MCPServer, tool string) (*events.MCPServer, string) {
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
