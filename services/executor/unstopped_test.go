package executor_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor"
)

// silent is an agent with a tool call that prints nothing until the file "go" exists. It writes its process id to the
// file "pid" at its start, and creates the file "effect" at its end.
const silent = `
rules:
  - name: silent
    match: {user: {regex: 'wait'}, tools: [run_code]}
    steps:
      - tool: {name: run_code, input: {language: bash, code: "echo $$ > pid.new; mv pid.new pid; while [ ! -e go ]; do sleep 0.05; done; touch effect; echo waited"}}
      - text: "It {{result | trim}}."
  - name: rest
    steps:
      - text: "You said {{user}}"
`

// silentTool starts a silent tool call and returns its execution, its process and its workspace.
func silentTool(b *bench, e *runningExecutor) (s *talk, execution string, pid int, dir string) {
	b.t.Helper()
	s = b.session(func(c *events.SessionCreated) { c.Architecture = "spool" })
	execution = s.post("wait")
	dir = filepath.Join(e.WorkspacesDir(), s.id)
	b.until("the tool runs", func() bool {
		raw, err := os.ReadFile(filepath.Join(dir, "pid"))
		if err != nil {
			return false
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(raw)))
		return err == nil
	})
	if !lives(pid) {
		b.t.Fatalf("process %d of the tool does not live", pid)
	}
	b.until("the log has the tool's call", func() bool { return strings.Contains(types(s.events()), "block_start") })
	return s, execution, pid, dir
}

// lives reports whether a process runs.
func lives(pid int) bool {
	state, ok := processState(pid)
	return ok && state != 'Z'
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Rolling restarts of the executors during a tool call that prints nothing do not use up the
// execution's claims: the last executor follows the call to its end.
func TestRollingRestarts_DuringASilentToolCallEndNothing(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, silent)
	current := b.run()
	s, execution, _, dir := silentTool(b, current)
	for range run.MaxClaimsWithoutProgress + 2 {
		next := b.run()
		epoch := s.load().Run.Epoch
		if err := current.stop(); err != nil {
			t.Fatal(err)
		}
		if l := s.until("the next executor has claimed", func(l *eventlog.SessionState) bool { return l.Run.Epoch > epoch || l.Run.HasEnded(execution) }); l.Run.HasEnded(execution) {
			t.Fatalf("the execution ended under epoch %d: %+v", l.Run.Epoch, s.last(execution))
		}
		current = next
	}
	s.until("the last executor has attached", func(*eventlog.SessionState) bool {
		list := s.events()
		d, ok := list[len(list)-1].Data.(events.ExecutionAttached)
		return ok && d.Epoch == s.load().Run.Epoch
	})
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l := s.untilEnded(execution)
	if done, ok := s.last(execution).(events.ExecutionCompleted); !ok || !strings.Contains(done.Result, "waited") || len(starts(s.events())) != 1 {
		t.Errorf("the end is %+v after %s", s.last(execution), types(s.events()))
	}
	if l.Run.Epoch < run.MaxClaimsWithoutProgress+3 {
		t.Errorf("the execution was claimed %d times", l.Run.Epoch)
	}
	s.removeAll(current)
}

// The agent of an execution whose claims are exhausted is killed before the log says that the
// execution has ended.
func TestClaimsExhausted_KillsTheAgentBeforeTheEndIsInTheLog(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, silent)
	first := b.run()
	s, execution, pid, dir := silentTool(b, first)
	first.wire.kill()
	for range run.MaxClaimsWithoutProgress {
		s.claimAs(mint(t, events.KindExecutor))
	}
	if !lives(pid) {
		t.Fatal("the tool has ended by itself")
	}
	var before atomic.Bool
	b.stored = func(d events.Draft) {
		for _, ev := range d.Events {
			if events.IsTerminal(ev.Type()) && lives(pid) {
				before.Store(true)
			}
		}
	}
	e := b.run()
	s.untilEnded(execution)
	f, ok := s.last(execution).(events.ExecutionFailed)
	if !ok || f.Code != "CLAIMS_EXHAUSTED" || f.Unstopped {
		t.Errorf("the end is %+v", s.last(execution))
	}
	if before.Load() || lives(pid) {
		t.Errorf("the end is in the log, and process %d lives", pid)
	}
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	second := s.post("hello")
	if l := s.untilEnded(second); l.Run.Phase != run.Completed {
		t.Errorf("the next turn ended with %+v", s.last(second))
	}
	if exists(filepath.Join(dir, "effect")) {
		t.Error("the tool went on after the end of its execution")
	}
	s.removeAll(e)
}

// lose ends the execution as the session service does when its executor is gone.
func (s *talk) lose(execution string) {
	s.b.t.Helper()
	s.decide(events.Actor{Kind: "service", ID: "session/one"}, func(l *eventlog.SessionState) run.Command {
		return run.AbandonExecution{
			CommandMeta: events.CommandMeta{CommandID: mint(s.b.t, events.KindCommand), Now: time.Now().UTC()}, ExecutionID: execution, Turn: l.Life.Active.Turn, By: "session/one",
			Outcome: events.ExecutionFailed{Code: "EXECUTOR_LOST"}.WithStopFailure(errors.New("no executor holds the execution")),
		}
	})
}

// An agent whose execution was ended while no executor held it is stopped by the sweep.
func TestExecutorLost_TheSweepStopsTheAgent(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, silent)
	first := b.run()
	s, execution, pid, dir := silentTool(b, first)
	first.wire.kill()
	s.lose(execution)
	if !lives(pid) {
		t.Fatal("the tool has ended by itself")
	}
	e := b.run(func(c *executor.Config) { c.SweepEvery = 50 * time.Millisecond })
	b.until("the agent is stopped", func() bool { return !lives(pid) })
	s.check()
	if exists(filepath.Join(dir, "effect")) {
		t.Error("the tool went on to its end")
	}
	s.removeAll(e)
}

// If no sweep has run, the next turn stops such an agent before it starts its own.
func TestExecutorLost_TheNextTurnStopsTheAgentFirst(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, silent)
	first := b.run()
	s, execution, pid, _ := silentTool(b, first)
	first.wire.kill()
	s.lose(execution)
	second := s.post("hello")
	e := b.run()
	if l := s.untilEnded(second); l.Run.Phase != run.Completed || l.Run.Sandbox.Unstopped {
		t.Errorf("the next turn ended with %+v in %+v", s.last(second), l.Run.Sandbox)
	}
	if lives(pid) {
		t.Errorf("process %d of the execution that had ended lives", pid)
	}
	s.removeAll(e)
}

// unreachable is a provider that cannot find or end sandboxes while it is away.
type unreachable struct {
	sandbox.Provider
	away *atomic.Bool
}

func (p unreachable) Attach(ctx context.Context, id string) (sandbox.Sandbox, error) {
	if p.away.Load() {
		return nil, errors.New("the socket is gone")
	}
	return p.Provider.Attach(ctx, id)
}

func (p unreachable) Terminate(ctx context.Context, id string, wipe bool) error {
	if p.away.Load() {
		return errors.New("the socket is gone")
	}
	return p.Provider.Terminate(ctx, id, wipe)
}

// If the agent cannot be stopped, the terminal event says so, and the sweep stops the agent later.
func TestClaimsExhausted_SaysThatTheAgentCouldNotBeStopped(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	var away atomic.Bool
	b := newBench(t, steps(2, allow))
	b.wrap = func(p sandbox.Provider) sandbox.Provider { return unreachable{p, &away} }
	first := b.run()
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	first.wire.kill()
	for range run.MaxClaimsWithoutProgress {
		s.claimAs(mint(t, events.KindExecutor))
	}
	away.Store(true)
	b.run(func(c *executor.Config) { c.SweepEvery = 50 * time.Millisecond })
	l := s.untilEnded(execution)
	f, ok := s.last(execution).(events.ExecutionFailed)
	if !ok || f.Code != "CLAIMS_EXHAUSTED" || !f.Unstopped || !strings.Contains(f.Message, "the socket is gone") || !l.Run.Sandbox.Unstopped {
		t.Errorf("the end is %+v in %+v", s.last(execution), l.Run.Sandbox)
	}
	fake := b.provider.onlyBox().runner
	if !fake.runs() {
		t.Fatal("the agent was stopped although it cannot be reached")
	}
	away.Store(false)
	b.until("the sweep has stopped the agent", func() bool { return !fake.runs() })
	s.check()
}

// deafen makes the runner ignore interrupt and kill.
func (r *fakeRunner) deafen() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deaf = true
}

// abandoned starts an execution whose runner does not obey, and kills its executor.
func abandoned(b *bench, allow chan<- struct{}) (s *talk, execution string) {
	b.t.Helper()
	first := b.run()
	s = b.session()
	execution = s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	b.provider.onlyBox().runner.deafen()
	first.wire.kill()
	return s, execution
}

// checkSandboxEnded checks that the session's sandbox was ended, with its workspace kept.
func (s *talk) checkSandboxEnded(sandbox string) {
	s.b.t.Helper()
	if wiped, terminated := s.b.provider.wiped(sandbox); !terminated || wiped {
		s.b.t.Errorf("sandbox %s: terminated %t, wiped %t", sandbox, terminated, wiped)
	}
	list := of[events.SandboxTerminated](s)
	if len(list) != 1 || list[0].SandboxID != sandbox || list[0].Reason != "unhealthy" || !list[0].Kept {
		s.b.t.Errorf("the log says %+v", list)
	}
	s.check()
}

// A runner that does not obey a kill loses its sandbox before the end of a claim too many is in the log.
func TestClaimsExhausted_EndsTheSandboxOfARunnerThatDoesNotObey(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	s, execution := abandoned(b, allow)
	id := s.load().Run.Sandbox.ID
	for range run.MaxClaimsWithoutProgress {
		s.claimAs(mint(t, events.KindExecutor))
	}
	b.run()
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "CLAIMS_EXHAUSTED" || f.Unstopped {
		t.Errorf("the end is %+v", s.last(execution))
	}
	s.checkSandboxEnded(id)
}

// The sweep records in the log that the sandbox of an unresponsive runner ends, before it ends the sandbox.
func TestExecutorLost_TheSweepEndsTheSandboxOfARunnerThatDoesNotObey(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	s, execution := abandoned(b, allow)
	id := s.load().Run.Sandbox.ID
	s.lose(execution)
	b.run(func(c *executor.Config) { c.SweepEvery = 50 * time.Millisecond })
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	b.until("the sandbox is ended", func() bool { _, terminated := b.provider.wiped(id); return terminated })
	s.checkSandboxEnded(id)
}
