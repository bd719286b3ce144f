package references

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/skill"
)

// Resolved holds the resolved references of an execution: its agent, skills, variables, secrets and hosts.
type Resolved struct {
	events.ExecutionResolved
	Definition       events.AgentSpec // of the agent; zero for the built-in one
	Secrets          []string         // values that must not be shown anywhere
	InspectsRequests bool             // a host of Egress allows some methods only, so that the egress proxy reads requests to it

	skills    []runner.Skill    // in the order of ExecutionResolved.Skills; Dir is "" if the archive is missing
	documents []string          // the SKILL.md of each
	values    map[string]string // values of the variables; those of secrets are decrypted
	removed   []string          // digests of skills that were removed from the catalogue
}

// IsEmpty reports whether the execution has no agent, no environments, no variables and no allowed hosts.
func (r *Resolved) IsEmpty() bool {
	return r.Agent.Slug == "" && len(r.Environments) == 0 && len(r.Variables) == 0 && len(r.Egress) == 0
}

// Allowlist returns the entries of the sandbox's allowlist for the egress proxy. It is never nil.
func (r *Resolved) Allowlist() []string {
	out := make([]string, 0, len(r.Egress))
	for _, h := range r.Egress {
		out = append(out, h.Entry)
	}
	return out
}

// SkillDigests returns the digests of the execution's skills whose files are on the engine.
func (r *Resolved) SkillDigests() []string {
	var out []string
	for i, used := range r.Skills {
		if r.skills[i].Dir != "" {
			out = append(out, used.Ref.Version)
		}
	}
	return out
}

// An MCPContainer is an MCP server of the agent that runs in its own container.
type MCPContainer struct {
	events.MCPServer
	Field string // of the definition, for messages
}

// Containers returns the agent's MCP servers that run in their own containers, in the order of the definition.
func (r *Resolved) Containers() []MCPContainer {
	var out []MCPContainer
	for i, m := range r.Definition.MCPServers {
		if m.Type == events.MCPTypeDocker {
			out = append(out, MCPContainer{m, fmt.Sprintf("mcpServers[%d]", i)})
		}
	}
	return out
}

// checkServers returns an *Error if the provider cannot run the agent's MCP servers in containers, or if a server's arguments contain
// a secret, because every process can read them. It must be called before expandServers.
func (r *Resolver) checkServers(out *Resolved) error {
	for _, c := range out.Containers() {
		if !r.Containers {
			return &Error{"MCP_SERVER_UNSUPPORTED", fmt.Errorf("%s.type: docker MCP servers need provider docker, and this session's is %s: server %s", c.Field, r.Provider, c.Name)}
		}
		for i, arg := range c.Command {
			for _, name := range layers.PlaceholderNames(arg) {
				if out.isSecret(name) {
					return &Error{"SECRET_EXPOSED", fmt.Errorf("%s.command[%d]: variable %s is a secret, and every process can read arguments: give it to server %s in env", c.Field, i, name, c.Name)}
				}
			}
		}
	}
	return nil
}

// isSecret reports whether the value of a variable is secret.
func (r *Resolved) isSecret(name string) bool {
	return slices.ContainsFunc(r.Variables, func(v events.Provenance) bool { return v.Secret && v.Name == name })
}

// expandServers replaces the placeholders in the definitions of MCP servers by the values of variables.
func (r *Resolved) expandServers() error {
	value := func(name string) (string, bool) {
		v, ok := r.values[name]
		return v, ok
	}
	var errs []error
	expand := func(s string) string {
		out, err := layers.ExpandPlaceholders(s, value)
		errs = append(errs, err)
		return out
	}
	servers := make([]events.MCPServer, len(r.Definition.MCPServers))
	for i, m := range r.Definition.MCPServers {
		m.URL, m.Command = expand(m.URL), slices.Clone(m.Command)
		for j := range m.Command {
			m.Command[j] = expand(m.Command[j])
		}
		m.Env, m.Headers = expandAll(m.Env, expand), expandAll(m.Headers, expand)
		servers[i] = m
	}
	r.Definition.MCPServers = servers
	return variableError(errors.Join(errs...))
}

// expandAll returns in with expand applied to each value.
func expandAll(in map[string]string, expand func(string) string) map[string]string {
	if in == nil {
		return nil
	}
	out := make(map[string]string, len(in))
	for _, k := range slices.Sorted(maps.Keys(in)) {
		out[k] = expand(in[k])
	}
	return out
}

// mcpTimeout is the timeout, in milliseconds, of a call to an MCP server whose definition has none.
const mcpTimeout = 30_000

// AddToQuery adds the agent's definition to a query for the runner. sockets are the paths of the sockets of the MCP servers in
// containers, in the order of Containers. If proxied is true, the agent reaches MCP servers over HTTP through the egress proxy, which
// adds their headers.
func (r *Resolved) AddToQuery(q *runner.Query, proxied bool, sockets []string) {
	a := r.Definition
	q.SystemPrompt, q.MemoryFile, q.Tools, q.Commands, q.MaxTurns = r.addSkillsPrompt(a.Instructions, ""), a.MemoryFile, a.Tools, a.Commands, a.Limits.Turns
	q.Permissions, q.SubagentDepth = a.Permissions, a.Limits.MaxSubagentDepth()
	for _, sub := range a.Subagents {
		sub.Instructions, sub.Skills = r.addSkillsPrompt(sub.Instructions, sub.Name), nil
		q.Subagents = append(q.Subagents, sub)
	}
	for _, s := range r.skills { // the agent's own are first
		if s.Dir != "" && !slices.ContainsFunc(q.Skills, func(other runner.Skill) bool { return other.Dir == s.Dir }) {
			q.Skills = append(q.Skills, s)
		}
	}
	for _, m := range a.MCPServers {
		socket := ""
		if m.Type == events.MCPTypeDocker && len(sockets) > 0 {
			socket, sockets = sockets[0], sockets[1:]
		}
		if proxied && m.Type == events.MCPTypeHTTP {
			m.URL, m.Headers = runner.EgressURL+runner.EgressMCPPath+m.Name, nil
		}
		q.MCPServers = append(q.MCPServers, runner.MCPServer{
			Name: m.Name, Type: m.Type, Socket: socket, Command: m.Command, Env: m.Env, URL: m.URL, Headers: m.Headers, TimeoutMs: cmp.Or(m.TimeoutMs, mcpTimeout), Tools: m.Tools,
		})
	}
	for name, value := range r.values {
		if _, set := q.Env[name]; !set {
			q.Env[name] = value
		}
	}
	q.Redact = r.Secrets
}

// addSkillsPrompt returns instructions, followed by a description of the skills that a sub-agent can use. subagent is "" for the
// agent itself.
func (r *Resolved) addSkillsPrompt(instructions, subagent string) string {
	var list []skill.PromptSkill
	for i, s := range r.skills {
		if r.Skills[i].Subagent == subagent {
			list = append(list, skill.PromptSkill{Name: s.Name, Description: s.Description, Dir: s.Dir, Document: r.documents[i]})
		}
	}
	if len(list) == 0 {
		return instructions
	}
	return strings.TrimPrefix(instructions+"\n\n"+skill.FormatPrompt(list, skill.PromptBudget), "\n\n")
}
