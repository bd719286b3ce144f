// Command turn measures how long a later turn of a session takes to its first
// text: from the message posted by REST to the text on a WebSocket, against the
// same warm agent on bare stdio, turn and turn about, and against the one-shot
// form of its CLI, which starts a process for every turn. The model is scripted,
// the same for all; the bare agents and the one-shot ones run on this machine,
// also where Spool's run in Docker. Agents: the built-in one, and those of
// claude, codex and opencode that are on the PATH.
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
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/bare"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// script answers everything at the pace of a fast model.
const script = `
stream: {piece: 12, delay: 10ms}
rules:
  - steps:
      - text: 'You said {{user}}, and this is what there is to say about it: nothing much, but in several pieces.'
`

// turnPatience bounds one turn, the first one in a new container included.
const turnPatience = 60 * time.Second

func main() {
	var b bench
	flag.IntVar(&b.turns, "turns", 40, "measured turns of each kind")
	flag.IntVar(&b.shots, "shots", 8, "measured turns of the one-shot CLI")
	agents := flag.String("agents", "spool,claude-code,codex,opencode", "architectures to measure")
	flag.StringVar(&b.places, "places", "local,docker", "kinds of sandboxes to measure")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	flag.Parse()
	b.agents = strings.Split(*agents, ",")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := b.run(ctx, os.Stdout, *dir); err != nil {
		fmt.Fprintln(os.Stderr, "turn:", err)
		os.Exit(1)
	}
}

// bench is one run of all.
type bench struct {
	turns, shots int
	agents       []string
	places       string

	tmp, runner, url string
	singles          map[string][]time.Duration // of the one-shot CLIs, by architecture
}

func (b *bench) run(ctx context.Context, out io.Writer, dir string) (err error) {
	if b.turns < 1 || b.shots < 1 {
		return errors.New("turns and shots must be positive")
	}
	chosen, err := b.choose()
	if err != nil {
		return err
	}
	tmp, remove, err := system.Scratch(dir)
	if err != nil {
		return err
	}
	defer remove()
	b.tmp, b.singles = tmp, map[string][]time.Duration{}
	if b.runner, err = system.Build(ctx, tmp, "runner"); err != nil {
		return err
	}
	url, stop, err := system.Model(script)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	b.url = url
	for _, place := range strings.Split(b.places, ",") {
		switch place {
		case executor.Local:
		case executor.Docker:
			if err := system.Docker(ctx); err != nil {
				fmt.Fprintln(os.Stderr, "turn: the rows of Docker are left out:", err)
				continue
			}
		default:
			return fmt.Errorf("places: %q is neither %s nor %s", place, executor.Local, executor.Docker)
		}
		if err := b.at(ctx, out, place, chosen); err != nil {
			return fmt.Errorf("%s: %w", place, err)
		}
	}
	return nil
}

// choose finds the agents that are asked for; a CLI that is not installed is said and left out.
func (b *bench) choose() (chosen []cli, err error) {
	known := clis()
	for _, name := range b.agents {
		c, ok := known[name]
		if !ok {
			return nil, fmt.Errorf("agents: %q is not known", name)
		}
		if c.program != "" {
			if c.path, err = exec.LookPath(c.program); err != nil {
				fmt.Fprintf(os.Stderr, "turn: %s is not on the PATH, so its rows are left out (make install brings it)\n", c.program)
				continue
			}
		}
		chosen = append(chosen, c)
	}
	return chosen, nil
}

// at measures all agents in one kind of sandboxes.
func (b *bench) at(ctx context.Context, out io.Writer, place string, chosen []cli) (err error) {
	sys, err := system.Start(ctx, system.Config{
		Dir: filepath.Join(b.tmp, place), Docker: place == executor.Docker, ModelURL: b.url, Executor: executor.Config{Runner: b.runner},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	for _, c := range chosen {
		if c.program == "" {
			c.path = b.runner
		}
		if err := b.agent(ctx, out, sys, place, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func (b *bench) agent(ctx context.Context, out io.Writer, sys *system.System, place string, c cli) error {
	plainly, err := c.bare(c.path, filepath.Join(b.tmp, "bare-"+place+"-"+c.architecture), b.url)
	if err != nil {
		return fmt.Errorf("on bare stdio: %w", err)
	}
	s, through, plain, err := b.compare(ctx, sys, c, plainly)
	_ = plainly.Close() // its turns were checked
	if err != nil {
		return err
	}
	if err := row.Write(out, added(place, c.name, s, through, plain)); err != nil || c.once == nil {
		return err
	}
	if b.singles[c.architecture] == nil {
		if b.singles[c.architecture], err = b.single(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", c.oneShot, err)
		}
	}
	return row.Write(out, faster(place, c, through, b.singles[c.architecture]))
}

// single takes the turns of the one-shot form, after one that makes the session which the others go on with.
func (b *bench) single(ctx context.Context, c cli) (all []time.Duration, err error) {
	once, err := c.once(c.path, filepath.Join(b.tmp, "once-"+c.architecture), b.url)
	if err != nil {
		return nil, err
	}
	for i := range b.shots + 1 {
		d, err := timed(ctx, once, i)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			all = append(all, d)
		}
	}
	return all, nil
}

// compare warms both up by a turn and then takes turns of each, in turn.
func (b *bench) compare(ctx context.Context, sys *system.System, c cli, plainly bare.Talker) (s *session, through, plain []time.Duration, err error) {
	s, err = newSession(ctx, sys, c.architecture, c.model)
	if err != nil {
		return nil, nil, nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for i := range b.turns + 1 {
		for _, k := range []struct {
			bare.Talker
			into *[]time.Duration
		}{{plainly, &plain}, {s, &through}} {
			d, err := timed(ctx, k.Talker, i)
			if err != nil {
				return nil, nil, nil, err
			}
			if i > 0 {
				*k.into = append(*k.into, d)
			}
		}
	}
	return s, through, plain, nil
}

func timed(ctx context.Context, t bare.Talker, n int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, turnPatience)
	defer cancel()
	d, err := t.Turn(ctx, fmt.Sprint("number ", n))
	if err != nil {
		return 0, fmt.Errorf("turn %d of %T: %w", n, t, err)
	}
	return d, nil
}
