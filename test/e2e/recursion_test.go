package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// diggingScript returns a script in which the sub-agents of each level create the file level-N and start one of the next level, with the tools of
// OpenCode and of Codex.
func diggingScript() string {
	script := "models: [known-model, gpt-5.6-sol]\nrules:\n" + `
  - match: {user: DIG-0, tools: [task]}
    steps:
      - tool: {name: task, input: {description: Dig, prompt: DIG-1 please, subagent_type: digger}}
      - text: Done.
`
	for n := range 4 {
		script += fmt.Sprintf(`
  - match: {user: DIG-%[1]d, tools: [task]}
    steps:
      - tool: {name: bash, input: {command: touch level-%[1]d, description: Dig}}
      - tool: {name: task, input: {description: Dig, prompt: DIG-%[2]d please, subagent_type: digger}}
      - text: Done.
  - match: {user: DIG-%[1]d, tools: [exec]}
    steps:
      - tool: {name: exec, input: 'text((await tools.exec_command({cmd: "touch level-%[1]d"})).output)'}
      - tool: {name: collaboration.spawn_agent, input: {task_name: digger%[2]d, message: DIG-%[2]d please, fork_turns: none}}
      - tool: {name: collaboration.wait_agent, input: {timeout_ms: 10000}}
      - text: Done.
`, n, n+1)
	}
	return script + "  - {steps: [{text: Numbers}]}\n"
}

// TestRecursion_FailsBelowTheLimitOfSubagents tests with OpenCode and Codex that the execution fails when a sub-agent below the limit is started,
// that this sub-agent runs nothing, and that the sub-agents above it are in the log with their calls.
func TestRecursion_FailsBelowTheLimitOfSubagents(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: diggingScript()})
	for architecture, spec := range map[string]map[string]any{
		"opencode": {"model": "known-model", "subagents": []map[string]any{{"name": "digger", "description": "Digs.", "instructions": "You dig.", "tools": []string{"bash", "task"}}}},
		"codex":    {"model": "gpt-5.6-sol"}, // sub-agents of older models start no others
	} {
		t.Run(architecture, func(t *testing.T) {
			t.Parallel()
			if _, err := exec.LookPath(architecture); err != nil {
				t.Skipf("%s is not on the PATH: run scripts/install: %v", architecture, err)
			}
			c := c.ForSubtest(t)
			spec["architecture"], spec["instructions"], spec["limits"] = architecture, "You dig holes.", map[string]any{"subagentDepth": 2}
			apply(c, "agents", "digger-"+architecture, spec)
			session := c.CreateSession("", map[string]any{"agent": "digger-" + architecture})
			s, end := c.RunQuery(session, "DIG-0", nil)
			var failed events.ExecutionFailed
			if err := json.Unmarshal(end.Data, &failed); err != nil || failed.Code != "RECURSION_LIMIT" || !strings.Contains(failed.Message, "3 levels below the agent; the limit is 2") {
				t.Fatalf("the execution ended with %s %s, %v\n%s", end.Type, end.Data, err, s.View)
			}
			for level := 1; level <= 3; level++ {
				_, err := os.Stat(filepath.Join(c.WorkspaceFolder(session), fmt.Sprintf("level-%d", level)))
				recorded := strings.Contains(fmt.Sprint(s.View), fmt.Sprintf("touch level-%d", level))
				if allowed := level <= 2; (err == nil) != allowed || recorded != allowed {
					t.Errorf("level %d: its file %v, its call recorded %v\n%s", level, err, recorded, s.View)
				}
			}
		})
	}
}
