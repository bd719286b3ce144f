package opencode_test

import (
	"bytes"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// nestedScript returns rules of a script in which the sub-agent of each level up to the given one runs a command, creates the file level-N and starts
// the sub-agent of the next level.
func nestedScript(levels int) []string {
	rules := []string{call("begin", "task", map[string]any{"description": "Dig", "prompt": "DIG-1 please", "subagent_type": "digger"})}
	for n := 1; n <= levels; n++ {
		next := ""
		if n < levels {
			next = fmt.Sprintf("\n      - tool: {name: task, input: {description: Dig, prompt: DIG-%d please, subagent_type: digger}}", n+1)
		}
		rules = append(rules, fmt.Sprintf(`
  - match: {user: DIG-%[1]d}
    steps:
      - text: I am level %[1]d.
      - tool: {name: bash, input: {command: "echo output-%[1]d; touch level-%[1]d", description: Dig}}%[2]s
      - text: DONE-%[1]d
`, n, next))
	}
	return rules
}

// Sub-agents start others only if their definitions name the tool. Then every one has a conversation of its own, and one below the limit does not
// start.
func TestRealNestedSubagents_AreRecordedUpToTheLimit(t *testing.T) {
	t.Parallel()
	for limit, levels := range map[uint32]int{3: 3, 2: 2} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			t.Parallel()
			b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, nestedScript(3)...))
			x := b.RunTurn("begin", func(q *runner.Query) {
				q.SubagentDepth = limit
				q.Subagents = []events.SubagentSpec{{Name: "digger", Description: "Digs holes.", Instructions: "You dig.", Tools: []string{"bash", "task"}}}
			})
			spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
			if len(spawned) != 3 || x.Ended().Outcome != runner.OutcomeCompleted { // the start that was refused is recorded as well
				t.Fatalf("sub-agents %+v%s", spawned, x)
			}
			parent := events.MainConversation
			for i, s := range spawned {
				if s.Parent != parent || s.Depth != uint32(i+1) { //nolint:gosec // a small number
					t.Errorf("sub-agent %+v, want one of depth %d below %s", s, i+1, parent)
				}
				parent = s.Conversation
				if file := fmt.Sprintf("level-%d", i+1); b.HasFile(file) != (i < levels) {
					t.Errorf("limit %d: %s exists: %v", limit, file, b.HasFile(file))
				}
				for kind, want := range map[events.BlockKind]string{events.KindToolUse: fmt.Sprintf("echo output-%d;", i+1), events.KindToolResult: fmt.Sprintf("output-%d\n", i+1)} {
					found := false
					for _, block := range x.FinishedBlocks(kind) {
						found = found || block.ConversationID == s.Conversation && strings.Contains(string(block.Input)+block.Output, want)
					}
					if found != (i < levels) {
						t.Errorf("limit %d: level %d has a %s with %q: %v%s", limit, i+1, kind, want, found, x)
					}
				}
			}
		})
	}
}

// What sub-agents do is journaled while they run, at every depth: also if the turn is interrupted, or the agent is killed. After an interrupt, the CLI
// may end only the sub-agents.
func TestRealNestedSubagents_AreRecordedWhileTheyRun(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*agenttest.Harness, agenttest.Turn){
		"killed": func(_ *agenttest.Harness, x agenttest.Turn) {
			if err := syscall.Kill(x.Started().PID, syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		},
		"interrupted": func(b *agenttest.Harness, _ agenttest.Turn) { b.Supervisor.Interrupt() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t,
				call("begin", "task", map[string]any{"description": "Dig", "prompt": "DIG-1 please", "subagent_type": "digger"}),
				call("DIG-1", "task", map[string]any{"description": "Dig", "prompt": "DIG-2 please", "subagent_type": "digger"}),
				`  - {match: {user: DIG-2}, steps: [{text: "I am level 2."}, {tools: [{name: bash, input: {command: "touch begun; sleep 600", description: Dig}}]}]}`+"\n"))
			x := b.MustStartTurn("begin", func(q *runner.Query) {
				q.SubagentDepth = 3
				q.Subagents = []events.SubagentSpec{{Name: "digger", Description: "Digs holes.", Instructions: "You dig.", Tools: []string{"bash", "task"}}}
			})
			x = b.ReadUntil("call of level 2", func(l runner.JournalLine) bool {
				return l.Type == events.BlockComplete{}.EventType() && bytes.Contains(l.Data, []byte("touch begun"))
			}, x)
			end(b, x)
			x = b.ReadToEnd(x)
			spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
			if len(spawned) != 2 || spawned[1].Parent != spawned[0].Conversation {
				t.Fatalf("sub-agents %+v%s", spawned, x)
			}
			for _, block := range x.FinishedBlocks(events.KindSubagent) {
				if !block.IsError && block.Status != events.StatusError {
					t.Errorf("sub-agent %+v has not failed", block)
				}
			}
			for kind, want := range map[events.BlockKind]string{events.KindUserMessage: "DIG-2 please", events.KindAssistantText: "I am level 2.", events.KindToolUse: "touch begun; sleep 600"} {
				n := 0
				for _, block := range x.FinishedBlocks(kind) {
					if block.ConversationID == spawned[1].Conversation && strings.Contains(string(block.Input)+block.Content, want) {
						n++
					}
				}
				if n != 1 {
					t.Errorf("level 2 has %d blocks %s with %q%s", n, kind, want, x)
				}
			}
		})
	}
}
