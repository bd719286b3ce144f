package supervisor

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/mcpsidecar"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// join replaces the MCP servers of type docker in a query by commands that connect to them, which the agent starts like
// MCP servers of type stdio. So adapters need not support containers.
func join(q *runner.Query, executable string) *runner.CommandError {
	q.MCPServers = slices.Clone(q.MCPServers)
	for i, s := range q.MCPServers {
		if s.Type != events.MCPDocker {
			continue
		}
		if !filepath.IsAbs(s.Socket) {
			return invalid(fmt.Sprintf("query.mcpServers[%d].socket: %q is not an absolute path: a server of type docker is joined there", i, s.Socket))
		}
		s.Type, s.Command, s.Socket = events.MCPStdio, mcpsidecar.Command(executable, s), ""
		q.MCPServers[i] = s
	}
	return nil
}
