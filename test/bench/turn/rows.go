package turn

import (
	"fmt"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/row"
)

// minSpeedup is the performance target: how many times faster, at the median, a later turn through Spool must be than a
// turn of the agent's one-shot CLI, which starts a process for every turn.
const minSpeedup = 5.0

// maxAddedLatencyMs returns the performance target of a sandbox provider: the maximum time, in milliseconds at the
// median, by which a turn through Spool may be slower than a turn of the same agent without Spool.
func maxAddedLatencyMs(provider string) float64 {
	if provider == executor.ProviderDocker {
		return 60
	}
	return 30
}

// displayName returns the name of a sandbox provider in docs/performance.md.
func displayName(provider string) string {
	if provider == executor.ProviderDocker {
		return "Docker"
	}
	return provider
}

// addedLatencyRow returns the row of docs/performance.md that compares turns through Spool (through) with turns of the
// same agent without Spool (bare).
func addedLatencyRow(provider, agent string, s *session, through, bare []time.Duration) row.Row {
	p50, base, target := row.Percentile(through, 0.5), row.Percentile(bare, 0.5), maxAddedLatencyMs(provider)
	note := fmt.Sprintf("execution claimed after %.0f ms, agent started after %.0f ms; ",
		row.Percentile(s.claimed[1:], 0.5), row.Percentile(s.started[1:], 0.5)) + "with the runner's 20 ms of coalescing; the model sends 12 bytes every 10 ms"
	if provider == executor.ProviderDocker {
		note += "; the bare agent runs outside of Docker and without the egress proxy"
	}
	return row.Row{
		What:     "second turn, message posted to first text on the WebSocket, " + displayName(provider) + ", " + agent,
		Target:   fmt.Sprintf("p50 under +%.0f ms over the same warm agent on bare stdio", target),
		Measured: fmt.Sprintf("%+.1f ms, of %d turns", p50-base, len(through)),
		Against:  fmt.Sprintf("bare p50 %.1f ms, p99 %.1f ms", base, row.Percentile(bare, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(through, 0.99), OK: p50-base < target, Note: note,
	}
}

// speedupRow returns the row of docs/performance.md that compares turns through Spool (through) with turns of the
// agent's one-shot CLI (oneShot), which starts a process for every turn.
func speedupRow(provider string, c bareagent.OneShotCLI, through, oneShot []time.Duration) row.Row {
	p50, base := row.Percentile(through, 0.5), row.Percentile(oneShot, 0.5)
	r := row.Row{
		What:     fmt.Sprintf("the same, against the one-shot CLI (%s), %s", c.Command, displayName(provider)),
		Target:   fmt.Sprintf("at least %.0f times faster", minSpeedup),
		Measured: fmt.Sprintf("%.1f times faster", base/p50),
		Against:  fmt.Sprintf("%s in the same session, p50 %.0f ms of %d turns", c.Command, base, len(oneShot)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(through, 0.99), OK: base >= minSpeedup*p50,
	}
	if c.Whole {
		r.Note = c.Command + " prints the text when it is complete"
	}
	return r
}
