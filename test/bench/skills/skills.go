// Package skills measures what an agent's skills add to the first turn of a new session in Docker: skills that the engine
// has never seen, and skills that it already has, each compared with an agent without skills in the same round.
package skills

import (
	"context"
	"fmt"
	"time"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// turnTimeout is the time limit of one session: its creation, its first turn and its deletion.
const turnTimeout = 2 * time.Minute

// Benchmark is the subcommand skills of the benchmark program. It measures the time that an agent's skills add to the
// first turn of a session.
type Benchmark struct {
	Rounds harness.PositiveCount `default:"10" help:"Measured rounds, each of three sessions."`
	Skills harness.PositiveCount `default:"20" help:"Skills of the agent."`
}

// testbed is a running Spool, and the number of skills that the measured agent has.
type testbed struct {
	sys    *system.System
	client *system.Client
	dir    string
	skills int
}

// roundTimes holds the durations that were measured in all rounds: of first turns without skills, with new skills, and
// with the same skills again, and of unpacking the skills without a session.
type roundTimes struct{ none, first, again, unpacked []time.Duration }

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	if !b.CanUseDocker(ctx, "its rows") {
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
	s := &testbed{dir: b.Dir, skills: int(m.Skills)}
	if s.sys, err = b.StartSystem(ctx, system.Config{Docker: true, ModelURL: url, Executor: executor.Config{Runner: runner}}); err != nil {
		return err
	}
	s.client = system.NewClient(s.sys.URL)
	defer s.client.HTTP.CloseIdleConnections()
	if err := s.applyAgent(ctx, plainAgent, nil); err != nil {
		return err
	}
	var t roundTimes
	for i := range int(m.Rounds) + 1 { // the first round warms the services up
		if err := s.runRound(ctx, i, &t); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
		if i == 0 {
			t = roundTimes{}
		}
	}
	for _, r := range t.toRows(s.skills) {
		if err := b.ReportRow(r); err != nil {
			return err
		}
	}
	return nil
}

// toRows returns the rows of docs/performance.md about an agent with the given number of skills.
func (t *roundTimes) toRows(skills int) []row.Row {
	none, first, again, raw := row.Percentile(t.none, 0.5), row.Percentile(t.first, 0.5), row.Percentile(t.again, 0.5), row.Percentile(t.unpacked, 0.5)
	what := "first turn of a new session, message posted to first text on the WebSocket, Docker, the built-in agent with %d skills that the engine %s"
	note := fmt.Sprintf("an agent without skills: p50 %.1f ms, p99 %.1f ms; 6 files and 100 KiB each", none, row.Percentile(t.none, 0.99))
	return []row.Row{{
		What: fmt.Sprintf(what, skills, "has not seen"), Measured: fmt.Sprintf("%+.1f ms over none, of %d sessions", first-none, len(t.first)),
		Against: fmt.Sprintf("the same ZIPs unpacked into a folder of the machine: p50 %.1f ms", raw), Ratio: (first - none) / raw,
		P50Ms: first, P99Ms: row.Percentile(t.first, 0.99), Note: note,
	}, {
		What: fmt.Sprintf(what, skills, "has"), Measured: fmt.Sprintf("%+.1f ms over none, of %d sessions", again-none, len(t.again)),
		Against: fmt.Sprintf("an agent without skills: p50 %.1f ms", none), Ratio: again / none,
		P50Ms: again, P99Ms: row.Percentile(t.again, 0.99), Note: note,
	}}
}
