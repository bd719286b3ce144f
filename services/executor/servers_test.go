package executor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor"
)

// serverProvider is a provider with MCP servers for its sandboxes.
type serverProvider struct {
	pausable
	more *served
}

type served struct {
	mu    sync.Mutex
	calls []string // sandbox, number, image, whether egress is allowed
	err   error
}

func (s *served) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(slices.Values(s.calls))
}

func (p serverProvider) StartServer(_ context.Context, id string, n int, s sandbox.MCPServer) (string, error) {
	p.more.mu.Lock()
	defer p.more.mu.Unlock()
	if p.more.err != nil {
		return "", p.more.err
	}
	p.mu.Lock()
	room := p.specs[id].Servers
	p.mu.Unlock()
	if n >= room {
		return "", fmt.Errorf("room for %d: %w", room, sandbox.ErrNotFound)
	}
	p.more.calls = append(p.more.calls, fmt.Sprintf("%d %s %v", n, s.Image, s.Egress))
	return fmt.Sprintf("/spool/mcp/%d/server.sock", n), nil
}

func newServedBench(t *testing.T) (*bench, *served) {
	t.Helper()
	b, s := newBench(t, answers), &served{}
	b.secrets = &vault{values: map[string]string{tenant + "/s1": "hunter2-hunter2"}}
	b.wrap = func(p sandbox.Provider) sandbox.Provider { return serverProvider{pausable{b.provider}, s} }
	return b, s
}

func boxes(more ...events.MCPServer) events.AgentSpec {
	return events.AgentSpec{Architecture: "claude-code", Instructions: "You call servers.", MCPServers: append([]events.MCPServer{
		{Name: "desk", Type: events.MCPTypeStdio, Command: []string{"desk"}},
		{Name: "one", Type: events.MCPTypeDocker, Image: "one:1", Command: []string{"--for=${WHOM}"}, Env: map[string]string{"T": "x${TOKEN}"}},
	}, more...)}
}

// failedAs returns the terminal event of an execution that failed before it began.
func (s *talk) failedAs(execution string) events.ExecutionFailed {
	s.b.t.Helper()
	if l := s.untilEnded(execution); l.Run.Phase != run.Failed {
		s.b.t.Fatalf("it ended as %s", l.Run.Phase)
	}
	failed, ok := s.last(execution).(events.ExecutionFailed)
	if !ok {
		s.b.t.Fatalf("it ended with %+v", s.last(execution))
	}
	return failed
}

// MCP servers in containers run before the agent gets the query, in every turn, and the query has their sockets.
func TestServers_RunBeforeTheQuery(t *testing.T) {
	t.Parallel()
	b, served := newServedBench(t)
	b.run()
	env := b.environment("street", 31, map[string]events.Variable{"WHOM": {Value: "Ada"}, "TOKEN": {Secret: true, Sealed: "s1"}})
	agent := b.agent("boxer", 11, boxes(events.MCPServer{Name: "two", Type: events.MCPTypeDocker, Image: "two:2", TimeoutMs: 7}))
	s := b.session(of1(agent, env), func(c *events.SessionCreated) { c.Options.Egress = []string{"a.example"} })
	s.untilEnded(s.post("go"))
	s.untilEnded(s.post("again"))
	if got := strings.Join(served.all(), ", "); got != "0 one:1 true, 0 one:1 true, 1 two:2 true, 1 two:2 true" {
		t.Errorf("served %s", got)
	}
	box := b.provider.onlyBox()
	if box.spec.Servers != 2 {
		t.Errorf("the sandbox has room for %d", box.spec.Servers)
	}
	for _, q := range box.runner.receivedQueries() {
		one, two := q.MCPServers[1], q.MCPServers[2]
		if one.Type != "docker" || one.Socket != "/spool/mcp/0/server.sock" || !slices.Equal(one.Command, []string{"--for=Ada"}) || one.Env["T"] != "xhunter2-hunter2" || one.TimeoutMs != 30_000 {
			t.Errorf("the first is asked for as %+v", one)
		}
		if two.Socket != "/spool/mcp/1/server.sock" || two.TimeoutMs != 7 || q.MCPServers[0].Socket != "" {
			t.Errorf("the others as %+v, %+v", q.MCPServers[0], two)
		}
	}
}

// If a server cannot run, the execution fails before the agent begins, and the error names the field.
func TestServers_FailureNamesTheField(t *testing.T) {
	t.Parallel()
	b, served := newServedBench(t)
	b.run()
	env := b.environment("street", 31, map[string]events.Variable{"WHOM": {Value: "Ada"}, "TOKEN": {Secret: true, Sealed: "s1"}})
	loud := boxes()
	loud.MCPServers[1].Command = []string{"a", "--token=${TOKEN}"}
	s := b.session(of1(b.agent("loud", 12, loud), env))
	if f := s.failedAs(s.post("go")); f.Code != "SECRET_EXPOSED" || !strings.HasPrefix(f.Message, "mcpServers[1].command[1]: variable TOKEN") {
		t.Errorf("%+v", f)
	}
	s = b.session(of1(b.agent("boxer", 11, boxes()), env))
	served.err = &sandbox.Error{Code: sandbox.CodeImageNotFound, Message: "there is no image", Err: errors.New("no")}
	if f := s.failedAs(s.post("go")); f.Code != "IMAGE_NOT_FOUND" || f.Message != "mcpServers[1].image: server one: there is no image" {
		t.Errorf("%+v", f)
	}
	if n := len(b.provider.onlyBox().runner.receivedQueries()); n != 0 {
		t.Errorf("the agent was asked %d times", n)
	}
	// The sandbox stays, and the next message tries again.
	id := b.provider.onlyBox().spec.ID
	served.mu.Lock()
	served.err = nil
	served.mu.Unlock()
	if l := s.untilEnded(s.post("go")); l.Run.Phase != run.Completed || b.provider.onlyBox().spec.ID != id {
		t.Errorf("it ended as %s in %s, before %s", l.Run.Phase, b.provider.onlyBox().spec.ID, id)
	}
}

// A sandbox that was created for fewer servers is replaced.
func TestServers_SandboxForFewerIsReplaced(t *testing.T) {
	t.Parallel()
	b, _ := newServedBench(t)
	b.run()
	env := b.environment("street", 31, map[string]events.Variable{"WHOM": {Value: "Ada"}, "TOKEN": {Secret: true, Sealed: "s1"}})
	s := b.session(of1(b.agent("boxer", 11, boxes()), env))
	s.untilEnded(s.post("go"))
	first := b.provider.onlyBox().spec.ID
	b.provider.mu.Lock()
	spec := b.provider.specs[first]
	spec.Servers = 0
	b.provider.specs[first] = spec
	b.provider.mu.Unlock()
	if l := s.untilEnded(s.post("again")); l.Run.Phase != run.Completed || l.Run.Sandbox.ID == first {
		t.Errorf("it ended as %s in %s", l.Run.Phase, l.Run.Sandbox.ID)
	}
}

// Sandboxes of the pool have no servers, so a session with servers does not take one.
func TestServers_DoNotUseThePool(t *testing.T) {
	t.Parallel()
	b, _ := newServedBench(t)
	b.run(func(c *executor.Config) { c.Pool = []string{"claude-code=1"} })
	b.until("the pool is full", func() bool { return b.provider.count() == 1 })
	env := b.environment("street", 31, map[string]events.Variable{"WHOM": {Value: "Ada"}, "TOKEN": {Secret: true, Sealed: "s1"}})
	s := b.session(of1(b.agent("boxer", 11, boxes()), env))
	s.untilEnded(s.post("go"))
	if r := of[events.SandboxReady](s); len(r) != 1 || r[0].Pooled {
		t.Errorf("ready %+v", r)
	}
}

// Other providers refuse servers before a sandbox is created.
func TestServers_OtherProvidersRefuseThem(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.secrets = &vault{values: map[string]string{tenant + "/s1": "hunter2-hunter2"}}
	b.run()
	env := b.environment("street", 31, map[string]events.Variable{"WHOM": {Value: "Ada"}, "TOKEN": {Secret: true, Sealed: "s1"}})
	s := b.session(of1(b.agent("boxer", 11, boxes()), env))
	if f := s.failedAs(s.post("go")); f.Code != "MCP_SERVER_UNSUPPORTED" || !strings.Contains(f.Message, "mcpServers[1].type: docker MCP servers need provider docker") {
		t.Errorf("%+v", f)
	}
	if b.provider.onlyBox() != nil {
		t.Error("a sandbox was made")
	}
}
