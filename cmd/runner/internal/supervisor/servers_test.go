package supervisor

import (
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/runner"
)

// For a server that runs in a container the agent gets a program that connects to it.
func TestServersInContainers_BecomeCommands(t *testing.T) {
	t.Parallel()
	given := []runner.MCPServer{
		{Name: "desk", Type: "stdio", Command: []string{"desk"}},
		{Name: "box", Type: "docker", Socket: "/spool/mcp/0/server.sock", Command: []string{"--root", "-"}, Env: map[string]string{"TOKEN": "secret", "A": "1"}, TimeoutMs: 5, Tools: []string{"t"}},
	}
	q := runner.Query{MCPServers: given}
	if err := replaceDockerServers(&q, "/spool/bin/runner"); err != nil {
		t.Fatal(err)
	}
	box := q.MCPServers[1]
	want := "/spool/bin/runner mcp-join --socket /spool/mcp/0/server.sock --env A --env TOKEN -- --root -"
	if got := strings.Join(box.Command, " "); got != want || box.Type != "stdio" || box.Env["TOKEN"] != "secret" || box.TimeoutMs != 5 || !slices.Equal(box.Tools, []string{"t"}) {
		t.Errorf("it became %+v", box)
	}
	if q.MCPServers[0].Command[0] != "desk" || given[1].Type != "docker" {
		t.Errorf("another one was changed, or what was given: %+v, %+v", q.MCPServers[0], given[1])
	}
	q = runner.Query{MCPServers: []runner.MCPServer{{Name: "box", Type: "docker"}}}
	if err := replaceDockerServers(&q, "/runner"); err == nil || err.Code != "INVALID_COMMAND" || !strings.Contains(err.Message, "query.mcpServers[0].socket") {
		t.Errorf("without a socket: %v", err)
	}
}
