package acp_test

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// realAgent is an ACP agent of scripts/acp-agents.
type realAgent struct {
	command []string
	env     func(url string) map[string]string
	tool    string         // its tool that runs commands
	more    map[string]any // more arguments of the tool
}

var realAgents = map[string]realAgent{
	"qwen": {[]string{"qwen", "--acp"}, func(url string) map[string]string {
		return map[string]string{"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": url + "/v1", "OPENAI_MODEL": "known-model"}
	}, "run_shell_command", map[string]any{"is_background": false}},
	"claude": {[]string{"claude-code-acp"}, func(url string) map[string]string {
		return map[string]string{"ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": url, "ANTHROPIC_MODEL": "known-model", "ANTHROPIC_SMALL_FAST_MODEL": "known-model"}
	}, "Bash", nil},
}

// The agents ask about commands that change something, and take the decisions.
func TestRealAgents_Approvals(t *testing.T) {
	t.Parallel()
	for name, a := range realAgents {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			touch := func(file string) agenttest.ScriptToolCall {
				input := map[string]any{"command": "touch " + file, "description": "Makes it"}
				maps.Copy(input, a.more)
				return agenttest.ScriptToolCall{Name: a.tool, Input: input}
			}
			s := a.agentUnderTest(t)
			b := agenttest.NewHarnessWithScript(t, s, agenttest.ScriptOfRules(t, agenttest.ScriptRule("touch one", touch("one"), touch("two"))))
			b.Query.Permissions = events.Permissions{Default: events.PermissionAsk}
			x := b.RunTurnDeciding("touch one", nil, func(r events.ApprovalRequested) events.ApprovalDecided {
				if strings.Contains(r.Preview.Command, "touch two") {
					return events.ApprovalDecided{Decision: events.DecisionApprove}
				}
				return events.ApprovalDecided{Decision: events.DecisionReject, Comment: "Not that one."}
			})
			r := x.ApprovalRequests()
			if len(r) == 0 || r[0].Preview.Command != "touch one" || r[0].ToolUseID == "" || b.HasFile("one") {
				t.Fatalf("%s", x)
			}
			x = b.RunTurnDeciding("touch one", nil, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionApprove}))
			if e := x.Ended(); e.Outcome != runner.OutcomeCompleted || !b.HasFile("one") || !b.HasFile("two") {
				t.Errorf("ended %+v%s", e, x)
			}
			b.ModelRequests("Not that one.")
			x = b.ReadUntilRequests(1, b.MustStartTurn("touch one", nil))
			b.Supervisor.Interrupt()
			if e := b.ReadToEnd(x).Ended(); e.Outcome != runner.OutcomeInterrupted {
				t.Errorf("ended %+v", e)
			}
		})
	}
}

// agentUnderTest returns a real agent for the suite, or skips the test if the agents are not installed.
func (a realAgent) agentUnderTest(t *testing.T) agenttest.AgentUnderTest {
	t.Helper()
	dir, err := filepath.Abs("../../../../.tools/acp-agents/node_modules/.bin")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("the ACP agents are not installed: run scripts/install: %v", err)
	}
	s := agenttest.AgentUnderTest{
		Architecture: acp.Architecture, Adapter: acp.Adapter{}, Command: []string{filepath.Join(dir, a.command[0])},
		Env: func(url string) map[string]string {
			env := a.env(url)
			env["PATH"] = dir + string(os.PathListSeparator) + os.Getenv("PATH")
			return env
		},
	}
	s.Command = append(s.Command, a.command[1:]...)
	return s
}

// A real agent continues its conversation in another process, and in a fork whose workspace is another folder. It does not answer without it.
func TestRealAgents_ContinueTheConversation(t *testing.T) {
	t.Parallel()
	for name, a := range realAgents {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := a.agentUnderTest(t)
			parent := agenttest.NewHarnessWithScript(t, s, agenttest.ScriptOfRules(t))
			first := parent.RunTurnOK("Remember the number 4711", "4711", nil)
			parent.Supervisor.Kill(t.Context())
			parent.RunTurnOK("in another process", "You said", nil)
			parent.CheckLastModelRequest([]string{"number 4711", "in another process"}, nil, 0)
			parent.Supervisor.Kill(t.Context())

			fork := agenttest.NewHarnessWithScript(t, s, agenttest.ScriptOfRules(t))
			if err := os.CopyFS(fork.Folders.State, os.DirFS(parent.Folders.State)); err != nil {
				t.Fatal(err)
			}
			fork.RunTurnOK("in a fork", "You said", func(q *runner.Query) {
				q.SessionID, q.Resume, q.Fork = "ses_fork", first.TranscriptWritten().AgentSessionID, &runner.Fork{}
			})
			fork.CheckLastModelRequest([]string{"number 4711", "in a fork"}, nil, 0)

			const unknown = "11111111-2222-4333-8444-555555555555"
			lost := fork.RunTurn("hello", func(q *runner.Query) { q.SessionID, q.Resume = "ses_2", unknown })
			if e := lost.Ended(); e.Outcome != runner.OutcomeFailed || e.Code != runner.CodeConversationLost {
				t.Errorf("an unknown session: ended %+v%s", e, lost)
			}
		})
	}
}
