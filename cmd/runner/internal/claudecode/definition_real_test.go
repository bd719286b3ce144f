package claudecode_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
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

// call returns a rule by which the model, when the query contains text, calls a tool and quotes the result.
func call(text, tool string, input any) string {
	return agenttest.ScriptRule(text, agenttest.ScriptToolCall{Name: tool, Input: input})
}

// request is a request to the model.
type request struct {
	Model string
	body  string
	tools []string
}

// requests returns the requests to the model whose body contains text. There has to be one.
func requests(t *testing.T, b *agenttest.Harness, text string) []request {
	t.Helper()
	var out []request
	for _, r := range b.Model.Requests() {
		var body struct {
			Tools []struct {
				Name string `json:"name"`
			} `json:"tools"`
		}
		if !strings.HasPrefix(r.URL, "/v1/messages?") || !bytes.Contains(r.Body, []byte(text)) {
			continue
		}
		if err := json.Unmarshal(r.Body, &body); err != nil {
			t.Fatal(err)
		}
		a := request{Model: r.Model, body: string(r.Body)}
		for _, tool := range body.Tools {
			a.tools = append(a.tools, tool.Name)
		}
		out = append(out, a)
	}
	if len(out) == 0 {
		t.Fatalf("no request to the model contains %q", text)
	}
	return out
}

// The model and the CLI get everything in an agent's definition.
func TestRealDefinition_ReachesTheModel(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"system prompt and memory file": realPrompts,
		"tools":                         realTools,
		"denied tools":                  realDenied,
		"sub-agents":                    realSubagents,
		"sub-agents' servers":           realSubagentServers,
		"sub-agents' skills":            realSubagentSkills,
		"commands":                      realCommands,
		"skills":                        realSkills,
		"MCP over stdio":                realStdio,
		"MCP over HTTP":                 realHTTP,
		"MCP in a container":            realDocker,
		"an MCP server that is late":    realTimeout,
		"one that starts late":          realSlowStart,
		"turns":                         realTurns,
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
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t))
	b.RunTurnOK("hello", "hello", func(q *runner.Query) {
		q.SystemPrompt, q.MemoryFile = "PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT"
	})
	for _, want := range []string{"PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT"} {
		requests(t, b, want)
	}
	raw, err := os.ReadFile(filepath.Join(b.Folders.State, "claude", "CLAUDE.md"))
	if err != nil || string(raw) != "MEMORY-OF-THE-AGENT" {
		t.Errorf("CLAUDE.md: %q, %v", raw, err)
	}
}

func realTools(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, call("fetch", "WebFetch", map[string]any{"url": "http://127.0.0.1:9/", "prompt": "What?"})))
	x := b.RunTurn("fetch", func(q *runner.Query) { q.Tools.Allow = []string{"Read", "WebFetch"} })
	if got := requests(t, b, "fetch")[0].tools; !slices.Equal(slices.Sorted(slices.Values(got)), []string{"Read", "WebFetch"}) {
		t.Errorf("the model is offered %v", got)
	}
	// A tool that the policy would deny is allowed if the agent's definition names it.
	if d := x.PermissionDecisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "named-tool" {
		t.Errorf("decisions %+v", d)
	}
}

func realDenied(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t))
	b.RunTurnOK("hello", "hello", func(q *runner.Query) {
		q.Tools.Deny = []string{"Bash", "WebSearch", "mcp__desk__echo"}
		q.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "desk", nil)}
	})
	got := requests(t, b, "hello")[0].tools
	for _, gone := range []string{"Bash", "WebSearch", "mcp__desk__echo", "AskUserQuestion"} {
		if slices.Contains(got, gone) {
			t.Errorf("the model is offered %s", gone)
		}
	}
	for _, there := range []string{"Read", "Write", "mcp__desk__note"} {
		if !slices.Contains(got, there) {
			t.Errorf("the model is not offered %s: %v", there, got)
		}
	}
}

func realSubagents(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		"  - {match: {user: SUBTASK}, steps: [{text: The reviewer looked.}]}\n",
		call("delegate", "Agent", map[string]any{"description": "Review", "prompt": "SUBTASK review it", "subagent_type": "reviewer"})))
	x := b.RunTurnOK("delegate", "The reviewer looked", func(q *runner.Query) {
		q.Subagents = []events.SubagentSpec{{
			Name: "reviewer", Description: "REVIEWS-THINGS", Instructions: "YOU-ARE-THE-REVIEWER", Model: "claude-reviewer", Tools: []string{"Read", "Grep"},
		}}
	})
	requests(t, b, "REVIEWS-THINGS")
	if sub := requests(t, b, "YOU-ARE-THE-REVIEWER"); sub[0].Model != "claude-reviewer" || !slices.Contains(sub[0].tools, "Read") || slices.Contains(sub[0].tools, "Bash") {
		t.Errorf("the sub-agent asked as %s with %v", sub[0].Model, sub[0].tools)
	}
	spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
	if len(spawned) != 1 || spawned[0].Name != "reviewer" || spawned[0].Conversation == "" || spawned[0].Conversation == events.MainConversation {
		t.Fatalf("spawned %+v", spawned)
	}
	if said := slices.IndexFunc(x.Lines, func(l runner.JournalLine) bool {
		return l.ConversationID == spawned[0].Conversation && strings.Contains(string(l.Data), "The reviewer looked")
	}); said < 0 {
		t.Errorf("nothing of the sub-agent in its conversation\n%s", x)
	}
}

func realCommands(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t))
	with := func(q *runner.Query) {
		q.Commands = []events.CommandSpec{
			{Name: "deploy", Description: `Deploys: "all" of it`, Prompt: "Deploy $ARGUMENTS with care."},
			{Name: "plain", Prompt: "---\nNo front matter."},
		}
	}
	b.RunTurnOK("/deploy the shop", "Deploy the shop with care.", with)
	b.RunTurnOK("/plain", "No front matter.", with)
}

func realSkills(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "0a1b")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"SKILL.md": "---\nname: greet\ndescription: GREETS-PEOPLE\n---\nSKILL-BODY: read words.txt beside this.\n", "words.txt": "WORDS-OF-THE-SKILL",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		call("use the skill", "Skill", map[string]any{"skill": "greet"}),
		call("read the words", "Read", map[string]any{"file_path": filepath.Join(dir, "words.txt")}),
		call("change the words", "Write", map[string]any{"file_path": filepath.Join(dir, "words.txt"), "content": "no"})))
	with := func(q *runner.Query) {
		q.Skills = []runner.Skill{{Name: "greet", Description: "GREETS-PEOPLE", Dir: dir, Version: "0a1b"}}
	}
	b.RunTurnOK("hello", "hello", with)
	requests(t, b, "GREETS-PEOPLE")
	x := b.RunTurn("use the skill", with)
	requests(t, b, "SKILL-BODY")
	if l := x.FinishedBlocks(events.KindSkillLoad); len(l) != 1 || *l[0].Skill != (events.LoadedSkill{Name: "greet", Version: "0a1b", Path: dir}) || l[0].ToolUseID == "" {
		t.Errorf("loaded skills %+v", l)
	}
	b.RunTurnOK("read the words", "WORDS-OF-THE-SKILL", with)
	if d := b.RunTurnOK("change the words", "outside of the workspace", with).PermissionDecisions(); len(d) != 1 || d[0].Decision != "deny" {
		t.Errorf("decisions %+v", d)
	}
}

func realStdio(t *testing.T) {
	file := filepath.Join(t.TempDir(), "note.txt")
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		call("take a note", "mcp__desk__note", map[string]any{"path": file, "text": "noted by the server"}),
		call("tell the token", "mcp__desk__variable", map[string]any{"name": "TOKEN"}),
		call("the hidden one", "mcp__desk__hidden", map[string]any{"path": file + ".hidden", "text": "x"})))
	with := func(q *runner.Query) {
		desk := mcptest.StdioServer(t, "desk", map[string]string{"TOKEN": "t-${HOME}-1"})
		desk.Tools = []string{"note", "variable"}
		q.MCPServers = []runner.MCPServer{desk}
	}
	if d := b.RunTurnOK("take a note", "noted", with).PermissionDecisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "mcp-server" {
		t.Errorf("decisions %+v", d)
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != "noted by the server" {
		t.Errorf("the note: %q, %v", raw, err)
	}
	// Text that looks like a variable is not expanded again.
	b.RunTurnOK("tell the token", "TOKEN is t-${HOME}-1", with)
	if d := b.RunTurnOK("the hidden one", "not one that this agent has", with).PermissionDecisions(); len(d) != 1 || d[0].Rule != "left-out" {
		t.Errorf("decisions %+v", d)
	}
	if _, err := os.Stat(file + ".hidden"); err == nil {
		t.Error("a tool that was left out was run")
	}
	info, err := os.Stat(filepath.Join(b.Folders.State, "launch", "claude-mcp.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the servers' file: %v, %v", info, err)
	}
}

func realDocker(t *testing.T) {
	file := filepath.Join(t.TempDir(), "note.txt")
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		call("tell the token", "mcp__box__variable", map[string]any{"name": "TOKEN"}),
		call("the hidden one", "mcp__box__hidden", map[string]any{"path": file, "text": "x"})))
	box := mcptest.DockerServer(t, "box", map[string]string{"TOKEN": "t-${HOME}-1"})
	box.Tools = []string{"variable"}
	with := func(q *runner.Query) { q.MCPServers = []runner.MCPServer{box} }
	if d := b.RunTurnOK("tell the token", "TOKEN is t-${HOME}-1", with).PermissionDecisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "mcp-server" {
		t.Errorf("decisions %+v", d)
	}
	b.RunTurnOK("the hidden one", "not one that this agent has", with)
	if _, err := os.Stat(file); err == nil {
		t.Error("a tool that was left out was run")
	}
}

func realHTTP(t *testing.T) {
	web := mcptest.StartHTTPServer(t)
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, call("say it back", "mcp__web__echo", map[string]any{"text": "over HTTP"})))
	b.RunTurnOK("say it back", "echoed over HTTP", func(q *runner.Query) {
		q.MCPServers = []runner.MCPServer{{Name: "web", Type: "http", URL: web.URL, Headers: map[string]string{"X-Desk": "d-1"}, TimeoutMs: 30_000}}
	})
	if got := web.HeaderValues("X-Desk"); len(got) == 0 || slices.ContainsFunc(got, func(v string) bool { return v != "d-1" }) {
		t.Errorf("headers %q", got)
	}
}

func realTimeout(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, call("wait for it", "mcp__desk__slow", map[string]any{"ms": 60_000})))
	b.RunTurnOK("wait for it", "timed out", func(q *runner.Query) {
		desk := mcptest.StdioServer(t, "desk", nil)
		desk.TimeoutMs = 1000
		q.MCPServers = []runner.MCPServer{desk}
	})
}

// The first turn has the tools of a server for which the CLI by itself would not wait.
func realSlowStart(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t))
	b.RunTurnOK("hello", "hello", func(q *runner.Query) {
		desk := mcptest.StdioServer(t, "desk", nil)
		desk.Command = []string{"/bin/sh", "-c", `sleep 7; exec "$0"`, desk.Command[0]}
		q.MCPServers = []runner.MCPServer{desk}
	})
	if got := requests(t, b, "hello")[0].tools; !slices.Contains(got, "mcp__desk__echo") {
		t.Errorf("the model is offered %v", got)
	}
}

func realTurns(t *testing.T) {
	round := map[string]any{"command": "echo round"}
	rule := "  - match: {user: go round}\n    steps:\n"
	for range 4 {
		raw, err := json.Marshal(map[string]any{"name": "Bash", "input": round})
		if err != nil {
			t.Fatal(err)
		}
		rule += fmt.Sprintf("      - tool: %s\n", raw)
	}
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, rule+"      - text: All the rounds.\n"))
	with := func(q *runner.Query) { q.MaxTurns = 2 }
	for range 2 { // each turn has its own
		if e := b.RunTurn("go round", with).Ended(); e.Outcome != runner.OutcomeFailed || e.Code != "TURN_LIMIT" {
			t.Errorf("ended %+v", e)
		}
	}
	if n := len(requests(t, b, "go round")); n != 4 {
		t.Errorf("the model was asked %d times in two turns of two", n)
	}
	b.RunTurnOK("go round", "All the rounds", nil)
}

// Another definition needs another process, which has nothing of the previous one.
func realOther(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t))
	first := b.RunTurnOK("/deploy it", "Deploy it now", func(q *runner.Query) {
		q.MemoryFile = "OLD-MEMORY"
		q.Commands = []events.CommandSpec{{Name: "deploy", Prompt: "Deploy $ARGUMENTS now"}}
		q.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "desk", nil)}
	})
	second := b.RunTurnOK("hello again", "hello again", nil)
	if s := second.Started(); s.Warm || s.PID == first.Started().PID {
		t.Errorf("start %+v after %+v", s, first.Started())
	}
	if a := requests(t, b, "hello again")[0]; strings.Contains(a.body, "OLD-MEMORY") || slices.ContainsFunc(a.tools, func(n string) bool { return strings.HasPrefix(n, "mcp__") }) {
		t.Errorf("the second agent still has of the first: %v", a.tools)
	}
	for _, gone := range []string{"claude/CLAUDE.md", "claude/commands/deploy.md", "launch/claude-mcp.json"} {
		if _, err := os.Lstat(filepath.Join(b.Folders.State, gone)); err == nil {
			t.Errorf("%s is still there", gone)
		}
	}
}

// The agent works with a secret that no line contains, however it is printed and streamed.
func realRedact(t *testing.T) {
	const key = "s3cr3t-Value/42"
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		"  - {match: {user: say the key}, steps: [{text: {text: 'The key is "+key+", once more "+key+".', piece: 3}}]}\n",
		call("use the key", "Bash", map[string]any{"command": "printf %s \"$KEY\" | tee key.txt; printf ' %s' \"$KEY\" | base64; echo '" + key + "'", "description": "Use " + key})))
	with := func(q *runner.Query) {
		q.Redact, q.Env = []string{key}, maps.Clone(b.Query.Env)
		q.Env["KEY"] = key
	}
	for _, query := range []string{"say the key", "use the key"} {
		x := b.RunTurnOK(query, "[redacted]", with)
		if said := x.String(); strings.Contains(said, key) || strings.Contains(said, "czNjcjN0") || strings.Contains(said, base64.StdEncoding.EncodeToString([]byte(" "+key))) {
			t.Errorf("%s: %s", query, said)
		}
	}
	if got := b.ReadFile("key.txt"); got != key {
		t.Errorf("the agent wrote %q", got)
	}
}
