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

// runnersCommand is the hidden subcommand of the process that plays the runners.
const runnersCommand = "fanout-runners"

// runners runs the script of the runners of all sessions, in this process or in another one.
type runners interface {
	// awaitQueries blocks until every runner has its query.
	awaitQueries(ctx context.Context) error
	// begin starts the load, whose first lines are due from started on.
	begin(started time.Time) error
	// lateness returns the 99th percentile of how late lines were written, in milliseconds.
	lateness() (int, error)
}

// runnersConfig is the first line of input of the runners' process. Its first line of output is {} when every runner has
// its query. The second line of input is the time at which the load starts, the third one requests the lateness.
type runnersConfig struct {
	Socket          string
	Mode            string
	Blocks, Runners int
}

// runnersProcess is a child process of the benchmark that plays the runners.
type runnersProcess struct{ *process }

// startRunners starts a process that plays the runners for the provider that it returns. It stops at the end of the
// benchmark.
func startRunners(ctx context.Context, b *harness.Bench, cfg runnersConfig) (*runnersProcess, *fake.Provider, error) {
	dir, err := os.MkdirTemp("", "runners")
	if err != nil {
		return nil, nil, err
	}
	b.Cleanup(func() error { return os.RemoveAll(dir) })
	cfg.Socket = filepath.Join(dir, "socket")
	started, err := startProcess(ctx, b, runnersCommand)
	if err != nil {
		return nil, nil, err
	}
	p := &runnersProcess{started}
	if err := p.exchange(cfg, new(struct{})); err != nil { // it listens
		return nil, nil, err
	}
	return p, fake.NewRemote(cfg.Socket), nil
}

// exchange sends a line and reads the next one.
func (p *runnersProcess) exchange(line, into any) error {
	if err := errors.Join(p.in.Encode(line), p.out.Decode(into)); err != nil {
		return fmt.Errorf("process of the runners: %w", err)
	}
	return nil
}

func (p *runnersProcess) awaitQueries(context.Context) error {
	return p.exchange(struct{}{}, new(struct{})) // the process ends with the context
}

func (p *runnersProcess) begin(started time.Time) error {
	return p.exchange(started, new(struct{}))
}

func (p *runnersProcess) lateness() (ms int, err error) {
	err = p.exchange(struct{}{}, &ms)
	return ms, err
}

// Runners is the subcommand fanout-runners. It stops at the end of its input.
type Runners struct{}

// Run is called by kong.
func (Runners) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), json.NewEncoder(os.Stdout)
	var cfg runnersConfig
	if err := in.Decode(&cfg); err != nil {
		return err
	}
	s := newScript(cfg.Mode, cfg.Blocks, cfg.Runners)
	l, err := net.Listen("unix", cfg.Socket)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return fake.Serve(ctx, l, s.play) })
	group.Go(func() error {
		defer stop()
		return s.serveRequests(ctx, in, out)
	})
	return group.Wait()
}

// serveRequests answers the lines of runnersProcess.
func (s *script) serveRequests(ctx context.Context, in *json.Decoder, out *json.Encoder) error {
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
	next(&started, func() (any, error) { return struct{}{}, s.begin(started) })
	next(new(struct{}), func() (any, error) { return s.lateness() })
	next(new(struct{}), func() (any, error) { return nil, errors.New("unexpected line") })
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
