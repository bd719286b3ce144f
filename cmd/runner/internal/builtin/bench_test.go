package builtin_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// BenchmarkToolCall measures turns of 500 calls in one answer of the model, under the real supervisor. A call includes its
// part of the answer, its blocks, the permission request and the tool.
func BenchmarkToolCall(b *testing.B) {
	const calls = 500
	for name, change := range map[string]func(*runner.Query){
		"no policy": nil,
		"policy":    func(q *runner.Query) { q.Permissions = events.Permissions{Preset: events.PresetReadOnly} },
	} {
		b.Run(name, func(b *testing.B) {
			tool := `{name: list_directory, input: {path: "."}}`
			script, err := server.ParseScript(b.Name(), []byte("rules:\n"+
				"  - {match: {user: many}, steps: [{tools: ["+strings.Repeat(tool+", ", calls-1)+tool+"]}, {text: done}]}\n"+
				"  - {match: {user: few}, steps: [{tools: ["+tool+"]}, {text: done}]}\n"))
			if err != nil {
				b.Fatal(err)
			}
			bench := agenttest.NewHarnessWithScript(b, subject(), script)
			bench.RunTurnOK("few", "done", change)
			for b.Loop() {
				bench.RunTurnOK("many", "done", change)
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*calls), "µs/call")
		})
	}
}

// subject is the agent as the supervisor runs it.
func subject() agenttest.AgentUnderTest {
	return agenttest.AgentUnderTest{
		Architecture: builtin.Architecture, Adapter: builtin.Adapter{},
		Env: func(url string) map[string]string {
			return map[string]string{"OPENAI_BASE_URL": url + "/v1", "OPENAI_API_KEY": "sk-secret"}
		},
	}
}
