package definition_test

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
)

// agentWith returns a valid agent after applying change.
func agentWith(change func(*events.AgentSpec)) events.AgentSpec {
	s := events.AgentSpec{Architecture: "spool", Instructions: "Say hello to all."}
	change(&s)
	return s
}

// describe returns one line for each error. It leaves out errors about fields that the architecture does not honour.
func describe(list []definition.FieldError) string {
	var out []string
	for _, e := range list {
		if !strings.HasSuffix(e.Detail, "does not support this field") {
			out = append(out, e.Error())
		}
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

func server(change func(*events.MCPServer)) func(*events.AgentSpec) {
	return func(s *events.AgentSpec) {
		m := events.MCPServer{Name: "m", Type: events.MCPTypeHTTP, URL: "https://example.com/mcp"}
		change(&m)
		s.MCPServers = append(s.MCPServers, m)
	}
}

func stdio(change func(*events.MCPServer)) func(*events.AgentSpec) {
	return server(func(m *events.MCPServer) {
		*m = events.MCPServer{Name: "m", Type: events.MCPTypeStdio, Command: []string{"serve", "--token=${TOKEN}"}}
		change(m)
	})
}

func docker(change func(*events.MCPServer)) func(*events.AgentSpec) {
	return server(func(m *events.MCPServer) {
		*m = events.MCPServer{Name: "m", Type: events.MCPTypeDocker, Image: "registry.example.com/tools:2"}
		change(m)
	})
}

func TestCheckAgent_NamesInvalidFields(t *testing.T) {
	t.Parallel()
	mib := strings.Repeat("x", 1<<20)
	for name, c := range map[string]struct {
		change func(*events.AgentSpec)
		want   string // prefix of each line of the error; "" if the agent is valid
	}{
		"good":                  {func(*events.AgentSpec) {}, ""},
		"ten characters":        {func(s *events.AgentSpec) { s.Instructions = "éééééééééé" }, ""},
		"nine characters":       {func(s *events.AgentSpec) { s.Instructions = "ééééééééé" }, "instructions: has 9 characters"},
		"spaces":                {func(s *events.AgentSpec) { s.Instructions = strings.Repeat(" ", 20) }, "instructions: has 0 characters"},
		"largest instructions":  {func(s *events.AgentSpec) { s.Instructions = mib }, ""},
		"larger instructions":   {func(s *events.AgentSpec) { s.Instructions = mib + "x" }, "instructions: has 1048577 bytes"},
		"larger memory":         {func(s *events.AgentSpec) { s.MemoryFile = mib + "x" }, "memoryFile: has 1048577 bytes"},
		"larger description":    {func(s *events.AgentSpec) { s.Description = mib }, "description: has"},
		"NUL":                   {func(s *events.AgentSpec) { s.Description = "a\x00" }, "description: has a NUL byte"},
		"no UTF-8":              {func(s *events.AgentSpec) { s.Environment = map[string]events.Declaration{"A": {Value: "\xff"}} }, "environment.A.value: is not valid UTF-8"},
		"name of two lines":     {func(s *events.AgentSpec) { s.Name = "a\nb" }, "name: must be one line"},
		"long model":            {func(s *events.AgentSpec) { s.Model = strings.Repeat("m", 201) }, "model: must be one line"},
		"no architecture":       {func(s *events.AgentSpec) { s.Architecture = "" }, "architecture: is required"},
		"model provider":        {func(s *events.AgentSpec) { s.ModelProvider = "gpt" }, `modelProvider: unknown model provider "gpt"`},
		"another's provider":    {func(s *events.AgentSpec) { s.ModelProvider = "anthropic" }, `modelProvider: architecture spool cannot use model provider "anthropic"; it can use openai, nvidia`},
		"unknown architecture":  {func(s *events.AgentSpec) { s.Architecture = "Codex" }, `architecture: unknown architecture "Codex"`},
		"alias":                 {func(s *events.AgentSpec) { s.Architecture = "claude-sdk" }, ""},
		"acp":                   {func(s *events.AgentSpec) { s.Architecture, s.Command = "acp", []string{"a"} }, ""},
		"acp without a command": {func(s *events.AgentSpec) { s.Architecture = "acp" }, "command: architecture acp runs the agent that you name"},
		"empty program":         {func(s *events.AgentSpec) { s.Architecture, s.Command = "acp", []string{" ", "a"} }, "command[0]: is empty; the first part"},
		"long argument":         {func(s *events.AgentSpec) { s.Architecture, s.Command = "acp", []string{"a", mib} }, "command[1]: has"},
		"image":                 {func(s *events.AgentSpec) { s.Image = "Nope:" }, `image: "Nope:" is not a reference of an image`},
		"tools":                 {func(s *events.AgentSpec) { s.Tools.Allow = []string{"Read", "", "Read"} }, "tools.allow[1]: is required\ntools.allow[2]: \"Read\" is already in tools.allow[0]"},
		"skills": {func(s *events.AgentSpec) {
			s.Skills = []events.Reference{{Slug: "a"}, {Slug: "B"}, {Slug: "a", Version: "v"}, {Scope: "x", Slug: "a"}}
		}, "skills[1].slug: \nskills[2]: \"a\" is already in skills[0]\nskills[3].scope: "},
		"skills in two ways": {func(s *events.AgentSpec) {
			s.Skills = []events.Reference{{Slug: "a"}, {Scope: events.ScopeOrganization, Slug: "a"}}
		}, `skills[1]: "a" is already in skills[0]`},
		"subagents": {func(s *events.AgentSpec) {
			s.Subagents = []events.SubagentSpec{{Name: "a", Description: "d", Instructions: "i"}, {Name: "a_b"}, {Name: "a", Description: "d", Instructions: "i"}}
		}, "subagents[1].description: \nsubagents[1].instructions: \nsubagents[1].name: \"a_b\" is not a name\nsubagents[2].name: \"a\" is already in subagents[0]"},
		"servers and skills of subagents": {func(s *events.AgentSpec) {
			server(func(*events.MCPServer) {})(s)
			s.Subagents = []events.SubagentSpec{{
				Name: "a", Description: "d", Instructions: "i", MCPServers: []string{"m", "n", "m", ""}, Skills: []events.Reference{{Slug: "a"}, {Slug: "B"}, {Slug: "a"}},
			}}
		}, "subagents[0].mcpServers[1]: \"n\" is not an MCP server of the agent\nsubagents[0].mcpServers[2]: \nsubagents[0].mcpServers[3]: \nsubagents[0].skills[1].slug: \nsubagents[0].skills[2]: "},
		"servers that look alike": {func(s *events.AgentSpec) {
			for _, name := range []string{"m_", "n__b", "n", "n_c"} {
				server(func(m *events.MCPServer) { m.Name = name })(s)
			}
			s.Subagents = []events.SubagentSpec{{Name: "a", Description: "d", Instructions: "i", MCPServers: []string{"n"}}}
		}, "mcpServers[1].name: \"n__b\" could be a tool of mcpServers[2]"},
		"commands": {func(s *events.AgentSpec) {
			s.Commands = []events.CommandSpec{{Name: "-a", Prompt: "p"}, {Name: "b"}, {Name: strings.Repeat("c", 65), Prompt: "p"}}
		}, "commands[0].name: \ncommands[1].prompt: \ncommands[2].name: "},
		"variables": {func(s *events.AgentSpec) {
			s.Environment = map[string]events.Declaration{"OK": {Value: "v", Required: true}, "HOME": {}, "a-b": {}, "": {}, "LONG": {Value: mib}}
		}, "environment.HOME: \nenvironment.LONG.value: \nenvironment.a-b: \nenvironment[\"\"]: "},
		"secrets": {func(s *events.AgentSpec) {
			s.Environment = map[string]events.Declaration{"A": {Secret: true, Required: true}, "B": {Secret: true, Value: "x"}}
		}, "environment.B.value: must not be set: agents hold no secrets"},
		"files": {func(s *events.AgentSpec) {
			s.Files = []events.FileSpec{{Path: "a/b"}, {Path: "../x"}, {Path: "a/b"}, {Path: "a/b/c/d"}, {Path: "a", Mode: 0o1777}, {Path: ""}}
		}, "files[0].path: folder a is also a file: files[4]\nfiles[1].path: must not have a part ..\nfiles[2].path: \"a/b\" is already in files[0]\nfiles[2].path: folder a is also a file\nfiles[3].path: folder a/b is also a file: files[0]\nfiles[4].mode: 01777 is not permission bits\nfiles[5].path: is empty"},
		"contents": {func(s *events.AgentSpec) {
			s.Files = []events.FileSpec{{Path: "a", ContentBase64: "eA=="}, {Path: "b", ContentBase64: "eA"}, {Path: "c", Content: "x", ContentBase64: "eA=="}, {Path: "d", ContentBase64: "eB=="}}
		}, "files[1].contentBase64: is not base64\nfiles[2].contentBase64: must not be set together with content\nfiles[3].contentBase64: is not base64"},
		"largest files": {func(s *events.AgentSpec) {
			s.Files = []events.FileSpec{{Path: "a", Content: strings.Repeat("x", 4<<20)}, {Path: "b", ContentBase64: base64.StdEncoding.EncodeToString(make([]byte, 4<<20))}}
		}, ""},
		"larger files": {func(s *events.AgentSpec) {
			s.Files = []events.FileSpec{{Path: "a", Content: strings.Repeat("x", 4<<20)}, {Path: "b", ContentBase64: base64.StdEncoding.EncodeToString(make([]byte, 4<<20+1))}}
		}, "files: has 8388609 bytes together"},
		"egress": {func(s *events.AgentSpec) {
			s.Egress = []string{"GET a.com", "http://b", "*.com", "127.0.0.1", "", "GET,get b"}
		}, "egress[1]: must be a host, not a URL\negress[2]: must not be every host\negress[3]: is never reachable\negress[4]: is empty\negress[5]: the text before the space must be methods: \"get\""},
		"too much egress":                    {func(s *events.AgentSpec) { s.Egress = slices.Repeat([]string{"a.com"}, command.MaxEgressEntries+1) }, "egress: has 257 entries"},
		"budget":                             {func(s *events.AgentSpec) { s.Limits.BudgetUSD = -1 }, "limits.budgetUsd: "},
		"infinite budget":                    {func(s *events.AgentSpec) { s.Limits.BudgetUSD = math.Inf(1) }, "limits.budgetUsd: "},
		"no budget":                          {func(s *events.AgentSpec) { s.Limits.BudgetUSD = math.NaN() }, "limits.budgetUsd: "},
		"retries":                            {func(s *events.AgentSpec) { s.Retries = events.Retries{Attempts: 20, BackoffMs: 300_000} }, ""},
		"many retries":                       {func(s *events.AgentSpec) { s.Retries = events.Retries{Attempts: 21, BackoffMs: 300_001} }, "retries.attempts: is 21\nretries.backoffMs: is 300001"},
		"useless backoff":                    {func(s *events.AgentSpec) { s.Retries = events.Retries{Attempts: 1, BackoffMs: 1} }, "retries.backoffMs: must not be set if"},
		"loops":                              {func(s *events.AgentSpec) { s.Loops = events.Loops{Action: "stop", Warn: 2, Stop: 100, Window: 100} }, ""},
		"loops that only warn":               {func(s *events.AgentSpec) { s.Loops = events.Loops{Action: "warn", Warn: 20} }, ""},
		"loops that are not looked for":      {func(s *events.AgentSpec) { s.Loops = events.Loops{Action: "none"} }, ""},
		"loops that stop before the warning": {func(s *events.AgentSpec) { s.Loops = events.Loops{Stop: 2} }, ""},
		"unknown action after a loss":        {func(s *events.AgentSpec) { s.Conversation.OnLoss = "ask" }, `conversation.onLoss: "ask" is unknown; must be fail or continue`},
		"unknown action for loops":           {func(s *events.AgentSpec) { s.Loops = events.Loops{Action: "off"} }, `loops.action: "off" is not an action; must be stop, warn or none`},
		"loops that warn and have a stop":    {func(s *events.AgentSpec) { s.Loops = events.Loops{Action: "warn", Stop: 4} }, "loops.stop: must not be set if loops.action is warn"},
		"no loops and a window":              {func(s *events.AgentSpec) { s.Loops = events.Loops{Action: "none", Window: 4} }, "loops.action: none must be the only field of loops"},
		"loops of one call":                  {func(s *events.AgentSpec) { s.Loops = events.Loops{Warn: 1, Stop: 1} }, "loops.stop: is 1; must be 2 or more\nloops.warn: is 1; must be 2 or more"},
		"loops that warn after the stop":     {func(s *events.AgentSpec) { s.Loops = events.Loops{Warn: 5, Stop: 4} }, "loops.warn: is 5; must not be more than loops.stop, which is 4"},
		"loops longer than the window":       {func(s *events.AgentSpec) { s.Loops = events.Loops{Stop: 6, Window: 5} }, "loops.window: is 5; must not be less than loops.warn and loops.stop, of which the greater is 6"},
		"loops with a long window":           {func(s *events.AgentSpec) { s.Loops = events.Loops{Window: 101} }, "loops.window: is 101; the limit is 100"},
		"permissions": {func(s *events.AgentSpec) {
			s.Permissions = events.Permissions{Preset: "ask", Rules: []events.PermissionRule{{Command: []string{"rm"}, Then: "deny"}}, Tools: map[string]string{"Read": "allow"}}
		}, ""},
		"permissions that are not valid": {func(s *events.AgentSpec) {
			s.Permissions = events.Permissions{Preset: "yolo", Rules: []events.PermissionRule{{Command: []string{""}}}, Tools: map[string]string{"A": "no", "B C": "no"}}
		}, "permissions.preset: \"yolo\" is not known; the preset must be workspace, read-only, ask or full\npermissions.rules[0].command[0]: is empty\npermissions.rules[0].then: is required; must be allow, ask or deny\npermissions.tools.A: \"no\" is not known\npermissions.tools[\"B C\"]: "},
		"deep sub-agents": {func(s *events.AgentSpec) { s.Architecture = "codex"; s.Limits.SubagentDepth = 101 }, "limits.subagentDepth: is 101; the limit is 100"},
		"dependencies": {func(s *events.AgentSpec) {
			s.Dependencies = events.Dependencies{NPM: []string{"@a/b@1.0.0", "left-pad@^1.3.0", "@a/b@2.0.0"}, PIP: []string{"httpx[http2]==0.27.0", "--index-url==1"}}
		}, "dependencies.npm[1]: \"left-pad@^1.3.0\": must be an npm package with an exact version\ndependencies.npm[2]: \"@a/b\" is already in npm[0]\ndependencies.pip[1]: \"--index-url==1\": must be a Python package"},
		"too many dependencies": {func(s *events.AgentSpec) { s.Dependencies.PIP = slices.Repeat([]string{"a==1"}, 101) }, "dependencies.pip: has 101 entries; the limit is 100"},
		"too many": {func(s *events.AgentSpec) {
			for i := range definition.MaxListEntries + 1 {
				s.Commands = append(s.Commands, events.CommandSpec{Name: fmt.Sprint("c", i), Prompt: "p"})
			}
		}, "commands: has 1001 entries"},
		"server": {server(func(m *events.MCPServer) {
			m.Headers = map[string]string{"Authorization": "Bearer ${TOKEN}"}
			m.TimeoutMs = 300_000
		}), ""},
		"server's name":           {server(func(m *events.MCPServer) { m.Name = "a_b-c" }), ""},
		"server's wrong name":     {server(func(m *events.MCPServer) { m.Name = "_a" }), "mcpServers[0].name: "},
		"server's type":           {server(func(m *events.MCPServer) { m.Type = "podman" }), `mcpServers[0].type: "podman" is not a type; must be stdio, http or docker`},
		"server's timeout":        {server(func(m *events.MCPServer) { m.TimeoutMs = 300_001 }), "mcpServers[0].timeoutMs: "},
		"server's tools":          {server(func(m *events.MCPServer) { m.Tools = []string{"a", "a"} }), `mcpServers[0].tools[1]: "a" is already in mcpServers[0].tools[0]`},
		"no address":              {server(func(m *events.MCPServer) { m.URL = "" }), "mcpServers[0].url: is required"},
		"relative address":        {server(func(m *events.MCPServer) { m.URL = "/mcp" }), "mcpServers[0].url: must be an absolute URL"},
		"address without a host":  {server(func(m *events.MCPServer) { m.URL = "https:///mcp" }), "mcpServers[0].url: must be an absolute URL"},
		"another protocol":        {server(func(m *events.MCPServer) { m.URL = "ftp://a/b" }), "mcpServers[0].url: must be an absolute URL"},
		"address with a user":     {server(func(m *events.MCPServer) { m.URL = "https://u:p@a/b" }), "mcpServers[0].url: must not have a user name"},
		"address with a fragment": {server(func(m *events.MCPServer) { m.URL = "https://a/b#" }), "mcpServers[0].url: must not have a fragment"},
		"address with variables":  {server(func(m *events.MCPServer) { m.URL = "https://${HOST_NAME}:${PORT}/${PATH_}" }), ""},
		"address in a variable":   {server(func(m *events.MCPServer) { m.URL = "${MCP_URL}" }), ""},
		"open placeholder":        {server(func(m *events.MCPServer) { m.URL = "https://a/${X" }), "mcpServers[0].url: a ${ is not closed"},
		"reserved placeholder":    {server(func(m *events.MCPServer) { m.Headers = map[string]string{"X": "${HOME}"} }), "mcpServers[0].headers.X: variable HOME is set by Spool"},
		"headers": {server(func(m *events.MCPServer) {
			m.Headers = map[string]string{"a b": "", "HOST": "x", "X-A": "1\r\nB: 2", "x-a": "", "T'": "ok\t"}
		}), "mcpServers[0].headers.HOST: \nmcpServers[0].headers.X-A: \nmcpServers[0].headers.x-a: is already set as X-A\nmcpServers[0].headers[\"a b\"]: "},
		"http with a program":     {server(func(m *events.MCPServer) { m.Command, m.Env = []string{"a"}, map[string]string{"A": "1"} }), "mcpServers[0].command: \nmcpServers[0].env: "},
		"stdio":                   {stdio(func(m *events.MCPServer) { m.Env = map[string]string{"A": "$$${B}"} }), ""},
		"stdio without a program": {stdio(func(m *events.MCPServer) { m.Command = nil }), "mcpServers[0].command: is required"},
		"stdio with an address":   {stdio(func(m *events.MCPServer) { m.URL, m.Headers = "https://a", map[string]string{"A": "b"} }), "mcpServers[0].headers: \nmcpServers[0].url: "},
		"stdio's variables":       {stdio(func(m *events.MCPServer) { m.Env = map[string]string{"PATH": "x", "A": "${B C}"} }), "mcpServers[0].env.A: \nmcpServers[0].env.PATH: "},
		"stdio's arguments":       {stdio(func(m *events.MCPServer) { m.Command = []string{"a", "${", "\x00"} }), "mcpServers[0].command[1]: a ${\nmcpServers[0].command[2]: has a NUL byte\nmcpServers[0].command[2]: has a NUL byte"},
		"stdio's empty program":   {stdio(func(m *events.MCPServer) { m.Command = []string{""} }), "mcpServers[0].command[0]: "},
		"docker": {docker(func(m *events.MCPServer) {
			m.Command, m.Env, m.TimeoutMs, m.Tools = []string{"--root", "${ROOT}"}, map[string]string{"A": "${B}"}, 1000, []string{"a"}
		}), ""},
		"docker without an image":    {docker(func(m *events.MCPServer) { m.Image = "" }), "mcpServers[0].image: is required"},
		"docker's wrong image":       {docker(func(m *events.MCPServer) { m.Image = "--privileged" }), `mcpServers[0].image: "--privileged" is not a reference of an image`},
		"docker's variable image":    {docker(func(m *events.MCPServer) { m.Image = "a:${TAG}" }), "mcpServers[0].image: "},
		"docker with an address":     {docker(func(m *events.MCPServer) { m.URL, m.Headers = "https://a", map[string]string{"A": "b"} }), "mcpServers[0].headers: must not be set for a server of type docker\nmcpServers[0].url: "},
		"docker's variables":         {docker(func(m *events.MCPServer) { m.Env = map[string]string{"PATH": "x", "A": "${B C}"} }), "mcpServers[0].env.A: \nmcpServers[0].env.PATH: "},
		"docker's arguments":         {docker(func(m *events.MCPServer) { m.Command = []string{"", "${"} }), "mcpServers[0].command[1]: a ${"},
		"docker's long argument":     {docker(func(m *events.MCPServer) { m.Command = []string{strings.Repeat("x", 4097)} }), "mcpServers[0].command[0]: has 4097 bytes"},
		"an image that is no docker": {stdio(func(m *events.MCPServer) { m.Image = "a" }), "mcpServers[0].image: must not be set: only servers of type docker have an image"},
		"too many containers": {func(s *events.AgentSpec) {
			for i := range 9 {
				docker(func(m *events.MCPServer) { m.Name = fmt.Sprintf("m%d", i) })(s)
			}
		}, "mcpServers[8].type: more than 8 servers have type docker"},
		"servers of one name": {func(s *events.AgentSpec) { server(func(*events.MCPServer) {})(s); stdio(func(*events.MCPServer) {})(s) }, `mcpServers[1].name: "m" is already in mcpServers[0]`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, want := describe(definition.CheckAgent(agentWith(c.change))), strings.Split(c.want, "\n")
			lines := strings.Split(got, "\n")
			ok := len(lines) == len(want) && (c.want != "") == (got != "")
			for i := range lines {
				ok = ok && strings.HasPrefix(lines[i], want[i])
			}
			if !ok {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

func TestCheckInstance_NamesInvalidFields(t *testing.T) {
	t.Parallel()
	if got := definition.CheckInstance(events.InstanceSpec{Agent: events.Reference{Slug: "a"}, Environments: []events.Reference{{Slug: "a"}, {Org: "o", Slug: "a"}}}); got != nil {
		t.Error(got)
	}
	got := describe(definition.CheckInstance(events.InstanceSpec{Description: "\x00", Environments: []events.Reference{{Slug: "a"}, {Slug: "a", Version: "v"}, {Slug: "A"}}}))
	want := `agent.slug: "" is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens
description: has a NUL byte
environments[1]: "a" is already in environments[0]
environments[2].slug: "A" is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens`
	if got != want {
		t.Errorf("got\n%s", got)
	}
	many := definition.CheckInstance(events.InstanceSpec{Agent: events.Reference{Slug: "a"}, Environments: make([]events.Reference, definition.MaxEnvironments+1)})
	if !strings.Contains(describe(many), "environments: has 33 entries") {
		t.Errorf("got %v", many)
	}
}

// TestCheckEnvironment_KeepsSecretsOutOfStoredSpecs tests that a draft may hold the values of secrets, and that a
// stored environment may not.
func TestCheckEnvironment_KeepsSecretsOutOfStoredSpecs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spec          events.EnvironmentSpec
		draft, stored string
	}{
		"none":    {events.EnvironmentSpec{}, "variables: is required", "variables: is required"},
		"empty":   {events.EnvironmentSpec{Variables: map[string]events.Variable{}}, "", ""},
		"plain":   {events.EnvironmentSpec{Variables: map[string]events.Variable{"A": {Value: "v"}}}, "", ""},
		"value":   {events.EnvironmentSpec{Variables: map[string]events.Variable{"A": {Value: "v", Secret: true}}}, "", "variables.A.value: must not be set: the value of a secret is encrypted before it is stored"},
		"nothing": {events.EnvironmentSpec{Variables: map[string]events.Variable{"A": {Secret: true}}}, "", "variables.A.sealed: is required: the key of the secret's encrypted value"},
		"sealed":  {events.EnvironmentSpec{Variables: map[string]events.Variable{"A": {Secret: true, Sealed: "k"}}}, "variables.A.sealed: must not be set by clients; set value", ""},
		"no secret": {events.EnvironmentSpec{Variables: map[string]events.Variable{"A": {Sealed: "k"}}}, "variables.A.sealed: must not be set by clients; set value\nvariables.A.sealed: must not be set: only secrets have an encrypted value",
			"variables.A.sealed: must not be set: only secrets have an encrypted value"},
		"names":           {events.EnvironmentSpec{Variables: map[string]events.Variable{"PATH": {}}}, "variables.PATH: variable PATH is set by Spool itself", "variables.PATH: variable PATH is set by Spool itself"},
		"egress":          {events.EnvironmentSpec{Variables: map[string]events.Variable{}, Egress: []string{"GET a.com", "TRACE a.com"}}, "egress[1]: method TRACE is never allowed; " + egress.EntrySyntax, "egress[1]: method TRACE is never allowed; " + egress.EntrySyntax},
		"too much egress": {events.EnvironmentSpec{Variables: map[string]events.Variable{}, Egress: slices.Repeat([]string{"a.com"}, command.MaxEgressEntries+1)}, "egress: has 257 entries; the limit is 256", "egress: has 257 entries; the limit is 256"},
		"long": {events.EnvironmentSpec{Variables: map[string]events.Variable{"A": {Value: strings.Repeat("x", definition.MaxVariableSize+1)}}}, "variables.A.value: has 122881 bytes; the limit is 122880",
			"variables.A.value: has 122881 bytes; the limit is 122880"},
	} {
		if got := describe(definition.CheckRequestedEnvironment(c.spec)); got != c.draft {
			t.Errorf("%s, as it is sent: %s", name, got)
		}
		if got := describe(definition.CheckEnvironment(c.spec)); got != c.stored {
			t.Errorf("%s, as it is stored: %s", name, got)
		}
	}
}

func TestCheckEntry_NamesInvalidFields(t *testing.T) {
	t.Parallel()
	if got := definition.CheckEntryNames(events.Reference{Slug: "a"}, []string{"v1", "latest"}); got != nil {
		t.Error(got)
	}
	got := describe(definition.CheckEntryNames(events.Reference{Slug: "a", Version: "v1"}, []string{"v", "V", "v"}))
	if !strings.HasPrefix(got, `tags[1]: "V" is not a tag`) || !strings.Contains(got, "\ntags[2]: \"v\" is already in tags[0]\nversion: ") {
		t.Errorf("got\n%s", got)
	}
	if got := describe(definition.CheckEntryNames(events.Reference{Scope: events.ScopeAccount, Slug: "a"}, slices.Repeat([]string{"v"}, 65))); !strings.HasPrefix(got, "org: ") || !strings.Contains(got, "\ntags: has 65 entries; the limit is 64") {
		t.Errorf("got %.200s", got)
	}
}

func TestFill_ReadsValuesFromVariablesAndFiles(t *testing.T) {
	t.Parallel()
	env := func(name string) (string, bool) {
		v, ok := map[string]string{"TOKEN": "t0p\n", "EMPTY": "", "NUL": "h1dden\x00"}[name]
		return v, ok
	}
	files := func(path string) ([]byte, error) {
		b, ok := map[string]string{"key": "k\r\n", "lines": "a\n\n", "bad": "h1dden\xff", "empty": "\n", "large": strings.Repeat("x", definition.MaxVariableSize+1)}[path]
		if !ok {
			return nil, errors.New("there is no such file")
		}
		return []byte(b), nil
	}
	from := func(s definition.Source, secret bool) definition.EnvironmentSpec {
		return definition.EnvironmentSpec{Variables: map[string]definition.Variable{"A": {ValueFrom: s, Secret: secret}}}
	}
	for name, c := range map[string]struct {
		spec  definition.EnvironmentSpec
		value string
		wrong string
	}{
		"value":          {definition.EnvironmentSpec{Variables: map[string]definition.Variable{"A": {Value: "v"}}}, "v", ""},
		"env":            {from(definition.Source{Env: "TOKEN"}, true), "t0p\n", ""},
		"file":           {from(definition.Source{File: "key"}, true), "k", ""},
		"lines":          {from(definition.Source{File: "lines"}, false), "a\n", ""},
		"empty":          {from(definition.Source{Env: "EMPTY"}, false), "", ""},
		"empty secret":   {from(definition.Source{Env: "EMPTY"}, true), "", "spec.variables.A.valueFrom: is empty"},
		"empty file":     {from(definition.Source{File: "empty"}, true), "", "spec.variables.A.valueFrom: is empty"},
		"no variable":    {from(definition.Source{Env: "NOPE"}, true), "", "spec.variables.A.valueFrom: variable NOPE is not set here"},
		"no file":        {from(definition.Source{File: "nope"}, true), "", "spec.variables.A.valueFrom: there is no such file"},
		"NUL":            {from(definition.Source{Env: "NUL"}, true), "", "spec.variables.A.valueFrom: has a NUL byte"},
		"not UTF-8":      {from(definition.Source{File: "bad"}, true), "", "spec.variables.A.valueFrom: is not valid UTF-8"},
		"large":          {from(definition.Source{File: "large"}, true), "", "spec.variables.A.valueFrom: has 122881 bytes; the limit is 122880"},
		"kept by server": {from(definition.Source{}, true), "", ""},
	} {
		got, wrong := c.spec.ReadValues(env, files)
		if got.Variables["A"].Value != c.value && c.wrong == "" || describe(wrong) != c.wrong || strings.Contains(describe(wrong), "h1dden") {
			t.Errorf("%s: %+v, %s", name, got, describe(wrong))
		}
	}
}

// TestHonours_HasARowForEveryField tests that every field of an agent has a row, and that every row is about a field.
func TestHonours_HasARowForEveryField(t *testing.T) {
	t.Parallel()
	table := definition.SupportTable()
	known := map[string]bool{}
	var walk func(reflect.Type, string, bool)
	walk = func(typ reflect.Type, at string, must bool) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			path := strings.TrimPrefix(at+"."+name, ".")
			known[path] = true
			_, there := table[path]
			switch {
			case f.Type.Kind() == reflect.Struct && f.Type != reflect.TypeFor[events.Reference]():
				walk(f.Type, path, must && !there)
			case must && !there:
				t.Errorf("%s has no row", path)
			case f.Type.Kind() == reflect.Slice && f.Type.Elem().Kind() == reflect.Struct:
				walk(f.Type.Elem(), path, false)
			}
		}
	}
	walk(reflect.TypeFor[events.AgentSpec](), "", true)
	for field, cells := range table {
		if !known[field] {
			t.Errorf("the row %s names no field", field)
		}
		for a, how := range cells {
			if !slices.Contains(architecture.Names(), a) || strings.ContainsAny(how, "|\n") {
				t.Errorf("%s: cell %s %q", field, a, how)
			}
		}
	}
}

// TestHonours_AgreesWithCheckAgent tests that CheckAgent refuses a field exactly for the architectures whose cell in
// the table is empty.
func TestHonours_AgreesWithCheckAgent(t *testing.T) {
	t.Parallel()
	sets := map[string]func(*events.AgentSpec){
		"name":          func(s *events.AgentSpec) { s.Name = "n" },
		"description":   func(s *events.AgentSpec) { s.Description = "d" },
		"architecture":  func(*events.AgentSpec) {},
		"model":         func(s *events.AgentSpec) { s.Model = "m" },
		"modelProvider": func(s *events.AgentSpec) { s.ModelProvider = "openai" },
		"instructions":  func(*events.AgentSpec) {},
		"memoryFile":    func(s *events.AgentSpec) { s.MemoryFile = "m" },
		"tools.allow":   func(s *events.AgentSpec) { s.Tools.Allow = []string{"Read"} },
		"tools.deny":    func(s *events.AgentSpec) { s.Tools.Deny = []string{"Read"} },
		"skills":        func(s *events.AgentSpec) { s.Skills = []events.Reference{{Slug: "a"}} },
		"subagents": func(s *events.AgentSpec) {
			s.Subagents = []events.SubagentSpec{{Name: "a", Description: "d", Instructions: "i"}}
		},
		"commands":   func(s *events.AgentSpec) { s.Commands = []events.CommandSpec{{Name: "a", Prompt: "p"}} },
		"mcpServers": server(func(*events.MCPServer) {}),
		"subagents.tools": func(s *events.AgentSpec) {
			s.Subagents = []events.SubagentSpec{{Name: "a", Description: "d", Instructions: "i", Tools: []string{"Read"}}}
		},
		"subagents.mcpServers": func(s *events.AgentSpec) {
			s.Subagents = []events.SubagentSpec{{Name: "a", Description: "d", Instructions: "i", MCPServers: []string{"m"}}}
			if a, _ := architecture.Canonical(s.Architecture); definition.SupportTable()["mcpServers"][a] != "" {
				server(func(*events.MCPServer) {})(s)
			}
		},
		"subagents.skills": func(s *events.AgentSpec) {
			s.Subagents = []events.SubagentSpec{{Name: "a", Description: "d", Instructions: "i", Skills: []events.Reference{{Slug: "a"}}}}
		},
		"mcpServers.image":     docker(func(*events.MCPServer) {}),
		"mcpServers.timeoutMs": server(func(m *events.MCPServer) { m.TimeoutMs = 1000 }),
		"mcpServers.tools":     server(func(m *events.MCPServer) { m.Tools = []string{"a"} }),
		"environment":          func(s *events.AgentSpec) { s.Environment = map[string]events.Declaration{"A": {}} },
		"files":                func(s *events.AgentSpec) { s.Files = []events.FileSpec{{Path: "a"}} },
		"command":              func(s *events.AgentSpec) { s.Command = []string{"a"} },
		"modelSettings":        func(s *events.AgentSpec) { s.ModelSettings.Preset = "qwen" },
		"image":                func(s *events.AgentSpec) { s.Image = "i" },
		"egress":               func(s *events.AgentSpec) { s.Egress = []string{"a.com"} },
		"retries.attempts":     func(s *events.AgentSpec) { s.Retries.Attempts = 2 },
		"retries.backoffMs":    func(s *events.AgentSpec) { s.Retries.BackoffMs = 1 },
		"loops":                func(s *events.AgentSpec) { s.Loops.Warn = 2 },
		"conversation.onLoss":  func(s *events.AgentSpec) { s.Conversation.OnLoss = "continue" },
		"permissions":          func(s *events.AgentSpec) { s.Permissions.Preset = "ask" },
		"limits.subagentDepth": func(s *events.AgentSpec) { s.Limits.SubagentDepth = 1 },
		"limits.turns":         func(s *events.AgentSpec) { s.Limits.Turns = 1 },
		"limits.budgetUsd":     func(s *events.AgentSpec) { s.Limits.BudgetUSD = 1 },
		"limits.tokens":        func(s *events.AgentSpec) { s.Limits.Tokens = 1 },
		"dependencies.npm":     func(s *events.AgentSpec) { s.Dependencies.NPM = []string{"a@1.0.0"} },
		"dependencies.pip":     func(s *events.AgentSpec) { s.Dependencies.PIP = []string{"a==1"} },
		"limits.timeMs":        func(s *events.AgentSpec) { s.Limits.TimeMs = 1 },
		"limits.outputEvents":  func(s *events.AgentSpec) { s.Limits.OutputEvents = 1 },
		"limits.outputBytes":   func(s *events.AgentSpec) { s.Limits.OutputBytes = 1 },
		"limits.session":       func(s *events.AgentSpec) { s.Limits.Session.Turns = 1 },
	}
	for field, cells := range definition.SupportTable() {
		set, ok := sets[field]
		if !ok {
			t.Errorf("the test does not know how to set %s", field)
			continue
		}
		for _, a := range append(architecture.Names(), slices.Collect(maps.Keys(architecture.Aliases()))...) {
			s := agentWith(set)
			s.Architecture = a
			if a == definition.ACP {
				s.Command = []string{"agent"}
			}
			canonical, _ := architecture.Canonical(a)
			if s.ModelProvider != "" { // use a provider that the architecture supports
				s.ModelProvider = architecture.ModelProvidersOf(canonical)[0]
			}
			want := ""
			if cells[canonical] == "" {
				at := field
				if list, inner, ok := strings.Cut(field, "."); ok && definition.SupportTable()[list] != nil {
					if at = list + "[0]." + inner; definition.SupportTable()[list][canonical] == "" {
						at = list // CheckAgent refuses the list as a whole
					}
				}
				want = at + ": architecture " + canonical + " does not support this field"
			}
			got := definition.CheckAgent(s)
			if want == "" && len(got) > 0 || want != "" && (len(got) != 1 || got[0].Error() != want) {
				t.Errorf("%s with %s: %v, want %q", a, field, got, want)
			}
		}
	}
	// An empty field does not count as set.
	if got := definition.CheckAgent(agentWith(func(s *events.AgentSpec) {
		s.Tools.Allow, s.MCPServers, s.Environment = []string{}, []events.MCPServer{}, map[string]events.Declaration{}
	})); got != nil {
		t.Error(got)
	}
}
