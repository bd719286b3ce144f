package builtin_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/cmd/runner/internal/mcpsidecar"
	"github.com/spoolhq/spool/cmd/runner/internal/mcptest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

func (r request) tools() []string {
	var names []string
	for _, t := range r.Tools {
		names = append(names, t.Function.Name)
	}
	return names
}

// last returns the last text that the model got.
func (e *endpoint) last() string {
	seen := e.seen()
	m := seen[len(seen)-1].Messages
	return fmt.Sprint(m[len(m)-1].Content)
}

func TestDefinitionPrompts(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, says("ok"), says("ok"), says("ok"), says("ok"))
	s := startSpool(t, e, newPlace(t), "", nil)
	s.query = runner.Query{
		SystemPrompt: "PROMPT-OF-THE-AGENT", MemoryFile: "MEMORY-OF-THE-AGENT",
		Commands: []events.CommandSpec{{Name: "deploy", Prompt: "Deploy $ARGUMENTS, yes $ARGUMENTS."}, {Name: "plain", Prompt: "Plainly."}},
	}
	for content, want := range map[string]string{
		"/deploy the shop": "Deploy the shop, yes the shop.", "/plain": "Plainly.", "/plain and more": "Plainly.\n\nARGUMENTS: and more", "/unknown x": "/unknown x",
	} {
		s.turn(content, nil)
		if got := e.last(); got != want {
			t.Errorf("%s became %q, want %q", content, got, want)
		}
	}
	if got := fmt.Sprint(e.seen()[0].Messages[0].Content); got != "PROMPT-OF-THE-AGENT\n\nMEMORY-OF-THE-AGENT" {
		t.Errorf("system prompt %q", got)
	}
}

func TestDefinitionTools(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, says("ok"), says("ok"), calls("call_1", "run_code", `{"language":"bash","code":"touch ran"}`), says("ok"))
	place := newPlace(t)
	s := startSpool(t, e, place, "", nil)
	s.query.Tools.Allow = []string{"read_file", "list_directory"}
	s.turn("one", nil)
	s.query.Tools = events.ToolChoice{Deny: []string{"run_code"}}
	s.turn("two", nil)
	s.turn("three", nil)
	if got := e.seen()[0].tools(); !slices.Equal(slices.Sorted(slices.Values(got)), []string{"list_directory", "read_file"}) {
		t.Errorf("offered %v", got)
	}
	if got := e.seen()[1].tools(); slices.Contains(got, "run_code") || len(got) != 3 {
		t.Errorf("offered %v", got)
	}
	if _, err := os.Stat(filepath.Join(place.Workspace, "ran")); err == nil || !strings.Contains(e.last(), "there is no tool") {
		t.Errorf("a tool that was left out: %v, %s", err, e.last())
	}
}

func TestDefinition_LimitsTurns(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, calls("call_1", "list_directory", `{}`), calls("call_2", "list_directory", `{}`), says("never"))
	s := startSpool(t, e, newPlace(t), "", nil)
	s.query.MaxTurns = 2
	if end := ended(t, s.turn("go", nil)); end.Code != "TURN_LIMIT" || !strings.Contains(end.Message, "2 times") || len(e.seen()) != 2 {
		t.Errorf("ended %+v after %d requests", end, len(e.seen()))
	}
}

func TestDefinitionServers(t *testing.T) {
	t.Parallel()
	web, file := mcptest.StartHTTPServer(t), filepath.Join(t.TempDir(), "note.txt")
	e := newEndpoint(t,
		calls("call_1", "mcp__desk__note", fmt.Sprintf(`{"path":%q,"text":"noted by the server"}`, file)), says("ok"),
		calls("call_2", "mcp__desk__variable", `{"name":"TOKEN"}`), says("ok"),
		calls("call_3", "mcp__desk__variable", `{"name":"MY_TOKEN"}`), says("ok"),
		calls("call_4", "mcp__desk__hidden", fmt.Sprintf(`{"path":%q,"text":"x"}`, file+".hidden")), says("ok"),
		calls("call_5", "mcp__late__slow", `{"ms":60000}`), says("ok"),
		calls("call_6", "mcp__web__echo", `{"text":"over HTTP"}`), says("ok"),
		calls("call_7", "mcp__web__echo", `{"text":7}`), says("ok"),
		calls("call_8", "mcp__box__variable", `{"name":"TOKEN"}`), says("ok"))
	s := startSpool(t, e, newPlace(t), "", nil)
	desk, late := mcptest.StdioServer(t, "desk", map[string]string{"TOKEN": "t-1"}), mcptest.StdioServer(t, "late", nil)
	desk.Tools, late.TimeoutMs = []string{"note", "variable"}, 200
	box := mcptest.DockerServer(t, "box", map[string]string{"TOKEN": "b-1"})
	box.Type, box.Command = "stdio", mcpsidecar.JoinCommand(desk.Command[0], box) // as the supervisor gives it
	s.query.MCPServers = []runner.MCPServer{
		desk, late, box,
		{Name: "web", Type: "http", URL: web.URL, Headers: map[string]string{"X-Desk": "d-1"}, TimeoutMs: 30_000},
		{Name: "none", Type: "stdio", Command: []string{"/no/such/server"}, TimeoutMs: 1000},
	}
	s.query.Tools.Allow = []string{"read_file"}
	var rules []string
	for i, want := range []string{"noted", "TOKEN is t-1", "MY_TOKEN is t0p", "there is no tool", "TIMEOUT: the MCP server late did not answer within 200ms", "echoed over HTTP", "EXECUTION_ERROR", "TOKEN is b-1"} {
		lines := s.turn(fmt.Sprintf("turn %d", i), nil)
		if got := e.last(); !strings.Contains(got, want) || strings.Contains(got, "sk-secret") {
			t.Errorf("turn %d: the model was told %q, want %q", i, got, want)
		}
		failed := slices.ContainsFunc(lines, func(l runner.JournalLine) bool {
			return l.Type == "error" && strings.Contains(string(l.Data), "MCP_SERVER_FAILED") && strings.Contains(string(l.Data), "none")
		})
		if !failed {
			t.Errorf("turn %d: nothing is said of the server that cannot be started", i)
		}
		for _, l := range lines {
			if l.Type == "permission_decided" {
				rules = append(rules, decode[events.PermissionDecided](t, l).Rule)
			}
		}
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != "noted by the server" {
		t.Errorf("the note: %q, %v", raw, err)
	}
	if _, err := os.Stat(file + ".hidden"); err == nil {
		t.Error("a tool that was left out was run")
	}
	if got := web.HeaderValues("X-Desk"); len(got) == 0 || slices.ContainsFunc(got, func(v string) bool { return v != "d-1" }) {
		t.Errorf("headers %q", got)
	}
	if got := e.seen()[0].tools(); slices.Contains(got, "mcp__desk__hidden") || slices.Contains(got, "run_code") || !slices.Contains(got, "mcp__web__slow") {
		t.Errorf("offered %v", got)
	}
	if slices.ContainsFunc(rules, func(r string) bool { return r != "mcp.server" }) || len(rules) != 7 {
		t.Errorf("rules %q", rules)
	}
}

// The command depends on the MCP servers of a definition and on no other field, so only other servers cause a new
// process.
func TestDefinitionCommand(t *testing.T) {
	t.Parallel()
	env := func(l agent.Launch) string {
		c, err := builtin.Adapter{}.Command(l)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(c.Env, "\n")
	}
	one := agent.Launch{MCPServers: []runner.MCPServer{{Name: "a", Env: map[string]string{"K": "secret"}}}}
	two := agent.Launch{MCPServers: []runner.MCPServer{{Name: "a", Env: map[string]string{"K": "other"}}}}
	if env(one) == env(two) || env(one) == env(agent.Launch{}) || strings.Contains(env(one), "secret") {
		t.Errorf("environments %q and %q", env(one), env(two))
	}
}
