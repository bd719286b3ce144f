// Command ready measures how long `spool up` takes until every part is ready: from the start of the real binary to
// the line that reports readiness, first in an empty data folder, which creates Postgres and the streams, and then
// in the same folder again.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The performance targets of this benchmark.
const (
	firstTarget = 8 * time.Second
	againTarget = 3 * time.Second
)

// patience is the time limit of one start or stop.
const patience = 30 * time.Second

func main() {
	rounds := flag.Int("rounds", 3, "data folders, each started in for the first time and again; the slowest start counts")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *rounds); err != nil {
		fmt.Fprintln(os.Stderr, "ready:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, dir string, rounds int) error {
	if rounds < 1 {
		return errors.New("rounds must be positive")
	}
	tmp, remove, err := system.Scratch(dir)
	if err != nil {
		return err
	}
	defer remove()
	spool, err := system.Build(ctx, tmp, "spool")
	if err != nil {
		return err
	}
	if _, err := system.Build(ctx, tmp, "runner"); err != nil { // looked for beside it
		return err
	}
	var first, again []time.Duration
	for i := range rounds {
		data := filepath.Join(tmp, fmt.Sprint("data-", i))
		for _, into := range []*[]time.Duration{&first, &again} {
			took, err := start(ctx, spool, data)
			if err != nil {
				return err
			}
			*into = append(*into, took)
		}
	}
	for _, m := range []struct {
		what    string
		target  time.Duration
		samples []time.Duration
	}{{"spool up to ready", againTarget, again}, {"spool up to ready, first time", firstTarget, first}} {
		slowest := slices.Max(m.samples)
		if err := row.Write(out, row.Row{
			What: m.what, Target: fmt.Sprintf("under %.0f s", m.target.Seconds()),
			Measured: fmt.Sprintf("%.2f s, the slowest of %d", slowest.Seconds(), len(m.samples)),
			P50Ms:    row.Percentile(m.samples, 0.5), OK: slowest < m.target, Command: "cd test && go run ./bench/ready",
			Note: "the binary's start included",
		}); err != nil {
			return err
		}
	}
	return nil
}

// start runs spool up until it is ready, returns how long that took, and ends it.
func start(ctx context.Context, spool, data string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, spool, "up", "--data", data, "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--mock-llm")
	var said strings.Builder
	cmd.Stderr = &said
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = patience
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	took = time.Since(began)
	if !strings.HasPrefix(line, "ready http://") {
		cancel()
		return 0, errors.Join(fmt.Errorf("spool up said %q: %s", line, said.String()), err, cmd.Wait())
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		return 0, err
	}
	if err := cmd.Wait(); err != nil {
		return 0, fmt.Errorf("spool up did not end well: %w: %s", err, said.String())
	}
	return took, nil
}
