package executor_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
)

// TestJobs_SnapshotOfOneSessionDoesNotDelayAnother: while a snapshot of session A lasts, 45 file changes of A publish
// 45 jobs. A message to B is handled before that snapshot ends.
func TestJobs_SnapshotOfOneSessionDoesNotDelayAnother(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, answers)
	b.run()
	a, other := b.session(short(events.Options{})), b.session(short(events.Options{}))
	a.untilEnded(a.post("one"))
	other.untilEnded(other.post("one"))
	b.noJobs()
	block := b.store.blockSnapshots()
	a.put("0.txt", "0")
	<-b.store.began
	for i := 1; i <= 45; i++ {
		a.put(fmt.Sprintf("%d.txt", i), fmt.Sprint(i))
	}
	if l := other.untilEnded(other.post("two")); l.Run.Phase != run.Completed {
		t.Errorf("the message to the other session ended as %s", l.Run.Phase)
	}
	if l := a.load(); l.Run.Applied != 0 {
		t.Errorf("the snapshot had ended by then: file changes up to %d are recorded", l.Run.Applied)
	}
	close(block)
	a.until("every file is in a snapshot", func(l *eventlog.SessionState) bool { return l.Run.Snapshot.Applied == 46 })
	b.noJobs()
	a.check()
}

// TestJobs_SnapshotsOfManySessionsDoNotDelayATurn: snapshots of more sessions at rest than the executor takes jobs at
// once leave room for a turn.
func TestJobs_SnapshotsOfManySessionsDoNotDelayATurn(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, answers)
	b.run(func(c *executor.Config) { c.Slots = 1 })
	var list []*talk
	for range 12 {
		s := b.session(short(events.Options{}))
		s.untilEnded(s.post("one"))
		list = append(list, s)
	}
	b.noJobs()
	block := b.store.blockSnapshots()
	for _, s := range list[1:] {
		s.put("a.txt", "a")
	}
	<-b.store.began
	list[0].untilEnded(list[0].post("two"))
	for _, s := range list[1:] {
		if l := s.load(); l.Run.Applied != 0 {
			t.Errorf("a snapshot had ended by then: file changes up to %d are recorded", l.Run.Applied)
		}
	}
	close(block)
	for _, s := range list[1:] {
		s.until("its file is in a snapshot", func(l *eventlog.SessionState) bool { return l.Run.Snapshot.Applied == 1 })
	}
	b.noJobs()
}

// TestJobs_AcknowledgedWhileTheSessionIsHandledAreNotLost: of the jobs for a session that is being handled all except
// the latest are acknowledged at once, on whichever subject they come. When the executor then ends, in any way,
// another one does the work that the jobs requested.
func TestJobs_AcknowledgedWhileTheSessionIsHandledAreNotLost(t *testing.T) {
	t.Parallel()
	const anyEngine, here = "job.local.any", "job.local.on.here"
	for name, test := range map[string]struct {
		handled, further string // subjects
		end              func(*runningExecutor)
	}{
		"killed":                       {here, here, func(c *runningExecutor) { c.wire.kill() }},
		"stopped":                      {here, here, func(c *runningExecutor) { _ = c.stop() }}, // the cleanup reports its error
		"killed, job for any engine":   {anyEngine, here, func(c *runningExecutor) { c.wire.kill() }},
		"killed, jobs for any engine":  {here, anyEngine, func(c *runningExecutor) { c.wire.kill() }},
		"stopped, job for any engine":  {anyEngine, here, func(c *runningExecutor) { _ = c.stop() }},
		"stopped, jobs for any engine": {here, anyEngine, func(c *runningExecutor) { _ = c.stop() }},
		"killed in a turn":             {"", here, func(c *runningExecutor) { c.wire.kill() }},
		"stopped in a turn":            {"", here, func(c *runningExecutor) { _ = c.stop() }},
		"killed, its own job came anew": {here, here, func(c *runningExecutor) {
			c.wire.freeze()
			time.Sleep(topology.JobAckWait + time.Second)
			c.wire.thaw()
			time.Sleep(time.Second)
			c.wire.kill()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStoreBench(t, func(f *fakeTurn) {
				if f.Query.Content == "long" {
					polite(f)
					return
				}
				answers(f)
			})
			first := b.run()
			s := b.session(short(events.Options{}))
			s.untilEnded(s.post("one"))
			b.noJobs()
			block := b.store.blockSnapshots()
			if test.handled == "" {
				long := s.post("long")
				s.until("the long turn runs", func(l *eventlog.SessionState) bool { return l.Run.Execution == long && l.Run.Phase == run.Running })
			} else {
				s.life(putFile("0.txt"))
				s.jobAt(test.handled)
				<-b.store.began
			}
			for i := 1; i <= 3; i++ {
				s.life(putFile(fmt.Sprintf("%d.txt", i)))
				s.jobAt(test.further)
			}
			s.life(func(base session.CommandBase, _ *eventlog.SessionState) session.Command {
				return session.RequestSync{CommandBase: base}
			})
			s.jobAt(test.further)
			b.until("the handler's job and the latest are left", func() bool { return b.jobs() == 2 })
			test.end(first)
			if l := s.load(); l.Run.Synced > 0 {
				t.Fatal("the snapshot was not blocked")
			}
			close(block)
			b.run()
			if test.handled == "" {
				s.interrupt()
			}
			s.until("every file is in a snapshot", func(l *eventlog.SessionState) bool {
				return l.Run.IsIdle() && l.Run.Synced == 1 && len(l.Life.ChangesAfter(l.Run.Snapshot.Applied)) == 0
			})
			b.noJobs()
			s.check()
		})
	}
}

func putFile(path string) func(session.CommandBase, *eventlog.SessionState) session.Command {
	return func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.PutFile{CommandBase: base, FileUpload: session.FileUpload{Path: path, Object: path}, Held: l.Run.Snapshot.Applied}
	}
}

// TestJobs_MessageEndsASnapshotAtRest: a snapshot of a session at rest does not delay the session's next turn, which
// puts the file changes in itself.
func TestJobs_MessageEndsASnapshotAtRest(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, answers)
	b.run()
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	b.noJobs()
	block := b.store.blockSnapshots()
	defer close(block)
	s.put("a.txt", "A")
	<-b.store.began
	if l := s.untilEnded(s.post("two")); l.Run.Applied != 1 || l.Run.Snapshot.Applied != 0 {
		t.Errorf("at the end of the turn file changes up to %d are in the workspace, up to %d in a snapshot", l.Run.Applied, l.Run.Snapshot.Applied)
	}
	s.check()
}

// TestOrphan_IsFollowedWithoutASlot: when an executor is killed while another has all slots taken and more executions
// wait, the other follows the agent that runs: it obeys a control, a limit or a budget while its own turn goes on.
func TestOrphan_IsFollowedWithoutASlot(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		options events.Options
		end     func(s *talk, execution string)
		code    string
	}{
		"cancel": {end: func(s *talk, execution string) { s.cancel(execution) }, code: "cancelled"},
		"terminate": {end: func(s *talk, execution string) {
			s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
				return session.RequestTerminate{CommandBase: base, ExecutionID: execution, ActiveEnded: l.RunView().ActiveEnded}
			})
		}, code: "terminated"},
		"budget": {options: events.Options{Budget: events.Budget{Tokens: 100}}, end: func(s *talk, execution string) {
			s.b.egress.say(execution, events.ModelCalled{Usage: events.Usage{InputTokens: 100}})
		}, code: "BUDGET_EXCEEDED"},
		"limit": {options: events.Options{TurnLimitMs: 20_000}, end: func(*talk, string) {}, code: "TURN_LIMIT_EXCEEDED"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStoreBench(t, polite)
			b.egress = &fakeEgress{}
			one := func(c *executor.Config) { c.Slots = 1 }
			b.run(one)
			own := b.session(short(events.Options{}))
			running := own.post("go")
			own.untilStarted()
			first := b.run(one)
			orphan := b.session(short(test.options), func(c *events.SessionCreated) {
				if limit := test.options.TurnLimitMs; limit > 0 {
					c.Options.TurnLimitMs = limit
				}
			})
			execution := orphan.post("go")
			orphan.untilStarted()
			for range 20 {
				b.session(short(events.Options{})).post("wait")
			}
			first.wire.kill()
			test.end(orphan, execution)
			orphan.untilEnded(execution)
			if l := own.load(); l.Run.Execution != running || l.Run.Phase != run.Running {
				t.Errorf("the turn that holds the slot is %s", l.Run.Phase)
			}
			switch end := orphan.last(execution).(type) {
			case events.ExecutionCancelled:
				if end.Reason != test.code {
					t.Errorf("it was cancelled as %s", end.Reason)
				}
			case events.ExecutionFailed:
				if end.Code != test.code {
					t.Errorf("it failed with %+v", end)
				}
			default:
				t.Errorf("it ended with %+v", end)
			}
			if n := len(of[events.ExecutionStarted](orphan)); n != 1 {
				t.Errorf("%d starts", n)
			}
		})
	}
}

// TestOrphan_LostSandboxWaitsForASlot: a new attempt of an execution that was followed without a slot starts an
// agent, so it waits for a slot.
func TestOrphan_LostSandboxWaitsForASlot(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before the takeover", "after the takeover"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			b := newStoreBench(t, polite)
			one := func(c *executor.Config) { c.Slots = 1 }
			b.run(one)
			own := b.session(short(events.Options{}))
			running := own.post("go")
			own.untilStarted()
			first := b.run(one)
			orphan := b.session(short(events.Options{}))
			execution := orphan.post("go")
			orphan.untilStarted()
			box := b.provider.box(orphan.load().Run.Sandbox.ID)
			first.wire.kill()
			if when == "after the takeover" {
				orphan.until("it is followed", func(l *eventlog.SessionState) bool { return l.Run.Epoch == 2 })
			}
			box.runner.die()
			orphan.until("the attempt has died", func(*eventlog.SessionState) bool { return len(of[events.AttemptFailed](orphan)) == 1 })
			third := b.session(short(events.Options{}))
			third.post("wait")
			if own.load().Run.IsIdle() || len(of[events.ExecutionStarted](orphan)) != 1 {
				t.Fatal("a second agent was started with one slot")
			}
			own.cancel(running)
			own.untilEnded(running)
			b.until("one of those that wait has the slot", func() bool {
				return len(of[events.ExecutionStarted](orphan)) == 2 || len(of[events.ExecutionStarted](third)) == 1
			})
			third.interrupt()
			orphan.until("the second attempt has started", func(*eventlog.SessionState) bool { return len(of[events.ExecutionStarted](orphan)) == 2 })
			orphan.cancel(execution)
			orphan.untilEnded(execution)
			if l := orphan.load(); l.Run.Claims > 1 {
				t.Errorf("%d claims without progress", l.Run.Claims)
			}
		})
	}
}

// TestAdoption_EndsInMidTurn: an executor that took the job of an engine that was gone runs its execution on an engine of
// its own. When the other engine comes back, the job does not stay with executors that cannot reach the sandbox.
func TestAdoption_EndsInMidTurn(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.engine = "elsewhere"
	gone := b.run()
	s := b.session()
	first := s.post("one")
	s.untilStarted()
	s.interrupt()
	s.untilEnded(first)
	if err := gone.stop(); err != nil {
		t.Fatal(err)
	}
	b.engine = "here"
	b.run(func(c *executor.Config) { c.EngineGone = time.Second })
	execution := s.post("two") // on job.local.on.elsewhere
	s.until("it runs on the other engine", func(l *eventlog.SessionState) bool {
		return l.Run.Execution == execution && l.Run.Phase == run.Running && l.Run.Sandbox.Engine == "here"
	})
	b.engine = "elsewhere"
	b.run()
	s.until("it was handed over and taken again", func(l *eventlog.SessionState) bool { return l.Run.Epoch >= 3 })
	s.cancel(execution)
	if l := s.untilEnded(execution); l.Run.Phase != run.Cancelled || l.Run.Sandbox.Engine != "here" {
		t.Errorf("it ended as %s on %s", l.Run.Phase, l.Run.Sandbox.Engine)
	}
	b.noJobs()
}
