package opencode

import (
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// A sub-agent calls without asking only the tools of which the policy allows every call.
func TestSubagentRules_FollowThePolicy(t *testing.T) {
	t.Parallel()
	deny, ask, allow := events.PermissionDeny, events.PermissionAsk, events.PermissionAllow
	for name, c := range map[string]struct {
		policy  events.Permissions
		allowed string
	}{
		"no permissions":    {events.Permissions{}, "read glob grep list bash edit todowrite desk_*"},
		"everything asked":  {events.Permissions{Default: ask}, ""},
		"commands denied":   {events.Permissions{Tools: map[string]string{"bash": deny}}, "read glob grep list edit todowrite desk_*"},
		"one editor denied": {events.Permissions{Tools: map[string]string{"write": deny}}, "read glob grep list bash todowrite desk_*"},
		"some paths": {events.Permissions{Rules: []events.PermissionRule{{Tool: "read", Path: []string{"secret/**"}, Then: ask}}},
			"glob grep list bash edit todowrite desk_*"},
		"a tool of the server": {events.Permissions{Rules: []events.PermissionRule{{Tool: "desk_note", Then: ask}}}, "read glob grep list bash edit todowrite"},
		"reading only": {events.Permissions{Default: deny, Rules: []events.PermissionRule{{Tool: "read", Then: allow}, {Tool: "gr*", Then: allow}}},
			"read grep"},
	} {
		got := ""
		l := agent.Launch{Permissions: c.policy, MCPServers: []runner.MCPServer{{Name: "desk"}}}
		for _, r := range subagentRules(l, nil, nil) {
			if r.action == "allow" {
				got += " " + r.permission
			}
		}
		if got != " "+c.allowed && got != c.allowed {
			t.Errorf("%s: allowed%s, want %s", name, got, c.allowed)
		}
	}
}
