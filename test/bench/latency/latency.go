// Package latency measures the age of a piece of an agent's text when a WebSocket receives it, on an otherwise idle
// system: a model that stamps every piece with the time, the built-in agent in a local sandbox, its runner with its
// coalescing, executor, DELTAS, projector, Postgres and gateway.
package latency

import (
	"context"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The performance targets, in milliseconds.
const (
	p50Target = 30
	p99Target = 100
)

// Benchmark is the subcommand latency. It measures the age of text when a client of an idle system receives it.
type Benchmark struct {
	Pieces harness.PositiveCount `default:"1500" help:"Pieces of text in the measured turn, 5 to 35 ms apart."`
}

// Measure implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	runner, err := b.Runner(ctx)
	if err != nil {
		return err
	}
	llm := &model{pieces: warmUp}
	url, stop, err := llm.serve()
	if err != nil {
		return err
	}
	b.Cleanup(stop)
	sys, err := b.System(ctx, system.Config{Executor: executor.Config{Runner: runner, OpenAIBaseURL: url, OpenAIKey: "bench"}})
	if err != nil {
		return err
	}
	ages, err := measure(ctx, sys, llm, int(m.Pieces))
	if err != nil {
		return err
	}
	r := row.Row{
		What: "runner's line to WebSocket, idle", Target: fmt.Sprintf("p50 under %d ms, p99 under %d ms", p50Target, p99Target),
		P50Ms: row.Percentile(ages, 0.5), P99Ms: row.Percentile(ages, 0.99),
		Note: "from the time at which the model sends a piece, so with the agent and the runner's 20 ms of coalescing; pieces 5 to 35 ms apart",
	}
	r.Measured = fmt.Sprintf("%.1f ms, of %d pieces", r.P50Ms, len(ages))
	r.OK = r.P50Ms < p50Target && r.P99Ms < p99Target
	return b.Report(r)
}

// warmUp is the number of pieces of text of the first turn, which starts the sandbox and the agent and is not measured.
const warmUp = 50

// measure runs a warm-up turn and the measured turn. It returns the age of every piece of the measured turn.
func measure(ctx context.Context, sys *system.System, llm *model, pieces int) (ages []time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute+time.Duration(pieces)*maxPause)
	defer cancel()
	c := system.NewClient(sys.URL)
	session, err := c.Create(ctx, system.SessionSpec{Architecture: "spool"})
	if err != nil {
		return nil, err
	}
	socket, err := c.Join(ctx, session)
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	var stamps system.Stamps
	for _, n := range []int{warmUp, pieces} {
		llm.set(n)
		ages = nil
		_, err := c.TakeTurn(ctx, socket, session, "go on", func(w events.Wire, received time.Time) error {
			more, err := stamps.Add(w, received)
			ages = append(ages, more...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if stamps.Pieces != warmUp+pieces {
		return nil, fmt.Errorf("received %d pieces, the model sent %d", stamps.Pieces, warmUp+pieces)
	}
	return ages, nil
}
