// Command pool measures the first turn of a new session whose sandbox comes from the warm pool (Docker, Claude
// Code, and a model that answers at once), compared with the first turn of a Claude Code on bare stdio that has
// just started. Between two turns it waits until the pool is full again and the former session's sandbox has ended.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// target is the maximum time in milliseconds at the median.
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
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
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
	claude  string // its path
	dir     string
	url     string // of the model
}

func run(ctx context.Context, out io.Writer, dir string, turns, size int) (err error) {
	if turns < 1 || size < 1 {
		return errors.New("turns and size must be positive")
	}
	if err := system.Docker(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "pool: its row is left out:", err)
		return nil
	}
	claude, err := exec.LookPath("claude")
	if err != nil {
		fmt.Fprintln(os.Stderr, "pool: claude is not on the PATH, so its row is left out (make install brings it)")
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
	b := &bench{metrics: prometheus.NewRegistry(), size: size, claude: claude, dir: tmp, url: url}
	b.sys, err = system.Start(ctx, system.Config{
		Dir: tmp, Docker: true, ModelURL: url, Metrics: b.metrics,
		Executor: executor.Config{Runner: runner, Pool: []string{fmt.Sprintf("%s=%d", architecture, size)}},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.sys.Close()) }()
	var r results
	for i := range turns + 1 { // the first ones warm the services up
		plain, err := b.plain(ctx, i)
		if err != nil {
			return fmt.Errorf("bare process %d: %w", i, err)
		}
		t, err := b.session(ctx, i)
		if err != nil {
			return fmt.Errorf("session %d: %w", i, err)
		}
		if i > 0 {
			r.add(plain, t)
		}
	}
	return row.Write(out, r.row(size))
}

// results are all times of a kind. They start when the message is posted, except made, which starts at the
// session's own POST, and plain.
type results struct{ plain, made, ready, started, text []time.Duration }

func (r *results) add(plain time.Duration, t times) {
	r.plain = append(r.plain, plain)
	r.made = append(r.made, t.text.Sub(t.began))
	r.ready = append(r.ready, t.ready.Sub(t.posted))
	r.started = append(r.started, t.started.Sub(t.posted))
	r.text = append(r.text, t.text.Sub(t.posted))
}

func (r *results) row(size int) row.Row {
	p50, base := row.Percentile(r.text, 0.5), row.Percentile(r.plain, 0.5)
	return row.Row{
		What:     "first turn of a new session from the warm pool, message posted to first text on the WebSocket, Docker, Claude Code",
		Target:   fmt.Sprintf("p50 under %.0f ms with an instant model", target),
		Measured: fmt.Sprintf("%.1f ms, of %d sessions", p50, len(r.text)),
		Against:  fmt.Sprintf("the first turn of a Claude Code that has just started, on bare stdio outside of Docker: p50 %.1f ms, p99 %.1f ms", base, row.Percentile(r.plain, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(r.text, 0.99), OK: p50 < target,
		Command: "cd test && go run ./bench/pool",
		Note: fmt.Sprintf("sandbox taken after %.0f ms, agent at work after %.0f ms; from the session's own POST on %.1f ms; "+
			"SPOOL_POOL=%s=%d, full before each, and filled again beside the turn",
			row.Percentile(r.ready, 0.5), row.Percentile(r.started, 0.5), row.Percentile(r.made, 0.5), architecture, size),
	}
}

// full blocks until the pool is full and the engine has no other sandbox.
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

// pooled returns how many sandboxes wait in the pool, according to the executor's metrics.
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
