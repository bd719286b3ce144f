package agent

import (
	"cmp"
	"path"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// HasPolicy reports whether the launch has a permission policy that can decide differently from the policy of an agent
// without permissions.
func (l Launch) HasPolicy() bool {
	p := l.Permissions
	return p.Preset != "" && p.Preset != events.PresetWorkspace || p.Default != "" || len(p.Rules)+len(p.Tools)+len(l.ExecutionPermissions.Rules) > 0
}

// AllowsAll reports whether the permission policy allows every call of the tool of c, whatever its arguments. c is an
// example of such a call. AllowsAll is for calls that an agent's program makes without asking: if a rule with
// conditions might forbid one of them, the answer is false.
func (l Launch) AllowsAll(c permission.Call) bool {
	agent, execution := l.Permissions, l.ExecutionPermissions
	for _, rules := range []*[]events.PermissionRule{&agent.Rules, &execution.Rules} {
		var unconditional []events.PermissionRule
		for _, r := range *rules {
			matches, err := path.Match(cmp.Or(r.Tool, "*"), c.Tool)
			conditional := len(r.Command)+len(r.Path)+len(r.Host) > 0
			switch {
			case err != nil, matches && conditional && r.Then != events.PermissionAllow:
				return false
			case !conditional:
				unconditional = append(unconditional, r)
			}
		}
		*rules = slices.Clip(unconditional)
	}
	policy, err := permission.New(agent, execution)
	return err == nil && policy.Decide(c).Action == events.PermissionAllow
}
