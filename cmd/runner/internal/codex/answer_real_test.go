package codex_test

import (
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestResult_HoldsTheWholeLastAnswer(t *testing.T) {
	t.Parallel()
	script, err := server.ParseScript(t.Name(), []byte(`
rules:
  - match: {user: compare}
    steps:
      - {text: "I look first."}
      - {tools: [{name: exec_command, input: {cmd: "true"}}]}
      - {text: "First part."}
      - {thinking: "A second part is needed."}
      - {text: "Second part."}
`))
	if err != nil {
		t.Fatal(err)
	}
	b := agenttest.NewHarnessWithScript(t, subject, script)
	end := b.RunTurn("compare", nil).Ended()
	if want := "First part.\n\nSecond part."; end.Outcome != runner.OutcomeCompleted || end.Result != want {
		t.Errorf("ended %+v, want the result %q", end, want)
	}
}
