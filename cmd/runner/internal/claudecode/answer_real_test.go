package claudecode_test

import (
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
)

func TestAnswers_AreWholeAndHaveTheirCodes(t *testing.T) {
	t.Parallel()
	agenttest.CheckAnswers(t, subject, `{name: Bash, input: {command: "true", description: look}}`)
}
