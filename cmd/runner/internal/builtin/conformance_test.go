package builtin_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/pkg/events"
)

// TestConformance runs the agent as the supervisor does: the test binary is the runner, started again as `runner agent`.
func TestConformance(t *testing.T) {
	t.Parallel()
	const key = "sk-a-key-that-nobody-may-write-down"
	agenttest.Exercise(t, agenttest.AgentUnderTest{
		Architecture: builtin.Architecture,
		Adapter:      builtin.Adapter{},
		Env: func(url string) map[string]string {
			return map[string]string{"OPENAI_BASE_URL": url + "/v1", "OPENAI_API_KEY": key}
		},
	}, agenttest.Capabilities{
		Conversation: &agenttest.Conversation{
			Usage: true,
			Edit: []agenttest.ExpectedDecision{
				{Tool: "read_file", Decision: "allow", Rule: "workspace.inside"}, {Tool: "write_file", Decision: "allow", Rule: "workspace.inside"},
			},
			Command: "[exit status 3]",
			Sleeps:  true,
			Failures: []agenttest.ExpectedFailure{
				{Query: "bad request please", Code: "MODEL_ERROR", Message: "scripted refusal"},
				{Query: "wrong key please", Code: "MODEL_UNAUTHORIZED", Message: "invalid api key"},
				{Query: "wrong model please", Code: "MODEL_NOT_FOUND", Message: "no-such-model"},
			},
			Transcript: true,
			Secrets:    []string{key},
		},
		Confinement: &agenttest.ConfinementCheck{
			Refused: []string{"write outside please", "write through the link", "read outside please"},
			Answer:  "PERMISSION_DENIED",
			Rule:    "workspace.outside",
		},
		Resume: &agenttest.ResumeCheck{Usage: true, UnknownSession: "agt-UNKNOWN", OtherModel: "some-model"},
		ProxyRestart: &agenttest.ProxyRestartCheck{
			Env: func(url string) map[string]string {
				return map[string]string{"OPENAI_BASE_URL": url + "/openai", "OPENAI_API_KEY": key}
			},
			Shell: func(command string) agenttest.ScriptToolCall {
				return agenttest.ScriptToolCall{Name: "run_code", Input: map[string]any{"language": "bash", "code": command}}
			},
		},
		Bare: bareagent.BuiltIn,
		Fork: &agenttest.ForkCheck{
			Copy: func(t testing.TB, from, to string) {
				t.Helper()
				if err := os.CopyFS(filepath.Join(to, "spool"), os.DirFS(filepath.Join(from, "spool"))); err != nil {
					t.Fatal(err)
				}
			},
			Cases: func(p agenttest.ForkParent) map[string]agenttest.ForkCase {
				whole := []string{"number 11", "The file is written", "Results:", "number 22"}
				return map[string]agenttest.ForkCase{
					"at a tool's result in a turn": {
						Anchor: p.Write.FinishedBlocks(events.KindToolResult)[0].Anchor, Answer: "remember 11.",
						Present: []string{"I will write hello.txt.", "hello.txt"}, Absent: []string{"The file is written", "two at once", "number 22"},
					},
					"at the last of parallel results": {
						Anchor: p.Pair.FinishedBlocks(events.KindToolResult)[1].Anchor, Answer: "remember 11.",
						Present: []string{"The file is written", "two at once", "one", "two"}, Absent: []string{"Results:", "number 22"},
					},
					"at the end":                {Anchor: p.Last.LastTextBlock().Anchor, Answer: "remember 22.", Present: whole},
					"of the whole conversation": {Answer: "remember 22.", Present: whole},
				}
			},
			AfterKill:     "at a tool's result in a turn",
			UnknownAnchor: "99",
			File:          true,
			Records:       "spool/*.jsonl",
		},
	})
}
