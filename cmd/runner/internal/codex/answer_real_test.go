package codex_test

import (
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
)

func TestAnswers_AreWholeAndHaveTheirCodes(t *testing.T) {
	t.Parallel()
	agenttest.CheckAnswers(t, subject, `{name: exec_command, input: {cmd: "true"}}`)
}
