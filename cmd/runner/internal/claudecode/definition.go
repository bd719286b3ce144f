package claudecode

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// mcpToolPrefix is the prefix of the names of tools of MCP servers: mcp__server__tool.
const mcpToolPrefix = "mcp__"

// mcpConfigFile is the path, relative to the state folder, of the file that lists the MCP servers for the CLI. Their variables and headers may be
// secrets.
const mcpConfigFile = agent.UnsavedFolder + "/claude-mcp.json"

// toolNamePattern matches the name of a tool, but not a permission rule such as Bash(git *).
var toolNamePattern = regexp.MustCompile(`^[A-Za-z0-9_.:-]+$`)

// checkToolNames returns an error if the agent's definition lists a tool by a name to which the CLI's arguments would give another meaning.
func checkToolNames(l agent.Launch) error {
	for field, names := range map[string][]string{"allow": l.Tools.Allow, "deny": l.Tools.Deny} {
		for i, name := range names {
			if !toolNamePattern.MatchString(name) {
				return &runner.CommandError{Code: "INVALID_COMMAND", Message: fmt.Sprintf("query.tools.%s[%d]: %q is not a tool's name", field, i, name)}
			}
		}
	}
	return nil
}

// definitionArguments returns the CLI's flags for the agent's definition: tools and MCP servers.
func definitionArguments(l agent.Launch) []string {
	// Only the MCP servers of the agent are started: those of a workspace would be unknown programs.
	args := []string{
		"--strict-mcp-config",
		"--disallowedTools", strings.Join(slices.Concat(deniedQuestionTools(l), excludedTools, l.Tools.Deny), ","),
	}
	if asksAboutEachCall(l) {
		// The settings of the workspace could name commands that the CLI runs by itself. With --add-dir the CLI reads the
		// workspace's CLAUDE.md all the same.
		args = append(args, "--settings", cliSettings(l), "--setting-sources", "user", "--add-dir", l.Workspace)
	}
	if len(l.Tools.Allow) > 0 {
		args = append(args, "--tools", strings.Join(allowedCLITools(l), ","))
	}
	if len(l.MCPServers) > 0 {
		args = append(args, "--mcp-config", filepath.Join(l.State, mcpConfigFile))
	}
	if l.MaxTurns > 0 {
		args = append(args, "--max-turns", strconv.FormatUint(uint64(l.MaxTurns), 10))
	}
	return args
}

// allowedCLITools returns the CLI's own tools that the agent may use: those that its definition names, and those that its sub-agents and skills
// need.
func allowedCLITools(l agent.Launch) []string {
	own := slices.DeleteFunc(slices.Clone(l.Tools.Allow), isMCPTool)
	if len(l.Subagents) > 0 && !slices.ContainsFunc(own, isSubagentTool) {
		own = append(own, "Agent")
	}
	if len(l.MainAgentSkills()) > 0 && !slices.Contains(own, "Skill") {
		own = append(own, "Skill")
	}
	return own
}

// definitionFiles returns the files of the configuration folder for the definition of the agent.
func definitionFiles(l agent.Launch) ([]agent.LaunchFile, error) {
	var files []agent.LaunchFile
	add := func(path, content string) { files = append(files, agent.LaunchFile{Path: path, Content: content}) }
	if l.MemoryFile != "" {
		add(configDirName+"/CLAUDE.md", l.MemoryFile)
	}
	for _, c := range l.Commands {
		front := ""
		if c.Description != "" {
			front = "---\ndescription: " + quoteYAML(c.Description) + "\n---\n"
		} else if strings.HasPrefix(c.Prompt, "---") {
			front = "---\n---\n" // the prompt's own dashes are no front matter
		}
		add(configDirName+"/commands/"+c.Name+".md", front+c.Prompt)
	}
	for _, s := range l.MainAgentSkills() {
		files = append(files, agent.LaunchFile{Path: configDirName + "/skills/" + s.Name, Link: s.Dir})
	}
	if len(l.MCPServers) > 0 {
		servers, _ := mcpServers(l)
		raw, err := json.Marshal(map[string]any{"mcpServers": servers})
		if err != nil {
			return nil, fmt.Errorf("configuration of MCP servers: %w", err)
		}
		add(mcpConfigFile, string(raw))
	}
	return files, nil
}

// quoteYAML returns s as a scalar of YAML. JSON strings are such scalars.
func quoteYAML(s string) string {
	raw, err := json.Marshal(s)
	if err != nil {
		return `""` // strings always marshal
	}
	return string(raw)
}

// mcpServer is an MCP server in the format of the CLI.
type mcpServer struct {
	Type    string            `json:"type"`
	Command string            `json:"command,omitempty"`
	Args    []string          `json:"args,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	URL     string            `json:"url,omitempty"`
	Headers map[string]string `json:"headers,omitempty"`
	Timeout uint32            `json:"timeout,omitempty"` // milliseconds for a call
}

// mcpServers returns the MCP servers of the agent in the format of the CLI, and environment variables that they need. The CLI expands ${VAR} in the
// definitions of servers, where Spool has expanded all variables already. Text that still looks like a variable is therefore passed in an
// environment variable of its own.
func mcpServers(l agent.Launch) (servers map[string]mcpServer, variables map[string]string) {
	servers, variables = map[string]mcpServer{}, map[string]string{}
	literal := func(s string) string {
		if !strings.Contains(s, "${") {
			return s
		}
		name := fmt.Sprintf("SPOOL_MCP_%d", len(variables)+1)
		variables[name] = s
		return "${" + name + "}"
	}
	all := func(m map[string]string) map[string]string {
		out := map[string]string{}
		for _, k := range slices.Sorted(maps.Keys(m)) {
			out[k] = literal(m[k])
		}
		return out
	}
	for _, s := range l.MCPServers {
		m := mcpServer{Type: s.Type, URL: literal(s.URL), Env: all(s.Env), Headers: all(s.Headers), Timeout: s.TimeoutMs}
		for i, word := range s.Command {
			if i == 0 {
				m.Command = literal(word)
			} else {
				m.Args = append(m.Args, literal(word))
			}
		}
		servers[s.Name] = m
	}
	return servers, variables
}

// subagent is the definition of a sub-agent in the format of the CLI's handshake.
type subagent struct {
	Description string   `json:"description"`
	Prompt      string   `json:"prompt"`
	Tools       []string `json:"tools,omitempty"`
	Without     []string `json:"disallowedTools,omitempty"`
	Model       string   `json:"model,omitempty"`
}

// subagents returns the definitions of the agent's sub-agents by name, nil if it has none.
func subagents(l agent.Launch) map[string]subagent {
	if len(l.Subagents) == 0 {
		return nil
	}
	out := map[string]subagent{}
	for _, a := range l.Subagents {
		x := subagent{Description: a.Description, Prompt: a.Instructions, Tools: a.Tools, Model: a.Model}
		if len(a.MCPServers) > 0 {
			x.Tools, x.Without = subagentTools(l, a)
		}
		out[a.Name] = x
	}
	return out
}

// subagentTools returns the tools that a sub-agent may use and those that it may not use, so that it can call only the MCP servers that its
// definition names. A sub-agent cannot start other sub-agents, which could call other servers, unless its list of tools has that tool.
func subagentTools(l agent.Launch, a events.SubagentSpec) (tools, without []string) {
	tools = slices.Clone(a.Tools)
	for _, s := range l.MCPServers {
		prefix := mcpToolPrefix + s.Name + "__"
		switch named := slices.ContainsFunc(a.Tools, func(t string) bool { return strings.HasPrefix(t, prefix) }); {
		case !slices.Contains(a.MCPServers, s.Name):
			without = append(without, prefix+"*")
		case len(a.Tools) > 0 && !named:
			tools = append(tools, prefix+"*")
		}
	}
	if !slices.ContainsFunc(a.Tools, isSubagentTool) {
		without = append(without, "Agent")
	}
	return tools, without
}

// isMCPTool reports whether a tool belongs to an MCP server, by its name.
func isMCPTool(tool string) bool { return strings.HasPrefix(tool, mcpToolPrefix) }

// replacedNameCharacters matches the characters that the CLI replaces by an underscore in the names of MCP servers and their tools.
var replacedNameCharacters = regexp.MustCompile(`[^A-Za-z0-9_-]`)

// policyScope holds the properties of the agent that are needed to describe its tool calls to the permission policy, such as its folders and MCP
// servers.
type policyScope struct {
	root    string           // the workspace
	skills  []string         // folders that may be read
	allow   []string         // tools that the definition names
	deny    []string         // tools that the definition excludes
	servers []mcpServerTools // the agent's MCP servers
	checked bool             // the CLI asks about every call; see asksAboutEachCall
	home    string           // the agent's home folder
	plans   string           // the folder of the plans of plan mode; "" if the agent has no plan mode

	destructive map[string]bool // tools of MCP servers that destroy data, as their servers say
}

// mcpServerTools is the prefix of the names of an MCP server's tools, and the list of those tools that the agent may use.
type mcpServerTools struct {
	prefix string
	only   []string // full names; nil for all
}

// newPolicyScope returns the policyScope of the agent of a launch.
func newPolicyScope(l agent.Launch) policyScope {
	s := policyScope{root: l.Workspace, allow: l.Tools.Allow, deny: l.Tools.Deny, checked: asksAboutEachCall(l), home: environmentVariable(l, "HOME")}
	if s.checked && !slices.Contains(deniedQuestionTools(l), exitPlanMode) {
		s.plans = filepath.Join(configDir(l.Folders), "plans")
	}
	for _, k := range l.Skills {
		s.skills = append(s.skills, k.Dir)
	}
	for _, server := range l.MCPServers {
		m := mcpServerTools{prefix: mcpToolPrefix + server.Name + "__"}
		for _, t := range server.Tools {
			m.only = append(m.only, m.prefix+replacedNameCharacters.ReplaceAllString(t, "_"))
		}
		// If the definition allows some tools of a server by name, the agent has only these.
		named := slices.DeleteFunc(slices.Clone(l.Tools.Allow), func(t string) bool { return !strings.HasPrefix(t, m.prefix) })
		switch {
		case len(named) > 0 && m.only == nil:
			m.only = named
		case len(named) > 0:
			m.only = slices.DeleteFunc(m.only, func(t string) bool { return !slices.Contains(named, t) })
		}
		s.servers = append(s.servers, m)
	}
	return s
}

// serverToolStatus reports whether a tool belongs to an MCP server of the agent (known), and if so, whether the agent may call the tool (has).
func (s policyScope) serverToolStatus(tool string) (known, has bool) {
	var of mcpServerTools // the longest match: a server's name may be a prefix of another's
	for _, m := range s.servers {
		if strings.HasPrefix(tool, m.prefix) && len(m.prefix) > len(of.prefix) {
			of = m
		}
	}
	return of.prefix != "", of.only == nil || slices.Contains(of.only, tool)
}

// resolveSkillFile returns the absolute path with its symbolic links resolved, and reports whether it is inside the folder of one of the agent's
// skills.
func (s policyScope) resolveSkillFile(path string) (string, bool) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil || !filepath.IsAbs(path) {
		return "", false
	}
	return real, slices.ContainsFunc(s.skills, func(dir string) bool {
		dir, err := filepath.EvalSymlinks(dir)
		return err == nil && isWithin(dir, real)
	})
}
