package opencode_test

import (
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
)

func TestAnswers_AreWholeAndHaveTheirCodes(t *testing.T) {
	t.Parallel()
	agenttest.CheckAnswers(t, subject, `{name: bash, input: {command: "true", description: look}}`)
}
