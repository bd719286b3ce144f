package codex_test

import (
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestContextExceeded_HasItsCode(t *testing.T) {
	t.Parallel()
	script, err := server.ParseScript(t.Name(), []byte(`
rules:
  - match: {user: compare}
    steps:
      - {error: {status: 400, message: "prompt is too long: 210000 tokens > 200000 maximum"}}
`))
	if err != nil {
		t.Fatal(err)
	}
	b := agenttest.NewHarnessWithScript(t, subject, script)
	if end := b.RunTurn("compare", nil).Ended(); end.Outcome != runner.OutcomeFailed || end.Code != "MODEL_CONTEXT_EXCEEDED" {
		t.Errorf("ended %+v", end)
	}
}
