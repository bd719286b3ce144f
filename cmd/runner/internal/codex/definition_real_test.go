package codex_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/mcptest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestMain(m *testing.M) { mcptest.Main(m) }

// plain is a model that the CLI does not know: it is offered all tools at once, not found by a search.
const plain = "some-model"

// calls is a rule by which the model calls tools when it is asked for name, and quotes the last result.
func calls(name string, tools ...map[string]any) string {
	steps := []any{}
	for _, t := range tools {
		steps = append(steps, map[string]any{"tool": t})
	}
	raw, err := json.Marshal(map[string]any{
		"match": map[string]any{"user": name}, "steps": append(steps, map[string]any{"text": "The tool said: {{result}}"}),
	})
	if err != nil {
		panic(err) // texts
	}
	return "  - " + string(raw) + "\n"
}

func call(tool string, input map[string]any) map[string]any {
	return map[string]any{"name": tool, "input": input}
}

func script(t *testing.T, rules ...string) *server.Script {
	t.Helper()
	s, err := server.Load(t.Name(), []byte("rules:\n"+strings.Join(rules, "")+"  - steps: [{text: 'You said: {{user}}'}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// asked are the requests whose body has a text in it.
func (b *bench) asked(with string) []server.Request {
	b.t.Helper()
	var out []server.Request
	for _, r := range b.mock.Requests() {
		if bytes.Contains(r.Body, []byte(with)) {
			out = append(out, r)
		}
	}
	if len(out) == 0 {
		b.t.Fatalf("the model was never asked with %q in it", with)
	}
	return out
}

// What a definition says of an agent is what the model is shown, and what is done.
func TestRealDefinition(t *testing.T) {
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
	b := benchWith(t, script(t))
	b.completed("hello", "hello", func(q *runner.Query) {
		q.SystemPrompt, q.MemoryFile = "PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT"
	})
	for _, want := range []string{"PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT"} {
		b.asked(want)
	}
}

func realSubagents(t *testing.T) {
	b := benchWith(t, script(t,
		"  - {match: {user: SUBTASK}, steps: [{text: The reviewer looked.}]}\n",
		calls("delegate",
			call("multi_agent_v1.spawn_agent", map[string]any{"agent_type": "re-viewer", "message": "SUBTASK review it"}),
			call("multi_agent_v1.wait_agent", map[string]any{"targets": []string{"{{result | find `\"agent_id\":\"([^\"]+)\"`}}"}, "timeout_ms": 20_000}))))
	b.model = plain
	x := b.completed("delegate", "The reviewer looked", func(q *runner.Query) {
		q.Subagents = []events.SubagentSpec{{Name: "re-viewer", Description: `REVIEWS-"THINGS"`, Instructions: "YOU-ARE-\n\"THE\"\\REVIEWER", Model: "reviewer-model"}}
	})
	b.asked(`REVIEWS-`)
	if sub := b.asked(`YOU-ARE-\n\"THE\"\\REVIEWER`); sub[0].Model != "reviewer-model" {
		t.Errorf("the sub-agent asked as %s", sub[0].Model)
	}
	spawned := all[events.SubagentSpawned](x, "subagent_spawned")
	if len(spawned) != 1 || spawned[0].Conversation == "" || spawned[0].Conversation == events.MainConversation {
		t.Fatalf("spawned %+v", spawned)
	}
	if said := slices.IndexFunc(x.lines, func(l runner.Line) bool {
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
	b := benchWith(t, script(t))
	with := func(q *runner.Query) {
		q.Skills = []runner.Skill{{Name: "greet", Description: "GREETS-PEOPLE", Dir: dir}}
	}
	b.completed("hello", "hello", with)
	b.asked("GREETS-PEOPLE")
	b.ask("$greet them", with)
	b.asked("SKILL-BODY")
	// One that is a sub-agent's alone is in that one's instructions, and not offered.
	b = benchWith(t, script(t))
	b.completed("hello", "hello", func(q *runner.Query) {
		q.Skills = []runner.Skill{{Name: "greet", Description: "GREETS-PEOPLE", Dir: dir, Unlisted: true}}
	})
	for _, r := range b.asked("hello") {
		if bytes.Contains(r.Body, []byte("GREETS-PEOPLE")) {
			t.Error("the agent is offered its sub-agent's skill")
		}
	}
}

func realStdio(t *testing.T) {
	file := filepath.Join(t.TempDir(), "note.txt")
	b := benchWith(t, script(t,
		calls("take a note", call("mcp__desk.note", map[string]any{"path": file, "text": "noted by the server"})),
		calls("tell the token", call("mcp__desk.variable", map[string]any{"name": "TOKEN"})),
		calls("the hidden one", call("mcp__desk.hidden", map[string]any{"path": file + ".hidden", "text": "x"}))))
	b.model = plain
	with := func(q *runner.Query) {
		desk := mcptest.Stdio(t, "desk", map[string]string{"TOKEN": "t-${HOME}-1"})
		desk.Tools = []string{"note", "variable"}
		q.MCPServers = []runner.MCPServer{desk}
	}
	x := b.completed("take a note", "noted", with)
	if d := x.decisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "mcp-server" || d[0].ToolName != "mcp__desk__note" {
		t.Errorf("decisions %+v", d)
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != "noted by the server" {
		t.Errorf("the note: %q, %v", raw, err)
	}
	b.completed("tell the token", "TOKEN is t-${HOME}-1", with)
	b.ask("the hidden one", with)
	if _, err := os.Stat(file + ".hidden"); err == nil {
		t.Error("a tool that was left out was run")
	}
	for _, r := range b.mock.Requests() {
		if bytes.Contains(r.Body, []byte("Is not offered")) {
			t.Error("a tool that was left out is offered")
		}
	}
	// A process that follows another has its servers too.
	b.supervisor.Kill(t.Context())
	if s := b.completed("tell the token", "TOKEN is t-${HOME}-1", with).started(); s.Warm {
		t.Errorf("start %+v", s)
	}
}

func realDocker(t *testing.T) {
	file := filepath.Join(t.TempDir(), "note.txt")
	b := benchWith(t, script(t,
		calls("tell the token", call("mcp__box.variable", map[string]any{"name": "TOKEN"})),
		calls("the hidden one", call("mcp__box.hidden", map[string]any{"path": file, "text": "x"}))))
	b.model = plain
	box := mcptest.Docker(t, "box", map[string]string{"TOKEN": "t-${HOME}-1"})
	box.Tools = []string{"variable"}
	with := func(q *runner.Query) { q.MCPServers = []runner.MCPServer{box} }
	if d := b.completed("tell the token", "TOKEN is t-${HOME}-1", with).decisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "mcp-server" {
		t.Errorf("decisions %+v", d)
	}
	b.ask("the hidden one", with)
	if _, err := os.Stat(file); err == nil {
		t.Error("a tool that was left out was run")
	}
}

func realHTTP(t *testing.T) {
	web := mcptest.HTTP(t)
	b := benchWith(t, script(t, calls("say it back", call("mcp__web.echo", map[string]any{"text": "over HTTP"}))))
	b.model = plain
	b.completed("say it back", "echoed over HTTP", func(q *runner.Query) {
		q.MCPServers = []runner.MCPServer{{Name: "web", Type: "http", URL: web.URL, Headers: map[string]string{"X-Desk": "d-1"}, TimeoutMs: 30_000}}
	})
	if got := web.Header("X-Desk"); len(got) == 0 || slices.ContainsFunc(got, func(v string) bool { return v != "d-1" }) {
		t.Errorf("headers %q", got)
	}
}

func realTimeout(t *testing.T) {
	b := benchWith(t, script(t, calls("wait for it", call("mcp__desk.slow", map[string]any{"ms": 60_000}))))
	b.model = plain
	b.completed("wait for it", "timed out", func(q *runner.Query) {
		desk := mcptest.Stdio(t, "desk", nil)
		desk.TimeoutMs = 1000
		q.MCPServers = []runner.MCPServer{desk}
	})
}

// Another definition needs another process, and finds nothing of the one before.
func realOther(t *testing.T) {
	b := benchWith(t, script(t))
	b.model = plain
	first := b.completed("hello", "hello", func(q *runner.Query) {
		q.Subagents = []events.SubagentSpec{{Name: "reviewer", Description: "REVIEWS-THINGS", Instructions: "YOU-ARE-THE-REVIEWER"}}
		q.MCPServers = []runner.MCPServer{mcptest.Stdio(t, "desk", nil)}
	})
	second := b.completed("hello again", "hello again", nil)
	if s := second.started(); s.Warm || s.PID == first.started().PID {
		t.Errorf("start %+v after %+v", s, first.started())
	}
	for _, r := range b.asked("hello again") {
		if bytes.Contains(r.Body, []byte("mcp__desk")) || bytes.Contains(r.Body, []byte("REVIEWS-THINGS")) {
			t.Error("the second agent still has of the first")
		}
	}
}

// The agent works with a secret; nobody reads it.
func realRedact(t *testing.T) {
	const key = "s3cr3t-Value/42"
	b := benchWith(t, script(t,
		"  - {match: {user: say the key}, steps: [{text: {text: 'The key is "+key+", once more "+key+".', piece: 3}}]}\n",
		calls("use the key", call("exec_command", map[string]any{"cmd": "printf %s '" + key + "' | tee key.txt; printf ' %s' '" + key + "' | base64"}))))
	b.model = classic
	for _, query := range []string{"say the key", "use the key"} {
		x := b.completed(query, "[redacted]", func(q *runner.Query) { q.Redact = []string{key} })
		if said := x.String(); strings.Contains(said, key) || strings.Contains(said, "czNjcjN0") {
			t.Errorf("%s: %s", query, said)
		}
	}
	if got := b.file("key.txt"); got != key {
		t.Errorf("the agent wrote %q", got)
	}
}
