// Command snapshot measures the snapshot at the end of a turn, over NATS that
// syncs every message: of a workspace with many files, when the turn has left
// them all alone and when it has changed one. The built-in agent is told by a
// scripted model what to do; times are those that the log has. The agent's own
// records, which every turn changes, are in each snapshot.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// script runs what it is told to.
const script = `
rules:
  - match: {user: {regex: 'run the command (?s)(.*)'}}
    steps:
      - tool: {name: run_code, input: {language: bash, code: '{{match 1}}'}}
      - text: 'It said: {{result}}'
  - steps:
      - text: 'You said {{user}}.'
`

// turnWithin bounds a turn and its snapshot.
const turnWithin = 3 * time.Minute

// maxFiles bounds the workspace: more would be a test of the disk.
const maxFiles = 200_000

func main() {
	var b bench
	flag.IntVar(&b.files, "files", 20_000, "files in the workspace")
	flag.IntVar(&b.rounds, "rounds", 8, "turns of each kind")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := b.run(ctx, os.Stdout, *dir); err != nil {
		fmt.Fprintln(os.Stderr, "snapshot:", err)
		os.Exit(1)
	}
}

type bench struct {
	files, rounds int
	tmp           string
	runner, url   string
}

func (b *bench) run(ctx context.Context, out io.Writer, dir string) (err error) {
	if b.files < 100 || b.files > maxFiles || b.rounds < 1 {
		return fmt.Errorf("files must be 100 to %d, rounds positive", maxFiles)
	}
	tmp, remove, err := system.Scratch(dir)
	if err != nil {
		return err
	}
	defer remove()
	b.tmp = tmp
	if b.runner, err = system.Build(ctx, tmp, "runner"); err != nil {
		return err
	}
	url, stop, err := system.Model(script)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	b.url = url
	if err := b.at(ctx, out, "local"); err != nil {
		return fmt.Errorf("local: %w", err)
	}
	if err := system.Docker(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "snapshot: the rows of Docker are left out:", err)
		return nil
	}
	if err := b.at(ctx, out, "Docker"); err != nil {
		return fmt.Errorf("docker: %w", err)
	}
	return nil
}

// at measures in one kind of sandboxes.
func (b *bench) at(ctx context.Context, out io.Writer, place string) (err error) {
	sys, err := system.Start(ctx, system.Config{
		Dir: filepath.Join(b.tmp, place), Docker: place == "Docker", ModelURL: b.url, Executor: executor.Config{Runner: b.runner},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	s, err := newSession(ctx, sys)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	first, err := s.turn(ctx, "run the command "+fill(b.files))
	if err != nil {
		return err
	}
	if int(first.Files) < b.files {
		return fmt.Errorf("the first snapshot has %d files, not the %d that were made", first.Files, b.files)
	}
	var same, changed samples
	for i := range b.rounds + 1 { // the first ones read what was too new to be trusted
		one, err := s.turn(ctx, fmt.Sprintf("run the command echo changed %d > d0/f0", i))
		if err != nil {
			return err
		}
		none, err := s.turn(ctx, fmt.Sprint("number ", i))
		if err != nil {
			return err
		}
		if i > 0 {
			same, changed = append(same, none), append(changed, one)
		}
	}
	var idle samples
	for range b.rounds {
		d, err := s.sync(ctx)
		if err != nil {
			return err
		}
		idle = append(idle, d)
	}
	const at = "snapshot at the end of a turn, "
	const records = "; the agent's own records, changed by every turn, are in it"
	for _, r := range []row.Row{
		b.row(place, at+"none of %d files changed", same, first, records),
		b.row(place, at+"one of %d files changed", changed, first, records),
		b.row(place, "snapshot on request, %d files, nothing changed at all", idle, first, ""),
	} {
		if err := row.Write(out, r); err != nil {
			return err
		}
	}
	return nil
}

// samples are snapshots of one kind.
type samples []events.WorkspaceSynced

// times are how long they took.
func (s samples) times() (all []time.Duration) {
	for _, d := range s {
		all = append(all, time.Duration(d.DurationMs)*time.Millisecond)
	}
	return all
}

func (b *bench) row(place, what string, s samples, first events.WorkspaceSynced, note string) row.Row {
	p50 := row.Percentile(s.times(), 0.5)
	stored := uint64(0)
	for _, d := range s {
		stored += d.NewBytes / uint64(len(s))
	}
	return row.Row{
		What:     fmt.Sprintf(what, b.files) + ", " + place,
		Measured: fmt.Sprintf("%.0f ms and %.1f kB of content stored, of %d", p50, float64(stored)/1e3, len(s)),
		Against:  fmt.Sprintf("the first snapshot, of all: %d ms, %.1f MB of files", first.DurationMs, float64(first.Bytes)/1e6),
		Ratio:    p50 / float64(max(first.DurationMs, 1)), P50Ms: p50, P99Ms: row.Percentile(s.times(), 0.99),
		Command: "cd test && go run ./bench/snapshot",
		Note:    "NATS syncs every message" + note,
	}
}

// fill is a command that makes files of 0 to 2,000 bytes, a hundred in a folder.
func fill(files int) string {
	script := []string{
		fmt.Sprintf("for d in $(seq 0 %d); do mkdir d$d; for f in $(seq 0 99); do printf '%%*d' $((f * 20)) $((d * 100 + f)) > d$d/f$f; done; done", files/100-1),
		"find . -type f -exec touch -d '1 hour ago' {} +", // so that their times can be trusted
		"find . -type f | wc -l",
	}
	return strings.Join(script, "; ")
}
