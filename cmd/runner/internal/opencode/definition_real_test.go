package opencode_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
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
				Function struct {
					Name string `json:"name"`
				} `json:"function"`
			} `json:"tools"`
		}
		if !bytes.Contains(r.Body, []byte(text)) {
			continue
		}
		if err := json.Unmarshal(r.Body, &body); err != nil {
			t.Fatal(err)
		}
		a := request{Model: r.Model, body: string(r.Body)}
		for _, tool := range body.Tools {
			a.tools = append(a.tools, tool.Function.Name)
		}
		out = append(out, a)
	}
	if len(out) == 0 {
		t.Fatalf("no request to the model contains %q", text)
	}
	return out
}

// The model and the CLI get everything in an agent's definition. OpenCode takes seconds to start, so one process covers
// several cases.
func TestRealDefinition_ReachesTheModel(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"prompts, commands and sub-agents": realParts,
		"tools":                            realTools,
		"MCP servers":                      realServers,
		"sub-agents' servers and skills":   realSubagents,
		"skills":                           realSkills,
		"any ACP agent":                    realACP,
		"early text":                       realText,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}

func realParts(t *testing.T) {
	const key = "s3cr3t-Value/42"
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		"  - {match: {user: SUBTASK}, steps: [{text: The reviewer looked.}]}\n",
		"  - {match: {user: say the key}, steps: [{text: {text: 'The key is "+key+", once more "+key+".', piece: 3}}]}\n",
		call("delegate", "task", map[string]any{"description": "Review", "prompt": "SUBTASK review it", "subagent_type": "reviewer"})))
	with := func(q *runner.Query) {
		q.SystemPrompt, q.MemoryFile, q.Redact = "PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT", []string{key}
		q.Commands = []events.CommandSpec{{Name: "deploy", Description: "Deploys", Prompt: "Deploy $ARGUMENTS with {env:HOME} care."}}
		q.Subagents = []events.SubagentSpec{{
			Name: "reviewer", Description: "REVIEWS-THINGS", Instructions: "YOU-ARE-THE-{file:/etc/hostname}-REVIEWER", Model: "reviewer-model", Tools: []string{"read", "grep"},
		}}
	}
	b.RunTurnOK("/deploy the shop", "Deploy the shop with {env:HOME} care.", with)
	requests(t, b, "PROMPT-OF-THE-AGENT")
	requests(t, b, "MEMORY-OF-THE-AGENT")
	requests(t, b, "REVIEWS-THINGS")
	x := b.RunTurnOK("delegate", "The reviewer looked", with)
	sub := requests(t, b, "YOU-ARE-THE-{file:/etc/hostname}-REVIEWER")[0]
	if sub.Model != "reviewer-model" || !slices.Contains(sub.tools, "read") || slices.Contains(sub.tools, "bash") || slices.Contains(sub.tools, "write") {
		t.Errorf("the sub-agent asked as %s with %v", sub.Model, sub.tools)
	}
	spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
	if len(spawned) != 1 || spawned[0].Name != "reviewer" || spawned[0].Conversation == "" || spawned[0].Conversation == events.MainConversation {
		t.Errorf("spawned %+v", spawned)
	}
	if said := b.RunTurnOK("say the key", "[redacted], once more [redacted].", with).String(); strings.Contains(said, key) {
		t.Errorf("journaled %s", said)
	}
}

func realTools(t *testing.T) {
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, call("change it", "edit", map[string]any{"filePath": "{{context \"[Ww]orking directory: *(\\\\S+)\"}}/x.txt", "oldString": "", "newString": "no"})))
	b.RunTurnOK("hello", "hello", func(q *runner.Query) {
		q.Tools.Allow = []string{"read", "write", "webfetch"}
		q.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "desk", nil)}
	})
	got := requests(t, b, "hello")[0].tools
	for _, there := range []string{"read", "write", "webfetch", "desk_note"} {
		if !slices.Contains(got, there) {
			t.Errorf("the model is not offered %s: %v", there, got)
		}
	}
	for _, gone := range []string{"bash", "grep", "task", "todowrite"} {
		if slices.Contains(got, gone) {
			t.Errorf("the model is offered %s", gone)
		}
	}
	b.RunTurnOK("once more", "once more", func(q *runner.Query) {
		q.Tools.Deny = []string{"bash", "webfetch", "task", "desk_note"}
		q.MCPServers = []runner.MCPServer{mcptest.StdioServer(t, "desk", nil)}
	})
	got = requests(t, b, "once more")[0].tools
	for _, gone := range []string{"bash", "webfetch", "task", "desk_note"} {
		if slices.Contains(got, gone) {
			t.Errorf("the model is offered %s", gone)
		}
	}
	if !slices.Contains(got, "read") || !slices.Contains(got, "desk_echo") {
		t.Errorf("the model is offered %v", got)
	}
	// One of several tools that share a permission is denied when it is called.
	b.RunTurn("change it", func(q *runner.Query) { q.Tools.Allow = []string{"read", "write"} })
	if _, err := os.Stat(filepath.Join(b.Folders.Workspace, "x.txt")); err == nil {
		t.Error("a tool that was left out was run")
	}
}

func realServers(t *testing.T) {
	web, file := mcptest.StartHTTPServer(t), filepath.Join(t.TempDir(), "note.txt")
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		call("take a note", "desk_note", map[string]any{"path": file, "text": "noted by the server"}),
		call("tell the token", "desk_variable", map[string]any{"name": "TOKEN"}),
		call("the hidden one", "desk_hidden", map[string]any{"path": file + ".hidden", "text": "x"}),
		call("wait for it", "late_slow", map[string]any{"ms": 60_000}),
		call("say it back", "web_echo", map[string]any{"text": "over HTTP"}),
		call("look into the box", "box_variable", map[string]any{"name": "TOKEN"})))
	box := mcptest.DockerServer(t, "box", map[string]string{"TOKEN": "b-{env:HOME}-1"})
	box.Tools = []string{"variable"}
	with := func(q *runner.Query) {
		desk, late := mcptest.StdioServer(t, "desk", map[string]string{"TOKEN": "t-{env:HOME}-1"}), mcptest.StdioServer(t, "late", nil)
		desk.Tools, late.TimeoutMs = []string{"note", "variable"}, 2000
		q.MCPServers = []runner.MCPServer{desk, late, box, {Name: "web", Type: "http", URL: web.URL, Headers: map[string]string{"X-Desk": "d-1"}, TimeoutMs: 30_000}}
	}
	x := b.RunTurnOK("take a note", "noted", with)
	if d := x.PermissionDecisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "mcp-server" {
		t.Errorf("decisions %+v", d)
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != "noted by the server" {
		t.Errorf("the note: %q, %v", raw, err)
	}
	b.RunTurnOK("tell the token", "TOKEN is t-{env:HOME}-1", with)
	b.RunTurn("the hidden one", with)
	if _, err := os.Stat(file + ".hidden"); err == nil || slices.Contains(requests(t, b, "take a note")[0].tools, "desk_hidden") {
		t.Error("a tool that was left out was run, or offered")
	}
	b.RunTurnOK("look into the box", "TOKEN is b-{env:HOME}-1", with)
	if slices.Contains(requests(t, b, "look into the box")[0].tools, "box_hidden") {
		t.Error("a tool of the container that was left out is offered")
	}
	b.RunTurnOK("wait for it", "timed out", with)
	b.RunTurnOK("say it back", "echoed over HTTP", with)
	if got := web.HeaderValues("X-Desk"); len(got) == 0 || slices.ContainsFunc(got, func(v string) bool { return v != "d-1" }) {
		t.Errorf("headers %q", got)
	}
	info, err := os.Stat(filepath.Join(b.Folders.State, "launch", "opencode.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the servers' file: %v, %v", info, err)
	}
}

// A skill is offered by name, loaded by the CLI's own tool, and its folder is read-only.
func realSkills(t *testing.T) {
	if _, err := exec.LookPath("rg"); err != nil {
		t.Skip("rg, by which the CLI lists a skill's files, is not on the PATH: apt-get install ripgrep")
	}
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
	words := filepath.Join(dir, "words.txt")
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
		call("use the skill", "skill", map[string]any{"name": "greet"}),
		call("read the words", "read", map[string]any{"filePath": words}),
		call("change the words", "write", map[string]any{"filePath": words, "content": "no"})))
	for _, allow := range [][]string{nil, {"read", "write"}} {
		with := func(q *runner.Query) {
			q.Skills, q.Tools.Allow = []runner.Skill{{Name: "greet", Description: "GREETS-PEOPLE", Dir: dir}}, allow
		}
		x := b.RunTurnOK("use the skill", "SKILL-BODY", with)
		if d := x.PermissionDecisions(); len(d) != 1 || d[0].Decision != "allow" || !strings.Contains(x.String(), words) {
			t.Errorf("decisions %+v; the skill's files are not told", d)
		}
		requests(t, b, "GREETS-PEOPLE")
		b.RunTurnOK("read the words", "WORDS-OF-THE-SKILL", with)
		b.RunTurn("change the words", with)
		if raw, err := os.ReadFile(words); err != nil || string(raw) != "WORDS-OF-THE-SKILL" {
			t.Errorf("the skill: %q, %v", raw, err)
		}
	}
}

// The architecture acp, of which OpenCode is one agent: prompts and servers go over the protocol alone.
func realACP(t *testing.T) {
	dir := t.TempDir()
	file, words := filepath.Join(dir, "note.txt"), filepath.Join(dir, "skill", "words.txt")
	if err := os.Mkdir(filepath.Dir(words), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(words, []byte("WORDS-OF-THE-SKILL"), 0o600); err != nil {
		t.Fatal(err)
	}
	overACP := agenttest.AgentUnderTest{
		Architecture: acp.Architecture, Adapter: acp.Adapter{}, Program: subject.Program, Install: subject.Install, Command: []string{"opencode", "acp"},
		Env: func(url string) map[string]string {
			config, err := json.Marshal(map[string]any{
				"model": "p/m", "small_model": "p/m", "enabled_providers": []string{"p"}, "permission": map[string]string{"*": "ask"},
				"agent": map[string]any{"title": map[string]any{"disable": true}},
				"provider": map[string]any{"p": map[string]any{
					"npm": "@ai-sdk/openai-compatible", "name": "P", "options": map[string]string{"baseURL": url + "/v1", "apiKey": "k"},
					"models": map[string]any{"m": map[string]any{"name": "m", "tool_call": true}},
				}},
			})
			if err != nil {
				t.Fatal(err)
			}
			return map[string]string{
				"OPENCODE_CONFIG_CONTENT": string(config), "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1",
				"OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
			}
		},
	}
	web := mcptest.StartHTTPServer(t)
	b := agenttest.NewHarnessWithScript(t, overACP, agenttest.ScriptOfRules(t,
		call("take a note", "desk_note", map[string]any{"path": file, "text": "noted by the server"}),
		call("say it back", "web_echo", map[string]any{"text": "over HTTP"}),
		call("look into the box", "box_variable", map[string]any{"name": "TOKEN"}),
		call("read the words", "read", map[string]any{"filePath": words}),
		call("change the words", "write", map[string]any{"filePath": words, "content": "no"})))
	b.Query.SystemPrompt, b.Query.MemoryFile = "PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT"
	b.Query.Skills = []runner.Skill{{Name: "words", Dir: filepath.Dir(words)}}
	b.Query.MCPServers = []runner.MCPServer{
		mcptest.StdioServer(t, "desk", nil), {Name: "web", Type: "http", URL: web.URL, Headers: map[string]string{"X-Desk": "d-1"}, TimeoutMs: 30_000},
		mcptest.DockerServer(t, "box", map[string]string{"TOKEN": "b-1"}),
	}
	x := b.RunTurnOK("take a note", "noted", nil)
	if d := x.PermissionDecisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "mcp-server" {
		t.Errorf("decisions %+v", d)
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != "noted by the server" {
		t.Errorf("the note: %q, %v", raw, err)
	}
	b.RunTurnOK("say it back", "echoed over HTTP", nil)
	if got := web.HeaderValues("X-Desk"); len(got) == 0 || slices.ContainsFunc(got, func(v string) bool { return v != "d-1" }) {
		t.Errorf("headers %q", got)
	}
	b.RunTurnOK("look into the box", "TOKEN is b-1", nil)
	b.RunTurnOK("read the words", "WORDS-OF-THE-SKILL", nil)
	b.RunTurn("change the words", nil)
	if raw, err := os.ReadFile(words); err != nil || string(raw) != "WORDS-OF-THE-SKILL" {
		t.Errorf("the skill: %q, %v", raw, err)
	}
	for _, want := range []string{"PROMPT-OF-THE-AGENT", "MEMORY-OF-THE-AGENT"} {
		b.ModelRequests(want)
	}
}

// The beginning of the text comes from the plugin, before the usage of the answer, and its end from ACP. Both together are
// the text once, in one block, on every turn of a process.
func realText(t *testing.T) {
	song := strings.Repeat("na ", 100)
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, "  - {match: {user: sing}, steps: [{text: {text: '"+song+"', piece: 3}}]}\n"))
	for _, ask := range []string{"sing", "sing again"} {
		x := b.RunTurnOK(ask, song, nil)
		if texts := x.FinishedBlocks(events.KindAssistantText); len(texts) != 1 || texts[0].Content != song {
			t.Errorf("%s: texts %+v", ask, texts)
		}
		text := slices.IndexFunc(x.Lines, func(l runner.JournalLine) bool { return l.Type == events.TextDelta })
		usage := slices.IndexFunc(x.Lines, func(l runner.JournalLine) bool { return l.Type == (events.MetadataUpdate{}).EventType() })
		if text < 0 || usage < text {
			t.Errorf("%s: line %d is the first text, line %d the usage", ask, text, usage)
		}
	}
}
