// Package snapshot measures the snapshot at the end of a turn, with NATS that syncs every message: of a workspace with
// many files, when the turn has changed no file and when it has changed one. A scripted model makes the built-in agent
// run commands. The times are those in the log. Every snapshot contains the agent's own records, which every turn
// changes.
package snapshot

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// modelScript is the script of the model server, in mockllm's format. It makes the agent run the shell command in the
// message.
const modelScript = `
rules:
  - match: {user: {regex: 'run the command (?s)(.*)'}}
    steps:
      - tool: {name: run_code, input: {language: bash, code: '{{match 1}}'}}
      - text: 'It said: {{result}}'
  - steps:
      - text: 'You said {{user}}.'
`

// turnTimeout is the time limit of a turn with its snapshot, and of a requested snapshot.
const turnTimeout = 3 * time.Minute

// maxChangedMs is the performance target for local sandboxes: the maximum of the median time, in milliseconds, of a
// snapshot after one file has changed.
const maxChangedMs = 50

// maxFiles is the maximum of the flag --files. With more files, the benchmark would measure the disk.
const maxFiles = 200_000

// Benchmark is the subcommand snapshot of the benchmark program. It measures snapshots of a workspace with many files.
type Benchmark struct {
	Files  int                   `default:"20000" help:"Files in the workspace, 100 to 200,000."`
	Rounds harness.PositiveCount `default:"8" help:"Turns of each kind."`
}

// Validate checks the flags of the benchmark. kong, the parser of the command line, calls it.
func (m *Benchmark) Validate() error {
	if m.Files < 100 || m.Files > maxFiles {
		return fmt.Errorf("--files must be 100 to %d", maxFiles)
	}
	return nil
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	runner, err := b.BuildRunner(ctx)
	if err != nil {
		return err
	}
	url, err := b.StartModel(modelScript)
	if err != nil {
		return err
	}
	for _, provider := range []string{"local", "Docker"} {
		docker := provider == "Docker"
		if docker && !b.CanUseDocker(ctx, "the rows of Docker") {
			continue
		}
		err := b.RunPart(provider, func(b *harness.Bench) error {
			sys, err := b.StartSystem(ctx, system.Config{Docker: docker, ModelURL: url, Executor: executor.Config{Runner: runner}})
			if err != nil {
				return err
			}
			return m.measureProvider(ctx, b, sys, provider)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// measureProvider measures snapshots with one sandbox provider (local or Docker), and reports the rows of
// docs/performance.md.
func (m *Benchmark) measureProvider(ctx context.Context, b *harness.Bench, sys *system.System, provider string) (err error) {
	s, err := newSession(ctx, sys)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	first, err := s.takeTurn(ctx, "run the command "+createFilesCommand(m.Files))
	if err != nil {
		return err
	}
	if int(first.Files) < m.Files {
		return fmt.Errorf("the first snapshot has %d files, the workspace has %d", first.Files, m.Files)
	}
	var same, changed snapshotSamples
	for i := range int(m.Rounds) + 1 { // the first turns read files again that were too new to rely on their times
		one, err := s.takeTurn(ctx, fmt.Sprintf("run the command echo changed %d > d0/f0", i))
		if err != nil {
			return err
		}
		none, err := s.takeTurn(ctx, fmt.Sprint("number ", i))
		if err != nil {
			return err
		}
		if i > 0 {
			same, changed = append(same, none), append(changed, one)
		}
	}
	var idle snapshotSamples
	for range m.Rounds {
		d, err := s.requestSnapshot(ctx)
		if err != nil {
			return err
		}
		idle = append(idle, d)
	}
	const turn = "snapshot at the end of a turn, "
	const records = "; with the agent's own records, which every turn changes"
	one := m.snapshotRow(provider, turn+"one of %d files changed", changed, first, records)
	if provider == "local" {
		one.Target, one.OK = fmt.Sprintf("under %d ms", maxChangedMs), one.P50Ms < maxChangedMs
	}
	for _, r := range []row.Row{
		m.snapshotRow(provider, turn+"none of %d files changed", same, first, records),
		one,
		m.snapshotRow(provider, "snapshot on request, %d files, nothing changed at all", idle, first, ""),
	} {
		if err := b.ReportRow(r); err != nil {
			return err
		}
	}
	return nil
}

// snapshotSamples are the events of the measured snapshots of one kind.
type snapshotSamples []events.WorkspaceSynced

// durations returns the time that each of the snapshots took.
func (s snapshotSamples) durations() (all []time.Duration) {
	for _, d := range s {
		all = append(all, time.Duration(d.DurationMs)*time.Millisecond)
	}
	return all
}

// snapshotRow returns the row of docs/performance.md about one kind of snapshots. what names the kind; first is the session's
// first snapshot, with which the others are compared.
func (m *Benchmark) snapshotRow(provider, what string, s snapshotSamples, first events.WorkspaceSynced, note string) row.Row {
	p50 := row.Percentile(s.durations(), 0.5)
	stored := uint64(0)
	for _, d := range s {
		stored += d.NewBytes / uint64(len(s))
	}
	return row.Row{
		What:     fmt.Sprintf(what, m.Files) + ", " + provider,
		Measured: fmt.Sprintf("%.0f ms and %.1f kB of content stored, of %d", p50, float64(stored)/1e3, len(s)),
		Against:  fmt.Sprintf("the first snapshot, of all: %d ms, %.1f MB of files", first.DurationMs, float64(first.Bytes)/1e6),
		Ratio:    p50 / float64(max(first.DurationMs, 1)), P50Ms: p50, P99Ms: row.Percentile(s.durations(), 0.99),
		Note: "NATS syncs every message" + note,
	}
}

// createFilesCommand returns a shell command that creates a number of files of 0 to 2,000 bytes, a hundred in each
// folder.
func createFilesCommand(files int) string {
	script := []string{
		fmt.Sprintf("for d in $(seq 0 %d); do mkdir d$d; for f in $(seq 0 99); do printf '%%*d' $((f * 20)) $((d * 100 + f)) > d$d/f$f; done; done", files/100-1),
		"find . -type f -exec touch -d '1 hour ago' {} +", // so that snapshots rely on their times
		"find . -type f | wc -l",
	}
	return strings.Join(script, "; ")
}
