// Package pool measures the first turn of a new session whose sandbox comes from the warm pool (Docker, Claude Code, and
// a model that answers at once), compared with the first turn of a Claude Code on bare stdio that has just started.
// Between two turns it waits until the pool is full again and the sandbox of the previous session has ended.
package pool

import (
	"context"
	"fmt"
	"os/exec"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// maxMedianMs is the performance target: the maximum of the median time, in milliseconds, from the message of a
// session's first turn to the first text.
const maxMedianMs = 250.0

// measuredArchitecture is the architecture of the sessions that the benchmark measures.
const measuredArchitecture = "claude-code"

const (
	// fillTimeout is the time limit of the wait until the warm pool is full.
	fillTimeout = 2 * time.Minute
	// turnTimeout is the time limit of one turn.
	turnTimeout = time.Minute
)

// Benchmark is the subcommand pool of the benchmark program. It measures the first turn of sessions whose sandbox comes
// from the warm pool.
type Benchmark struct {
	Turns harness.PositiveCount `default:"20" help:"Measured sessions."`
	Size  harness.PositiveCount `default:"2" help:"Sandboxes in the pool."`
}

// testbed is a running Spool with a warm pool, with the paths and the URL that are needed to run Claude Code without
// Spool.
type testbed struct {
	sys     *system.System
	metrics *prometheus.Registry
	size    int
	claude  string // the path of the CLI
	dir     string
	url     string // of the model
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	if !b.CanUseDocker(ctx, "its row") {
		return nil
	}
	claude, err := exec.LookPath("claude")
	if err != nil {
		b.PrintSkipped("its row", "claude is not on the PATH; make install installs it")
		return nil
	}
	runner, err := b.BuildRunner(ctx)
	if err != nil {
		return err
	}
	url, err := b.StartModel(system.EchoScript)
	if err != nil {
		return err
	}
	t := &testbed{metrics: prometheus.NewRegistry(), size: int(m.Size), claude: claude, dir: b.Dir, url: url}
	t.sys, err = b.StartSystem(ctx, system.Config{
		Docker: true, ModelURL: url, Metrics: t.metrics,
		Executor: executor.Config{Runner: runner, Pool: []string{fmt.Sprintf("%s=%d", measuredArchitecture, m.Size)}},
	})
	if err != nil {
		return err
	}
	var r poolTimings
	for i := range int(m.Turns) + 1 { // the first session and process warm the services up
		bare, err := t.timeTurnWithoutSpool(ctx, i)
		if err != nil {
			return fmt.Errorf("bare process %d: %w", i, err)
		}
		s, err := t.measureSession(ctx, i)
		if err != nil {
			return fmt.Errorf("session %d: %w", i, err)
		}
		if i > 0 {
			r.addSession(bare, s)
		}
	}
	return b.ReportRow(r.toRow(t.size))
}

// poolTimings holds the measured durations of all sessions. created is the time from the start of the session's
// creation to the first text. ready, started and text are the times from the message to the ready sandbox, to the
// started agent and to the first text. bare is the time to the first text of Claude Code without Spool.
type poolTimings struct{ bare, created, ready, started, text []time.Duration }

// addSession adds the measurements of one session, and the time to the first text of the turn without Spool that was
// measured before it.
func (r *poolTimings) addSession(bare time.Duration, s sessionTimes) {
	r.bare = append(r.bare, bare)
	r.created = append(r.created, s.FirstText.Sub(s.created))
	r.ready = append(r.ready, s.ready.Sub(s.Posted))
	r.started = append(r.started, s.started.Sub(s.Posted))
	r.text = append(r.text, s.Latency())
}

// toRow returns the row of docs/performance.md. size is the number of sandboxes in the warm pool.
func (r *poolTimings) toRow(size int) row.Row {
	p50, base := row.Percentile(r.text, 0.5), row.Percentile(r.bare, 0.5)
	return row.Row{
		What:     "first turn of a new session from the warm pool, message posted to first text on the WebSocket, Docker, Claude Code",
		Target:   fmt.Sprintf("p50 under %.0f ms with an instant model", maxMedianMs),
		Measured: fmt.Sprintf("%.1f ms, of %d sessions", p50, len(r.text)),
		Against:  fmt.Sprintf("the first turn of a Claude Code that has just started, on bare stdio outside of Docker: p50 %.1f ms, p99 %.1f ms", base, row.Percentile(r.bare, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(r.text, 0.99), OK: p50 < maxMedianMs,
		Note: fmt.Sprintf("sandbox taken after %.0f ms, agent started after %.0f ms; %.1f ms from the POST of the session; "+
			"SPOOL_POOL=%s=%d, full before each session, and filled again during the turn",
			row.Percentile(r.ready, 0.5), row.Percentile(r.started, 0.5), row.Percentile(r.created, 0.5), measuredArchitecture, size),
	}
}

// awaitFullPool blocks until the warm pool has all its sandboxes and the Docker engine has no other sandbox.
func (t *testbed) awaitFullPool(ctx context.Context) error {
	return system.PollUntil(ctx, fillTimeout, "the pool is full", func() (bool, error) {
		if err := t.sys.Err(); err != nil {
			return false, err
		}
		n, err := t.pooledSandboxes()
		if err != nil || n < t.size {
			return false, err
		}
		containers, err := t.sys.CountContainers(ctx)
		return containers == t.size, err
	})
}

// pooledSandboxes returns the number of sandboxes in the warm pool, which the executor reports as a metric.
func (t *testbed) pooledSandboxes() (int, error) {
	const name = "spool_executor_pool_sandboxes"
	families, err := t.metrics.Gather()
	if err != nil {
		return 0, err
	}
	for _, f := range families {
		if f.GetName() == name && len(f.GetMetric()) == 1 {
			return int(f.GetMetric()[0].GetGauge().GetValue()), nil
		}
	}
	return 0, fmt.Errorf("the executor has no metric %s", name)
}
