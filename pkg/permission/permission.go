// Package permission decides by an agent's permission policy what happens to a call of a tool: it is allowed, denied, or a
// person decides. It is pure.
package permission

import (
	"cmp"
	"fmt"
	"path"

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
)

// Decision is the decision on a call.
type Decision struct {
	Action string // events.PermissionAllow, PermissionAsk or PermissionDeny
	Rule   string // the rule that decided
	Reason string // for a denial: a sentence for the agent
}

// Policy is the permission policy of one execution. It is safe for concurrent use.
type Policy struct {
	agent     events.Permissions
	execution events.ExecutionPermissions
}

// New returns the policy of an execution of an agent.
func New(agent events.Permissions, execution events.ExecutionPermissions) (*Policy, error) {
	return &Policy{agent: agent, execution: execution}, nil
}

// Decide returns the decision on a call. It does not know what a person has approved; see Class.
func (p *Policy) Decide(c Call) Decision {
	if c.LeftOut {
		return workspace(c)
	}
	for i, r := range p.execution.Rules {
		if matches(r, c) {
			return Decision{Action: r.Then, Rule: fmt.Sprintf("execution.rules[%d]", i), Reason: denied(c)}
		}
	}
	for i, r := range p.agent.Rules {
		if matches(r, c) {
			return Decision{Action: r.Then, Rule: fmt.Sprintf("rules[%d]", i), Reason: denied(c)}
		}
	}
	if then := p.agent.Tools[c.Tool]; then != "" {
		return Decision{Action: then, Rule: "tools." + c.Tool, Reason: denied(c)}
	}
	if p.agent.Default != "" {
		return Decision{Action: p.agent.Default, Rule: "default", Reason: denied(c)}
	}
	return workspace(c)
}

func denied(c Call) string {
	return fmt.Sprintf("The permission policy does not allow this call of %s. Go on without it.", c.Tool)
}

func matches(r events.PermissionRule, c Call) bool {
	ok, err := path.Match(cmp.Or(r.Tool, "*"), c.Tool)
	return err == nil && ok && len(r.Command) == 0 && len(r.Path) == 0 && len(r.Host) == 0
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

// Class returns the class of calls that a person approves together with this call ("approve all"), as text for people. ""
// means that the call can only be approved alone.
func (p *Policy) Class(c Call) string { return "calls of " + c.Tool }

// Unattended reports whether no person is there to decide. Then a request that a person would decide is denied.
func (p *Policy) Unattended() bool { return p.execution.Unattended }

// SkipsUnattended reports whether the agent of an unattended execution is told that a denied request was skipped.
func (p *Policy) SkipsUnattended() bool { return p.agent.Unattended == events.UnattendedSkip }

// TimeoutMs returns the milliseconds after which a request that nobody has decided is denied; 0 means never.
func (p *Policy) TimeoutMs() uint32 { return p.agent.TimeoutMs }
