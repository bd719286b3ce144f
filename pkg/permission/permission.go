// Package permission decides by an agent's permission policy what happens to a call of a tool: it is allowed, denied, or a
// person decides. It is pure.
//
// Rules about commands are no security boundary: a program can start any other program, and a file can hold any script. What
// a command can reach is limited by the sandbox. See docs/permissions.md.
package permission

import (
	"cmp"
	"fmt"
	"reflect"

	"github.com/spoolhq/spool/pkg/events"
)

// Kind is what a call does.
type Kind string

// The kinds of calls.
const (
	Read        Kind = "read"        // reads or searches files
	Edit        Kind = "edit"        // changes files
	Shell       Kind = "shell"       // runs a command
	Network     Kind = "network"     // reaches the network
	Agent       Kind = "agent"       // starts a sub-agent
	Bookkeeping Kind = "bookkeeping" // the agent's own lists and notes
	Server      Kind = "server"      // a tool of one of the agent's MCP servers
	Question    Kind = "question"    // asks the user, or leaves plan mode
	Unknown     Kind = "unknown"
)

// Path is a path that a call names.
type Path struct {
	Path    string // relative to the workspace with slashes, or absolute outside of it; with symbolic links resolved
	Outside bool   // outside the workspace
	Skill   bool   // in a folder of one of the agent's skills
}

// Call is a call of a tool, as an adapter of an agent describes it.
type Call struct {
	Tool        string // the name that the agent uses
	Kind        Kind
	Paths       []Path
	Command     string // of kind shell
	Hosts       []string
	Named       bool // the agent's definition names the tool
	LeftOut     bool // the agent's definition excludes the tool
	Destructive bool // the tool says that it destroys data
}

// Rules that decide if no rule of a policy matches. Their names are recorded in permission_decided.
const (
	RuleInside     = "workspace-path"    // allow: files inside the workspace
	RuleOutside    = "outside-workspace" // deny
	RuleShell      = "sandboxed-shell"   // allow: the sandbox limits what a command can reach
	RuleAgent      = "sub-agent"         // allow: its own calls are checked as well
	RuleBooks      = "bookkeeping"       // allow
	RuleServer     = "mcp-server"        // allow: a tool of one of the agent's MCP servers
	RuleSkill      = "skill-file"        // allow: reading a file of one of the agent's skills
	RuleNamed      = "named-tool"        // allow: the agent's definition names it
	RuleLeftOut    = "left-out"          // deny: the agent's definition excludes it; no policy changes that
	RuleNetwork    = "network"           // deny
	RuleUnknown    = "unknown-tool"      // deny
	RuleUnattended = "unattended"        // deny: a person would have to decide, and none is there
	RuleApproved   = "approved-class"    // allow: a person approved all calls of the class

	// RuleDestructive asks about a call that the preset allows, because the tool says that it destroys data. Agents without
	// permissions do not have it.
	RuleDestructive = "destructive-hint"
)

// Layers of a decision, from the first to the last that is asked.
const (
	LayerTools     = "tools"     // the tools that the agent's definition excludes
	LayerExecution = "execution" // the rules of the message
	LayerAgent     = "agent"     // permissions of the agent
	LayerPreset    = "preset"    // the preset of the agent's permissions
)

// Decision is the decision on a call.
type Decision struct {
	Action string // events.PermissionAllow, PermissionAsk or PermissionDeny
	Rule   string // the rule that decided
	Reason string // for a denial: a sentence for the agent
}

// Policy is the permission policy of one execution. The zero value is the policy of an agent without permissions. A Policy is
// safe for concurrent use.
type Policy struct {
	agent          events.Permissions
	unattended     bool
	execution      []rule // of the message
	rules          []rule // of the agent
	hasPermissions bool   // the agent has permissions
}

// New returns the policy of an execution of an agent. Its error, of type Errors, names the fields that are not valid.
func New(agent events.Permissions, execution events.ExecutionPermissions) (*Policy, error) {
	if errs := append(CheckExecution(execution), Check(agent)...); len(errs) > 0 {
		return nil, errs
	}
	return &Policy{
		agent: agent, unattended: execution.Unattended, execution: compile(execution.Rules, "execution."), rules: compile(agent.Rules, ""),
		hasPermissions: !reflect.ValueOf(agent).IsZero(),
	}, nil
}

// Decide returns the decision on a call. It does not know what a person has approved; see Class.
func (p *Policy) Decide(c Call) Decision {
	d, _, _ := p.decide(newSubject(c))
	return d
}

// decide returns the decision, the layer that decided, and the rule of a list of rules, if one decided.
func (p *Policy) decide(s *subject) (Decision, string, *rule) {
	d, layer, r := p.decideAny(s)
	if s.Kind == Question && d.Action == events.PermissionAllow && d.Rule != RuleNamed {
		d.Action = events.PermissionAsk // only a person can answer
	}
	return d, layer, r
}

func (p *Policy) decideAny(s *subject) (Decision, string, *rule) {
	if s.LeftOut {
		return workspace(s.Call), LayerTools, nil
	}
	for _, layer := range []struct {
		name  string
		rules []rule
	}{{LayerExecution, p.execution}, {LayerAgent, p.rules}} {
		for i := range layer.rules {
			if r := &layer.rules[i]; r.matches(s) {
				return decided(r.Then, r.name, s), layer.name, r
			}
		}
	}
	if then := p.agent.Tools[s.Tool]; then != "" {
		return decided(then, "tools."+s.Tool, s), LayerAgent, nil
	}
	if p.agent.Default != "" {
		return decided(p.agent.Default, "default", s), LayerAgent, nil
	}
	d := p.preset(s)
	if p.hasPermissions && s.Destructive && d.Action == events.PermissionAllow {
		d = Decision{Action: events.PermissionAsk, Rule: RuleDestructive}
	}
	return d, LayerPreset, nil
}

// decided returns the decision of a rule.
func decided(action, rule string, s *subject) Decision {
	d := Decision{Action: action, Rule: rule}
	switch {
	case action != events.PermissionDeny:
	case s.parsed != nil && s.parsed.opaque:
		d.Reason = fmt.Sprintf("The permission policy does not allow this call of %s: it cannot tell what the command runs. Write names of programs without variables, or go on without it.", s.Tool)
	default:
		d.Reason = fmt.Sprintf("The permission policy does not allow this call of %s. Go on without it.", s.Tool)
	}
	return d
}

// preset returns the decision on a call that no rule matches.
func (p *Policy) preset(s *subject) Decision {
	d, preset := workspace(s.Call), cmp.Or(p.agent.Preset, events.PresetWorkspace)
	switch {
	case preset == events.PresetWorkspace:
		if p.hasPermissions && s.Kind == Question && d.Rule == RuleNamed {
			return Decision{Action: events.PermissionAsk, Rule: RuleNamed}
		}
		return d
	case s.Kind == Question:
		return Decision{Action: events.PermissionAsk, Rule: preset}
	case preset == events.PresetFull:
		return Decision{Action: events.PermissionAllow, Rule: preset}
	case d.Action == events.PermissionAllow && (s.Kind == Read || s.Kind == Bookkeeping):
		return d
	case preset == events.PresetAsk:
		return Decision{Action: events.PermissionAsk, Rule: preset}
	case d.Action == events.PermissionDeny && d.Rule == RuleOutside:
		return d
	}
	return Decision{Action: events.PermissionDeny, Rule: preset, Reason: s.Tool + " is not allowed: this agent may only read files of its workspace. Go on without it."}
}

// workspace returns the decision of the preset workspace.
func workspace(c Call) Decision {
	allow := func(rule string) Decision { return Decision{Action: events.PermissionAllow, Rule: rule} }
	deny := func(rule, reason string) Decision {
		return Decision{Action: events.PermissionDeny, Rule: rule, Reason: reason}
	}
	switch {
	case c.LeftOut:
		return deny(RuleLeftOut, fmt.Sprintf("The tool %q is not one that this agent has. Go on without it.", c.Tool))
	case c.Kind == Server:
		return allow(RuleServer)
	case c.Kind == Read, c.Kind == Edit:
		rule := RuleInside
		for _, p := range c.Paths {
			switch {
			case p.Skill && c.Kind == Read:
				rule = RuleSkill
			case p.Outside:
				return deny(RuleOutside, p.Path+" is outside of the workspace, and the workspace policy allows files inside it only.")
			}
		}
		return allow(rule)
	case c.Kind == Shell:
		return allow(RuleShell)
	case c.Kind == Agent:
		return allow(RuleAgent)
	case c.Kind == Bookkeeping:
		return allow(RuleBooks)
	case c.Named:
		return allow(RuleNamed)
	case c.Kind == Network:
		return deny(RuleNetwork, c.Tool+" reaches the network, which the workspace policy does not allow. Go on without it.")
	}
	return deny(RuleUnknown, fmt.Sprintf("The workspace policy does not know the tool %q and so does not allow it. Go on without it.", c.Tool))
}

// Unattended reports whether no person is there to decide. Then a request that a person would decide is denied.
func (p *Policy) Unattended() bool { return p.unattended }

// SkipsUnattended reports whether the agent of an unattended execution is told that a denied request was skipped.
func (p *Policy) SkipsUnattended() bool { return p.agent.Unattended == events.UnattendedSkip }

// TimeoutMs returns the milliseconds after which a request that nobody has decided is denied; 0 means never.
func (p *Policy) TimeoutMs() uint32 { return p.agent.TimeoutMs }
