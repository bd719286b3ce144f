package builtin_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/mcptest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/modelstreamtest"
	"github.com/spoolhq/spool/pkg/runner"
)

// Names of tools become equal in the characters that model APIs accept, and one tool has the name that another would get instead.
func TestServerTools_HaveUniqueNamesAndAreReachedByThem(t *testing.T) {
	t.Parallel()
	sum := sha256.Sum256([]byte("desk\x00notes.read"))
	hashed := "notes_read_" + hex.EncodeToString(sum[:4])
	own := []string{"notes.read", "notes_read", "notes-read", "list/all", "list.all", strings.Repeat("long", 20), strings.Repeat("long", 20) + ".", hashed}
	web := mcptest.StartHTTPServerWithTools(t, own...)
	server := modelstreamtest.StartServer(t)
	s := startSpool(t, &endpoint{Server: server.Server}, newPlace(t), "", nil)
	s.query.MCPServers = []runner.MCPServer{{Name: "desk", Type: "http", URL: web.URL, TimeoutMs: 30_000}}
	if end := ended(t, s.turn("one", nil)); end.Outcome != runner.OutcomeCompleted {
		t.Fatalf("end %+v", end)
	}
	var first request
	if err := json.Unmarshal(server.Requests()[0], &first); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, name := range first.tools() {
		if strings.HasPrefix(name, "mcp__desk__") {
			names = append(names, name)
		}
	}
	if len(names) != len(own) || !slices.Contains(names, "mcp__desk__notes_read") || !slices.Contains(names, "mcp__desk__notes-read") || !slices.Contains(names, "mcp__desk__"+hashed) {
		t.Fatalf("the tools are %q", names)
	}
	reached := map[string]bool{}
	for i, name := range names {
		server := modelstreamtest.StartServer(t, modelstreamtest.Answer{Body: fmt.Sprintf(
			`data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"call_%d","function":{"name":%q,"arguments":"{}"}}]},"finish_reason":"tool_calls"}]}`+"\n\n", i, name)})
		s := startSpool(t, &endpoint{Server: server.Server}, newPlace(t), "", nil)
		s.query.MCPServers = []runner.MCPServer{{Name: "desk", Type: "http", URL: web.URL, TimeoutMs: 30_000}}
		results := completed(t, s.turn("call", nil), events.KindToolResult)
		if len(results) != 1 || results[0].IsError {
			t.Fatalf("%s: %+v", name, results)
		}
		if name == "mcp__desk__notes_read" && results[0].Output != "this is notes_read" {
			t.Errorf("the name of a tool that needs no change reaches another tool: %s", results[0].Output)
		}
		reached[results[0].Output] = true
		s.close()
	}
	if len(reached) != len(own) {
		t.Errorf("tools that were reached: %v", reached)
	}
}
