// Command skills measures what an agent's skills add to the first turn of a new
// session in Docker: twenty that the engine has never seen, and twenty that lie
// there already, each against an agent without any in the same round.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// script answers everything at once.
const script = `
rules:
  - steps:
      - text: 'You said {{user}}.'
`

const turnWithin = 2 * time.Minute

func main() {
	rounds := flag.Int("rounds", 10, "measured rounds, each of three sessions")
	skills := flag.Int("skills", 20, "skills of the agent")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *rounds, *skills); err != nil {
		fmt.Fprintln(os.Stderr, "skills:", err)
		os.Exit(1)
	}
}

// bench is a running Spool and the skills that are pushed to it.
type bench struct {
	sys    *system.System
	client *system.Client
	dir    string
	skills int
}

// times are of all measured rounds.
type times struct{ none, first, again, unpacked []time.Duration }

func run(ctx context.Context, out io.Writer, dir string, rounds, skills int) (err error) {
	if rounds < 1 || skills < 1 {
		return errors.New("rounds and skills must be positive")
	}
	if err := system.Docker(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "skills: its rows are left out:", err)
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
	b := &bench{dir: tmp, skills: skills}
	b.sys, err = system.Start(ctx, system.Config{Dir: tmp, Docker: true, ModelURL: url, Executor: executor.Config{Runner: runner}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.sys.Close()) }()
	b.client = system.NewClient(b.sys.URL)
	defer b.client.HTTP.CloseIdleConnections()
	if err := b.agent(ctx, plain, nil); err != nil {
		return err
	}
	var t times
	for i := range rounds + 1 { // the first one warms the services up
		if err := b.round(ctx, i, &t); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
		if i == 0 {
			t = times{}
		}
	}
	for _, r := range t.rows(skills) {
		if err := row.Write(out, r); err != nil {
			return err
		}
	}
	return nil
}

func (t *times) rows(skills int) []row.Row {
	none, first, again, raw := row.Percentile(t.none, 0.5), row.Percentile(t.first, 0.5), row.Percentile(t.again, 0.5), row.Percentile(t.unpacked, 0.5)
	what := "first turn of a new session, message posted to first text on the WebSocket, Docker, the built-in agent with %d skills that the engine %s"
	note := fmt.Sprintf("an agent without skills: p50 %.1f ms, p99 %.1f ms; 6 files and 100 KiB each", none, row.Percentile(t.none, 0.99))
	const command = "cd test && go run ./bench/skills"
	return []row.Row{{
		What: fmt.Sprintf(what, skills, "has not seen"), Measured: fmt.Sprintf("+%.1f ms over none, of %d sessions", first-none, len(t.first)),
		Against: fmt.Sprintf("the same ZIPs unpacked into a folder of the machine: p50 %.1f ms", raw), Ratio: (first - none) / raw,
		P50Ms: first, P99Ms: row.Percentile(t.first, 0.99), Command: command, Note: note,
	}, {
		What: fmt.Sprintf(what, skills, "has"), Measured: fmt.Sprintf("%+.1f ms over none, of %d sessions", again-none, len(t.again)),
		Against: fmt.Sprintf("an agent without skills: p50 %.1f ms", none), Ratio: again / none,
		P50Ms: again, P99Ms: row.Percentile(t.again, 0.99), Command: command, Note: note,
	}}
}
