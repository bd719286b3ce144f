package main

import (
	"fmt"
	"time"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/bare"
	"github.com/spoolhq/spool/test/bench/row"
)

// The performance targets of this benchmark.
const fasterTarget = 5.0 // factor by which a warm turn is faster than the one-shot CLI, at the median

// addedTarget returns the maximum time in milliseconds that a turn may take longer than with the bare agent, at the median, for a sandbox provider.
func addedTarget(place string) float64 {
	if place == executor.Docker {
		return 60
	}
	return 30
}

// cli is an agent and the ways to talk to it without Spool.
type cli struct {
	architecture, name string
	program            string // on the PATH; "" for the runner itself
	path               string // of it
	model              string // of its sessions; "" for the default one
	bare               func(path, dir, url string) (bare.Talker, error)
	oneShot            string // what people type for it
	whole              bool   // the one-shot form prints a text when it is whole
	once               func(path, dir, url string) (*bare.OneShot, error)
}

func clis() map[string]cli {
	all := map[string]cli{}
	for _, c := range []cli{
		{architecture: "spool", name: "the built-in agent", bare: bare.BuiltIn},
		{
			architecture: "claude-code", name: "Claude Code", program: "claude", bare: bare.Claude, oneShot: "claude -p", once: bare.OnceClaude,
		},
		{
			architecture: "codex", name: "Codex", program: "codex", model: bare.CodexModel, bare: bare.Codex, oneShot: "codex exec", whole: true, once: bare.OnceCodex,
		},
		{
			architecture: "opencode", name: "OpenCode", program: "opencode", model: bare.OpenCodeModel, bare: bare.OpenCode, oneShot: "opencode run", whole: true, once: bare.OnceOpenCode,
		},
	} {
		all[c.architecture] = c
	}
	return all
}

// where is a kind of sandboxes, for people.
func where(place string) string {
	if place == executor.Docker {
		return "Docker"
	}
	return place
}

// command measures rows again.
const command = "cd test && go run ./bench/turn"

func added(place, agent string, s *session, through, plain []time.Duration) row.Row {
	p50, base, target := row.Percentile(through, 0.5), row.Percentile(plain, 0.5), addedTarget(place)
	note := fmt.Sprintf("of it until the execution is claimed %.0f ms, until the agent is at work %.0f ms; ",
		row.Percentile(s.claimed[1:], 0.5), row.Percentile(s.started[1:], 0.5)) + "the runner's 20 ms of coalescing included; the model sends 12 bytes every 10 ms"
	if place == executor.Docker {
		note += "; the bare agent runs outside of Docker and without the egress proxy"
	}
	return row.Row{
		What:     "second turn, message posted to first text on the WebSocket, " + where(place) + ", " + agent,
		Target:   fmt.Sprintf("p50 under +%.0f ms over the same warm agent on bare stdio", target),
		Measured: fmt.Sprintf("%+.1f ms, of %d turns", p50-base, len(through)),
		Against:  fmt.Sprintf("bare p50 %.1f ms, p99 %.1f ms", base, row.Percentile(plain, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(through, 0.99), OK: p50-base < target, Command: command, Note: note,
	}
}

func faster(place string, c cli, through, single []time.Duration) row.Row {
	p50, base := row.Percentile(through, 0.5), row.Percentile(single, 0.5)
	r := row.Row{
		What:     fmt.Sprintf("the same, against the one-shot CLI (%s), %s", c.oneShot, where(place)),
		Target:   fmt.Sprintf("at least %.0f times faster", fasterTarget),
		Measured: fmt.Sprintf("%.1f times faster", base/p50),
		Against:  fmt.Sprintf("%s in the same session, p50 %.0f ms of %d turns", c.oneShot, base, len(single)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(through, 0.99), OK: base >= fasterTarget*p50, Command: command,
	}
	if c.whole {
		r.Note = c.oneShot + " prints the text when it is whole"
	}
	return r
}
