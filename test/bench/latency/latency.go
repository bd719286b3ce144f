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
	// maxP50Ms is the performance target: the maximum median age, in milliseconds, of a piece of text when the client
	// receives it.
	maxP50Ms = 30
	// maxP99Ms is the performance target: the maximum of the 99th percentile of the age, in milliseconds, of a piece of
	// text when the client receives it.
	maxP99Ms = 100
)

// Benchmark is the subcommand latency of the benchmark program. In a system without other load, it measures the age of
// a piece of the agent's text when a client receives it.
type Benchmark struct {
	Pieces harness.PositiveCount `default:"1500" help:"Pieces of text in the measured turn, 5 to 35 ms apart."`
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	runner, err := b.BuildRunner(ctx)
	if err != nil {
		return err
	}
	llm := &fakeModel{pieces: warmUpPieces}
	url, stop, err := llm.start()
	if err != nil {
		return err
	}
	b.Cleanup(stop)
	sys, err := b.StartSystem(ctx, system.Config{Executor: executor.Config{Runner: runner, OpenAIBaseURL: url, OpenAIKey: "bench"}})
	if err != nil {
		return err
	}
	ages, err := measureAges(ctx, sys, llm, int(m.Pieces))
	if err != nil {
		return err
	}
	r := row.Row{
		What: "runner's line to WebSocket, idle", Target: fmt.Sprintf("p50 under %d ms, p99 under %d ms", maxP50Ms, maxP99Ms),
		P50Ms: row.Percentile(ages, 0.5), P99Ms: row.Percentile(ages, 0.99),
		Note: "from the time at which the model sends a piece, so with the agent and the runner's 20 ms of coalescing; pieces 5 to 35 ms apart",
	}
	r.Measured = fmt.Sprintf("%.1f ms, of %d pieces", r.P50Ms, len(ages))
	r.OK = r.P50Ms < maxP50Ms && r.P99Ms < maxP99Ms
	return b.ReportRow(r)
}

// warmUpPieces is the number of pieces of text of the first turn, which starts the sandbox and the agent and is not
// measured.
const warmUpPieces = 50

// measureAges takes a first turn, which is not measured, and a second turn in which the model sends a number of pieces
// of text. It returns the age of every piece of the second turn when the client receives it.
func measureAges(ctx context.Context, sys *system.System, llm *fakeModel, pieces int) (ages []time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute+time.Duration(pieces)*maxPieceInterval)
	defer cancel()
	c := system.NewClient(sys.URL)
	session, err := c.CreateSession(ctx, system.SessionSpec{Architecture: "spool"})
	if err != nil {
		return nil, err
	}
	socket, err := c.JoinSession(ctx, session)
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	var stamps system.TimestampChecker
	for _, n := range []int{warmUpPieces, pieces} {
		llm.setPieces(n)
		ages = nil
		_, err := c.TakeTurn(ctx, socket, session, "go on", func(w events.WireEvent, received time.Time) error {
			more, err := stamps.CheckEvent(w, received)
			ages = append(ages, more...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if stamps.Pieces != warmUpPieces+pieces {
		return nil, fmt.Errorf("received %d pieces, the model sent %d", stamps.Pieces, warmUpPieces+pieces)
	}
	return ages, nil
}
