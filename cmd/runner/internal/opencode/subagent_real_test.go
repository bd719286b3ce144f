package opencode_test

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

// A sub-agent has the servers that it names, beside its tools, and cannot call another's; it may read skills.
func realSubagents(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "0a1b")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	words, note := filepath.Join(dir, "words.txt"), filepath.Join(t.TempDir(), "note.txt")
	if err := os.WriteFile(words, []byte("WORDS-OF-THE-SKILL"), 0o600); err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "secret.txt")
	if err := os.WriteFile(secret, []byte("OUTSIDE-OF-ALL"), 0o600); err != nil {
		t.Fatal(err)
	}
	specs := []events.SubagentSpec{
		{Name: "all"}, {Name: "one", MCPServers: []string{"desk"}}, {Name: "longer", MCPServers: []string{"web_2"}}, {Name: "shorter", MCPServers: []string{"web"}},
		{Name: "beside", Tools: []string{"read"}, MCPServers: []string{"desk"}},
		{Name: "tool", Tools: []string{"read", "desk_echo", "web_note"}, MCPServers: []string{"desk"}},
		{Name: "alone", Tools: []string{"read"}},
	}
	want := map[string]string{
		"all": "desk_* web_* web_2_* bash read", "one": "desk_* bash read", "longer": "web_2_* bash read", "shorter": "web_* bash read", "beside": "desk_* read", "tool": "desk_echo read", "alone": "read",
	}
	rules := []string{
		call("SUBTASK", "web_note", map[string]any{"path": note, "text": "x"}),
		call("READ-IT", "read", map[string]any{"filePath": words}),
		call("SPOIL-IT", "write", map[string]any{"filePath": words, "content": "no"}),
		call("PEEK", "read", map[string]any{"filePath": secret}),
	}
	task := func(query, to, prompt string) {
		rules = append(rules, call(query, "task", map[string]any{"description": "Review", "prompt": prompt + " it", "subagent_type": to}))
	}
	for i := range specs {
		specs[i].Description, specs[i].Instructions = "REVIEWS-THINGS", "YOU-ARE-THE-"+strings.ToUpper(specs[i].Name)
		task("delegate to "+specs[i].Name, specs[i].Name, "SUBTASK")
	}
	task("have it read", "beside", "READ-IT")
	task("have it spoilt", "one", "SPOIL-IT")
	task("have it peek", "one", "PEEK")
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, rules...))
	with := func(q *runner.Query) {
		q.Subagents = specs
		q.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "web_2", nil), mcptest.StdioServer(t, "desk", nil), mcptest.StdioServer(t, "web", nil)}
		q.Skills = []runner.Skill{{Name: "words", Description: "HAS-WORDS", Dir: dir, Unlisted: true}}
	}
	for _, s := range specs {
		if err := os.Remove(note); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		b.RunTurn("delegate to "+s.Name, with)
		got := requests(t, b, s.Instructions)[0].tools
		for _, tool := range []string{"desk_note", "desk_echo", "web_note", "web_2_note", "bash", "read"} {
			server, _, ofServer := strings.Cut(tool, "_note")
			has := slices.ContainsFunc(strings.Fields(want[s.Name]), func(w string) bool {
				return w == tool || ofServer && w == server+"_*" || tool == "desk_echo" && w == "desk_*"
			})
			if slices.Contains(got, tool) != has {
				t.Errorf("%s: offered %s: %v, want %v; of %v", s.Name, tool, !has, has, got)
			}
		}
		if _, err := os.Stat(note); (err == nil) != slices.Contains(strings.Fields(want[s.Name]), "web_*") {
			t.Errorf("%s: whether the server web was called: %v", s.Name, err)
		}
	}
	b.RunTurnOK("have it read", "WORDS-OF-THE-SKILL", with)
	b.RunTurn("have it spoilt", with)
	if raw, err := os.ReadFile(words); err != nil || string(raw) != "WORDS-OF-THE-SKILL" {
		t.Errorf("the skill: %q, %v", raw, err)
	}
	if x := b.RunTurn("have it peek", with); strings.Contains(x.String(), "OUTSIDE-OF-ALL") {
		t.Error("a sub-agent read outside of the workspace")
	}
}
