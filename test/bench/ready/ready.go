// Package ready measures how long `spool up` takes until all services are ready: from the start of the real binary to
// the line that reports readiness, first in an empty data folder, which creates Postgres and the streams, and then
// in the same folder again.
package ready

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The performance targets of this benchmark.
const (
	// maxFirstStart is the performance target: the maximum time until `spool up` is ready in a new data folder.
	maxFirstStart = 8 * time.Second
	// maxLaterStart is the performance target: the maximum time until `spool up` is ready in a data folder that it has
	// used before.
	maxLaterStart = 3 * time.Second
)

// startTimeout is the time limit for `spool up` to become ready, and for it to stop.
const startTimeout = 30 * time.Second

// Benchmark is the subcommand ready of the benchmark program. It measures the time from the start of `spool up` until
// it is ready.
type Benchmark struct {
	Rounds harness.PositiveCount `default:"3" help:"Data folders, in each of which Spool starts twice; the slowest start counts."`
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	spool, err := system.BuildCommand(ctx, b.Dir, "spool")
	if err != nil {
		return err
	}
	if _, err := b.BuildRunner(ctx); err != nil { // spool looks for the runner beside its own binary
		return err
	}
	var first, again []time.Duration
	for i := range m.Rounds {
		data := filepath.Join(b.Dir, fmt.Sprint("data-", i))
		for _, into := range []*[]time.Duration{&first, &again} {
			took, err := timeStart(ctx, spool, data)
			if err != nil {
				return err
			}
			*into = append(*into, took)
		}
	}
	for _, kind := range []struct {
		what    string
		target  time.Duration
		samples []time.Duration
	}{{"spool up to ready", maxLaterStart, again}, {"spool up to ready, first time", maxFirstStart, first}} {
		slowest := slices.Max(kind.samples)
		if err := b.ReportRow(row.Row{
			What: kind.what, Target: fmt.Sprintf("under %.0f s", kind.target.Seconds()),
			Measured: fmt.Sprintf("%.2f s, the slowest of %d", slowest.Seconds(), len(kind.samples)),
			P50Ms:    row.Percentile(kind.samples, 0.5), OK: slowest < kind.target,
			Note: "with the start of the binary",
		}); err != nil {
			return err
		}
	}
	return nil
}

// timeStart starts `spool up` with a data folder, and stops it when it is ready. It returns the time from the start
// until Spool was ready. spool is the path of the program.
func timeStart(ctx context.Context, spool, data string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*startTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, spool, "up", "--data", data, "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--mock-llm")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = startTimeout
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	started := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	took = time.Since(started)
	if !strings.HasPrefix(line, "ready http://") {
		cancel()
		return 0, errors.Join(fmt.Errorf("spool up printed %q, want a line that begins with ready: %s", line, stderr.String()), err, cmd.Wait())
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		return 0, err
	}
	if err := cmd.Wait(); err != nil {
		return 0, fmt.Errorf("stop spool up: %w: %s", err, stderr.String())
	}
	return took, nil
}
