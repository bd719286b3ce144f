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

// definitionFile is the part of the CLI's configuration that is secret or too long for a variable: sub-agents, commands
// and MCP servers.
const definitionFile = agent.Unkept + "/opencode.json"

// toolName matches the name of a single tool, not a pattern.
var toolName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// checkTools refuses names that the CLI would read as patterns.
func checkTools(l agent.Launch) error {
	check := func(field string, names []string) error {
		for i, name := range names {
			if !toolName.MatchString(name) {
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

// editors are the tools that share one permission of the CLI.
var editors = []string{"edit", "write", "multiedit", "patch", "apply_patch"}

// permissionOf returns the CLI's name for the permission of a tool.
func permissionOf(tool string) string {
	if slices.Contains(editors, tool) {
		return "edit"
	}
	return tool
}

// rules are permissions in order: the last rule that matches a tool applies.
type rules []rule

type rule struct {
	permission string
	action     any // allow, ask, deny, or rules by the tool's argument
}

// MarshalJSON keeps the order of the rules.
func (rs rules) MarshalJSON() ([]byte, error) {
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

// add appends a rule and removes an earlier one for the same permission.
func (rs rules) add(permission string, action any) rules {
	return append(slices.DeleteFunc(slices.Clone(rs), func(r rule) bool { return r.permission == permission }), rule{permission, action})
}

// agentRules returns the rules of the agent itself. The CLI asks for every tool that the agent has, so that the policy
// decides and records it. Other tools are not offered.
func agentRules(l agent.Launch) rules {
	rs := rules{{"*", "ask"}}
	if len(l.Tools.Allow) > 0 {
		rs = rules{{"*", "deny"}, {"external_directory", "ask"}}
		for _, t := range l.Tools.Allow {
			rs = rs.add(permissionOf(t), "ask")
		}
	}
	if len(nativeSkillDirs(l)) > 0 { // skills cannot be used without it
		rs = rs.add("skill", "ask")
	}
	rs = addServers(rs, l, "ask")
	for _, t := range l.Tools.Deny {
		if p := permissionOf(t); p != "edit" || slices.Contains(l.Tools.Deny, "edit") && slices.Contains(l.Tools.Deny, "write") {
			rs = rs.add(p, "deny")
		}
	}
	rs = rs.add("doom_loop", "deny").add("question", "deny")
	// Other sub-agents would ask in vain: the CLI does not pass on the questions of sub-agents.
	task := rules{{"*", "deny"}}
	if hasTool(l, "task") {
		task = append(task, rule{"general", "ask"}, rule{"explore", "ask"})
	}
	for _, a := range l.Subagents {
		task = task.add(a.Name, "ask")
	}
	if slices.Contains(l.Tools.Deny, "task") || len(task) == 1 {
		return rs.add("task", "deny")
	}
	return rs.add("task", task)
}

// hasTool reports whether the definition allows one of the CLI's own tools.
func hasTool(l agent.Launch, tool string) bool {
	return (len(l.Tools.Allow) == 0 || slices.Contains(l.Tools.Allow, tool)) && !slices.Contains(l.Tools.Deny, tool)
}

// addServers returns rs with rules for the tools of the agent's MCP servers: action for those that the agent has, deny for all others.
func addServers(rs rules, l agent.Launch, action string) rules {
	for _, s := range l.MCPServers {
		only := allowedTools(s, l.Tools.Allow)
		if only == nil {
			rs = rs.add(serverPrefix(s)+"*", action)
			continue
		}
		rs = rs.add(serverPrefix(s)+"*", "deny")
		for _, t := range only {
			rs = rs.add(t, action)
		}
	}
	return rs
}

// notInNames matches the characters that the CLI replaces by an underscore in the names of servers and their tools.
var notInNames = regexp.MustCompile(`[^A-Za-z0-9_-]`)

// serverPrefix returns the prefix of the names that the CLI gives to the tools of an MCP server.
func serverPrefix(s runner.MCPServer) string { return notInNames.ReplaceAllString(s.Name, "_") + "_" }

// allowedTools returns the full names of a server's tools that the agent has, nil for all: the tools to which the
// server is limited, or those that the definition allows by name, if it names any tool of the server.
func allowedTools(s runner.MCPServer, allow []string) []string {
	var only []string
	for _, t := range s.Tools {
		only = append(only, serverPrefix(s)+notInNames.ReplaceAllString(t, "_"))
	}
	named := slices.DeleteFunc(slices.Clone(allow), func(t string) bool { return !strings.HasPrefix(t, serverPrefix(s)) })
	switch {
	case len(named) == 0:
		return only
	case only == nil:
		return named
	}
	return append([]string{}, slices.DeleteFunc(only, func(t string) bool { return !slices.Contains(named, t) })...)
}

// subagentRules returns the rules of a sub-agent: the policy `workspace`, as far as the CLI can apply it itself, and
// only the listed tools and servers if the sub-agent has such lists.
func subagentRules(l agent.Launch, tools, servers []string) rules {
	rs := rules{{"*", "deny"}}
	if len(tools) == 0 {
		for _, t := range []string{"read", "glob", "grep", "list", "bash", "edit", "todowrite"} {
			if hasTool(l, t) {
				rs = rs.add(t, "allow")
			}
		}
		rs = addServers(rs, l, "allow")
		for _, t := range l.Tools.Deny {
			rs = rs.add(permissionOf(t), "deny")
		}
	}
	for _, t := range tools {
		rs = rs.add(permissionOf(t), "allow")
	}
	if len(servers) > 0 {
		rs = addChosenServers(rs, l, tools, servers)
	}
	outside, edit := rules{{"*", "deny"}}, rules{{"*", "allow"}}
	for _, s := range l.Skills { // skills may be read; when it edits a file the CLI asks with a relative path
		outside, edit = outside.add(s.Dir+"/*", "allow"), edit.add("*"+strings.TrimPrefix(s.Dir, "/")+"/*", "deny")
	}
	if i := slices.IndexFunc(rs, func(r rule) bool { return r.permission == "edit" && r.action == "allow" }); i >= 0 && len(l.Skills) > 0 {
		rs[i].action = edit
	}
	return limit(l, rs).add("external_directory", outside)
}

// addChosenServers returns rs with rules for a sub-agent that lists its MCP servers, and possibly some of their tools: it may use these only.
func addChosenServers(rs rules, l agent.Launch, tools, servers []string) rules {
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
			rs = rs.add(serverPrefix(s)+"*", action)
			continue
		}
		rs = rs.add(serverPrefix(s)+"*", "deny")
		if has == nil {
			has, named = named, nil
		}
		for _, t := range has {
			if named == nil || slices.Contains(named, t) {
				rs = rs.add(t, action)
			}
		}
	}
	for _, t := range l.Tools.Deny {
		if slices.ContainsFunc(all, func(s runner.MCPServer) bool { return strings.HasPrefix(t, serverPrefix(s)) }) {
			rs = rs.add(t, "deny")
		}
	}
	return rs
}

// definition returns the content of definitionFile, or "" if the agent needs none.
func definition(l agent.Launch) (string, error) {
	if len(l.Subagents)+len(l.Commands)+len(l.MCPServers) == 0 {
		return "", nil
	}
	agents, commands, servers := object{}, object{}, object{}
	for _, a := range l.Subagents {
		o := object{"mode": "subagent", "description": a.Description, "prompt": a.Instructions, "permission": subagentRules(l, a.Tools, a.MCPServers)}
		if a.Model != "" {
			o["model"] = provider + "/" + a.Model
		}
		agents[a.Name] = o
	}
	for _, c := range l.Commands {
		commands[c.Name] = object{"template": c.Prompt, "description": c.Description}
	}
	for _, s := range l.MCPServers {
		o := object{"enabled": true}
		if s.TimeoutMs > 0 {
			o["timeout"] = s.TimeoutMs
		}
		if s.Type == "http" {
			o["type"], o["url"], o["headers"], o["oauth"] = "remote", s.URL, s.Headers, false
			if s.Headers == nil {
				o["headers"] = object{}
			}
		} else {
			o["type"], o["command"], o["environment"] = "local", s.Command, s.Env
			if s.Env == nil {
				o["environment"] = object{}
			}
		}
		servers[s.Name] = o
	}
	raw, err := json.Marshal(object{"$schema": schema, "agent": agents, "command": commands, "mcp": servers})
	// The CLI expands {env:…} and {file:…} everywhere; here they are plain text of the definition.
	return strings.NewReplacer("{env:", `\u007benv:`, "{file:", `\u007bfile:`).Replace(string(raw)), err
}

// definitionFiles returns the files of the agent's definition. If there is a definitionFile, it sets the environment variable in set that names
// the file.
func definitionFiles(l agent.Launch, set map[string]string) ([]agent.File, error) {
	content, err := definition(l)
	if content == "" || err != nil {
		return nil, err
	}
	set["OPENCODE_CONFIG"] = filepath.Join(l.State, definitionFile)
	return []agent.File{{Path: definitionFile, Content: content}}, nil
}

// classifier returns the function Dialect.Tool for an agent: it classifies the CLI's tools as tool does, and also knows the agent's MCP servers
// and the tools that the definition names or excludes.
func classifier(l agent.Launch) func(acp.Call) *acp.Tool {
	return func(c acp.Call) *acp.Tool {
		known := tool(c)
		name := known.Name
		if name == "" {
			name = c.Name
		}
		for _, s := range l.MCPServers {
			if only := allowedTools(s, l.Tools.Allow); strings.HasPrefix(name, serverPrefix(s)) && known.Kind == permission.KindUnknown {
				known.Kind, known.LeftOut = permission.KindMCPTool, only != nil && !slices.Contains(only, name)
			}
		}
		switch {
		case slices.Contains(l.Tools.Deny, name):
			known.LeftOut = true
		case known.Kind != permission.KindMCPTool && slices.Contains(editors, name) && len(l.Tools.Allow) > 0 && !slices.Contains(l.Tools.Allow, name):
			known.LeftOut = true // it has no permission of its own
		case known.Kind == permission.KindUnknown || known.Kind == permission.KindNetwork:
			known.Named = slices.Contains(l.Tools.Allow, name)
		}
		return known
	}
}
