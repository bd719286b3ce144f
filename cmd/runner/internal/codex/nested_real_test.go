package codex_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// nestedRules returns rules of a script in which the agent and its sub-agents of each level up to the given one run a command, create the file
// level-N and start the sub-agent of the next level and wait for it. The agent is level 0.
func nestedRules(levels int) []string {
	var rules []string
	for n := range levels + 1 {
		command := fmt.Sprintf("echo output-%[1]d; touch level-%[1]d", n)
		next := ""
		if n < levels {
			next = fmt.Sprintf(`
      - tool: {name: collaboration.spawn_agent, input: {task_name: digger%[1]d, message: DIG-%[1]d please, fork_turns: none}}
      - tool: {name: collaboration.wait_agent, input: {timeout_ms: 10000}}`, n+1)
		}
		rules = append(rules, fmt.Sprintf(`
  - match: {user: DIG-%[1]d, tools: [exec]}
    steps:
      - text: I am level %[1]d.
      - tool: {name: exec, input: 'text((await tools.exec_command({cmd: "%[2]s"})).output)'}%[3]s
      - text: DONE-%[1]d
`, n, command, next))
	}
	return rules
}

// withDefaultModel chooses the CLI's default model, whose sub-agents can start others.
func withDefaultModel(q *runner.Query) { q.Model = "" }

// Every sub-agent has a conversation of its own with all its calls, their inputs and results, however deep it is.
func TestRealNestedSubagents_AreRecordedAtEveryDepth(t *testing.T) {
	t.Parallel()
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, nestedRules(3)...))
	x := b.RunTurn("DIG-0", withDefaultModel)
	spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
	if len(spawned) != 3 || x.Ended().Outcome != runner.OutcomeCompleted {
		t.Fatalf("sub-agents %+v%s", spawned, x)
	}
	parent := events.MainConversation
	for i, s := range spawned {
		if s.Parent != parent || s.Depth != uint32(i+1) { //nolint:gosec // a small number
			t.Errorf("sub-agent %+v, want one of depth %d below %s", s, i+1, parent)
		}
		parent = s.Conversation
		for kind, want := range map[events.BlockKind]string{
			events.KindToolUse: fmt.Sprintf("echo output-%d;", i+1), events.KindToolResult: fmt.Sprintf("output-%d\n", i+1), events.KindAssistantText: fmt.Sprintf("I am level %d.", i+1),
		} {
			found := false
			for _, block := range x.FinishedBlocks(kind) {
				found = found || block.ConversationID == s.Conversation && strings.Contains(string(block.Input)+block.Output+block.Content, want)
			}
			if !found {
				t.Errorf("level %d has no %s with %q%s", i+1, kind, want, x)
			}
		}
	}
}

// A sub-agent below the limit runs nothing: its calls are denied, and its turn is stopped.
func TestRealNestedSubagents_BelowTheLimitRunNothing(t *testing.T) {
	t.Parallel()
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, nestedRules(3)...))
	x := b.RunTurn("DIG-0", func(q *runner.Query) { q.Model, q.SubagentDepth = "", 1 })
	spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
	if len(spawned) < 2 || spawned[1].Depth != 2 || !b.HasFile("level-1") || b.HasFile("level-2") || b.HasFile("level-3") {
		t.Errorf("sub-agents %+v, files %v %v %v%s", spawned, b.HasFile("level-1"), b.HasFile("level-2"), b.HasFile("level-3"), x)
	}
}
