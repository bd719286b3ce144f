package permission_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// inside and outside are paths of calls.
func inside(path string) permission.Path  { return permission.Path{Path: path} }
func outside(path string) permission.Path { return permission.Path{Path: path, Outside: true} }

func files(tool string, kind permission.CallKind, paths ...permission.Path) permission.Call {
	return permission.Call{Tool: tool, Kind: kind, Paths: paths}
}

// calls are one call of each sort.
func calls() map[string]permission.Call {
	return map[string]permission.Call{
		"read":        files("Read", permission.KindRead, inside("a")),
		"search":      files("Grep", permission.KindRead),
		"readOutside": files("Read", permission.KindRead, inside("a"), outside("/etc/passwd")),
		"skill":       files("Read", permission.KindRead, permission.Path{Path: "/skills/s/x", Outside: true, Skill: true}),
		"edit":        files("Edit", permission.KindEdit, inside("a")),
		"editOutside": files("Edit", permission.KindEdit, outside("/etc/passwd")),
		"editSkill":   files("Edit", permission.KindEdit, permission.Path{Path: "/skills/s/x", Outside: true, Skill: true}),
		"shell":       bash("ls"),
		"network":     {Tool: "WebFetch", Kind: permission.KindNetwork, Hosts: []string{"example.com"}},
		"named":       {Tool: "WebFetch", Kind: permission.KindNetwork, Named: true},
		"agent":       {Tool: "Task", Kind: permission.KindAgent},
		"books":       {Tool: "TodoWrite", Kind: permission.KindBookkeeping},
		"server":      {Tool: "mcp__s__t", Kind: permission.KindMCPTool},
		"destroys":    {Tool: "mcp__s__t", Kind: permission.KindMCPTool, Destructive: true},
		"question":    {Tool: "AskUserQuestion", Kind: permission.KindQuestion},
		"namedAsk":    {Tool: "AskUserQuestion", Kind: permission.KindQuestion, Named: true},
		"unknown":     {Tool: "X", Kind: permission.KindUnknown},
		"leftOut":     {Tool: "Read", Kind: permission.KindRead, LeftOut: true},
	}
}

func TestDecide_FollowsThePreset(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		policy events.Permissions
		want   string
	}{
		{events.Permissions{}, `
			agent allow sub-agent, books allow bookkeeping, destroys allow mcp-server, edit allow workspace-path, editOutside deny outside-workspace, editSkill deny outside-workspace,
			leftOut deny left-out, named allow named-tool, namedAsk allow named-tool, network deny network, question deny unknown-tool, read allow workspace-path, readOutside deny outside-workspace,
			search allow workspace-path, server allow mcp-server, shell allow sandboxed-shell, skill allow skill-file, unknown deny unknown-tool`},
		{events.Permissions{Preset: "workspace"}, `
			agent allow sub-agent, books allow bookkeeping, destroys ask destructive-hint, edit allow workspace-path, editOutside deny outside-workspace, editSkill deny outside-workspace,
			leftOut deny left-out, named allow named-tool, namedAsk ask named-tool, network deny network, question deny unknown-tool, read allow workspace-path, readOutside deny outside-workspace,
			search allow workspace-path, server allow mcp-server, shell allow sandboxed-shell, skill allow skill-file, unknown deny unknown-tool`},
		{events.Permissions{Preset: "read-only"}, `
			agent deny read-only, books allow bookkeeping, destroys deny read-only, edit deny read-only, editOutside deny outside-workspace, editSkill deny outside-workspace,
			leftOut deny left-out, named deny read-only, namedAsk ask read-only, network deny read-only, question ask read-only, read allow workspace-path, readOutside deny outside-workspace,
			search allow workspace-path, server deny read-only, shell deny read-only, skill allow skill-file, unknown deny read-only`},
		{events.Permissions{Preset: "ask"}, `
			agent ask ask, books allow bookkeeping, destroys ask ask, edit ask ask, editOutside ask ask, editSkill ask ask,
			leftOut deny left-out, named ask ask, namedAsk ask ask, network ask ask, question ask ask, read allow workspace-path, readOutside ask ask,
			search allow workspace-path, server ask ask, shell ask ask, skill allow skill-file, unknown ask ask`},
		{events.Permissions{Preset: "full"}, `
			agent allow full, books allow full, destroys allow full, edit allow full, editOutside allow full, editSkill allow full,
			leftOut deny left-out, named allow full, namedAsk ask full, network allow full, question ask full, read allow full, readOutside allow full,
			search allow full, server allow full, shell allow full, skill allow full, unknown allow full`},
		{events.Permissions{Default: "allow"}, `
			agent allow default, books allow default, destroys allow default, edit allow default, editOutside allow default, editSkill allow default,
			leftOut deny left-out, named allow default, namedAsk ask default, network allow default, question ask default, read allow default, readOutside allow default,
			search allow default, server allow default, shell allow default, skill allow default, unknown allow default`},
	} {
		p := policy(t, c.policy)
		all := calls()
		for entry := range strings.SplitSeq(c.want, ",") {
			words := strings.Fields(entry)
			call, ok := all[words[0]]
			delete(all, words[0])
			d := p.Decide(call)
			if got := d.Action + " " + d.Rule; !ok || got != words[1]+" "+words[2] {
				t.Errorf("%+v: %s: %s, want %s", c.policy, words[0], got, words[1:])
			}
			if (d.Reason != "") != (d.Action == "deny") {
				t.Errorf("%+v: %s: the reason of %s is %q", c.policy, words[0], d.Action, d.Reason)
			}
		}
		if len(all) > 0 {
			t.Errorf("%+v: no expectation for %d calls", c.policy, len(all))
		}
	}
	for name, call := range calls() {
		if got, want := (&permission.Policy{}).Decide(call), policy(t, events.Permissions{}).Decide(call); got != want {
			t.Errorf("%s: the zero value decides %+v, New of nothing %+v", name, got, want)
		}
	}
}

func TestDecide_TakesTheFirstRuleThenToolsThenTheDefault(t *testing.T) {
	t.Parallel()
	agent := events.Permissions{
		Preset:  "full",
		Rules:   []events.PermissionRule{{Tool: "A*", Then: "ask"}, {Tool: "?B", Then: "deny"}, {Tool: "*C", Then: "allow"}},
		Tools:   map[string]string{"AB": "deny", "D": "deny", "E": "allow"},
		Default: "ask",
	}
	p := policy(t, agent, events.PermissionRule{Tool: "AX", Then: "deny"}, events.PermissionRule{Tool: "AX*", Then: "allow"})
	for tool, want := range map[string]string{
		"AX": "deny execution.rules[0] execution", "AXC": "allow execution.rules[1] execution", "AB": "ask rules[0] agent", "BB": "deny rules[1] agent", "BC": "allow rules[2] agent",
		"D": "deny tools.D agent", "E": "allow tools.E agent", "F": "ask default agent", "ax": "ask default agent", "a/C": "allow rules[2] agent",
	} {
		e, err := p.Explain(permission.Call{Tool: tool, Kind: permission.KindUnknown})
		if got := fmt.Sprint(e.Action, " ", e.Rule, " ", e.Layer); err != nil || got != want {
			t.Errorf("%s: %s, want %s (%v)", tool, got, want, err)
		}
	}
	// No rule gives a call to an agent that does not have the tool.
	all := policy(t, events.Permissions{Preset: "full", Rules: []events.PermissionRule{{Then: "allow"}}, Tools: map[string]string{"X": "allow"}})
	if d := all.Decide(permission.Call{Tool: "X", Kind: permission.KindMCPTool, LeftOut: true}); d.Action != "deny" || d.Rule != permission.RuleOmittedTool {
		t.Error(d)
	}
	// A rule that allows a question asks it.
	for _, q := range []events.Permissions{{Rules: []events.PermissionRule{{Then: "allow"}}}, {Tools: map[string]string{"Q": "allow"}}, {Default: "ask"}} {
		if d := policy(t, q).Decide(permission.Call{Tool: "Q", Kind: permission.KindQuestion}); d.Action != "ask" {
			t.Errorf("%+v: %+v", q, d)
		}
	}
}

func TestDecide_MatchesPathsAndHosts(t *testing.T) {
	t.Parallel()
	net := func(hosts ...string) permission.Call {
		return permission.Call{Tool: "WebFetch", Kind: permission.KindNetwork, Hosts: hosts}
	}
	path := func(globs ...string) events.PermissionRule { return events.PermissionRule{Path: globs} }
	host := func(hosts ...string) events.PermissionRule { return events.PermissionRule{Host: hosts} }
	edit := func(paths ...permission.Path) permission.Call { return files("Edit", permission.KindEdit, paths...) }
	for name, c := range map[string]struct {
		rule       events.PermissionRule
		call       permission.Call
		allow, any bool // whether the rule matches if it allows, and if it denies or asks
	}{
		"file":                            {path("src/**/*.go"), edit(inside("src/a/b.go")), true, true},
		"file in the folder itself":       {path("src/**/*.go"), edit(inside("src/b.go")), true, true},
		"other file":                      {path("src/**/*.go"), edit(inside("src/b.txt")), false, false},
		"star does not cross folders":     {path("src/*"), edit(inside("src/a/b")), false, false},
		"alternatives":                    {path("{a,b}/*"), edit(inside("b/x")), true, true},
		"hidden file":                     {path("**"), edit(inside("a/.env")), true, true},
		"one of two paths":                {path("src/**"), edit(inside("src/a"), inside("b")), false, true},
		"both paths, by two globs":        {path("src/**", "b"), edit(inside("src/a"), inside("b")), true, true},
		"no path":                         {path("**"), edit(), false, false},
		"relative glob outside":           {path("**"), edit(outside("/etc/passwd")), false, false},
		"absolute glob outside":           {path("/etc/**"), edit(outside("/etc/a/b")), true, true},
		"absolute glob inside":            {path("/workspace/src/**"), edit(inside("src/a")), true, true},
		"absolute glob of everything":     {path("/**"), edit(inside("src/a"), outside("/x")), true, true},
		"path that is not clean":          {path("src/**"), edit(inside("src/../b")), false, false},
		"inside that leads outside":       {path("**"), edit(inside("../b")), false, false},
		"inside that leads outside, glob": {path("/b"), edit(inside("../b")), true, true},
		"outside of unknown place":        {path("/workspace/**", "/**", "**"), edit(outside("~/x")), false, true},
		"outside below the workspace":     {path("/workspace/**"), edit(outside("/workspace/link")), false, true},
		"shell command with paths":        {path("**"), permission.Call{Tool: "Bash", Kind: permission.KindShell, Command: "ls", Paths: []permission.Path{inside("a")}}, false, false},
		"call without a file":             {path("**"), net("example.com"), false, false},
		"host":                            {host("example.com"), net("example.com"), true, true},
		"host in capitals":                {host("Example.com"), net("EXAMPLE.com."), true, true},
		"host below":                      {host("*.example.com"), net("a.b.example.com"), true, true},
		"not the host itself":             {host("*.example.com"), net("example.com"), false, false},
		"not a host with the same end":    {host("*.example.com"), net("aexample.com"), false, false},
		"one of two hosts":                {host("example.com"), net("example.com", "example.org"), false, true},
		"two hosts":                       {host("example.com", "*.org"), net("example.com", "example.org"), true, true},
		"address":                         {host("127.0.0.1", "[::1]"), net("127.0.0.1", "[::1]", "::1"), true, true},
		"no host":                         {host("example.com"), net(), false, false},
		"host of a shell command":         {host("example.com"), permission.Call{Tool: "Bash", Kind: permission.KindShell, Command: "curl x", Hosts: []string{"example.com"}}, false, true},
		"command and host": {events.PermissionRule{Command: []string{"curl"}, Host: []string{"example.com"}},
			permission.Call{Tool: "Bash", Kind: permission.KindShell, Command: "curl x", Hosts: []string{"example.com"}}, true, true},
		"tool and path":   {events.PermissionRule{Tool: "Edit", Path: []string{"**"}}, edit(inside("a")), true, true},
		"other tool":      {events.PermissionRule{Tool: "Write", Path: []string{"**"}}, edit(inside("a")), false, false},
		"command of none": {events.PermissionRule{Command: []string{"ls"}}, edit(inside("a")), false, false},
	} {
		for then, want := range map[string]bool{"allow": c.allow, "deny": c.any, "ask": c.any} {
			r := c.rule
			r.Then = then
			d := policy(t, events.Permissions{Rules: []events.PermissionRule{r}}).Decide(c.call)
			if got := d.Rule == "rules[0]"; got != want {
				t.Errorf("%s: %s matches %t, want %t", name, then, got, want)
			}
		}
	}
}

func TestClass_NamesFilesHostsAndTools(t *testing.T) {
	t.Parallel()
	for want, list := range map[string][]permission.Call{
		"reads of files in the workspace":         {files("Read", permission.KindRead, inside("a"), inside("b/c")), files("Grep", permission.KindRead)},
		"changes of files in the workspace":       {files("Edit", permission.KindEdit, inside("a")), files("Write", permission.KindEdit, inside("b/c"))},
		"changes of files in /etc":                {files("Edit", permission.KindEdit, outside("/etc/a"), outside("/etc/b"))},
		"changes of files in /etc, the workspace": {files("Edit", permission.KindEdit, inside("a"), outside("/etc/b"))},
		"reads of files in /":                     {files("LS", permission.KindRead, outside("/etc"))},
		"requests to example.com":                 {{Tool: "WebFetch", Kind: permission.KindNetwork, Hosts: []string{"Example.com", "example.com"}}},
		"requests to a.com, b.com":                {{Tool: "WebFetch", Kind: permission.KindNetwork, Hosts: []string{"b.com", "a.com"}}},
		"calls of WebSearch":                      {{Tool: "WebSearch", Kind: permission.KindNetwork}},
		"calls of mcp__s__t":                      {{Tool: "mcp__s__t", Kind: permission.KindMCPTool}},
		"calls of X":                              {{Tool: "X", Kind: permission.KindUnknown}},
		"sub-agents":                              {{Tool: "Task", Kind: permission.KindAgent}},
		"": {
			{Tool: "AskUserQuestion", Kind: permission.KindQuestion}, files("Edit", permission.KindEdit), files("Edit", permission.KindEdit, outside("~/x")), files("Edit", permission.KindEdit, outside("/a,b/c")), files("Edit", permission.KindEdit, outside("/a\x1b/c")),
			{Tool: "WebFetch", Kind: permission.KindNetwork, Hosts: []string{"a.com, b.com"}}, {Tool: "X\u202e", Kind: permission.KindMCPTool}, {Tool: strings.Repeat("x", 600), Kind: permission.KindMCPTool},
		},
	} {
		for _, c := range list {
			if got := (&permission.Policy{}).Class(c); got != want {
				t.Errorf("%+v: %q, want %q", c, got, want)
			}
		}
	}
}

func TestExplain_NamesRuleAndClass(t *testing.T) {
	t.Parallel()
	p := policy(t, events.Permissions{Rules: []events.PermissionRule{{Tool: "Bash", Command: []string{"git push"}, Then: "ask"}}, Unattended: "skip", TimeoutMs: 5})
	got, err := p.Explain(bash("git push origin"))
	want := permission.Explanation{
		Action: "ask", Rule: "rules[0]", Text: `{"tool":"Bash","command":["git push"],"then":"ask"}`, Layer: "agent", Class: "commands that begin with `git push`", Unattended: "skip",
	}
	if err != nil || got != want {
		t.Errorf("%+v (%v)", got, err)
	}
	got, err = p.Explain(files("Edit", permission.KindEdit, outside("/x")))
	if err != nil || got.Action != "deny" || got.Layer != "preset" || got.Class != "" || got.Unattended != "" || !strings.Contains(got.Reason, "/x is outside") {
		t.Errorf("%+v (%v)", got, err)
	}
	if p.TimeoutMs() != 5 || !p.ReportsDeniedAsSkipped() || p.IsUnattended() {
		t.Error("the policy lost its settings")
	}
}

func BenchmarkDecide(b *testing.B) {
	var rules []events.PermissionRule
	for i := range 50 {
		rules = append(rules, events.PermissionRule{Tool: fmt.Sprint("mcp__s", i, "__*"), Then: "ask"}, events.PermissionRule{Path: []string{fmt.Sprint("dir", i, "/**/*.go")}, Then: "deny"})
	}
	rules = append(rules, events.PermissionRule{Command: []string{"rm", "git push"}, Then: "deny"}, events.PermissionRule{Command: []string{"go test", "git status"}, Then: "allow"})
	for name, c := range map[string]struct {
		policy *permission.Policy
		call   permission.Call
	}{
		"no permissions":          {&permission.Policy{}, files("Edit", permission.KindEdit, inside("a/b.go"))},
		"102 rules, file":         {policy(b, events.Permissions{Rules: rules}), files("Edit", permission.KindEdit, inside("a/b.go"))},
		"102 rules, MCP server":   {policy(b, events.Permissions{Rules: rules}), permission.Call{Tool: "mcp__other__t", Kind: permission.KindMCPTool}},
		"102 rules, command":      {policy(b, events.Permissions{Rules: rules}), bash("cd /workspace && go test ./... 2>&1 | tail -20")},
		"no permissions, command": {&permission.Policy{}, bash("cd /workspace && go test ./... 2>&1 | tail -20")},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.policy.Decide(c.call)
			}
		})
	}
}
