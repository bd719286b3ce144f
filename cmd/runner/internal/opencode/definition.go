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
	"github.com/spoolhq/spool/pkg/runner"
)

// definitionFile is the part of the CLI's configuration that is too long for a
// variable, or secret: sub-agents, commands and MCP servers.
const definitionFile = agent.Unkept + "/opencode.json"

// toolName is a tool's name, and no pattern of several.
var toolName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// checkTools refuses names that the CLI would take for patterns.
func checkTools(l agent.Launch) error {
	check := func(field string, names []string) error {
		for i, name := range names {
			if !toolName.MatchString(name) {
				return &runner.Error{Code: "INVALID_COMMAND", Message: fmt.Sprintf("%s[%d]: %q is not a tool's name", field, i, name)}
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

// editors are the tools that the CLI has one permission for.
var editors = []string{"edit", "write", "multiedit", "patch", "apply_patch"}

// permission is the CLI's name for the permission of a tool.
func permission(tool string) string {
	if slices.Contains(editors, tool) {
		return "edit"
	}
	return tool
}

// rules are permissions in order: the last one that fits a tool counts.
type rules []rule

type rule struct {
	permission string
	action     any // allow, ask, deny, or these by what the tool is used on
}

// MarshalJSON keeps the order.
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

// add puts a rule at the end, in place of an earlier one for the same.
func (rs rules) add(permission string, action any) rules {
	return append(slices.DeleteFunc(slices.Clone(rs), func(r rule) bool { return r.permission == permission }), rule{permission, action})
}

// askedOf are the rules of the agent itself: everything that it has is asked for,
// so that the policy decides and records it. What it has not is not offered.
func askedOf(l agent.Launch) rules {
	rs := rules{{"*", "ask"}}
	if len(l.Tools.Allow) > 0 {
		rs = rules{{"*", "deny"}, {"external_directory", "ask"}}
		for _, t := range l.Tools.Allow {
			rs = rs.add(permission(t), "ask")
		}
	}
	if len(native(l)) > 0 { // without which they could not be used
		rs = rs.add("skill", "ask")
	}
	rs = served(rs, l, "ask")
	for _, t := range l.Tools.Deny {
		if p := permission(t); p != "edit" || slices.Contains(l.Tools.Deny, "edit") && slices.Contains(l.Tools.Deny, "write") {
			rs = rs.add(p, "deny")
		}
	}
	rs = rs.add("doom_loop", "deny").add("question", "deny")
	// Sub-agents other than these would ask in vain: the CLI does not tell of questions that a sub-agent has.
	task := rules{{"*", "deny"}}
	if has(l, "task") {
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

// has tells whether the definition leaves a tool of the CLI's own to the agent.
func has(l agent.Launch, tool string) bool {
	return (len(l.Tools.Allow) == 0 || slices.Contains(l.Tools.Allow, tool)) && !slices.Contains(l.Tools.Deny, tool)
}

// served adds rules for the tools of MCP servers.
func served(rs rules, l agent.Launch, action string) rules {
	for _, s := range l.MCPServers {
		only := narrowed(s, l.Tools.Allow)
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

// notInNames is what the CLI writes as an underscore in the names of servers and their tools.
var notInNames = regexp.MustCompile(`[^A-Za-z0-9_-]`)

func serverPrefix(s runner.MCPServer) string { return notInNames.ReplaceAllString(s.Name, "_") + "_" }

// narrowed are the whole names of the tools that the agent has of a server, nil for all:
// those that the server is limited to, and of a server of which the definition allows some by name these alone.
func narrowed(s runner.MCPServer, allow []string) []string {
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

// fixedOf are a sub-agent's rules: the policy `workspace`, as far as the CLI can
// hold to it by itself, and its own tools and servers alone if it has lists of them.
func fixedOf(l agent.Launch, tools, servers []string) rules {
	rs := rules{{"*", "deny"}}
	if len(tools) == 0 {
		for _, t := range []string{"read", "glob", "grep", "list", "bash", "edit", "todowrite"} {
			if has(l, t) {
				rs = rs.add(t, "allow")
			}
		}
		rs = served(rs, l, "allow")
		for _, t := range l.Tools.Deny {
			rs = rs.add(permission(t), "deny")
		}
	}
	for _, t := range tools {
		rs = rs.add(permission(t), "allow")
	}
	if len(servers) > 0 {
		rs = chosen(rs, l, tools, servers)
	}
	outside, edit := rules{{"*", "deny"}}, rules{{"*", "allow"}}
	for _, s := range l.Skills { // they may be read; of what is edited the CLI asks by a relative path
		outside, edit = outside.add(s.Dir+"/*", "allow"), edit.add("*"+strings.TrimPrefix(s.Dir, "/")+"/*", "deny")
	}
	if i := slices.IndexFunc(rs, func(r rule) bool { return r.permission == "edit" && r.action == "allow" }); i >= 0 && len(l.Skills) > 0 {
		rs[i].action = edit
	}
	return rs.add("external_directory", outside)
}

// chosen adds rules for a sub-agent that names the MCP servers it has, and perhaps some of their tools.
func chosen(rs rules, l agent.Launch, tools, servers []string) rules {
	all := slices.Clone(l.MCPServers)
	// One server's name may begin another's: the longer one has the last word.
	slices.SortStableFunc(all, func(a, b runner.MCPServer) int { return len(a.Name) - len(b.Name) })
	for _, s := range all {
		action := "deny"
		if slices.Contains(servers, s.Name) {
			action = "allow"
		}
		has, named := narrowed(s, l.Tools.Allow), narrowed(runner.MCPServer{Name: s.Name}, tools)
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

// definition is the file's content, "" for nothing.
func definition(l agent.Launch) (string, error) {
	if len(l.Subagents)+len(l.Commands)+len(l.MCPServers) == 0 {
		return "", nil
	}
	agents, commands, servers := object{}, object{}, object{}
	for _, a := range l.Subagents {
		o := object{"mode": "subagent", "description": a.Description, "prompt": a.Instructions, "permission": fixedOf(l, a.Tools, a.MCPServers)}
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
	// The CLI fills in {env:…} and {file:…} wherever they stand; here they are somebody's text.
	return strings.NewReplacer("{env:", `\u007benv:`, "{file:", `\u007bfile:`).Replace(string(raw)), err
}

// definitionFiles lay that down.
func definitionFiles(l agent.Launch, set map[string]string) ([]agent.File, error) {
	content, err := definition(l)
	if content == "" || err != nil {
		return nil, err
	}
	set["OPENCODE_CONFIG"] = filepath.Join(l.State, definitionFile)
	return []agent.File{{Path: definitionFile, Content: content}}, nil
}

// scoped refines what a call is by what the agent's definition says.
func scoped(l agent.Launch) func(acp.Call) *acp.Tool {
	return func(c acp.Call) *acp.Tool {
		known := tool(c)
		name := known.Name
		if name == "" {
			name = c.Name
		}
		for _, s := range l.MCPServers {
			if only := narrowed(s, l.Tools.Allow); strings.HasPrefix(name, serverPrefix(s)) && known.Class == acp.ClassUnknown {
				if known.Class = acp.ClassLeftOut; only == nil || slices.Contains(only, name) {
					known.Class = acp.ClassServer
				}
			}
		}
		own := known.Class != acp.ClassServer && known.Class != acp.ClassLeftOut
		switch {
		case slices.Contains(l.Tools.Deny, name):
			known.Class = acp.ClassLeftOut
		case own && slices.Contains(editors, name) && len(l.Tools.Allow) > 0 && !slices.Contains(l.Tools.Allow, name):
			known.Class = acp.ClassLeftOut // it has no permission of its own
		case (known.Class == acp.ClassUnknown || known.Class == acp.ClassNetwork) && slices.Contains(l.Tools.Allow, name):
			known.Class = acp.ClassNamed
		}
		return known
	}
}
