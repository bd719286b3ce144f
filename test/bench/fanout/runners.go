package fanout

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/harness"
)

// runnersSubcommand is the name of the hidden subcommand RunnersCommand, which the benchmark runs in a child process.
const runnersSubcommand = "fanout-runners"

// runnerControl controls the fake runners of all sessions, which are in this process or in another one.
type runnerControl interface {
	// awaitQueries blocks until every fake runner has its query.
	awaitQueries(ctx context.Context) error
	// startWriting makes the fake runners write lines, the first ones at the time started.
	startWriting(started time.Time) error
	// latenessP99Ms returns the 99th percentile of how late lines were written, in milliseconds.
	latenessP99Ms() (int, error)
}

// runnersConfig is the configuration of the child process that runs the fake runners, which reads it as its first line
// of input. The process prints {} when every runner has its query. Its second line of input is the time at which the
// runners begin to write; the third line requests their lateness.
type runnersConfig struct {
	Socket          string
	Mode            string
	Blocks, Runners int
}

// runnersProcess is the child process that runs the fake runners of all sessions. It implements runnerControl.
type runnersProcess struct{ *jsonProcess }

// startRunners starts the child process that runs the fake runners, and returns it with the sandbox provider that uses
// these runners. The process ends when the benchmark ends.
func startRunners(ctx context.Context, b *harness.Bench, cfg runnersConfig) (*runnersProcess, *fake.Provider, error) {
	dir, err := os.MkdirTemp("", "runners")
	if err != nil {
		return nil, nil, err
	}
	b.Cleanup(func() error { return os.RemoveAll(dir) })
	cfg.Socket = filepath.Join(dir, "socket")
	started, err := startProcess(ctx, b, runnersSubcommand)
	if err != nil {
		return nil, nil, err
	}
	p := &runnersProcess{started}
	if err := p.exchange(cfg, new(struct{})); err != nil { // it listens
		return nil, nil, err
	}
	return p, fake.NewRemoteProvider(cfg.Socket), nil
}

// exchange writes line to the process, as JSON, and decodes the next line that the process prints into into.
func (p *runnersProcess) exchange(line, into any) error {
	if err := errors.Join(p.in.Encode(line), p.out.Decode(into)); err != nil {
		return fmt.Errorf("process of the runners: %w", err)
	}
	return nil
}

// awaitQueries implements runnerControl.
func (p *runnersProcess) awaitQueries(context.Context) error {
	return p.exchange(struct{}{}, new(struct{})) // the process ends with the context
}

// startWriting implements runnerControl.
func (p *runnersProcess) startWriting(started time.Time) error {
	return p.exchange(started, new(struct{}))
}

// latenessP99Ms implements runnerControl.
func (p *runnersProcess) latenessP99Ms() (ms int, err error) {
	err = p.exchange(struct{}{}, &ms)
	return ms, err
}

// RunnersCommand is the hidden subcommand fanout-runners of the benchmark program. It runs the fake runners of all
// sessions, and exits at the end of its input.
type RunnersCommand struct{}

// Run runs the subcommand. kong, the parser of the command line, calls it.
func (RunnersCommand) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), json.NewEncoder(os.Stdout)
	var cfg runnersConfig
	if err := in.Decode(&cfg); err != nil {
		return err
	}
	s := newRunnerScript(cfg.Mode, cfg.Blocks, cfg.Runners)
	l, err := net.Listen("unix", cfg.Socket)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return fake.ServeRunners(ctx, l, s.playTurn) })
	group.Go(func() error {
		defer stop()
		return s.serveRequests(ctx, in, out)
	})
	return group.Wait()
}

// serveRequests answers the lines of input that a runnersProcess sends to this child process.
func (s *runnerScript) serveRequests(ctx context.Context, in *json.Decoder, out *json.Encoder) error {
	err := out.Encode(struct{}{})
	next := func(line any, do func() (any, error)) {
		if err != nil {
			return
		}
		var answer any
		if err = in.Decode(line); err == nil {
			answer, err = do()
		}
		if err == nil {
			err = out.Encode(answer)
		}
	}
	var started time.Time
	next(new(struct{}), func() (any, error) { return struct{}{}, s.awaitQueries(ctx) })
	next(&started, func() (any, error) { return struct{}{}, s.startWriting(started) })
	next(new(struct{}), func() (any, error) { return s.latenessP99Ms() })
	next(new(struct{}), func() (any, error) { return nil, errors.New("unexpected line") })
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
