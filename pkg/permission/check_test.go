package permission_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

func TestCheck_NamesInvalidFields(t *testing.T) {
	t.Parallel()
	rules := func(list ...events.PermissionRule) events.Permissions { return events.Permissions{Rules: list} }
	command := func(s ...string) events.Permissions { return rules(events.PermissionRule{Command: s, Then: "deny"}) }
	path := func(s ...string) events.Permissions { return rules(events.PermissionRule{Path: s, Then: "deny"}) }
	host := func(s ...string) events.Permissions { return rules(events.PermissionRule{Host: s, Then: "deny"}) }
	many := func(n int) (out []string) {
		for range n {
			out = append(out, "x")
		}
		return out
	}
	for name, c := range map[string]struct {
		policy events.Permissions
		want   string // prefix of each line
	}{
		"nothing":    {events.Permissions{}, ""},
		"everything": {events.Permissions{Preset: "ask", Rules: []events.PermissionRule{{Tool: "mcp__*", Then: "allow"}, {Tool: "[A-Z]*", Command: []string{"git push", "rm"}, Host: []string{"*.example.com", "[::1]"}, Then: "deny"}, {Path: []string{"**", "/etc/**", "{a,b}"}, Then: "ask"}}, Tools: map[string]string{"Read": "allow"}, Default: "deny", Unattended: "skip", TimeoutMs: 604_800_000}, ""},
		"preset":     {events.Permissions{Preset: "yolo"}, `permissions.preset: "yolo" is not known; the preset must be workspace, read-only, ask or full`},
		"default":    {events.Permissions{Default: "no"}, `permissions.default: "no" is not known; the action must be allow, ask or deny`},
		"unattended": {events.Permissions{Unattended: "allow"}, `permissions.unattended: "allow" is not known; the value must be deny or skip`},
		"timeout":    {events.Permissions{TimeoutMs: 604_800_001}, "permissions.timeoutMs: is 604800001; the limit is 604800000 (seven days)"},
		"tools": {events.Permissions{Tools: map[string]string{"": "allow", "A": "", "B": "no", "C*": "deny", strings.Repeat("x", 201): "deny"}},
			"permissions.tools[\"\"]: is empty\npermissions.tools.A: is required; must be allow, ask or deny\npermissions.tools.B: \"no\" is not known\npermissions.tools[\"C*\"]: must be the name of a tool\npermissions.tools.xxx"},
		"no action":          {rules(events.PermissionRule{}), "permissions.rules[0].then: is required; must be allow, ask or deny"},
		"unknown action":     {rules(events.PermissionRule{Then: "Allow"}), `permissions.rules[0].then: "Allow" is not known`},
		"pattern of tool":    {rules(events.PermissionRule{Tool: "[", Then: "deny"}), `permissions.rules[0].tool: "[" is not a valid pattern`},
		"long tool":          {rules(events.PermissionRule{Tool: strings.Repeat("x", 201), Then: "deny"}), "permissions.rules[0].tool: has 201 bytes; the limit is 200"},
		"tool of two lines":  {rules(events.PermissionRule{Tool: "a\nb", Then: "deny"}), "permissions.rules[0].tool: must not have control characters"},
		"empty command":      {command("ls", "", "  "), "permissions.rules[0].command[1]: is empty\npermissions.rules[0].command[2]: \"  \" is empty"},
		"shell syntax":       {command("ls; rm", "ls 'x'", "$X"), "permissions.rules[0].command[0]: \"ls; rm\" must be the first words of one command\npermissions.rules[0].command[1]: \npermissions.rules[0].command[2]: "},
		"command of pattern": {command("git *"), `permissions.rules[0].command[0]: "git *" must not have wildcards`},
		"long command":       {command(strings.Repeat("x", 1025)), "permissions.rules[0].command[0]: has 1025 bytes; the limit is 1024"},
		"pattern of path":    {path("a", "[", ""), "permissions.rules[0].path[1]: \"[\" is not a valid pattern\npermissions.rules[0].path[2]: is empty"},
		"path that never matches": {path("../a", "a/../b", "./a", "a/", "a//b", "..", "~/a"),
			"permissions.rules[0].path[0]: \"../a\" never matches\npermissions.rules[0].path[1]: \npermissions.rules[0].path[2]: \npermissions.rules[0].path[3]: \npermissions.rules[0].path[4]: \npermissions.rules[0].path[5]: \npermissions.rules[0].path[6]: \"~/a\" must be absolute"},
		"braces": {path(strings.Repeat("{a,b}", 9)), "permissions.rules[0].path[0]: \"{a,b}"},
		"hosts": {host("https://a.com", "a.com:443", "a.com/x", "*.1.2.3.4", "*", "a b", ""),
			"permissions.rules[0].host[0]: \"https://a.com\" is not a host; must be host or *.host\npermissions.rules[0].host[1]: \npermissions.rules[0].host[2]: \npermissions.rules[0].host[3]: \npermissions.rules[0].host[4]: \npermissions.rules[0].host[5]: \npermissions.rules[0].host[6]: is empty"},
		"command and path": {rules(events.PermissionRule{Command: []string{"rm"}, Path: []string{"x"}, Then: "deny"}), "permissions.rules[0].path: never matches together with command"},
		"many entries":     {command(many(101)...), "permissions.rules[0].command: has 101 entries; the limit is 100"},
		"many rules":       {events.Permissions{Rules: make([]events.PermissionRule, 201)}, "permissions.rules: has 201 entries; the limit is 200"},
		"rule after all":   {rules(events.PermissionRule{Tool: "A", Then: "ask"}, events.PermissionRule{Then: "deny"}, events.PermissionRule{Tool: "B", Then: "ask"}), "permissions.rules[2]: never matches: rules[1] matches every call that it matches"},
		"rules of a tool": {rules(events.PermissionRule{Tool: "B*", Then: "allow"}, events.PermissionRule{Tool: "B*", Command: []string{"rm"}, Then: "deny"}, events.PermissionRule{Tool: "Bash", Then: "deny"}, events.PermissionRule{Tool: "B?", Then: "deny"}),
			"permissions.rules[1]: never matches: rules[0] \npermissions.rules[2]: never matches: rules[0] "},
		"same rule":              {rules(events.PermissionRule{Command: []string{"a", "b"}, Then: "ask"}, events.PermissionRule{Command: []string{"b"}, Then: "allow"}), "permissions.rules[1]: never matches: rules[0] "},
		"allow needs more":       {rules(events.PermissionRule{Command: []string{"a"}, Then: "allow"}, events.PermissionRule{Command: []string{"a"}, Then: "deny"}), ""},
		"allow before allow":     {rules(events.PermissionRule{Path: []string{"a"}, Then: "allow"}, events.PermissionRule{Tool: "E", Path: []string{"a"}, Then: "allow"}), "permissions.rules[1]: never matches: rules[0] "},
		"hosts of commands":      {rules(events.PermissionRule{Host: []string{"a.com"}, Then: "allow"}, events.PermissionRule{Command: []string{"curl"}, Host: []string{"a.com"}, Then: "allow"}), ""},
		"further conditions":     {rules(events.PermissionRule{Path: []string{"a"}, Then: "deny"}, events.PermissionRule{Path: []string{"a", "b"}, Then: "deny"}, events.PermissionRule{Tool: "X", Then: "deny"}), ""},
		"invalid rule before it": {rules(events.PermissionRule{}, events.PermissionRule{Tool: "X", Then: "deny"}), "permissions.rules[0].then: is required"},
	} {
		errs := permission.Check(c.policy)
		lines := strings.Split(c.want, "\n")
		if c.want == "" {
			lines = nil
		}
		ok := len(errs) == len(lines)
		for i := range errs {
			ok = ok && i < len(lines) && strings.HasPrefix(errs[i].Error(), strings.TrimSuffix(lines[i], " "))
		}
		if !ok {
			t.Errorf("%s:\n%v\nwant\n%s", name, errs, c.want)
		}
		_, err := permission.New(c.policy, events.ExecutionPermissions{})
		var got permission.Errors
		if errors.As(err, &got); !slices.Equal(got, errs) || (err == nil) != (len(errs) == 0) {
			t.Errorf("%s: New returned %v, Check %v", name, err, errs)
		}
	}
}

func TestCheckExecution_ChecksItsRules(t *testing.T) {
	t.Parallel()
	bad := events.ExecutionPermissions{Rules: []events.PermissionRule{{Then: "allow"}, {Tool: "X", Then: "never"}}, Unattended: true}
	want := `permissions.rules[1].then: "never" is not known; the action must be allow, ask or deny`
	if got := permission.CheckExecution(bad); len(got) != 1 || got[0].Error() != want {
		t.Error(got)
	}
	if _, err := permission.New(events.Permissions{}, bad); err == nil || err.Error() != want {
		t.Error(err)
	}
	bad.Rules = bad.Rules[:1]
	if p, err := permission.New(events.Permissions{Rules: []events.PermissionRule{{Then: "deny"}}}, bad); err != nil || !p.IsUnattended() {
		t.Error(err)
	}
}
