package supervisor

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/mcpsidecar"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// replaceDockerServers replaces the MCP servers of type docker in a query by commands that connect to their containers.
// The agent starts these commands like MCP servers of type stdio, so that adapters need not support containers.
func replaceDockerServers(q *runner.Query, executable string) *runner.CommandError {
	q.MCPServers = slices.Clone(q.MCPServers)
	for i, s := range q.MCPServers {
		if s.Type != events.MCPTypeDocker {
			continue
		}
		if !filepath.IsAbs(s.Socket) {
			return invalidQueryError(fmt.Sprintf("query.mcpServers[%d].socket: %q is not an absolute path: a server of type docker is joined there", i, s.Socket))
		}
		s.Type, s.Command, s.Socket = events.MCPTypeStdio, mcpsidecar.JoinCommand(executable, s), ""
		q.MCPServers[i] = s
	}
	return nil
}
