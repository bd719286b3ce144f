package codex_test

import (
	"bytes"
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

func TestMain(m *testing.M) { mcptest.RunTestsOrServer(m) }

// plain is a model that the CLI does not know: it gets all tools at once and does not have to search for them.
const plain = "some-model"

// The model and the CLI get everything in an agent's definition.
func TestRealDefinition_ReachesTheModel(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"system prompt and memory file": realPrompts,
		"sub-agents":                    realSubagents,
		"skills":                        realSkills,
		"MCP over stdio":                realStdio,
		"MCP over HTTP":                 realHTTP,
		"MCP in a container":            realDocker,
		"an MCP server that is late":    realTimeout,
		"another definition":            realOther,
		"what nobody may see":           realRedact,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}

func realPrompts(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t))
	b.RunTurnOK("hello", "hello", func(q *runner.Query) {
		q.SystemPrompt, q.MemoryFile = "PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT"
	})
	for _, want := range []string{"PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT"} {
		b.ModelRequests(want)
	}
}

func realSubagents(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t,
		"  - {match: {user: SUBTASK}, steps: [{text: The reviewer looked.}]}\n",
		agenttest.ScriptRule("delegate",
			agenttest.ScriptToolCall{Name: "multi_agent_v1.spawn_agent", Input: map[string]any{"agent_type": "re-viewer", "message": "SUBTASK review it"}},
			agenttest.ScriptToolCall{Name: "multi_agent_v1.wait_agent", Input: map[string]any{"targets": []string{"{{result | find `\"agent_id\":\"([^\"]+)\"`}}"}, "timeout_ms": 20_000}})))
	b.Query.Model = plain
	x := b.RunTurnOK("delegate", "The reviewer looked", func(q *runner.Query) {
		q.Subagents = []events.SubagentSpec{{Name: "re-viewer", Description: `REVIEWS-"THINGS"`, Instructions: "YOU-ARE-\n\"THE\"\\REVIEWER", Model: "reviewer-model"}}
	})
	b.ModelRequests(`REVIEWS-`)
	if sub := b.ModelRequests(`YOU-ARE-\n\"THE\"\\REVIEWER`); sub[0].Model != "reviewer-model" {
		t.Errorf("the sub-agent asked as %s", sub[0].Model)
	}
	spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
	if len(spawned) != 1 || spawned[0].Conversation == "" || spawned[0].Conversation == events.MainConversation {
		t.Fatalf("spawned %+v", spawned)
	}
	if said := slices.IndexFunc(x.Lines, func(l runner.JournalLine) bool {
		return l.ConversationID == spawned[0].Conversation && strings.Contains(string(l.Data), "The reviewer looked")
	}); said < 0 {
		t.Errorf("nothing of the sub-agent in its conversation\n%s", x)
	}
}

func realSkills(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "0a1b")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "SKILL.md"), []byte("---\nname: greet\ndescription: GREETS-PEOPLE\n---\nSKILL-BODY\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t))
	with := func(q *runner.Query) {
		q.Skills = []runner.Skill{{Name: "greet", Description: "GREETS-PEOPLE", Dir: dir}}
	}
	b.RunTurnOK("hello", "hello", with)
	b.ModelRequests("GREETS-PEOPLE")
	b.RunTurn("$greet them", with)
	b.ModelRequests("SKILL-BODY")
	// A skill of a sub-agent only is in that sub-agent's instructions, and not offered to the agent.
	b = agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t))
	b.RunTurnOK("hello", "hello", func(q *runner.Query) {
		q.Skills = []runner.Skill{{Name: "greet", Description: "GREETS-PEOPLE", Dir: dir, Unlisted: true}}
	})
	for _, r := range b.ModelRequests("hello") {
		if bytes.Contains(r.Body, []byte("GREETS-PEOPLE")) {
			t.Error("the agent is offered its sub-agent's skill")
		}
	}
}

func realStdio(t *testing.T) {
	file := filepath.Join(t.TempDir(), "note.txt")
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t,
		agenttest.ScriptRule("take a note", agenttest.ScriptToolCall{Name: "mcp__desk.note", Input: map[string]any{"path": file, "text": "noted by the server"}}),
		agenttest.ScriptRule("tell the token", agenttest.ScriptToolCall{Name: "mcp__desk.variable", Input: map[string]any{"name": "TOKEN"}}),
		agenttest.ScriptRule("the hidden one", agenttest.ScriptToolCall{Name: "mcp__desk.hidden", Input: map[string]any{"path": file + ".hidden", "text": "x"}})))
	b.Query.Model = plain
	with := func(q *runner.Query) {
		desk := mcptest.StdioServer(t, "desk", map[string]string{"TOKEN": "t-${HOME}-1"})
		desk.Tools = []string{"note", "variable"}
		q.MCPServers = []runner.MCPServer{desk}
	}
	x := b.RunTurnOK("take a note", "noted", with)
	if d := x.PermissionDecisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "mcp-server" || d[0].ToolName != "mcp__desk__note" {
		t.Errorf("decisions %+v", d)
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != "noted by the server" {
		t.Errorf("the note: %q, %v", raw, err)
	}
	b.RunTurnOK("tell the token", "TOKEN is t-${HOME}-1", with)
	b.RunTurn("the hidden one", with)
	if _, err := os.Stat(file + ".hidden"); err == nil {
		t.Error("a tool that was left out was run")
	}
	for _, r := range b.Model.Requests() {
		if bytes.Contains(r.Body, []byte("Is not offered")) {
			t.Error("a tool that was left out is offered")
		}
	}
	// The next process has the servers too.
	b.Supervisor.Kill(t.Context())
	if s := b.RunTurnOK("tell the token", "TOKEN is t-${HOME}-1", with).Started(); s.Warm {
		t.Errorf("start %+v", s)
	}
}

func realDocker(t *testing.T) {
	file := filepath.Join(t.TempDir(), "note.txt")
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t,
		agenttest.ScriptRule("tell the token", agenttest.ScriptToolCall{Name: "mcp__box.variable", Input: map[string]any{"name": "TOKEN"}}),
		agenttest.ScriptRule("the hidden one", agenttest.ScriptToolCall{Name: "mcp__box.hidden", Input: map[string]any{"path": file, "text": "x"}})))
	b.Query.Model = plain
	box := mcptest.DockerServer(t, "box", map[string]string{"TOKEN": "t-${HOME}-1"})
	box.Tools = []string{"variable"}
	with := func(q *runner.Query) { q.MCPServers = []runner.MCPServer{box} }
	if d := b.RunTurnOK("tell the token", "TOKEN is t-${HOME}-1", with).PermissionDecisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "mcp-server" {
		t.Errorf("decisions %+v", d)
	}
	b.RunTurn("the hidden one", with)
	if _, err := os.Stat(file); err == nil {
		t.Error("a tool that was left out was run")
	}
}

func realHTTP(t *testing.T) {
	web := mcptest.StartHTTPServer(t)
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t, agenttest.ScriptRule("say it back", agenttest.ScriptToolCall{Name: "mcp__web.echo", Input: map[string]any{"text": "over HTTP"}})))
	b.Query.Model = plain
	b.RunTurnOK("say it back", "echoed over HTTP", func(q *runner.Query) {
		q.MCPServers = []runner.MCPServer{{Name: "web", Type: "http", URL: web.URL, Headers: map[string]string{"X-Desk": "d-1"}, TimeoutMs: 30_000}}
	})
	if got := web.HeaderValues("X-Desk"); len(got) == 0 || slices.ContainsFunc(got, func(v string) bool { return v != "d-1" }) {
		t.Errorf("headers %q", got)
	}
}

func realTimeout(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t, agenttest.ScriptRule("wait for it", agenttest.ScriptToolCall{Name: "mcp__desk.slow", Input: map[string]any{"ms": 60_000}})))
	b.Query.Model = plain
	b.RunTurnOK("wait for it", "timed out", func(q *runner.Query) {
		desk := mcptest.StdioServer(t, "desk", nil)
		desk.TimeoutMs = 1000
		q.MCPServers = []runner.MCPServer{desk}
	})
}

// realOther checks that another definition leads to another process, which has nothing of the previous definition.
func realOther(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t))
	b.Query.Model = plain
	first := b.RunTurnOK("hello", "hello", func(q *runner.Query) {
		q.Subagents = []events.SubagentSpec{{Name: "reviewer", Description: "REVIEWS-THINGS", Instructions: "YOU-ARE-THE-REVIEWER"}}
		q.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "desk", nil)}
	})
	second := b.RunTurnOK("hello again", "hello again", nil)
	if s := second.Started(); s.Warm || s.PID == first.Started().PID {
		t.Errorf("start %+v after %+v", s, first.Started())
	}
	for _, r := range b.ModelRequests("hello again") {
		if bytes.Contains(r.Body, []byte("mcp__desk")) || bytes.Contains(r.Body, []byte("REVIEWS-THINGS")) {
			t.Error("the second agent still has of the first")
		}
	}
}

// realRedact checks that the agent works with a secret that no line contains.
func realRedact(t *testing.T) {
	const key = "s3cr3t-Value/42"
	b := agenttest.NewHarnessWithScript(t, codeMode(), agenttest.ScriptOfRules(t,
		"  - {match: {user: say the key}, steps: [{text: {text: 'The key is "+key+", once more "+key+".', piece: 3}}]}\n",
		agenttest.ScriptRule("use the key", agenttest.ScriptToolCall{Name: "exec_command", Input: map[string]any{"cmd": "printf %s '" + key + "' | tee key.txt; printf ' %s' '" + key + "' | base64"}})))
	b.Query.Model = classic
	for _, query := range []string{"say the key", "use the key"} {
		x := b.RunTurnOK(query, "[redacted]", func(q *runner.Query) { q.Redact = []string{key} })
		if said := x.String(); strings.Contains(said, key) || strings.Contains(said, "czNjcjN0") {
			t.Errorf("%s: %s", query, said)
		}
	}
	if got := b.ReadFile("key.txt"); got != key {
		t.Errorf("the agent wrote %q", got)
	}
}
