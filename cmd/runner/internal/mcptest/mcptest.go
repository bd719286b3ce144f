// Package mcptest provides an MCP server for tests of agents: over stdio, as the test binary started again, and over
// streamable HTTP inside the test.
package mcptest

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/spoolhq/spool/cmd/runner/internal/cli"
	"github.com/spoolhq/spool/cmd/runner/internal/mcpsidecar"
	"github.com/spoolhq/spool/pkg/runner"
)

// roleVariable is the environment variable that makes a test binary run as the MCP server instead of running its tests.
const roleVariable = "SPOOL_MCPTEST"

// roleInteractive is the value of roleVariable for an MCP server with the tools of InteractiveStdioServer.
const roleInteractive = "people"

// RunTestsOrServer is the body of a TestMain: it runs the tests, or the MCP server or a runner command if the process was started for that.
func RunTestsOrServer(m *testing.M) {
	ServeIfRequested()
	os.Exit(m.Run())
}

// ServeIfRequested runs the MCP server if roleVariable is set, or the runner's command agent or mcp-… if the arguments name one, and then exits.
// Otherwise it returns.
func ServeIfRequested() {
	if len(os.Args) > 1 && (os.Args[1] == "agent" || strings.HasPrefix(os.Args[1], "mcp-")) {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		code := cli.Run(ctx, os.Args[1:], cli.ProcessSystem())
		stop()
		os.Exit(code)
	}
	if os.Getenv(roleVariable) == "" {
		return
	}
	server := newServer()
	if os.Getenv(roleVariable) == roleInteractive {
		addInteractiveTools(server)
	}
	if err := server.Run(context.Background(), &mcp.StdioTransport{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// StdioServer returns the definition of a test MCP server of type stdio, which the agent starts as a process.
func StdioServer(t testing.TB, name string, env map[string]string) runner.MCPServer {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := runner.MCPServer{Name: name, Type: "stdio", Command: []string{exe}, Env: map[string]string{roleVariable: "stdio"}, TimeoutMs: 30_000}
	for k, v := range env {
		s.Env[k] = v
	}
	return s
}

// InteractiveStdioServer is StdioServer for a server with two more tools: color asks the user for a color by an elicitation, and wipe has the
// annotation that it destroys data.
func InteractiveStdioServer(t testing.TB, name string) runner.MCPServer {
	t.Helper()
	return StdioServer(t, name, map[string]string{roleVariable: roleInteractive})
}

// DockerServer returns the definition of a test MCP server of type docker, and starts the runner's command mcp-serve for it, as a sandbox provider
// does in a container. The agent must use the test binary as the runner.
func DockerServer(t testing.TB, name string, env map[string]string) runner.MCPServer {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "mcp") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := runner.MCPServer{Name: name, Type: "docker", Socket: filepath.Join(dir, "s"), Env: env, TimeoutMs: 30_000}
	entrypoint, err := json.Marshal([]string{exe})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "mcp-serve", "--socket", s.Socket, "--entrypoint", string(entrypoint))
	cmd.Env, cmd.Stderr = append(os.Environ(), roleVariable+"=stdio"), t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("mcp-serve: %v", err)
		}
	})
	if err := mcpsidecar.AwaitReady(t.Context(), s.Socket, time.Minute); err != nil {
		t.Fatal(err)
	}
	return s
}

// HTTPServer is a test MCP server that is reached over HTTP. It records the headers of the requests that it receives.
type HTTPServer struct {
	URL string

	mu      sync.Mutex
	headers []http.Header
}

// StartHTTPServer starts an HTTPServer that serves until the test ends.
func StartHTTPServer(t testing.TB) *HTTPServer {
	t.Helper()
	return startHTTPServer(t, newServer)
}

// StartHTTPServerWithTools is StartHTTPServer for a server with other tools: each returns its own name, and its schema is an object without
// properties.
func StartHTTPServerWithTools(t testing.TB, names ...string) *HTTPServer {
	t.Helper()
	return startHTTPServer(t, func() *mcp.Server {
		s := mcp.NewServer(&mcp.Implementation{Name: "mcptest", Version: "1"}, nil)
		for _, name := range names {
			s.AddTool(&mcp.Tool{Name: name, InputSchema: json.RawMessage(`{"type":"object"}`)}, func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
				return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "this is " + name}}}, nil
			})
		}
		return s
	})
}

// startHTTPServer starts an HTTPServer that serves a new server to every session.
func startHTTPServer(t testing.TB, server func() *mcp.Server) *HTTPServer {
	t.Helper()
	w := &HTTPServer{}
	handler := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server() }, nil)
	web := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.headers = append(w.headers, r.Header.Clone())
		w.mu.Unlock()
		handler.ServeHTTP(out, r)
	}))
	t.Cleanup(func() {
		web.CloseClientConnections() // the stream of a client could stay open for any time
		web.Close()
	})
	w.URL = web.URL
	return w
}

// HeaderValues returns the values of the header name in all requests so far.
func (w *HTTPServer) HeaderValues(name string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, h := range w.headers {
		all = append(all, h.Get(name))
	}
	return all
}

// echoArguments are the arguments of the test tool echo.
type echoArguments struct {
	Text string `json:"text" jsonschema:"what is given back"`
}

// noteArguments are the arguments of the test tool note, which writes a file.
type noteArguments struct {
	Path string `json:"path" jsonschema:"absolute"`
	Text string `json:"text"`
}

// variableArguments are the arguments of the test tool variable, which returns an environment variable of the server.
type variableArguments struct {
	Name string `json:"name"`
}

// slowArguments are the arguments of the test tool slow.
type slowArguments struct {
	Ms int `json:"ms"`
}

// newServer returns a server with the tools echo, note (writes a file), variable (of its environment), slow, hidden, look
// (only reads) and form (asks the user for a name), and the resource test://page.
func newServer() *mcp.Server {
	s := mcp.NewServer(&mcp.Implementation{Name: "mcptest", Version: "1"}, nil)
	say := func(text string) (*mcp.CallToolResult, any, error) {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}, nil, nil
	}
	mcp.AddTool(s, &mcp.Tool{Name: "echo", Description: "Gives a text back."},
		func(_ context.Context, _ *mcp.CallToolRequest, in echoArguments) (*mcp.CallToolResult, any, error) {
			return say("echoed " + in.Text)
		})
	mcp.AddTool(s, &mcp.Tool{Name: "note", Description: "Writes a file."},
		func(_ context.Context, _ *mcp.CallToolRequest, in noteArguments) (*mcp.CallToolResult, any, error) {
			if err := os.WriteFile(filepath.Clean(in.Path), []byte(in.Text), 0o600); err != nil {
				return nil, nil, err
			}
			return say("noted")
		})
	mcp.AddTool(s, &mcp.Tool{Name: "variable", Description: "Tells a variable of its environment."},
		func(_ context.Context, _ *mcp.CallToolRequest, in variableArguments) (*mcp.CallToolResult, any, error) {
			return say(in.Name + " is " + os.Getenv(in.Name))
		})
	mcp.AddTool(s, &mcp.Tool{Name: "slow", Description: "Answers late."},
		func(ctx context.Context, _ *mcp.CallToolRequest, in slowArguments) (*mcp.CallToolResult, any, error) {
			select {
			case <-time.After(time.Duration(in.Ms) * time.Millisecond):
			case <-ctx.Done():
			}
			return say("late")
		})
	mcp.AddTool(s, &mcp.Tool{Name: "hidden", Description: "Is not offered."},
		func(_ context.Context, _ *mcp.CallToolRequest, in noteArguments) (*mcp.CallToolResult, any, error) {
			if err := os.WriteFile(filepath.Clean(in.Path), []byte("hidden ran"), 0o600); err != nil {
				return nil, nil, err
			}
			return say("hidden")
		})
	addReadOnlyTool(s)
	addFormTool(s)
	return s
}

// addInteractiveTools adds the tools color and wipe of InteractiveStdioServer.
func addInteractiveTools(s *mcp.Server) {
	mcp.AddTool(s, &mcp.Tool{Name: "color", Description: "Asks the user for a color."},
		func(ctx context.Context, r *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
			got, err := r.Session.Elicit(ctx, elicitationFor("Which color do you want?", "color"))
			if err != nil {
				return nil, nil, err
			}
			text := fmt.Sprintf("the user chose to %s: %v", got.Action, got.Content["color"])
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}, nil, nil
		})
	destructive := true
	mcp.AddTool(s, &mcp.Tool{Name: "wipe", Description: "Wipes data.", Annotations: &mcp.ToolAnnotations{DestructiveHint: &destructive}},
		func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "wiped"}}}, nil, nil
		})
}

// addReadOnlyTool adds the tool look, which has the annotation that it only reads, and the resource test://page.
func addReadOnlyTool(s *mcp.Server) {
	mcp.AddTool(s, &mcp.Tool{Name: "look", Description: "Looks around.", Annotations: &mcp.ToolAnnotations{ReadOnlyHint: true}},
		func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "looked"}}}, nil, nil
		})
	s.AddResource(&mcp.Resource{URI: "test://page", Name: "page"}, func(context.Context, *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
		return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: "test://page", Text: "TEXT-OF-THE-PAGE"}}}, nil
	})
}

// addFormTool adds the tool form, which asks the user for a name.
func addFormTool(s *mcp.Server) {
	mcp.AddTool(s, &mcp.Tool{Name: "form", Description: "Asks the user."},
		func(ctx context.Context, r *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
			got, err := r.Session.Elicit(ctx, elicitationFor("What is your name?", "name"))
			if err != nil {
				return nil, nil, err
			}
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: fmt.Sprint(got.Action, " ", got.Content["name"])}}}, nil, nil
		})
}

// elicitationFor returns an elicitation, a request to the user, for one text field.
func elicitationFor(message, field string) *mcp.ElicitParams {
	return &mcp.ElicitParams{
		Message: message,
		RequestedSchema: map[string]any{
			"type": "object", "properties": map[string]any{field: map[string]any{"type": "string"}}, "required": []string{field},
		},
	}
}
