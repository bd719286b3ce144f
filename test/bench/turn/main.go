// Command turn measures how long a later turn of a session takes to its first
// text: from the message posted by REST to the text on a WebSocket, against the
// same warm agent on bare stdio, turn and turn about, and against the one-shot
// form of its CLI, which starts a process for every turn. The model is scripted,
// the same for all. Architectures: spool, and claude-code where claude is on the PATH.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The targets of design.md section 11.
const (
	addedTarget  = 30.0 // milliseconds over the bare agent at the median
	fasterTarget = 5.0  // times the one-shot CLI's median
)

// script answers everything at the pace of a fast model.
const script = `
stream: {piece: 12, delay: 10ms}
rules:
  - steps:
      - text: 'You said {{user}}, and this is what there is to say about it: nothing much, but in several pieces.'
`

// turnPatience bounds one turn.
const turnPatience = 30 * time.Second

func main() {
	turns := flag.Int("turns", 40, "measured turns of each kind")
	shots := flag.Int("shots", 8, "measured turns of the one-shot CLI")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *turns, *shots); err != nil {
		fmt.Fprintln(os.Stderr, "turn:", err)
		os.Exit(1)
	}
}

// talker takes a message and gives the time to the first text of the answer; it returns when the turn is over.
type talker interface {
	turn(ctx context.Context, text string) (time.Duration, error)
	io.Closer
}

func run(ctx context.Context, out io.Writer, dir string, turns, shots int) (err error) {
	if turns < 1 || shots < 1 {
		return errors.New("turns and shots must be positive")
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
	url, stop, err := model()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	sys, err := system.Start(ctx, system.Config{Dir: tmp, Executor: executor.Config{
		Runner: runner, AnthropicBaseURL: url, AnthropicKey: "bench", OpenAIBaseURL: url + "/v1", OpenAIKey: "bench",
	}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	if err := builtIn(ctx, out, sys, runner, filepath.Join(tmp, "bare-spool"), url, turns); err != nil {
		return fmt.Errorf("the built-in agent: %w", err)
	}
	claude, err := exec.LookPath("claude")
	if err != nil {
		fmt.Fprintln(os.Stderr, "turn: claude is not on the PATH, so its rows are left out (make install brings it)")
		return nil
	}
	if err := claudeCode(ctx, out, sys, claude, tmp, url, turns, shots); err != nil {
		return fmt.Errorf("with claude: %w", err)
	}
	return nil
}

// model runs the scripted model server.
func model() (url string, stop func() error, err error) {
	s, err := server.Load("turn.yaml", []byte(script))
	if err != nil {
		return "", nil, err
	}
	m, err := server.New(server.Config{Listen: "127.0.0.1:0", Script: s, MaxRecorded: 1})
	if err != nil {
		return "", nil, err
	}
	if err := m.Listen(); err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	return m.URL(), func() error { cancel(); return <-ended }, nil
}

func builtIn(ctx context.Context, out io.Writer, sys *system.System, runner, dir, url string, turns int) error {
	bare, err := bareBuiltIn(runner, dir, url)
	if err != nil {
		return err
	}
	defer bare.Close() //nolint:errcheck // its turns were checked
	through, plain, err := compare(ctx, sys, "spool", bare, turns)
	if err != nil {
		return err
	}
	return row.Write(out, added("the built-in agent", through, plain))
}

func claudeCode(ctx context.Context, out io.Writer, sys *system.System, claude, tmp, url string, turns, shots int) error {
	bare, err := bareClaude(claude, filepath.Join(tmp, "bare-claude"), url)
	if err != nil {
		return err
	}
	through, plain, err := compare(ctx, sys, "claude-code", bare, turns)
	_ = bare.Close() // its turns were checked
	if err != nil {
		return err
	}
	if err := row.Write(out, added("Claude Code", through, plain)); err != nil {
		return err
	}
	once := &oneShot{path: claude, dir: filepath.Join(tmp, "one-shot"), url: url}
	if _, err := timed(ctx, once, 0); err != nil { // makes the session that the others go on with
		return err
	}
	var single []time.Duration
	for i := range shots {
		d, err := timed(ctx, once, i+1)
		if err != nil {
			return err
		}
		single = append(single, d)
	}
	p50, base := row.Percentile(through, 0.5), row.Percentile(single, 0.5)
	return row.Write(out, row.Row{
		What: "the same, against the one-shot CLI (claude -p)", Target: fmt.Sprintf("at least %.0f times faster", fasterTarget),
		Measured: fmt.Sprintf("%.1f times faster", base/p50), Against: fmt.Sprintf("claude -p --resume, p50 %.0f ms of %d turns", base, shots),
		Ratio: p50 / base, P50Ms: p50, P99Ms: row.Percentile(through, 0.99), OK: base >= fasterTarget*p50, Command: "cd test && go run ./bench/turn",
	})
}

// compare warms both up by a turn and then takes turns of each, in turn.
func compare(ctx context.Context, sys *system.System, architecture string, bare talker, turns int) (through, plain []time.Duration, err error) {
	session, err := newSession(ctx, sys, architecture)
	if err != nil {
		return nil, nil, err
	}
	defer session.Close() //nolint:errcheck // its turns were checked
	for i := range turns + 1 {
		for _, k := range []struct {
			talker
			into *[]time.Duration
		}{{bare, &plain}, {session, &through}} {
			d, err := timed(ctx, k.talker, i)
			if err != nil {
				return nil, nil, err
			}
			if i > 0 {
				*k.into = append(*k.into, d)
			}
		}
	}
	return through, plain, nil
}

func timed(ctx context.Context, t talker, n int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, turnPatience)
	defer cancel()
	d, err := t.turn(ctx, fmt.Sprint("number ", n))
	if err != nil {
		return 0, fmt.Errorf("turn %d of %T: %w", n, t, err)
	}
	return d, nil
}

func added(agent string, through, plain []time.Duration) row.Row {
	p50, base := row.Percentile(through, 0.5), row.Percentile(plain, 0.5)
	return row.Row{
		What:     "second turn, message posted to first text on the WebSocket, local, " + agent,
		Target:   fmt.Sprintf("p50 under +%.0f ms over the same warm agent on bare stdio", addedTarget),
		Measured: fmt.Sprintf("%+.1f ms, of %d turns", p50-base, len(through)),
		Against:  fmt.Sprintf("bare p50 %.1f ms, p99 %.1f ms", base, row.Percentile(plain, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(through, 0.99), OK: p50-base < addedTarget, Command: "cd test && go run ./bench/turn",
		Note: "the runner's 20 ms of coalescing included; the model sends 12 bytes every 10 ms",
	}
}
