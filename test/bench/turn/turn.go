// Package turn measures how long a later turn of a session takes to its first text: from the POST of the message to the
// text on a WebSocket. It compares every agent with the same warm agent on bare stdio, in alternating turns, and with the
// one-shot form of its CLI, which starts a process for every turn. All agents use the same scripted model. The bare
// agents and the one-shot CLIs run on this machine, also where Spool's agents run in Docker.
package turn

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/system"
)

// modelScript is the script of the model server, in mockllm's format. The model answers every message at the pace of a
// fast model.
const modelScript = `
stream: {piece: 12, delay: 10ms}
rules:
  - steps:
      - text: 'You said {{user}}, and this is what there is to say about it: nothing much, but in several pieces.'
`

// turnTimeout is the time limit of one turn, including the first turn in a new container.
const turnTimeout = 60 * time.Second

// Benchmark is the subcommand turn of the benchmark program. It compares later turns of a session with turns of the
// same agent without Spool.
type Benchmark struct {
	Turns  harness.PositiveCount `default:"40" help:"Measured turns of each kind."`
	Shots  harness.PositiveCount `default:"8" help:"Measured turns of the one-shot CLI."`
	Agents []string              `placeholder:"ARCHITECTURE,…" help:"Architectures to measure; by default all whose CLI is on the PATH."`
	Places []string              `default:"local,docker" enum:"local,docker" help:"Sandbox providers to measure: local, docker."`
}

// Validate checks the flags of the benchmark. kong, the parser of the command line, calls it.
func (m *Benchmark) Validate() error {
	for _, name := range m.Agents {
		if !slices.ContainsFunc(bareagent.Agents(), func(a bareagent.Agent) bool { return a.Architecture == name }) {
			return fmt.Errorf("--agents: unknown architecture %q", name)
		}
	}
	return nil
}

// installedAgent is an agent whose CLI is installed on this machine, with the path of its program.
type installedAgent struct {
	bareagent.Agent
	path string
}

// testbed holds what all measurements share: the model server, the runner, the installed agents, and the measurements
// of the one-shot CLIs.
type testbed struct {
	*Benchmark
	runner   string // path of the binary
	url      string // of the model
	agents   []installedAgent
	oneShots map[string][]time.Duration // measured turns of the one-shot CLIs, by architecture
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) (err error) {
	t := &testbed{Benchmark: m, oneShots: map[string][]time.Duration{}}
	if t.runner, err = b.BuildRunner(ctx); err != nil {
		return err
	}
	t.agents = t.installedAgents(b)
	if t.url, err = b.StartModel(modelScript); err != nil {
		return err
	}
	for _, provider := range m.Places {
		docker := provider == executor.ProviderDocker
		if docker && !b.CanUseDocker(ctx, "the rows of Docker") {
			continue
		}
		err := b.RunPart(provider, func(b *harness.Bench) error {
			sys, err := b.StartSystem(ctx, system.Config{Docker: docker, ModelURL: t.url, Executor: executor.Config{Runner: t.runner}})
			if err != nil {
				return err
			}
			for _, a := range t.agents {
				if err := t.measureAgent(ctx, b, sys, provider, a); err != nil {
					return fmt.Errorf("%s: %w", a.Name, err)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// installedAgents returns the agents to measure. It prints which agents are left out because their CLI is not
// installed.
func (t *testbed) installedAgents(b *harness.Bench) (all []installedAgent) {
	for _, a := range bareagent.Agents() {
		if len(t.Agents) > 0 && !slices.Contains(t.Agents, a.Architecture) {
			continue
		}
		path := t.runner
		if a.Program != "" {
			var err error
			if path, err = exec.LookPath(a.Program); err != nil {
				b.PrintSkipped("the rows of "+a.Name, a.Program+" is not on the PATH; make install installs it")
				continue
			}
		}
		all = append(all, installedAgent{a, path})
	}
	return all
}

// measureAgent measures one agent in the running system sys with one sandbox provider, and reports the rows of
// docs/performance.md.
func (t *testbed) measureAgent(ctx context.Context, b *harness.Bench, sys *system.System, provider string, a installedAgent) error {
	warm, err := a.Warm(a.path, filepath.Join(b.Dir, "bare-"+a.Architecture), t.url)
	if err != nil {
		return fmt.Errorf("on bare stdio: %w", err)
	}
	s, through, bare, err := t.timeTurnsAlternately(ctx, sys, a, warm)
	if err := errors.Join(err, warm.Close()); err != nil {
		return err
	}
	if err := b.ReportRow(addedLatencyRow(provider, a.Name, s, through, bare)); err != nil || a.OneShot == nil {
		return err
	}
	if t.oneShots[a.Architecture] == nil {
		if t.oneShots[a.Architecture], err = t.timeOneShotTurns(ctx, a, filepath.Join(b.Dir, "one-shot-"+a.Architecture)); err != nil {
			return fmt.Errorf("%s: %w", a.OneShot.Command, err)
		}
	}
	return b.ReportRow(speedupRow(provider, *a.OneShot, through, t.oneShots[a.Architecture]))
}

// timeOneShotTurns takes several turns with the agent's one-shot CLI, which starts a process for every turn, and
// returns their times to the first text. It takes one turn before them, which is not measured and creates the
// conversation that the others continue. dir is the folder for the agent's files.
func (t *testbed) timeOneShotTurns(ctx context.Context, a installedAgent, dir string) (all []time.Duration, err error) {
	c, err := a.OneShot.Start(a.path, dir, t.url)
	if err != nil {
		return nil, err
	}
	for i := range int(t.Shots) + 1 {
		d, err := takeTurn(ctx, c, i)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			all = append(all, d)
		}
	}
	return all, c.Close()
}

// timeTurnsAlternately takes turns of an agent without Spool (warm) and of a new session of Spool, alternately. It
// returns the session, and the times to the first text of both. The first turn of each is not measured.
func (t *testbed) timeTurnsAlternately(ctx context.Context, sys *system.System, a installedAgent, warm bareagent.Conversation) (s *session, through, bare []time.Duration, err error) {
	s, err = newSession(ctx, sys, system.SessionSpec{Architecture: a.Architecture, Model: a.Model})
	if err != nil {
		return nil, nil, nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for i := range int(t.Turns) + 1 {
		for _, k := range []struct {
			bareagent.Conversation
			into *[]time.Duration
		}{{warm, &bare}, {s, &through}} {
			d, err := takeTurn(ctx, k.Conversation, i)
			if err != nil {
				return nil, nil, nil, err
			}
			if i > 0 {
				*k.into = append(*k.into, d)
			}
		}
	}
	return s, through, bare, nil
}

// takeTurn takes the n-th turn of a conversation and returns the time from the message to the first text. turnTimeout
// limits the turn.
func takeTurn(ctx context.Context, c bareagent.Conversation, n int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	d, err := c.Turn(ctx, fmt.Sprint("number ", n))
	if err != nil {
		return 0, fmt.Errorf("turn %d of %T: %w", n, c, err)
	}
	return d, nil
}
