package agent_test

import (
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

func TestAllowsAll(t *testing.T) {
	t.Parallel()
	allow, deny, ask := events.PermissionAllow, events.PermissionDeny, events.PermissionAsk
	rule := func(tool, then string, path ...string) events.PermissionRule {
		return events.PermissionRule{Tool: tool, Then: then, Path: path}
	}
	read := permission.Call{Tool: "read", Kind: permission.KindRead, Paths: []permission.Path{{Path: "a"}}}
	for name, c := range map[string]struct {
		agent, execution []events.PermissionRule
		fallback         string
		want             bool
	}{
		"no permissions":                    {want: true},
		"default":                           {fallback: ask},
		"rule before the default":           {agent: []events.PermissionRule{rule("read", allow)}, fallback: deny, want: true},
		"rule for another tool":             {agent: []events.PermissionRule{rule("bash", deny)}, want: true},
		"some paths are denied":             {agent: []events.PermissionRule{rule("*", deny, "secret/**")}},
		"some paths are asked about":        {execution: []events.PermissionRule{rule("", ask, "secret/**")}},
		"some paths only are allowed":       {agent: []events.PermissionRule{rule("read", allow, "**")}, fallback: ask},
		"allowed rule after a conditional":  {agent: []events.PermissionRule{rule("read", allow, "a"), rule("r*", allow)}, fallback: ask, want: true},
		"execution before the agent":        {agent: []events.PermissionRule{rule("read", deny)}, execution: []events.PermissionRule{rule("read", allow)}, want: true},
		"rule that cannot be read":          {agent: []events.PermissionRule{rule("[", allow)}},
		"conditional denial of other tools": {agent: []events.PermissionRule{rule("bash", deny, "x")}, want: true},
	} {
		l := agent.Launch{Permissions: events.Permissions{Rules: c.agent, Default: c.fallback}, ExecutionPermissions: events.ExecutionPermissions{Rules: c.execution}}
		if got := l.AllowsAll(read); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
		if got, want := l.HasPolicy(), name != "no permissions"; got != want {
			t.Errorf("%s: has a policy: %v, want %v", name, got, want)
		}
	}
	if (agent.Launch{Permissions: events.Permissions{Preset: events.PresetWorkspace, TimeoutMs: 1, Unattended: events.UnattendedSkip}}).HasPolicy() {
		t.Error("the preset workspace is taken for a policy of its own")
	}
}
