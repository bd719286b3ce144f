package opencode

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// definitionConfigFile is the path, relative to the state folder, of the part of the CLI's configuration that is secret or too long for a variable:
// sub-agents, commands and MCP servers.
const definitionConfigFile = agent.UnsavedFolder + "/opencode.json"

// toolNamePattern matches the name of a single tool, but not a pattern for several tools.
var toolNamePattern = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// checkToolNames returns an error if the agent's definition lists a tool by a name that the CLI would interpret as a pattern.
func checkToolNames(l agent.Launch) error {
	check := func(field string, names []string) error {
		for i, name := range names {
			if !toolNamePattern.MatchString(name) {
				return &runner.CommandError{Code: "INVALID_COMMAND", Message: fmt.Sprintf("%s[%d]: %q is not a tool's name", field, i, name)}
			}
		}
		return nil
	}
	for i, a := range l.Subagents {
		if err := check(fmt.Sprintf("query.subagents[%d].tools", i), a.Tools); err != nil {
			return err
		}
	}
	if err := check("query.tools.allow", l.Tools.Allow); err != nil {
		return err
	}
	return check("query.tools.deny", l.Tools.Deny)
}

// editTools are the tools for which the CLI checks one common permission, edit.
var editTools = []string{"edit", "write", "multiedit", "patch", "apply_patch"}

// permissionName returns the name of the permission that the CLI checks for a tool.
func permissionName(tool string) string {
	if slices.Contains(editTools, tool) {
		return "edit"
	}
	return tool
}

// permissionRules are the permission rules of an agent for the CLI, in order: the last rule that matches a tool applies.
type permissionRules []permissionRule

// permissionRule is the action, such as allow, ask or deny, for one permission of the CLI.
type permissionRule struct {
	permission string
	action     any // allow, ask, deny, or rules by the tool's argument
}

// MarshalJSON encodes the rules as a JSON object in their order.
func (rs permissionRules) MarshalJSON() ([]byte, error) {
	var out strings.Builder
	for i, r := range rs {
		raw, err := json.Marshal(r.action)
		if err != nil {
			return nil, err
		}
		sep := ","
		if i == 0 {
			sep = ""
		}
		fmt.Fprintf(&out, "%s%q:%s", sep, r.permission, raw)
	}
	return []byte("{" + out.String() + "}"), nil
}

// replaceRule returns the rules with a rule for the permission at the end, in place of an earlier rule for the same permission.
func (rs permissionRules) replaceRule(permission string, action any) permissionRules {
	return append(slices.DeleteFunc(slices.Clone(rs), func(r permissionRule) bool { return r.permission == permission }), permissionRule{permission, action})
}

// mainAgentRules returns the permission rules of the main agent. The CLI requests a permission for every tool that the agent has, so that the policy
// decides and records the call. Other tools are not offered to the model.
func mainAgentRules(l agent.Launch) permissionRules {
	rs := permissionRules{{"*", "ask"}}
	if len(l.Tools.Allow) > 0 {
		rs = permissionRules{{"*", "deny"}, {"external_directory", "ask"}}
		for _, t := range l.Tools.Allow {
			rs = rs.replaceRule(permissionName(t), "ask")
		}
	}
	if len(nativeSkillDirs(l)) > 0 { // skills cannot be used without it
		rs = rs.replaceRule("skill", "ask")
	}
	rs = addServerRules(rs, l, "ask")
	for _, t := range l.Tools.Deny {
		if p := permissionName(t); p != "edit" || slices.Contains(l.Tools.Deny, "edit") && slices.Contains(l.Tools.Deny, "write") {
			rs = rs.replaceRule(p, "deny")
		}
	}
	rs = rs.replaceRule("doom_loop", "deny").replaceRule("question", "deny")
	// Other sub-agents would ask in vain: the CLI does not pass on the questions of sub-agents.
	task := permissionRules{{"*", "deny"}}
	if allowsTool(l, "task") {
		task = append(task, permissionRule{"general", "ask"}, permissionRule{"explore", "ask"})
	}
	for _, a := range l.Subagents {
		task = task.replaceRule(a.Name, "ask")
	}
	if slices.Contains(l.Tools.Deny, "task") || len(task) == 1 {
		return rs.replaceRule("task", "deny")
	}
	return rs.replaceRule("task", task)
}

// allowsTool reports whether the agent's definition allows one of the CLI's own tools.
func allowsTool(l agent.Launch, tool string) bool {
	return (len(l.Tools.Allow) == 0 || slices.Contains(l.Tools.Allow, tool)) && !slices.Contains(l.Tools.Deny, tool)
}

// addServerRules returns rs with rules for the tools of the agent's MCP servers: action for the tools that the agent may use, deny for all others.
func addServerRules(rs permissionRules, l agent.Launch, action string) permissionRules {
	for _, s := range l.MCPServers {
		only := allowedTools(s, l.Tools.Allow)
		if only == nil {
			rs = rs.replaceRule(serverToolPrefix(s)+"*", action)
			continue
		}
		rs = rs.replaceRule(serverToolPrefix(s)+"*", "deny")
		for _, t := range only {
			rs = rs.replaceRule(t, action)
		}
	}
	return rs
}

// replacedNameCharacters matches the characters that the CLI replaces by an underscore in the names of MCP servers and their tools.
var replacedNameCharacters = regexp.MustCompile(`[^A-Za-z0-9_-]`)

// serverToolPrefix returns the prefix that the CLI gives to the names of an MCP server's tools.
func serverToolPrefix(s runner.MCPServer) string {
	return replacedNameCharacters.ReplaceAllString(s.Name, "_") + "_"
}

// allowedTools returns the full names of those tools of an MCP server that the agent may use, nil for all: the tools to which the server is
// limited, or those that the definition allows by name, if it names any tool of the server.
func allowedTools(s runner.MCPServer, allow []string) []string {
	var only []string
	for _, t := range s.Tools {
		only = append(only, serverToolPrefix(s)+replacedNameCharacters.ReplaceAllString(t, "_"))
	}
	named := slices.DeleteFunc(slices.Clone(allow), func(t string) bool { return !strings.HasPrefix(t, serverToolPrefix(s)) })
	switch {
	case len(named) == 0:
		return only
	case only == nil:
		return named
	}
	return append([]string{}, slices.DeleteFunc(only, func(t string) bool { return !slices.Contains(named, t) })...)
}

// subagentRules returns the permission rules of a sub-agent: the policy `workspace`, as far as the CLI can apply it itself, and only the listed
// tools and MCP servers if the definition of the sub-agent has such lists.
func subagentRules(l agent.Launch, tools, servers []string) permissionRules {
	rs := permissionRules{{"*", "deny"}}
	if len(tools) == 0 {
		for _, t := range []string{"read", "glob", "grep", "list", "bash", "edit", "todowrite"} {
			if allowsTool(l, t) {
				rs = rs.replaceRule(t, "allow")
			}
		}
		rs = addServerRules(rs, l, "allow")
		for _, t := range l.Tools.Deny {
			rs = rs.replaceRule(permissionName(t), "deny")
		}
	}
	for _, t := range tools {
		rs = rs.replaceRule(permissionName(t), "allow")
	}
	if len(servers) > 0 {
		rs = addSubagentServerRules(rs, l, tools, servers)
	}
	outside, edit := permissionRules{{"*", "deny"}}, permissionRules{{"*", "allow"}}
	for _, s := range l.Skills { // skills may be read; when it edits a file the CLI asks with a relative path
		outside, edit = outside.replaceRule(s.Dir+"/*", "allow"), edit.replaceRule("*"+strings.TrimPrefix(s.Dir, "/")+"/*", "deny")
	}
	if i := slices.IndexFunc(rs, func(r permissionRule) bool { return r.permission == "edit" && r.action == "allow" }); i >= 0 && len(l.Skills) > 0 {
		rs[i].action = edit
	}
	return restrictSubagentRules(l, rs).replaceRule("external_directory", outside)
}

// addSubagentServerRules returns rs with rules for a sub-agent whose definition lists its MCP servers, and possibly some of their tools: the
// sub-agent may use only these.
func addSubagentServerRules(rs permissionRules, l agent.Launch, tools, servers []string) permissionRules {
	all := slices.Clone(l.MCPServers)
	// The name of a server may be a prefix of another's: the rule for the longer name comes last and applies.
	slices.SortStableFunc(all, func(a, b runner.MCPServer) int { return len(a.Name) - len(b.Name) })
	for _, s := range all {
		action := "deny"
		if slices.Contains(servers, s.Name) {
			action = "allow"
		}
		has, named := allowedTools(s, l.Tools.Allow), allowedTools(runner.MCPServer{Name: s.Name}, tools)
		if action == "deny" || has == nil && named == nil {
			rs = rs.replaceRule(serverToolPrefix(s)+"*", action)
			continue
		}
		rs = rs.replaceRule(serverToolPrefix(s)+"*", "deny")
		if has == nil {
			has, named = named, nil
		}
		for _, t := range has {
			if named == nil || slices.Contains(named, t) {
				rs = rs.replaceRule(t, action)
			}
		}
	}
	for _, t := range l.Tools.Deny {
		if slices.ContainsFunc(all, func(s runner.MCPServer) bool { return strings.HasPrefix(t, serverToolPrefix(s)) }) {
			rs = rs.replaceRule(t, "deny")
		}
	}
	return rs
}

// encodeDefinition returns the content of the file definitionConfigFile, or "" if the agent needs none.
func encodeDefinition(l agent.Launch) (string, error) {
	if len(l.Subagents)+len(l.Commands)+len(l.MCPServers) == 0 {
		return "", nil
	}
	agents, commands, servers := jsonObject{}, jsonObject{}, jsonObject{}
	for _, a := range l.Subagents {
		o := jsonObject{"mode": "subagent", "description": a.Description, "prompt": a.Instructions, "permission": subagentRules(l, a.Tools, a.MCPServers)}
		if a.Model != "" {
			o["model"] = providerName + "/" + a.Model
		}
		agents[a.Name] = o
	}
	for _, c := range l.Commands {
		commands[c.Name] = jsonObject{"template": c.Prompt, "description": c.Description}
	}
	for _, s := range l.MCPServers {
		o := jsonObject{"enabled": true}
		if s.TimeoutMs > 0 {
			o["timeout"] = s.TimeoutMs
		}
		if s.Type == "http" {
			o["type"], o["url"], o["headers"], o["oauth"] = "remote", s.URL, s.Headers, false
			if s.Headers == nil {
				o["headers"] = jsonObject{}
			}
		} else {
			o["type"], o["command"], o["environment"] = "local", s.Command, s.Env
			if s.Env == nil {
				o["environment"] = jsonObject{}
			}
		}
		servers[s.Name] = o
	}
	raw, err := json.Marshal(jsonObject{"$schema": configSchemaURL, "agent": agents, "command": commands, "mcp": servers})
	// The CLI expands {env:…} and {file:…} everywhere; here they are plain text of the definition.
	return strings.NewReplacer("{env:", `\u007benv:`, "{file:", `\u007bfile:`).Replace(string(raw)), err
}

// definitionFiles returns the files of the agent's definition. If there is a definitionConfigFile, definitionFiles adds the environment variable
// that names the file to set.
func definitionFiles(l agent.Launch, set map[string]string) ([]agent.LaunchFile, error) {
	content, err := encodeDefinition(l)
	if content == "" || err != nil {
		return nil, err
	}
	set["OPENCODE_CONFIG"] = filepath.Join(l.State, definitionConfigFile)
	return []agent.LaunchFile{{Path: definitionConfigFile, Content: content}}, nil
}

// newToolClassifier returns the function Dialect.Tool for the agent of a launch. The function classifies the CLI's tools as classifyTool does, and
// also knows the agent's MCP servers and the tools that the definition names or excludes.
func newToolClassifier(l agent.Launch) func(acp.ToolCall) *acp.ToolInfo {
	return func(c acp.ToolCall) *acp.ToolInfo {
		known := classifyTool(c)
		name := known.Name
		if name == "" {
			name = c.Name
		}
		for _, s := range l.MCPServers {
			if only := allowedTools(s, l.Tools.Allow); strings.HasPrefix(name, serverToolPrefix(s)) && known.Kind == permission.KindUnknown {
				known.Kind, known.LeftOut = permission.KindMCPTool, only != nil && !slices.Contains(only, name)
			}
		}
		switch {
		case slices.Contains(l.Tools.Deny, name):
			known.LeftOut = true
		case known.Kind != permission.KindMCPTool && slices.Contains(editTools, name) && len(l.Tools.Allow) > 0 && !slices.Contains(l.Tools.Allow, name):
			known.LeftOut = true // it has no permission of its own
		case known.Kind == permission.KindUnknown || known.Kind == permission.KindNetwork:
			known.Named = slices.Contains(l.Tools.Allow, name)
		}
		if skill := known.Skill; skill != nil {
			known.Skill = l.LoadedSkill(skill.Name, skill.Path)
		}
		return known
	}
}
