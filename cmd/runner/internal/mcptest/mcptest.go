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

// roleVariable is the variable that tells a test binary to run as the server.
const roleVariable = "SPOOL_MCPTEST"

// Main replaces m.Run in a TestMain.
func Main(m *testing.M) {
	ServeIfAsked()
	os.Exit(m.Run())
}

// ServeIfAsked runs the MCP server, or the runner's subcommand agent or mcp-…, if the process was started for that, and
// then ends the process. Otherwise it returns.
func ServeIfAsked() {
	if len(os.Args) > 1 && (os.Args[1] == "agent" || strings.HasPrefix(os.Args[1], "mcp-")) {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		code := cli.Run(ctx, os.Args[1:], cli.OS())
		stop()
		os.Exit(code)
	}
	if os.Getenv(roleVariable) == "" {
		return
	}
	if err := newServer().Run(context.Background(), &mcp.StdioTransport{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Stdio returns a server that is started by its command.
func Stdio(t testing.TB, name string, env map[string]string) runner.MCPServer {
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

// Docker returns a server of type docker: the runner serves it as in a container. An agent that uses the test binary as
// the runner can join it.
func Docker(t testing.TB, name string, env map[string]string) runner.MCPServer {
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
	if err := mcpsidecar.Ready(t.Context(), s.Socket, time.Minute); err != nil {
		t.Fatal(err)
	}
	return s
}

// Web is a server that is reached over HTTP.
type Web struct {
	URL string

	mu      sync.Mutex
	headers []http.Header
}

// HTTP returns a server that serves until the test ends.
func HTTP(t testing.TB) *Web {
	t.Helper()
	w := &Web{}
	handler := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return newServer() }, nil)
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

// Header returns the values of a header in all requests so far.
func (w *Web) Header(name string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, h := range w.headers {
		all = append(all, h.Get(name))
	}
	return all
}

type echo struct {
	Text string `json:"text" jsonschema:"what is given back"`
}

type note struct {
	Path string `json:"path" jsonschema:"absolute"`
	Text string `json:"text"`
}

type variable struct {
	Name string `json:"name"`
}

type slow struct {
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
		func(_ context.Context, _ *mcp.CallToolRequest, in echo) (*mcp.CallToolResult, any, error) {
			return say("echoed " + in.Text)
		})
	mcp.AddTool(s, &mcp.Tool{Name: "note", Description: "Writes a file."},
		func(_ context.Context, _ *mcp.CallToolRequest, in note) (*mcp.CallToolResult, any, error) {
			if err := os.WriteFile(filepath.Clean(in.Path), []byte(in.Text), 0o600); err != nil {
				return nil, nil, err
			}
			return say("noted")
		})
	mcp.AddTool(s, &mcp.Tool{Name: "variable", Description: "Tells a variable of its environment."},
		func(_ context.Context, _ *mcp.CallToolRequest, in variable) (*mcp.CallToolResult, any, error) {
			return say(in.Name + " is " + os.Getenv(in.Name))
		})
	mcp.AddTool(s, &mcp.Tool{Name: "slow", Description: "Answers late."},
		func(ctx context.Context, _ *mcp.CallToolRequest, in slow) (*mcp.CallToolResult, any, error) {
			select {
			case <-time.After(time.Duration(in.Ms) * time.Millisecond):
			case <-ctx.Done():
			}
			return say("late")
		})
	mcp.AddTool(s, &mcp.Tool{Name: "hidden", Description: "Is not offered."},
		func(_ context.Context, _ *mcp.CallToolRequest, in note) (*mcp.CallToolResult, any, error) {
			if err := os.WriteFile(filepath.Clean(in.Path), []byte("hidden ran"), 0o600); err != nil {
				return nil, nil, err
			}
			return say("hidden")
		})
	addLook(s)
	addForm(s)
	return s
}

// addLook adds a tool that says that it only reads, and a resource.
func addLook(s *mcp.Server) {
	mcp.AddTool(s, &mcp.Tool{Name: "look", Description: "Looks around.", Annotations: &mcp.ToolAnnotations{ReadOnlyHint: true}},
		func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "looked"}}}, nil, nil
		})
	s.AddResource(&mcp.Resource{URI: "test://page", Name: "page"}, func(context.Context, *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
		return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: "test://page", Text: "TEXT-OF-THE-PAGE"}}}, nil
	})
}

// addForm adds a tool that asks the user for data.
func addForm(s *mcp.Server) {
	mcp.AddTool(s, &mcp.Tool{Name: "form", Description: "Asks the user."},
		func(ctx context.Context, r *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
			got, err := r.Session.Elicit(ctx, &mcp.ElicitParams{
				Message: "What is your name?",
				RequestedSchema: map[string]any{
					"type": "object", "properties": map[string]any{"name": map[string]any{"type": "string"}}, "required": []string{"name"},
				},
			})
			if err != nil {
				return nil, nil, err
			}
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: fmt.Sprint(got.Action, " ", got.Content["name"])}}}, nil, nil
		})
}
