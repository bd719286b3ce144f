package codex

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/runner"
)

// mcpServer is an MCP server in the format of the CLI's configuration.
type mcpServer struct {
	Command string            `json:"command,omitempty"`
	Args    []string          `json:"args,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	URL     string            `json:"url,omitempty"`
	Headers map[string]string `json:"http_headers,omitempty"`
	Timeout float64           `json:"tool_timeout_sec,omitempty"`
	Startup float64           `json:"startup_timeout_sec"`
	Tools   []string          `json:"enabled_tools,omitempty"`
	Asks    string            `json:"default_tools_approval_mode,omitempty"`
}

// mcpStartupSeconds is the time in seconds within which an MCP server must have listed its tools.
const mcpStartupSeconds = 20

// threadConfig returns the configuration that is sent with the request for the thread, nil for none. The secrets of MCP
// servers are sent in this way so that they are neither in arguments nor in files.
func threadConfig(l agent.Launch) map[string]any {
	if len(l.MCPServers) == 0 {
		return nil
	}
	servers := map[string]mcpServer{}
	for _, s := range l.MCPServers {
		m := mcpServer{Startup: mcpStartupSeconds, URL: s.URL, Env: s.Env, Headers: s.Headers, Timeout: float64(s.TimeoutMs) / 1000, Tools: s.Tools}
		if l.HasPolicy() {
			m.Asks = "prompt" // otherwise the CLI does not ask about tools that only read
		}
		if len(s.Command) > 0 {
			m.Command, m.Args = s.Command[0], s.Command[1:]
		}
		servers[s.Name] = m
	}
	return map[string]any{"mcp_servers": servers}
}

// handshakeDigest returns a hash of the prompts and the MCP servers, which are sent when the thread begins; "" if there
// are none.
func handshakeDigest(l agent.Launch) string {
	p, config := addedPrompt(l), threadConfig(l)
	if p == "" && config == nil {
		return ""
	}
	raw, err := json.Marshal([]any{p, config})
	if err != nil {
		raw = []byte(p) // strings always marshal
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// definitionFiles returns the files of the agent's definition that the CLI reads from its folder: skills, and
// sub-agents, which the CLI calls agent roles.
func definitionFiles(l agent.Launch) []agent.LaunchFile {
	var files []agent.LaunchFile
	for _, a := range l.Subagents {
		lines := []string{"name = " + quoteTOML(a.Name), "description = " + quoteTOML(a.Description), "developer_instructions = " + quoteTOML(a.Instructions)}
		if a.Model != "" {
			lines = append(lines, "model = "+quoteTOML(a.Model))
		}
		files = append(files, agent.LaunchFile{Path: homeDirName + "/agents/" + a.Name + ".toml", Content: strings.Join(lines, "\n") + "\n"})
	}
	for _, s := range l.MainAgentSkills() {
		files = append(files, agent.LaunchFile{Path: homeDirName + "/skills/" + s.Name, Link: s.Dir})
	}
	return files
}

// hasMCPTool reports whether the agent may use the tool of the MCP server with the given name.
func hasMCPTool(servers []runner.MCPServer, name, tool string) bool {
	return slices.ContainsFunc(servers, func(s runner.MCPServer) bool {
		return s.Name == name && (len(s.Tools) == 0 || slices.Contains(s.Tools, tool))
	})
}
