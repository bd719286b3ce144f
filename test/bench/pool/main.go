// Command pool measures the first turn of a new session whose sandbox comes from
// the warm pool: Docker, Claude Code, and a model that answers at once. Between
// two turns it waits until the pool is full again and the former session's
// sandbox is gone.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// target is that of design.md section 11: milliseconds at the median.
const target = 250.0

const architecture = "claude-code"

// script answers everything at once.
const script = `
rules:
  - steps:
      - text: 'You said {{user}}.'
`

const (
	fullWithin = 2 * time.Minute // bounds the wait for the pool
	turnWithin = time.Minute
)

func main() {
	turns := flag.Int("turns", 20, "measured sessions")
	size := flag.Int("size", 2, "sandboxes in the pool")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *turns, *size); err != nil {
		fmt.Fprintln(os.Stderr, "pool:", err)
		os.Exit(1)
	}
}

// bench is a running Spool with a pool.
type bench struct {
	sys     *system.System
	metrics *prometheus.Registry
	size    int
}

func run(ctx context.Context, out io.Writer, dir string, turns, size int) (err error) {
	if turns < 1 || size < 1 {
		return errors.New("turns and size must be positive")
	}
	if err := system.Docker(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "pool: its row is left out:", err)
		return nil
	}
	tmp, remove, err := system.Scratch(dir)
	if err != nil {
		return err
	}
	defer remove()
	runner, err := system.Build(ctx, tmp, "runner")
	if err != nil {
		return err
	}
	url, stop, err := system.Model(script)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	b := &bench{metrics: prometheus.NewRegistry(), size: size}
	b.sys, err = system.Start(ctx, system.Config{
		Dir: tmp, Docker: true, ModelURL: url, Metrics: b.metrics,
		Executor: executor.Config{Runner: runner, Pool: []string{fmt.Sprintf("%s=%d", architecture, size)}},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.sys.Close()) }()
	var posted, made []time.Duration
	for i := range turns + 1 { // the first one warms the services up
		t, err := b.session(ctx, i)
		if err != nil {
			return fmt.Errorf("session %d: %w", i, err)
		}
		if i > 0 {
			posted, made = append(posted, t.text.Sub(t.posted)), append(made, t.text.Sub(t.began))
		}
	}
	p50 := row.Percentile(posted, 0.5)
	return row.Write(out, row.Row{
		What:     "first turn of a new session from the warm pool, message posted to first text on the WebSocket, Docker, Claude Code",
		Target:   fmt.Sprintf("p50 under %.0f ms with an instant model", target),
		Measured: fmt.Sprintf("%.1f ms, of %d sessions", p50, turns),
		Against:  fmt.Sprintf("from the session's own POST on, with the WebSocket joined between: p50 %.1f ms, p99 %.1f ms", row.Percentile(made, 0.5), row.Percentile(made, 0.99)),
		Ratio:    p50 / row.Percentile(made, 0.5), P50Ms: p50, P99Ms: row.Percentile(posted, 0.99), OK: p50 < target,
		Command: "cd test && go run ./bench/pool",
		Note:    fmt.Sprintf("SPOOL_POOL=%s=%d, full before each; every sandbox was a pooled one; the pool is filled again beside the turn", architecture, size),
	})
}

// full waits until the pool is, and the engine has nothing beside it.
func (b *bench) full(ctx context.Context) error {
	return system.Until(ctx, fullWithin, "the pool is full", func() (bool, error) {
		if err := b.sys.Err(); err != nil {
			return false, err
		}
		n, err := b.pooled()
		if err != nil || n < b.size {
			return false, err
		}
		containers, err := b.sys.Containers(ctx)
		return containers == b.size, err
	})
}

// pooled is how many sandboxes wait in the pool, as the executor's metrics say.
func (b *bench) pooled() (int, error) {
	const name = "spool_executor_pool_sandboxes"
	families, err := b.metrics.Gather()
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
