package agenttest

import (
	"bytes"
	"context"
	"errors"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/bareagent"
)

// checkBareAgent checks how package bareagent runs the agent without Spool: both its warm and its one-shot form must
// continue a conversation, and bareagent.Agents must return the agent, because the benchmark "turn" measures the agents
// of that list.
func checkBareAgent(t *testing.T, s AgentUnderTest, a bareagent.Agent) {
	if a.Architecture != s.Architecture || a.Program != s.Program {
		t.Errorf("the bare agent is %s of %q, want %s of %q", a.Program, a.Architecture, s.Program, s.Architecture)
	}
	if !slices.ContainsFunc(bareagent.Agents(), func(b bareagent.Agent) bool { return b.Architecture == a.Architecture }) {
		t.Errorf("bareagent.Agents does not return %s, so the benchmark does not measure it", a.Architecture)
	}
	path, err := os.Executable()
	if s.Program != "" {
		if path, err = exec.LookPath(s.Program); errors.Is(err, exec.ErrNotFound) {
			t.Skipf("%s is not on the PATH: %s, or make install", s.Program, s.Install)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Run("warm", func(t *testing.T) { t.Parallel(); checkContinuedConversation(t, path, a.Warm) })
	if a.Command != nil {
		t.Run("asking", func(t *testing.T) { t.Parallel(); checkCommandRequests(t, path, a) })
	}
	if a.OneShot != nil {
		t.Run("one-shot", func(t *testing.T) { t.Parallel(); checkContinuedConversation(t, path, a.OneShot.Start) })
	}
}

// checkCommandRequests runs turns of the agent without Spool that run one command each. The agent must request a
// permission for each command.
func checkCommandRequests(t *testing.T, path string, a bareagent.Agent) {
	tool, input := a.Command("touch asked")
	model, err := server.New(server.Config{Script: ScriptOfRules(t, ScriptRule("run it", ScriptToolCall{tool, input}))})
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(model)
	t.Cleanup(web.Close)
	dir := t.TempDir()
	c, err := a.Warm(path, dir, web.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	asker, ok := c.(bareagent.PermissionConversation)
	if !ok {
		t.Fatalf("%T is no PermissionConversation", c)
	}
	ctx, cancel := context.WithTimeout(t.Context(), agentWaitTimeout)
	defer cancel()
	for range 2 {
		if took, err := asker.Ask(ctx, "run it"); err != nil || took <= 0 {
			t.Fatalf("result after %s, %v", took, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "workspace", "asked")); err != nil {
		t.Errorf("the command did not run: %v", err)
	}
	if _, err := asker.Ask(ctx, "call nothing"); err == nil {
		t.Error("a turn without a call has no error")
	}
}

// checkContinuedConversation starts a conversation with start, runs two turns, and checks that the second turn knows
// the first.
func checkContinuedConversation(t *testing.T, path string, start func(path, dir, modelURL string) (bareagent.Conversation, error)) {
	model, err := server.New(server.Config{Script: ScriptOfRules(t)})
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(model)
	t.Cleanup(web.Close)
	c, err := start(path, t.TempDir(), web.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), agentWaitTimeout)
	defer cancel()
	texts := []string{"the first number is 11", "the second number is 22"}
	for _, text := range texts {
		if took, err := c.Turn(ctx, text); err != nil || took <= 0 {
			t.Fatalf("turn %q: first text after %s, %v", text, took, err)
		}
	}
	requests := model.Requests()
	for _, text := range texts {
		if body := requests[len(requests)-1].Body; !bytes.Contains(body, []byte(text)) {
			t.Errorf("the last request to the model does not contain %q: %s", text, body)
		}
	}
}
