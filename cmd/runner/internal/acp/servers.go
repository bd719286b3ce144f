package acp

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// sessionServers returns the MCP servers of the agent in the form of the protocol. Timeouts and lists of allowed tools
// are lost, because the protocol cannot express them.
func (s *session) sessionServers() []sdk.McpServer {
	out := []sdk.McpServer{}
	for _, m := range s.d.MCPServers {
		if m.Type == "http" {
			h := &sdk.McpServerHttpInline{Name: m.Name, Type: "http", Url: m.URL, Headers: []sdk.HttpHeader{}}
			for _, k := range slices.Sorted(maps.Keys(m.Headers)) {
				h.Headers = append(h.Headers, sdk.HttpHeader{Name: k, Value: m.Headers[k]})
			}
			out = append(out, sdk.McpServer{Http: h})
			continue
		}
		p := &sdk.McpServerStdio{Name: m.Name, Args: []string{}, Env: []sdk.EnvVariable{}}
		if len(m.Command) > 0 {
			p.Command, p.Args = m.Command[0], append(p.Args, m.Command[1:]...)
		}
		for _, k := range slices.Sorted(maps.Keys(m.Env)) {
			p.Env = append(p.Env, sdk.EnvVariable{Name: k, Value: m.Env[k]})
		}
		out = append(out, sdk.McpServer{Stdio: p})
	}
	return out
}

// checkServersReachable returns an error if an MCP server has a transport that the agent does not support.
func (s *session) checkServersReachable() error {
	for i, m := range s.d.MCPServers {
		if m.Type == "http" && !s.caps.McpCapabilities.Http {
			return fmt.Errorf("query.mcpServers[%d].type: the agent does not support MCP servers over http", i)
		}
	}
	return nil
}

// namesServer reports whether the name of a call contains the name of one of the MCP servers as a separate word. Agents
// use different forms: mcp__desk__note, desk_note, desk/note and "note (desk MCP Server)".
func namesServer(servers []runner.MCPServer, name string) bool {
	return slices.ContainsFunc(servers, func(m runner.MCPServer) bool {
		found, err := regexp.MatchString(`(^|[^a-z0-9])`+regexp.QuoteMeta(m.Name)+`($|[^a-z0-9])`, strings.ToLower(name))
		return err == nil && found
	})
}

// classifyServerTools returns the function Dialect.Tool for an agent without a dialect of its own. The function
// recognises calls of tools of the agent's MCP servers.
func classifyServerTools(l agent.Launch) func(ToolCall) *ToolInfo {
	return func(c ToolCall) *ToolInfo {
		tool := toolInfoForKind(c.Kind)
		if tool.Kind == permission.KindUnknown && namesServer(l.MCPServers, c.Name) {
			tool.Kind = permission.KindMCPTool
		}
		return &tool
	}
}
