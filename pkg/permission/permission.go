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

// CallKind is the kind of effect that a tool call has, such as reading files or running a shell command.
type CallKind string

// The kinds of calls.
const (
	KindRead        CallKind = "read"        // reads or searches files
	KindEdit        CallKind = "edit"        // changes files
	KindShell       CallKind = "shell"       // runs a command
	KindNetwork     CallKind = "network"     // reaches the network
	KindAgent       CallKind = "agent"       // starts a sub-agent
	KindBookkeeping CallKind = "bookkeeping" // the agent's own lists and notes
	KindMCPTool     CallKind = "server"      // a tool of one of the agent's MCP servers
	KindQuestion    CallKind = "question"    // asks the user, or leaves plan mode
	KindUnknown     CallKind = "unknown"
)

// Path is a file path that a tool call names.
type Path struct {
	Path    string // relative to the workspace with slashes, or absolute outside of it; with symbolic links resolved
	Outside bool   // outside the workspace
	Skill   bool   // in a folder of one of the agent's skills
}

// Call is a call of a tool by an agent, as the architecture's adapter describes it.
type Call struct {
	Tool        string // the name that the agent uses
	Kind        CallKind
	Paths       []Path
	Command     string // of kind shell
	Hosts       []string
	Named       bool // the agent's definition names the tool
	LeftOut     bool // the agent's definition excludes the tool
	Destructive bool // the tool says that it destroys data
}

// Rules that decide if no rule of a policy matches. Their names are recorded in permission_decided.
const (
	RuleWorkspacePath    = "workspace-path"    // allow: files inside the workspace
	RuleOutsideWorkspace = "outside-workspace" // deny
	RuleSandboxedShell   = "sandboxed-shell"   // allow: the sandbox limits what a command can reach
	RuleSubagent         = "sub-agent"         // allow: its own calls are checked as well
	RuleBookkeeping      = "bookkeeping"       // allow
	RuleMCPServer        = "mcp-server"        // allow: a tool of one of the agent's MCP servers
	RuleSkillFile        = "skill-file"        // allow: reading a file of one of the agent's skills
	RuleNamedTool        = "named-tool"        // allow: the agent's definition names it
	RuleOmittedTool      = "left-out"          // deny: the agent's definition excludes it; no policy changes that
	RuleNetwork          = "network"           // deny
	RuleUnknownTool      = "unknown-tool"      // deny
	RuleUnattended       = "unattended"        // deny: a person would have to decide, and none is there
	RuleApprovedClass    = "approved-class"    // allow: a person approved all calls of the class

	// RuleDestructive is the rule by which a person decides about a call that the preset allows, because the tool states
	// that it destroys data. It does not apply to agents without permissions and to the preset full.
	RuleDestructive = "destructive-hint"
)

// Layers of a policy, in the order in which they may decide about a call.
const (
	PolicyLayerTools     = "tools"     // the tools that the agent's definition excludes
	PolicyLayerExecution = "execution" // the rules of the message
	PolicyLayerAgent     = "agent"     // permissions of the agent
	PolicyLayerPreset    = "preset"    // the preset of the agent's permissions
)

// Decision is the decision of a policy on a tool call: allow, ask or deny.
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
	execution      []compiledRule // of the message
	rules          []compiledRule // of the agent
	hasPermissions bool           // the agent has permissions
}

// New returns the permission policy of one execution of an agent. Its error, of type Errors, names the fields that are
// not valid.
func New(agent events.Permissions, execution events.ExecutionPermissions) (*Policy, error) {
	if errs := append(CheckExecution(execution), Check(agent)...); len(errs) > 0 {
		return nil, errs
	}
	return &Policy{
		agent: agent, unattended: execution.Unattended, execution: compileRules(execution.Rules, "execution."), rules: compileRules(agent.Rules, ""),
		hasPermissions: !reflect.ValueOf(agent).IsZero(),
	}, nil
}

// Decide returns the decision on a tool call. It does not take into account which classes of calls a person has
// approved; see Class.
func (p *Policy) Decide(c Call) Decision {
	d, _, _ := p.decide(newAnalyzedCall(c))
	return d
}

// decide returns the decision, the layer of the policy that decided, and the rule that matched, or nil if none did.
func (p *Policy) decide(s *analyzedCall) (Decision, string, *compiledRule) {
	d, layer, r := p.decideByLayers(s)
	if s.Kind == KindQuestion && d.Action == events.PermissionAllow && d.Rule != RuleNamedTool {
		d.Action = events.PermissionAsk // only a person can answer
	}
	return d, layer, r
}

// decideByLayers returns the decision of the first layer of the policy that decides about the call, the name of the
// layer, and the rule that matched, or nil if none did.
func (p *Policy) decideByLayers(s *analyzedCall) (Decision, string, *compiledRule) {
	if s.LeftOut {
		return decideByWorkspacePreset(s.Call), PolicyLayerTools, nil
	}
	for _, layer := range []struct {
		name  string
		rules []compiledRule
	}{{PolicyLayerExecution, p.execution}, {PolicyLayerAgent, p.rules}} {
		for i := range layer.rules {
			if r := &layer.rules[i]; r.matches(s) {
				return newDecision(r.Then, r.name, s), layer.name, r
			}
		}
	}
	if then := p.agent.Tools[s.Tool]; then != "" {
		return newDecision(then, "tools."+s.Tool, s), PolicyLayerAgent, nil
	}
	if p.agent.Default != "" {
		return newDecision(p.agent.Default, "default", s), PolicyLayerAgent, nil
	}
	d := p.decideByPreset(s)
	if p.hasPermissions && s.Destructive && p.agent.Preset != events.PresetFull && d.Action == events.PermissionAllow {
		d = Decision{Action: events.PermissionAsk, Rule: RuleDestructive}
	}
	return d, PolicyLayerPreset, nil
}

// newDecision returns the decision of a rule, with a reason for the agent if it denies the call.
func newDecision(action, rule string, s *analyzedCall) Decision {
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

// decideByPreset returns the preset's decision on a call that no rule of the policy matches.
func (p *Policy) decideByPreset(s *analyzedCall) Decision {
	d, preset := decideByWorkspacePreset(s.Call), cmp.Or(p.agent.Preset, events.PresetWorkspace)
	switch {
	case preset == events.PresetWorkspace:
		if p.hasPermissions && s.Kind == KindQuestion && d.Rule == RuleNamedTool {
			return Decision{Action: events.PermissionAsk, Rule: RuleNamedTool}
		}
		return d
	case s.Kind == KindQuestion:
		return Decision{Action: events.PermissionAsk, Rule: preset}
	case preset == events.PresetFull:
		return Decision{Action: events.PermissionAllow, Rule: preset}
	case d.Action == events.PermissionAllow && (s.Kind == KindRead || s.Kind == KindBookkeeping):
		return d
	case preset == events.PresetAsk:
		return Decision{Action: events.PermissionAsk, Rule: preset}
	case d.Action == events.PermissionDeny && d.Rule == RuleOutsideWorkspace:
		return d
	}
	return Decision{Action: events.PermissionDeny, Rule: preset, Reason: s.Tool + " is not allowed: this agent may only read files of its workspace. Go on without it."}
}

// decideByWorkspacePreset returns the decision of the preset workspace on a call.
func decideByWorkspacePreset(c Call) Decision {
	allow := func(rule string) Decision { return Decision{Action: events.PermissionAllow, Rule: rule} }
	deny := func(rule, reason string) Decision {
		return Decision{Action: events.PermissionDeny, Rule: rule, Reason: reason}
	}
	switch {
	case c.LeftOut:
		return deny(RuleOmittedTool, fmt.Sprintf("The tool %q is not one that this agent has. Go on without it.", c.Tool))
	case c.Kind == KindMCPTool:
		return allow(RuleMCPServer)
	case c.Kind == KindRead, c.Kind == KindEdit:
		rule := RuleWorkspacePath
		for _, p := range c.Paths {
			switch {
			case p.Skill && c.Kind == KindRead:
				rule = RuleSkillFile
			case p.Outside:
				return deny(RuleOutsideWorkspace, p.Path+" is outside of the workspace, and the workspace policy allows files inside it only.")
			}
		}
		return allow(rule)
	case c.Kind == KindShell:
		return allow(RuleSandboxedShell)
	case c.Kind == KindAgent:
		return allow(RuleSubagent)
	case c.Kind == KindBookkeeping:
		return allow(RuleBookkeeping)
	case c.Named:
		return allow(RuleNamedTool)
	case c.Kind == KindNetwork:
		return deny(RuleNetwork, c.Tool+" reaches the network, which the workspace policy does not allow. Go on without it.")
	}
	return deny(RuleUnknownTool, fmt.Sprintf("The workspace policy does not know the tool %q and so does not allow it. Go on without it.", c.Tool))
}

// IsUnattended reports whether nobody can decide about calls of this execution. Then a call that a person would have to
// decide is denied.
func (p *Policy) IsUnattended() bool { return p.unattended }

// ReportsDeniedAsSkipped reports whether the agent of an unattended execution is told that a denied call was skipped.
func (p *Policy) ReportsDeniedAsSkipped() bool { return p.agent.Unattended == events.UnattendedSkip }

// TimeoutMs returns the milliseconds after which an approval request that nobody has decided is denied; 0 means never.
func (p *Policy) TimeoutMs() uint32 { return p.agent.TimeoutMs }
