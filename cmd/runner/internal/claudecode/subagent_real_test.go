package claudecode_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/mcptest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// servedBy returns the servers whose tools are among those that the model gets.
func servedBy(tools []string) (servers []string) {
	for _, t := range tools {
		if rest, ok := strings.CutPrefix(t, "mcp__"); ok {
			server := rest[:strings.LastIndex(rest, "__")]
			if !slices.Contains(servers, server) {
				servers = append(servers, server)
			}
		}
	}
	slices.Sort(servers)
	return servers
}

// A sub-agent has the servers that it names, beside its tools, and cannot call another's.
func realSubagentServers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "note.txt")
	for name, c := range map[string]struct {
		spec        events.SubagentSpec
		servers     []string
		there, gone []string // other tools
	}{
		"all":            {events.SubagentSpec{}, []string{"desk", "web", "web_2"}, []string{"Read", "Bash", "Agent"}, nil},
		"one":            {events.SubagentSpec{MCPServers: []string{"desk"}}, []string{"desk"}, []string{"Read", "Bash"}, []string{"Agent"}},
		"a longer name":  {events.SubagentSpec{MCPServers: []string{"web_2"}}, []string{"web_2"}, nil, nil},
		"a shorter name": {events.SubagentSpec{MCPServers: []string{"web"}}, []string{"web"}, nil, nil},
		"beside a tool":  {events.SubagentSpec{Tools: []string{"Read"}, MCPServers: []string{"desk", "web"}}, []string{"desk", "web"}, []string{"Read", "mcp__desk__note"}, []string{"Bash", "Agent"}},
		"one tool of it": {events.SubagentSpec{Tools: []string{"Read", "mcp__desk__echo", "mcp__web__note"}, MCPServers: []string{"desk"}}, []string{"desk"}, []string{"Read", "mcp__desk__echo"}, []string{"Bash", "mcp__desk__note"}},
		"tools alone":    {events.SubagentSpec{Tools: []string{"Read"}}, nil, []string{"Read"}, []string{"Bash"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			note := file + "." + strings.ReplaceAll(name, " ", "-")
			b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
				call("SUBTASK", "mcp__web__note", map[string]any{"path": note, "text": "x"}),
				call("delegate", "Agent", map[string]any{"description": "Review", "prompt": "SUBTASK review it", "subagent_type": "reviewer"})))
			b.RunTurn("delegate", func(q *runner.Query) {
				sub := c.spec
				sub.Name, sub.Description, sub.Instructions = "reviewer", "REVIEWS-THINGS", "YOU-ARE-THE-REVIEWER"
				q.Subagents = []events.SubagentSpec{sub}
				q.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "desk", nil), mcptest.StdioServer(t, "web", nil), mcptest.StdioServer(t, "web_2", nil)}
			})
			got := requests(t, b, "YOU-ARE-THE-REVIEWER")[0].tools
			if !slices.Equal(servedBy(got), c.servers) {
				t.Errorf("the sub-agent is offered the servers %v of %v", servedBy(got), got)
			}
			for _, want := range c.there {
				if !slices.Contains(got, want) {
					t.Errorf("the sub-agent is not offered %s: %v", want, got)
				}
			}
			for _, gone := range c.gone {
				if slices.Contains(got, gone) {
					t.Errorf("the sub-agent is offered %s", gone)
				}
			}
			if _, err := os.Stat(note); (err == nil) != slices.Contains(c.servers, "web") {
				t.Errorf("whether the server web was called: %v", err)
			}
			if own := requests(t, b, "REVIEWS-THINGS")[0].tools; len(servedBy(own)) != 3 {
				t.Errorf("the agent itself is offered %v", own)
			}
		})
	}
}

// A skill that is a sub-agent's alone may be read, and is not offered to the agent.
func realSubagentSkills(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "0a1b")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"SKILL.md": "---\nname: greet\ndescription: GREETS-PEOPLE\n---\nSKILL-BODY\n", "words.txt": "WORDS-OF-THE-SKILL",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	words := filepath.Join(dir, "words.txt")
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		call("SUBTASK", "Read", map[string]any{"file_path": words}),
		call("MISCHIEF", "Write", map[string]any{"file_path": words, "content": "no"}),
		call("delegate", "Agent", map[string]any{"description": "Review", "prompt": "SUBTASK review it", "subagent_type": "reviewer"}),
		call("spoil", "Agent", map[string]any{"description": "Review", "prompt": "MISCHIEF review it", "subagent_type": "reviewer"})))
	with := func(q *runner.Query) {
		q.Subagents = []events.SubagentSpec{{Name: "reviewer", Description: "REVIEWS-THINGS", Instructions: "YOU-ARE-THE-REVIEWER of " + dir}}
		q.Skills = []runner.Skill{{Name: "greet", Description: "GREETS-PEOPLE", Dir: dir, Unlisted: true}}
	}
	b.RunTurnOK("delegate", "WORDS-OF-THE-SKILL", with)
	b.RunTurn("spoil", with)
	if raw, err := os.ReadFile(words); err != nil || string(raw) != "WORDS-OF-THE-SKILL" {
		t.Errorf("the skill: %q, %v", raw, err)
	}
	for _, r := range requests(t, b, "delegate") {
		if strings.Contains(r.body, "GREETS-PEOPLE") {
			t.Error("the agent is offered its sub-agent's skill")
		}
	}
}
