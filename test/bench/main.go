// Command bench runs the benchmarks, one subcommand each, and collects their rows into docs/performance.md.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/pkg/daemon"
	appendlog "github.com/spoolhq/spool/test/bench/append"
	"github.com/spoolhq/spool/test/bench/approvals"
	"github.com/spoolhq/spool/test/bench/egress"
	"github.com/spoolhq/spool/test/bench/fanout"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/heads"
	"github.com/spoolhq/spool/test/bench/idle"
	"github.com/spoolhq/spool/test/bench/inspector"
	"github.com/spoolhq/spool/test/bench/latency"
	"github.com/spoolhq/spool/test/bench/peer"
	"github.com/spoolhq/spool/test/bench/pool"
	"github.com/spoolhq/spool/test/bench/projector"
	"github.com/spoolhq/spool/test/bench/ready"
	"github.com/spoolhq/spool/test/bench/skills"
	"github.com/spoolhq/spool/test/bench/snapshot"
	"github.com/spoolhq/spool/test/bench/turn"
)

// commandLine is the command line of the benchmark program, for kong, which parses it. A subcommand that implements
// harness.Benchmark measures something; scripts/bench runs all of these.
type commandLine struct {
	Dir string `placeholder:"FOLDER" help:"Folder for the data, on the disk to measure; the system's temporary folder by default."`

	Append    appendlog.Benchmark `cmd:"" help:"Rate of appends to the log, compared with raw guarded publishes; CPU cost of commits of version 2."`
	Approvals approvals.Benchmark `cmd:"" help:"Time from a person's decision to the agent's next action; cost of the permission policy."`
	Egress    egress.Benchmark    `cmd:"" help:"Latency that the egress proxy adds to requests and streamed tokens."`
	Fanout    fanout.Benchmark    `cmd:"" help:"Age of text and events on WebSockets of many active sessions."`
	Heads     heads.Benchmark     `cmd:"" help:"CPU cost of signed heads."`
	Idle      idle.Benchmark      `cmd:"" help:"Memory and goroutines of idle sessions and WebSockets."`
	Inspector inspector.Benchmark `cmd:"" help:"The inspector in Chromium: first paint, scrolling, memory, and the cost of text in flight."`
	Latency   latency.Benchmark   `cmd:"" help:"Age of text on the WebSocket of an idle system."`
	Peer      peer.Benchmark      `cmd:"" help:"OpenCode through Spool, through sandbox-agent and without either. Not part of all, because npm installs sandbox-agent."`
	Pool      pool.Benchmark      `cmd:"" help:"First turn of a session from the warm pool."`
	Projector projector.Benchmark `cmd:"" help:"Rate of the projector, live and in a rebuild; past states and forks over REST."`
	Ready     ready.Benchmark     `cmd:"" help:"Time from the start of spool up until it is ready."`
	Skills    skills.Benchmark    `cmd:"" help:"Time that an agent's skills add to the first turn of a session."`
	Snapshot  snapshot.Benchmark  `cmd:"" help:"Snapshots of a workspace with many files."`
	Turn      turn.Benchmark      `cmd:"" help:"Later turns of a session, compared with the bare agents."`

	All     allCommand     `cmd:"" help:"Run benchmarks with their default flags, each in a process of its own, and make the page of their rows. It fails after all of them if one failed."`
	Collect collectCommand `cmd:"" help:"Make the page of rows on standard input."`

	FanoutClients fanout.ClientsCommand `cmd:"" name:"fanout-clients" hidden:"" help:"Clients of the benchmark fanout."`

	FanoutRunners fanout.RunnersCommand `cmd:"" name:"fanout-runners" hidden:"" help:"Runners of the benchmark fanout."`

	NATS        harness.NATSCommand `cmd:"" name:"nats" hidden:"" help:"NATS server of the benchmarks idle and fanout."`
	IdleSockets idle.SocketsCommand `cmd:"" name:"idle-sockets" hidden:"" help:"WebSockets of the benchmark idle."`
}

// standardStreams are the standard input, output and error of the benchmark program.
type standardStreams struct {
	in       io.Reader
	out, err io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := runCommandLine(ctx, os.Args[1:], &standardStreams{os.Stdin, os.Stdout, os.Stderr}); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// runCommandLine parses the arguments of the benchmark program and runs the subcommand that they name.
func runCommandLine(ctx context.Context, args []string, std *standardStreams) error {
	var c commandLine
	parser, err := newParser(&c)
	if err != nil {
		return err
	}
	parsed, err := parser.Parse(args)
	if err != nil {
		return err
	}
	if m, ok := benchmarkOf(parsed.Selected()); ok {
		daemon.SetGCPercent() // services run in this process
		return harness.Run(ctx, parsed.Selected().Name, m, c.Dir, std.out, std.err)
	}
	parsed.BindTo(ctx, (*context.Context)(nil))
	return parsed.Run(std)
}

// newParser returns the parser of the command line, which sets the fields of c.
func newParser(c *commandLine) (*kong.Kong, error) {
	return kong.New(c, kong.Name("bench"), kong.Description("Benchmarks of Spool. Every benchmark prints rows as lines of JSON."))
}

// benchmarkOf returns the benchmark that a subcommand runs; ok is false if the subcommand measures nothing.
func benchmarkOf(n *kong.Node) (m harness.Benchmark, ok bool) {
	m, ok = n.Target.Addr().Interface().(harness.Benchmark)
	return m, ok
}

// allCommand is the subcommand all of the benchmark program. It runs benchmarks, each in a process of its own.
type allCommand struct {
	Page  string   `placeholder:"FILE" help:"Write the page to this file; it is printed by default."`
	Names []string `arg:"" optional:"" help:"Benchmarks to run; all by default."`
}

// Run runs the subcommand. kong, the parser of the command line, calls it. Each benchmark has a process of its own,
// because some measure the memory and the processor time of their process.
func (c *allCommand) Run(ctx context.Context, parsed *kong.Context, std *standardStreams) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var known, names []string
	for _, n := range parsed.Model.Children {
		m, ok := benchmarkOf(n)
		if !ok {
			continue
		}
		known = append(known, n.Name)
		if o, ok := m.(interface{ Optional() bool }); !ok || !o.Optional() {
			names = append(names, n.Name)
		}
	}
	if len(c.Names) > 0 {
		names = c.Names
	}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return fmt.Errorf("unknown benchmark %q", name)
		}
	}
	var rows bytes.Buffer
	var failures []error
	for _, name := range names {
		cmd := exec.CommandContext(ctx, self, name) //nolint:gosec // this program
		cmd.Stdout, cmd.Stderr = io.MultiWriter(std.out, &rows), std.err
		// The benchmark stops its servers before it exits.
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		if err := cmd.Run(); err != nil {
			failures = append(failures, fmt.Errorf("%s: %w", name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	// The rows of a benchmark that failed a check are rows too.
	return errors.Join(append(failures, writePage(c.Page, &rows, std.out))...)
}

// collectCommand is the subcommand collect of the benchmark program. It reads the rows that benchmarks have printed,
// and writes docs/performance.md.
type collectCommand struct {
	Page   string `arg:"" optional:"" help:"File for the page; it is printed by default."`
	Update bool   `help:"Replace the rows of the same name in the page, add new ones, and keep all others. Each row says when it was measured."`
}

// Run runs the subcommand. kong, the parser of the command line, calls it.
func (c *collectCommand) Run(std *standardStreams) error {
	if c.Update {
		return updatePage(c.Page, std.in, time.Now())
	}
	return writePage(c.Page, std.in, std.out)
}
