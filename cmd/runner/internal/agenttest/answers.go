package agenttest

import (
	"testing"

	"github.com/spoolhq/spool/pkg/runner"
)

// CheckAnswers checks that the result of a turn is the whole last answer of the model, also if the agent's own result has only its last block, and that a
// request beyond the model's context has its own error code. look is a call of a tool, as a flow mapping of the scripted model.
func CheckAnswers(t *testing.T, a AgentUnderTest, look string) {
	t.Helper()
	b := NewHarnessWithScript(t, a, ScriptOfRules(t, `
  - match: {user: compare}
    steps:
      - {text: "I look first."}
      - {tools: [`+look+`]}
      - {text: "First part."}
      - {thinking: "A second part is needed."}
      - {text: "Second part."}
`))
	if end := b.RunTurn("compare", nil).Ended(); end.Outcome != runner.OutcomeCompleted || end.Result != "First part.\n\nSecond part." {
		t.Errorf("ended %+v", end)
	}
	b = NewHarnessWithScript(t, a, ScriptOfRules(t, `
  - match: {user: compare}
    steps:
      - {error: {status: 400, message: "prompt is too long: 210000 tokens > 200000 maximum"}}
`))
	if end := b.RunTurn("compare", nil).Ended(); end.Outcome != runner.OutcomeFailed || end.Code != "MODEL_CONTEXT_EXCEEDED" {
		t.Errorf("ended %+v", end)
	}
}
