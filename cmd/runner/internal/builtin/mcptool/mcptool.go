// Package mcptool provides the tools of MCP servers to the built-in agent, over stdio and streamable HTTP, with the
// protocol's official client.
package mcptool

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"regexp"
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
	// connectTimeout is the maximum time that a server may take until its tools are known.
	connectTimeout = 30 * time.Second
	// maxOutput is the number of bytes of a result that are kept.
	maxOutput = 128 << 10
	// maxName is the longest name of a tool that model APIs accept.
	maxName = 64
	// endTimeout is the maximum time that a server may take to end after its stdin is closed.
	endTimeout = time.Second
)

// Prefix is the prefix of the names of the tools: mcp__server__tool.
const Prefix = "mcp__"

// Config configures the servers that run as processes.
type Config struct {
	Dir     string   // absolute
	Environ []string // for all servers, KEY=value, without secrets; each server adds its own variables
}

// Servers holds connections that last from turn to turn. It is not safe for concurrent use.
type Servers struct {
	cfg  Config
	open map[string]*connection // by name
}

// connection is a connection to one server.
type connection struct {
	server  runner.MCPServer
	session *mcp.ClientSession
	tools   []tool.Tool
	gone    chan struct{} // closed when the server has ended
}

// New returns a Servers without connections.
func New(cfg Config) *Servers { return &Servers{cfg: cfg, open: map[string]*connection{}} }

// Tools connects to the servers that are not connected, and returns the tools of all. The error names the servers that
// could not be reached; the next call tries them again.
func (s *Servers) Tools(ctx context.Context, servers []runner.MCPServer) ([]tool.Tool, error) {
	var wg sync.WaitGroup
	found, failed := make([]*connection, len(servers)), make([]error, len(servers))
	for i, server := range servers {
		if c := s.open[server.Name]; c != nil && c.alive() {
			found[i] = c
			continue
		}
		wg.Go(func() { found[i], failed[i] = s.connect(ctx, server) })
	}
	wg.Wait()
	var all []tool.Tool
	for i, server := range servers {
		if failed[i] != nil {
			failed[i] = fmt.Errorf("MCP server %s: %w", server.Name, failed[i])
			continue
		}
		s.open[server.Name] = found[i]
		all = append(all, found[i].tools...)
	}
	return all, errors.Join(failed...)
}

// Close ends the connections, and the servers that were started.
func (s *Servers) Close() error {
	var all []error
	for _, c := range s.open {
		all = append(all, c.session.Close())
		<-c.gone
	}
	return errors.Join(all...)
}

// alive reports whether the connection has not ended.
func (c *connection) alive() bool {
	select {
	case <-c.gone:
		return false
	default:
		return true
	}
}

// connect starts or reaches a server, and lists its tools. The connection outlives ctx; only connecting ends with it.
func (s *Servers) connect(ctx context.Context, server runner.MCPServer) (*connection, error) {
	transport, err := s.transport(server)
	if err != nil {
		return nil, err
	}
	// The connection outlives the turn, so its context may not end with it.
	whole, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	late := time.AfterFunc(connectTimeout, cancel)
	client := mcp.NewClient(&mcp.Implementation{Name: "spool", Version: "1"}, nil)
	session, err := client.Connect(whole, transport, nil)
	if err != nil {
		cancel()
		return nil, err
	}
	c := &connection{server: server, session: session, gone: make(chan struct{})}
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
			c.tools = append(c.tools, newTool(c, t))
		}
	}
	if !stop() || !late.Stop() {
		return nil, errors.Join(context.Cause(whole), session.Close())
	}
	return c, nil
}

// transport returns the transport to a server: HTTP, or the stdio of a new process.
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
	return &mcp.CommandTransport{Command: cmd, TerminateDuration: endTimeout}, nil
}

// headerTransport adds a server's headers to every request.
type headerTransport struct{ set map[string]string }

// RoundTrip implements http.RoundTripper.
func (h headerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	for k, v := range h.set {
		r.Header.Set(k, v)
	}
	return http.DefaultTransport.RoundTrip(r)
}

// serverTool is a tool of a server.
type serverTool struct {
	c      *connection
	tool   *mcp.Tool
	name   string
	schema json.RawMessage
}

// notInNames matches the characters that model APIs do not accept in a name.
var notInNames = regexp.MustCompile(`[^A-Za-z0-9_-]`)

// newTool returns a tool of a server. A name that models would not accept is replaced and shortened.
func newTool(c *connection, t *mcp.Tool) serverTool {
	r := serverTool{c: c, tool: t, name: Prefix + c.server.Name + "__" + notInNames.ReplaceAllString(t.Name, "_"), schema: json.RawMessage(`{"type":"object"}`)}
	if len(r.name) > maxName {
		sum := sha256.Sum256([]byte(r.name))
		r.name = r.name[:maxName-9] + "_" + hex.EncodeToString(sum[:4])
	}
	if raw, err := json.Marshal(t.InputSchema); err == nil && strings.HasPrefix(string(raw), "{") {
		r.schema = raw // other types are not schemas of arguments
	}
	return r
}

// Name returns mcp__server__tool.
func (r serverTool) Name() string { return r.name }

// Description returns the server's description.
func (r serverTool) Description() string { return r.tool.Description }

// Schema returns the server's schema.
func (r serverTool) Schema() json.RawMessage { return r.schema }

// Paths returns none: the sandbox limits the files that a server can use.
func (r serverTool) Paths(json.RawMessage) ([]string, error) { return nil, nil }

// Effect describes a call by the server's annotations. A tool is destructive if its server says so: the protocol's default
// for a tool without annotations, which is destructive, would apply to nearly every tool.
func (r serverTool) Effect(arguments json.RawMessage) tool.Effect {
	e := tool.Effect{Kind: permission.KindMCPTool, Preview: events.ApprovalPreview{Text: string(arguments)}}
	var indented bytes.Buffer
	if err := json.Indent(&indented, arguments, "", "  "); err == nil {
		e.Preview.Text = indented.String()
	}
	name := r.tool.Title
	if a := r.tool.Annotations; a != nil {
		name = cmp.Or(name, a.Title)
		e.Destructive = a.DestructiveHint != nil && *a.DestructiveHint && !a.ReadOnlyHint
	}
	e.Title = fmt.Sprintf("%s (MCP server %s)", cmp.Or(name, r.tool.Name), r.c.server.Name)
	return e
}

// Run calls the tool, with the server's time limit.
func (r serverTool) Run(ctx context.Context, arguments json.RawMessage) tool.Result {
	limit := time.Duration(r.c.server.TimeoutMs) * time.Millisecond
	if limit == 0 {
		limit = connectTimeout
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
	result := tool.Result{Output: text(out)}
	if out.IsError {
		result.Code = tool.ExecutionError
	}
	return result
}

// text returns the parts of a result that a model can read.
func text(out *mcp.CallToolResult) string {
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
	if len(all) > maxOutput {
		all = truncate.Prefix(all, maxOutput) + fmt.Sprintf("\n[%d bytes more]", len(all)-maxOutput)
	}
	return all
}
