// Package mcptool provides the tools of MCP servers to the built-in agent, over stdio and streamable HTTP, with the
// protocol's official client.
package mcptool

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

const (
	// serverConnectTimeout is the time limit for connecting to an MCP server and listing its tools.
	serverConnectTimeout = 30 * time.Second
	// maxResultBytes is the number of bytes of a tool's result that are kept.
	maxResultBytes = 128 << 10
	// serverEndTimeout is the time within which the process of an MCP server must end after its stdin was closed.
	serverEndTimeout = time.Second
)

// ToolNamePrefix is the prefix of the names of tools of MCP servers: mcp__server__tool.
const ToolNamePrefix = "mcp__"

// Config configures the processes that run MCP servers of type stdio.
type Config struct {
	Dir     string   // absolute
	Environ []string // for all servers, KEY=value, without secrets; each server adds its own variables
}

// Servers holds the connections to MCP servers, which last from turn to turn. It is not safe for concurrent use.
type Servers struct {
	cfg  Config
	open map[string]*serverConnection // by name
}

// serverConnection is a connection to one MCP server, with the server's tools.
type serverConnection struct {
	server  runner.MCPServer
	session *mcp.ClientSession
	tools   []serverTool
	gone    chan struct{} // closed when the server has ended
}

// New returns a Servers without connections.
func New(cfg Config) *Servers { return &Servers{cfg: cfg, open: map[string]*serverConnection{}} }

// ConnectAndListTools connects to the MCP servers that are not connected yet, and returns the tools of all. The error
// names the servers that could not be reached; the next call tries them again.
func (s *Servers) ConnectAndListTools(ctx context.Context, servers []runner.MCPServer) ([]tool.Tool, error) {
	var wg sync.WaitGroup
	found, failed := make([]*serverConnection, len(servers)), make([]error, len(servers))
	for i, server := range servers {
		if c := s.open[server.Name]; c != nil && c.isAlive() {
			found[i] = c
			continue
		}
		wg.Go(func() { found[i], failed[i] = s.connect(ctx, server) })
	}
	wg.Wait()
	var all []serverTool
	for i, server := range servers {
		if failed[i] != nil {
			failed[i] = fmt.Errorf("MCP server %s: %w", server.Name, failed[i])
			continue
		}
		s.open[server.Name] = found[i]
		all = append(all, found[i].tools...)
	}
	return namedTools(all), errors.Join(failed...)
}

// Close closes the connections, and ends the MCP servers that were started as processes.
func (s *Servers) Close() error {
	var all []error
	for _, c := range s.open {
		all = append(all, c.session.Close())
		<-c.gone
	}
	return errors.Join(all...)
}

// isAlive reports whether the connection to the MCP server is still open.
func (c *serverConnection) isAlive() bool {
	select {
	case <-c.gone:
		return false
	default:
		return true
	}
}

// connect starts an MCP server or connects to it, and lists its tools. The connection outlives ctx, which only limits
// connecting.
func (s *Servers) connect(ctx context.Context, server runner.MCPServer) (*serverConnection, error) {
	transport, err := s.transport(server)
	if err != nil {
		return nil, err
	}
	// The connection outlives the turn, so its context may not end with it.
	whole, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	late := time.AfterFunc(serverConnectTimeout, cancel)
	client := mcp.NewClient(&mcp.Implementation{Name: "spool", Version: "1"}, nil)
	session, err := client.Connect(whole, transport, nil)
	if err != nil {
		cancel()
		return nil, err
	}
	c := &serverConnection{server: server, session: session, gone: make(chan struct{})}
	go func() { // ends with the connection
		defer close(c.gone)
		_ = session.Wait() //nolint:errcheck // the connection has ended, with or without an error
		cancel()
	}()
	for t, err := range session.Tools(whole, nil) {
		if err != nil {
			return nil, errors.Join(fmt.Errorf("list tools: %w", err), session.Close())
		}
		if len(server.Tools) == 0 || slices.Contains(server.Tools, t.Name) {
			c.tools = append(c.tools, newServerTool(c, t))
		}
	}
	if !stop() || !late.Stop() {
		return nil, errors.Join(context.Cause(whole), session.Close())
	}
	return c, nil
}

// transport returns the transport to an MCP server: HTTP, or the stdio of a process that is started.
func (s *Servers) transport(server runner.MCPServer) (mcp.Transport, error) {
	if server.Type == "http" {
		return &mcp.StreamableClientTransport{
			Endpoint: server.URL, HTTPClient: &http.Client{Transport: headerTransport{server.Headers}}, DisableStandaloneSSE: true,
		}, nil
	}
	if len(server.Command) == 0 {
		return nil, errors.New("command is empty")
	}
	cmd := exec.Command(server.Command[0], server.Command[1:]...) //nolint:gosec // the agent's definition names it
	cmd.Dir, cmd.Env = s.cfg.Dir, slices.Clone(s.cfg.Environ)
	for k, v := range server.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	return &mcp.CommandTransport{Command: cmd, TerminateDuration: serverEndTimeout}, nil
}

// headerTransport is an http.RoundTripper that adds the headers of an MCP server's definition to every request.
type headerTransport struct{ set map[string]string }

// RoundTrip implements http.RoundTripper.
func (h headerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	for k, v := range h.set {
		r.Header.Set(k, v)
	}
	return http.DefaultTransport.RoundTrip(r)
}

// serverTool is a tool of an MCP server. It implements tool.Tool.
type serverTool struct {
	c      *serverConnection
	tool   *mcp.Tool
	name   string
	schema json.RawMessage
}

// Name returns the name of the tool for the model, mcp__server__tool.
func (r serverTool) Name() string { return r.name }

// Description returns the description of the tool that the MCP server gave.
func (r serverTool) Description() string { return r.tool.Description }

// Schema returns the JSON schema of the arguments that the MCP server gave.
func (r serverTool) Schema() json.RawMessage { return r.schema }

// Paths returns no path, because the sandbox limits the files that an MCP server can use.
func (r serverTool) Paths(json.RawMessage) ([]string, error) { return nil, nil }

// Effect describes a call by the annotations of the tool. A tool is destructive if its server says so. The protocol's
// default for a tool without annotations is destructive, but would apply to nearly every tool.
func (r serverTool) Effect(arguments json.RawMessage) tool.CallEffect {
	e := tool.CallEffect{Kind: permission.KindMCPTool, Preview: events.ApprovalPreview{Text: string(arguments)}}
	var indented bytes.Buffer
	if err := json.Indent(&indented, arguments, "", "  "); err == nil {
		e.Preview.Text = indented.String()
	}
	e.Words = r.tool.Title
	if a := r.tool.Annotations; a != nil {
		e.Words = cmp.Or(e.Words, a.Title)
		e.Destructive = a.DestructiveHint != nil && *a.DestructiveHint && !a.ReadOnlyHint
	}
	e.Title = fmt.Sprintf("%s (MCP server %s)", r.tool.Name, r.c.server.Name)
	return e
}

// Run calls the tool on the MCP server, with the time limit of the server's definition.
func (r serverTool) Run(ctx context.Context, arguments json.RawMessage) tool.Result {
	limit := time.Duration(r.c.server.TimeoutMs) * time.Millisecond
	if limit == 0 {
		limit = serverConnectTimeout
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	out, err := r.c.session.CallTool(limited, &mcp.CallToolParams{Name: r.tool.Name, Arguments: arguments})
	switch {
	case ctx.Err() != nil:
		return tool.Result{Code: tool.ExecutionError, Output: "interrupted"}
	case limited.Err() != nil:
		return tool.Result{Code: tool.Timeout, Output: fmt.Sprintf("the MCP server %s did not answer within %s", r.c.server.Name, limit)}
	case err != nil:
		return tool.Result{Code: tool.ExecutionError, Output: err.Error()}
	}
	result := tool.Result{Output: resultText(out)}
	if out.IsError {
		result.Code = tool.ExecutionError
	}
	return result
}

// resultText returns the parts of a tool's result that a model can read, as text.
func resultText(out *mcp.CallToolResult) string {
	var parts []string
	for _, c := range out.Content {
		switch c := c.(type) {
		case *mcp.TextContent:
			parts = append(parts, c.Text)
		case *mcp.EmbeddedResource:
			if c.Resource != nil && c.Resource.Text != "" {
				parts = append(parts, c.Resource.Text)
			}
		case *mcp.ResourceLink:
			parts = append(parts, "["+c.Name+"]("+c.URI+")")
		case *mcp.ImageContent:
			parts = append(parts, "["+c.MIMEType+"]")
		case *mcp.AudioContent:
			parts = append(parts, "["+c.MIMEType+"]")
		}
	}
	if len(parts) == 0 && out.StructuredContent != nil {
		if raw, err := json.Marshal(out.StructuredContent); err == nil {
			parts = append(parts, string(raw))
		}
	}
	all := strings.Join(parts, "\n")
	if len(all) > maxResultBytes {
		all = truncate.Prefix(all, maxResultBytes) + fmt.Sprintf("\n[%d bytes more]", len(all)-maxResultBytes)
	}
	return all
}
