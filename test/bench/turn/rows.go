package turn

import (
	"fmt"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/row"
)

// speedupTarget is the target: the minimum of how many times faster, at the median, a warm turn through Spool is than
// the one-shot CLI.
const speedupTarget = 5.0

// addedLatencyTarget returns the target for a sandbox provider: the maximum time in milliseconds, at the median, by
// which a turn through Spool is slower than one of the bare agent.
func addedLatencyTarget(provider string) float64 {
	if provider == executor.Docker {
		return 60
	}
	return 30
}

// displayName returns the name of a sandbox provider in rows.
func displayName(provider string) string {
	if provider == executor.Docker {
		return "Docker"
	}
	return provider
}

// addedLatencyRow compares turns through Spool with turns of the bare agent.
func addedLatencyRow(provider, agent string, s *session, through, bare []time.Duration) row.Row {
	p50, base, target := row.Percentile(through, 0.5), row.Percentile(bare, 0.5), addedLatencyTarget(provider)
	note := fmt.Sprintf("execution claimed after %.0f ms, agent started after %.0f ms; ",
		row.Percentile(s.claimed[1:], 0.5), row.Percentile(s.started[1:], 0.5)) + "with the runner's 20 ms of coalescing; the model sends 12 bytes every 10 ms"
	if provider == executor.Docker {
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

// speedupRow compares turns through Spool with turns of the one-shot CLI.
func speedupRow(provider string, c bareagent.OneShot, through, oneShot []time.Duration) row.Row {
	p50, base := row.Percentile(through, 0.5), row.Percentile(oneShot, 0.5)
	r := row.Row{
		What:     fmt.Sprintf("the same, against the one-shot CLI (%s), %s", c.Command, displayName(provider)),
		Target:   fmt.Sprintf("at least %.0f times faster", speedupTarget),
		Measured: fmt.Sprintf("%.1f times faster", base/p50),
		Against:  fmt.Sprintf("%s in the same session, p50 %.0f ms of %d turns", c.Command, base, len(oneShot)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(through, 0.99), OK: base >= speedupTarget*p50,
	}
	if c.Whole {
		r.Note = c.Command + " prints the text when it is complete"
	}
	return r
}
