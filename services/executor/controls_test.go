package executor_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor"
)

var errNoRoom = errors.New("there is no room")

// polite ends the turn when it is interrupted; stubborn ends it only when it is killed.
func polite(t *fakeTurn) {
	t.Start()
	t.Open("b")
	outcome := runner.OutcomeInterrupted
	if !t.Wait(t.interrupted) {
		outcome = runner.OutcomeKilled
	}
	t.Say("block_complete", events.BlockComplete{Block: events.Block{ID: "b", Kind: events.KindAssistantText, Status: events.StatusError}})
	t.End(runner.TurnEnd{Outcome: outcome})
}

func stubborn(t *fakeTurn) {
	t.Start()
	t.Open("b")
	<-t.killed
	t.End(runner.TurnEnd{Outcome: runner.OutcomeKilled})
}

func (s *talk) untilStarted() {
	s.b.t.Helper()
	s.b.until("the block is open", func() bool { return strings.Contains(types(s.events()), "block_start") })
}

func TestInterrupt_EndsTheTurnAndKeepsTheAgentWarm(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run()
	s := b.session()
	execution := s.post("go")
	s.untilStarted()
	s.interrupt()
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCancelled); !ok || c.Reason != "interrupted" {
		t.Errorf("end: %+v", s.last(execution))
	}
	r := b.provider.onlyBox().runner
	if ops := r.operations(); slices.Contains(ops, runner.OpKill) || !r.isWarm() {
		t.Errorf("operations %v; the agent is warm: %v", ops, r.isWarm())
	}
	b.noJobs()
}

// With a hint a control takes effect before the next beat.
func TestHint_MakesAControlTakeEffectAtOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	a := b.run(func(c *executor.Config) { c.Beat = time.Hour })
	s := b.session()
	execution := s.post("go")
	s.untilStarted()
	s.interrupt()
	raw, err := refOf(s).Encode()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.nc.Publish("ctl."+a.ID(), raw); err != nil {
		t.Fatal(err)
	}
	s.untilEnded(execution)
}

// A control whose hint and job were lost takes effect with the next beat, long before the next check of the claim, which is ten beats away.
func TestControl_TakesEffectWithoutHintAndJob(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run(func(c *executor.Config) { c.Beat = 6 * time.Second })
	s := b.session()
	execution := s.post("go")
	s.untilStarted()
	s.interrupt()
	s.untilEnded(execution)
}

// The job of a control has the same effect if the hint was lost.
func TestControlJob_ReplacesALostHint(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run(func(c *executor.Config) { c.Beat = time.Hour })
	s := b.session()
	execution := s.post("go")
	s.untilStarted()
	s.interrupt()
	s.job()
	s.untilEnded(execution)
	b.noJobs()
}

func TestCancel_KillsAfterItsGrace(t *testing.T) {
	t.Parallel()
	b := newBench(t, stubborn)
	b.run()
	s := b.session()
	execution := s.post("go")
	s.untilStarted()
	began := time.Now()
	s.cancel(execution)
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCancelled); !ok || c.Reason != "cancelled" {
		t.Errorf("end: %+v", s.last(execution))
	}
	if took := time.Since(began); took < 200*time.Millisecond {
		t.Errorf("killed after %s, before its grace", took)
	}
	ops := b.provider.onlyBox().runner.operations()
	if i, k := slices.Index(ops, runner.OpInterrupt), slices.Index(ops, runner.OpKill); i < 0 || k < i {
		t.Errorf("operations %v", ops)
	}
}

// If the runner does not end the turn after a kill, its sandbox is ended.
func TestCancel_EndsTheSandboxOfAnUnresponsiveRunner(t *testing.T) {
	t.Parallel()
	b := newBench(t, stubborn)
	b.run()
	s := b.session()
	execution := s.post("go")
	s.untilStarted()
	box := b.provider.onlyBox()
	box.runner.mu.Lock()
	box.runner.mute = true
	box.runner.mu.Unlock()
	s.cancel(execution)
	l := s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCancelled); !ok || c.Reason != "cancelled" || l.Run.Sandbox.ID != "" {
		t.Errorf("end: %+v, sandbox %+v", s.last(execution), l.Run.Sandbox)
	}
	if _, terminated := b.provider.wiped(box.spec.ID); !terminated {
		t.Error("the sandbox was not ended")
	}
	b.noJobs()
}

// An execution is cancelled before an executor has claimed it.
func TestCancel_BeforeTheClaim(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	s := b.session()
	execution := s.post("go")
	s.cancel(execution)
	b.run()
	s.untilEnded(execution)
	if got := types(s.events()); got != "execution_claimed execution_cancelled" || b.provider.made != 0 {
		t.Errorf("events: %s; %d sandboxes", got, b.provider.made)
	}
	b.noJobs()
}

// An execution is cancelled between its claim and its start.
func TestCancel_BetweenClaimAndStart(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	s := b.session()
	execution := s.post("go")
	s.claimAs(mint(t, events.KindExecutor))
	s.cancel(execution)
	b.run()
	s.untilEnded(execution)
	if _, ok := s.last(execution).(events.ExecutionCancelled); !ok || b.provider.made != 0 {
		t.Errorf("end: %+v; %d sandboxes", s.last(execution), b.provider.made)
	}
}

// The next holder executes a control that a holder missed because it died. If the turn ended meanwhile, it keeps its
// own outcome.
func TestControl_MissedByADeadHolderIsExecuted(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run()
	s := b.session()
	execution := s.post("go")
	s.untilEnded(execution)
	s.cancel(execution)
	s.interrupt()
	s.job()
	b.noJobs()
	if _, ok := s.last(execution).(events.ExecutionCompleted); !ok {
		t.Errorf("end: %+v", s.last(execution))
	}
	s.check()
}

func TestTurnLimit_KillsTheTurn(t *testing.T) {
	t.Parallel()
	for name, agent := range map[string]script{"polite": polite, "stubborn": stubborn} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, agent)
			b.run()
			s := b.session(func(c *events.SessionCreated) { c.Options.TurnLimitMs = 150 })
			execution := s.post("go")
			s.untilEnded(execution)
			if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "TURN_LIMIT_EXCEEDED" {
				t.Errorf("end: %+v", s.last(execution))
			}
			b.noJobs()
		})
	}
}

// When a session ends while a turn runs, the turn is cancelled, then the sandbox is released and wiped.
func TestDelete_CancelsTheTurnAndWipesTheSandbox(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run()
	s := b.session()
	execution := s.post("go")
	s.untilStarted()
	box := b.provider.onlyBox()
	s.remove()
	s.job()
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	if c, ok := s.last(execution).(events.ExecutionCancelled); !ok || c.Reason != "session_deleted" {
		t.Errorf("end: %+v", s.last(execution))
	}
	b.noJobs()
	if wiped, ok := b.provider.wiped(box.spec.ID); !ok || !wiped {
		t.Errorf("terminated %v, wiped %v", ok, wiped)
	}
	if got := types(s.events()); !strings.HasSuffix(got, "execution_cancelled sandbox_terminated") {
		t.Errorf("events: %s", got)
	}
}

func TestIdle_EndsTheSandbox(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run()
	s := b.session(func(c *events.SessionCreated) { c.Options.IdleTimeoutMs = 1 })
	s.untilEnded(s.post("one"))
	box := b.provider.onlyBox()
	time.Sleep(2 * time.Millisecond)
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.HandleDeadline{CommandBase: base, Run: l.RunView()}
	})
	s.job()
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	b.noJobs()
	if wiped, ok := b.provider.wiped(box.spec.ID); !ok || wiped {
		t.Errorf("terminated %v, wiped %v", ok, wiped)
	}
	if !slices.Contains(box.runner.operations(), runner.OpShutdown) {
		t.Error("the runner was not shut down first")
	}
	if d, ok := s.events()[len(s.events())-1].Data.(events.SandboxTerminated); !ok || d.Reason != "idle" {
		t.Errorf("the last event is %+v", d)
	}
	if l := s.untilEnded(s.post("two")); l.Run.Phase != run.Completed || b.provider.made != 2 {
		t.Errorf("the next turn: %+v", l.Run)
	}
}

// When the agents exceed the memory budget, those that have rested for the longest end first; their sandboxes stay.
func TestWarmBudget_EndsTheLongestRestedAgents(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run(func(c *executor.Config) { c.WarmMemory, c.WarmEvery = 250, 20*time.Millisecond })
	var list []*talk
	for range 3 {
		s := b.session()
		s.untilEnded(s.post("hello"))
		list = append(list, s)
	}
	box := func(s *talk) *fakeRunner { return b.provider.box(s.load().Run.Sandbox.ID).runner }
	b.until("the first agent is ended", func() bool { return !box(list[0]).isWarm() })
	for _, s := range list[1:] {
		if !box(s).isWarm() {
			t.Error("an agent within the budget was ended")
		}
	}
	execution := list[0].post("again")
	list[0].untilEnded(execution)
	if b.provider.made != 3 {
		t.Errorf("%d sandboxes", b.provider.made)
	}
	b.until("another agent is ended in its place", func() bool { return !box(list[1]).isWarm() })
}

// With the setting, a stopping executor ends its sandboxes: those at rest, which the log records, and the one that runs
// a turn, which counts as lost.
func TestStopSandboxes_EndsThemWithTheExecutor(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		if t.Query.Content == "hang" && t.Query.Attempt == 1 {
			stubborn(t)
			return
		}
		answers(t)
	})
	a := b.run(func(c *executor.Config) { c.StopSandboxes = true })
	rests, works := b.session(), b.session()
	rests.untilEnded(rests.post("x"))
	execution := works.post("hang")
	works.untilStarted()
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	if list, err := b.provider.List(b.ctx); err != nil || len(list) != 0 {
		t.Errorf("left: %+v, %v", list, err)
	}
	if l := rests.load(); l.Run.Sandbox.ID != "" {
		t.Errorf("the log still has %+v", l.Run.Sandbox)
	}
	b.run()
	if l := works.untilEnded(execution); l.Run.Phase != run.Completed || l.Run.Attempt != 2 {
		t.Errorf("end: %+v", l.Run)
	}
	rests.untilEnded(rests.post("y"))
	b.noJobs()
}

func TestSweep_RemovesWhatTheLogHasEnded(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	a := b.run()
	kept, removed := b.session(), b.session()
	kept.untilEnded(kept.post("x"))
	removed.untilEnded(removed.post("x"))
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	keptBox, removedBox := kept.load().Run.Sandbox.ID, removed.load().Run.Sandbox.ID
	removed.remove()
	stray, err := b.provider.Create(b.ctx, strayOf(t, kept))
	if err != nil {
		t.Fatal(err)
	}
	b.run()
	b.until("what is over is gone", func() bool {
		return b.provider.box(stray.ID()) == nil && b.provider.box(removedBox) == nil
	})
	if wiped, _ := b.provider.wiped(removedBox); !wiped {
		t.Error("a deleted session's workspace was not wiped")
	}
	if wiped, _ := b.provider.wiped(stray.ID()); wiped || b.provider.box(keptBox) == nil {
		t.Error("the sweep removed a sandbox that is in use")
	}
}
