// Command latency measures the age of a piece of an agent's text when a WebSocket receives it, on an otherwise idle
// system: a model that stamps every piece with the time, the built-in agent in a local sandbox, its runner with its
// coalescing, executor, DELTAS, projector, Postgres, LIVE and gateway.
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

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The performance targets, in milliseconds.
const (
	p50Target = 30
	p99Target = 100
)

func main() {
	pieces := flag.Int("pieces", 1500, "pieces of text in the measured turn, 5 to 35 ms apart")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *pieces); err != nil {
		fmt.Fprintln(os.Stderr, "latency:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, dir string, pieces int) (err error) {
	if pieces < 1 {
		return errors.New("pieces must be positive")
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
	m := &model{pieces: warmUp}
	url, stop, err := m.serve()
	if err != nil {
		return err
	}
	defer stop()
	sys, err := system.Start(ctx, system.Config{
		Dir: tmp, Executor: executor.Config{Runner: runner, OpenAIBaseURL: url, OpenAIKey: "bench"},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	samples, err := measure(ctx, sys, m, pieces)
	if err != nil {
		return err
	}
	r := row.Row{
		What: "runner's line to WebSocket, idle", Target: fmt.Sprintf("p50 under %d ms, p99 under %d ms", p50Target, p99Target),
		P50Ms: row.Percentile(samples, 0.5), P99Ms: row.Percentile(samples, 0.99), Command: "cd test && go run ./bench/latency",
		Note: "from the model's piece, so with the agent and the runner's 20 ms of coalescing; pieces 5 to 35 ms apart",
	}
	r.Measured = fmt.Sprintf("%.1f ms, of %d pieces", r.P50Ms, len(samples))
	r.OK = r.P50Ms < p50Target && r.P99Ms < p99Target
	return row.Write(out, r)
}

// warmUp is the number of pieces of the first turn, which starts sandbox and agent and is not measured.
const warmUp = 50

// measure runs a warm-up turn and the measured turn.
func measure(ctx context.Context, sys *system.System, m *model, pieces int) ([]time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute+time.Duration(pieces)*longest)
	defer cancel()
	c := system.NewClient(sys.URL)
	session, err := c.Create(ctx, "spool")
	if err != nil {
		return nil, err
	}
	s, err := c.Join(ctx, session)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var stamps system.Stamps
	if _, err := turn(ctx, c, s, session, &stamps); err != nil {
		return nil, err
	}
	m.set(pieces)
	samples, err := turn(ctx, c, s, session, &stamps)
	if err == nil && stamps.Pieces != warmUp+pieces {
		err = fmt.Errorf("%d pieces were shown, %d were sent", stamps.Pieces, warmUp+pieces)
	}
	return samples, err
}

// turn posts a message and returns the age of every piece of its answer.
func turn(ctx context.Context, c *system.Client, s *system.Socket, session string, stamps *system.Stamps) ([]time.Duration, error) {
	execution, err := c.Post(ctx, session, "go on")
	if err != nil {
		return nil, err
	}
	var samples []time.Duration
	for {
		w, at, err := s.Next(ctx)
		if err != nil {
			return nil, err
		}
		late, err := stamps.Add(w, at)
		if err != nil {
			return nil, err
		}
		samples = append(samples, late...)
		if w.ExecutionID == execution && events.Terminal(w.Type) {
			if w.Type != (events.ExecutionCompleted{}).EventType() {
				return nil, fmt.Errorf("the turn ended with %s: %s", w.Type, w.Data)
			}
			return samples, nil
		}
	}
}
