package executor_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor"
)

func quick(t *fakeTurn) {
	t.Start()
	t.Text("b", "done")
	t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
}

func newStoreBench(t *testing.T, s script) *bench {
	b := newBench(t, s)
	b.store, b.pausable = newFakeStore(), true
	return b
}

// of returns the events of one type.
func of[P events.Payload](s *talk) (out []P) {
	for _, e := range s.events() {
		if p, ok := e.Data.(P); ok {
			out = append(out, p)
		}
	}
	return out
}

func (s *talk) do(c func(session.CommandBase, *eventlog.SessionState) session.Command) {
	s.b.t.Helper()
	s.life(c)
	s.job()
}

func (s *talk) put(path, content string) {
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.PutFile{CommandBase: base, FileUpload: session.FileUpload{Path: path, Object: content}, Held: l.Run.Snapshot.Applied}
	})
}

func (s *talk) idle() {
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		base.Now = base.Now.Add(2 * time.Hour)
		return session.HandleDeadline{CommandBase: base, Run: l.RunView()}
	})
}

func short(o events.Options) func(*events.SessionCreated) {
	return func(c *events.SessionCreated) {
		o.IdleTimeoutMs, o.TurnLimitMs, o.SessionLimitMs = 3600_000, 3600_000, 86400_000
		c.Options = o
	}
}

// Each turn ends with a snapshot. An idle session releases its sandbox after one more snapshot, and its next turn finds
// the same files in a new sandbox.
func TestIdle_NextTurnHasTheSameFiles(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.run()
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	s.until("the turn's snapshot is there", func(l *eventlog.SessionState) bool { return l.Run.Snapshot.ID != "" })
	first := b.provider.onlyBox()
	s.put("a.txt", "A")
	s.until("the file is in a snapshot", func(l *eventlog.SessionState) bool { return l.Run.Snapshot.Applied == 1 })
	if got := first.files.all(); got != "a.txt=A" {
		t.Fatalf("the workspace has %q", got)
	}
	s.put("b.txt", "B") // in the workspace, then in the last snapshot
	s.until("the second is applied", func(l *eventlog.SessionState) bool { return l.Run.Applied == 2 })
	s.idle()
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	b.until("it is wiped", func() bool { wiped, gone := b.provider.wiped(first.ID()); return wiped && gone })
	s.put("c.txt", "C") // while there is no sandbox
	s.untilEnded(s.post("two"))
	second := b.provider.onlyBox()
	if got := second.files.all(); got != "a.txt=A b.txt=B c.txt=C" {
		t.Fatalf("after the return the workspace has %q", got)
	}
	if second.ID() == first.ID() || len(of[events.WorkspaceRestored](s)) != 1 {
		t.Fatalf("events %s", types(s.events()))
	}
	var reasons []string
	for _, w := range of[events.WorkspaceSynced](s) {
		reasons = append(reasons, w.Reason)
	}
	if !slices.Contains(reasons, "turn") || !slices.Contains(reasons, "requested") || !slices.Contains(reasons, "idle") {
		t.Errorf("snapshots %v", reasons)
	}
	s.check()
	b.noJobs()
}

// A file that is put during a turn is soon in the workspace, a refused file is reported, and a requested snapshot is
// taken.
func TestFiles_AreAppliedDuringATurn(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, polite)
	b.run()
	s := b.session(short(events.Options{}))
	execution := s.post("go")
	s.untilStarted()
	s.put("a.txt", "A")
	s.put("../evil", "E")
	s.do(func(base session.CommandBase, _ *eventlog.SessionState) session.Command {
		return session.RequestSync{CommandBase: base}
	})
	l := s.until("all of it is done", func(l *eventlog.SessionState) bool { return l.Run.Applied == 2 && l.Run.Synced == 1 })
	if l.Run.IsIdle() {
		t.Fatal("the turn has ended")
	}
	if got := b.provider.onlyBox().files.all(); got != "a.txt=A" {
		t.Errorf("the workspace has %q", got)
	}
	var told string
	for _, a := range of[events.FilesApplied](s) {
		told += a.Error
	}
	if !strings.Contains(told, "../evil") {
		t.Errorf("the refusal is told as %q", told)
	}
	s.interrupt()
	s.untilEnded(execution)
	b.noJobs()
}

// A snapshot at the end of a turn does not delay the next message.
func TestSnapshot_DoesNotDelayTheNextMessage(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.store.block = make(chan struct{}) // never closed
	b.run()
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	<-b.store.began
	s.untilEnded(s.post("two"))
	<-b.store.began
}

// If the log is not available during a snapshot, the executor asks it repeatedly whether a job waits.
func TestSnapshot_AsksAnUnavailableLogAgain(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.store.block = make(chan struct{}) // never closed
	log := b.run().log
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	<-b.store.began
	log.setAway(true)
	execution := s.post("two")
	b.until("it has asked several times", func() bool { return log.askedInVain() > 5 })
	log.setAway(false)
	s.untilEnded(execution)
}

// A late signal of the turn's own events does not end the snapshot.
func TestSnapshot_IsNotEndedByALateSignal(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	block := make(chan struct{})
	b.store.block = block
	b.run()
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	<-b.store.began
	s.job()
	s.job()
	b.until("the second job is acknowledged for the third", func() bool { return b.jobs() == 2 })
	close(block)
	s.until("the snapshot", func(l *eventlog.SessionState) bool { return l.Run.Snapshot.ID != "" })
	b.noJobs()
}

// During a turn the workspace is stored at every interval.
func TestInterval_StoresTheWorkspaceDuringATurn(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, polite)
	b.run()
	s := b.session(short(events.Options{SyncIntervalMs: 1}))
	execution := s.post("go")
	b.until("two snapshots are there", func() bool { return len(of[events.WorkspaceSynced](s)) >= 2 })
	s.interrupt()
	s.untilEnded(execution)
	if w := of[events.WorkspaceSynced](s)[0]; w.Reason != "interval" {
		t.Errorf("reason %q", w.Reason)
	}
}

// A paused execution occupies neither a job nor a holder, waits for open model requests first, and resumes in the same
// process.
func TestPause_ResumesInTheSameProcess(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, polite)
	b.egress = &fakeEgress{open: 1}
	b.run()
	s := b.session(short(events.Options{}))
	execution := s.post("go")
	s.untilStarted()
	pause := func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestPause{CommandBase: base, ExecutionID: execution, ActiveEnded: l.RunView().ActiveEnded}
	}
	s.do(pause)
	if l := s.load(); l.Run.Phase != run.Running {
		t.Fatalf("phase %s with a request open", l.Run.Phase)
	}
	b.egress.set(0)
	l := s.until("it stands still", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Paused })
	id := l.Run.Sandbox.ID
	if !b.provider.isPaused(id) || !l.Run.Sandbox.Paused {
		t.Fatal("the sandbox is not paused")
	}
	b.noJobs()
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestResume{CommandBase: base, ExecutionID: execution, ActiveEnded: l.RunView().ActiveEnded}
	})
	s.until("it goes on", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	s.do(pause)
	s.until("it stands still again", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Paused })
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestCancel{CommandBase: base, ExecutionID: execution, ActiveEnded: l.RunView().ActiveEnded}
	})
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCancelled); !ok || c.Reason != "cancelled" {
		t.Errorf("end %+v", s.last(execution))
	}
	if n := len(of[events.ExecutionStarted](s)); n != 1 || b.provider.isPaused(id) {
		t.Errorf("%d starts; paused: %v", n, b.provider.isPaused(id))
	}
	b.noJobs()
}

// A terminate ends the process and the sandbox at once; the workspace stays for the next one.
func TestTerminate_EndsTheSandboxAndKeepsTheWorkspace(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, stubborn)
	b.run(func(c *executor.Config) { c.KillAfter = time.Hour })
	s := b.session(short(events.Options{}))
	execution := s.post("go")
	s.untilStarted()
	id := s.load().Run.Sandbox.ID
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestTerminate{CommandBase: base, ActiveEnded: l.RunView().ActiveEnded, HasSandbox: true}
	})
	l := s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCancelled); !ok || c.Reason != "terminated" {
		t.Errorf("end %+v", s.last(execution))
	}
	if wiped, gone := b.provider.wiped(id); wiped || !gone || l.Run.Lost.Workspace != id {
		t.Errorf("wiped %v, gone %v, kept %+v", wiped, gone, l.Run.Lost)
	}
	next := s.post("again")
	s.until("the next has started", func(l *eventlog.SessionState) bool { return l.Run.Execution == next && l.Run.Phase == run.Running })
	if box := b.provider.onlyBox(); !box.kept || box.spec.Workspace != id {
		t.Errorf("the next sandbox has workspace %q of %q, kept: %v", box.spec.Workspace, id, box.kept)
	}
	s.cancel(next)
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestTerminate{CommandBase: base, ExecutionID: next, ActiveEnded: l.RunView().ActiveEnded}
	})
	s.untilEnded(next)
	b.noJobs()
}

// An executor that takes over an execution that is to be terminated ends its sandbox from outside, without waiting for
// the runner.
func TestTerminate_OfAStoppedRunner(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, stubborn)
	a := b.run()
	s := b.session(short(events.Options{}))
	execution := s.post("go")
	s.untilStarted()
	id, r := s.load().Run.Sandbox.ID, b.provider.onlyBox().runner
	a.wire.kill()
	r.mu.Lock()
	r.stopped, r.attaches = true, 0
	r.mu.Unlock()
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestTerminate{CommandBase: base, ActiveEnded: l.RunView().ActiveEnded, HasSandbox: true}
	})
	b.run()
	l := s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCancelled); !ok || c.Reason != "terminated" || l.Run.Sandbox.ID != "" {
		t.Errorf("end %+v, sandbox %+v", s.last(execution), l.Run.Sandbox)
	}
	if _, gone := b.provider.wiped(id); !gone {
		t.Error("the sandbox was not ended")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.attaches != 0 {
		t.Errorf("the executor waited for the runner %d times", r.attaches)
	}
}

// A sandbox that is too old is replaced between two turns, with its files.
func TestMaxAge_ReplacesTheSandboxBetweenTurns(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.run()
	s := b.session(short(events.Options{SandboxMaxAgeMs: 1}))
	s.untilEnded(s.post("one"))
	s.put("a.txt", "A")
	s.until("the file is there", func(l *eventlog.SessionState) bool { return l.Run.Applied == 1 })
	first := s.load().Run.Sandbox.ID
	s.untilEnded(s.post("two"))
	box := b.provider.onlyBox()
	if box.ID() == first || box.files.all() != "a.txt=A" {
		t.Fatalf("sandbox %s after %s has %q", box.ID(), first, box.files.all())
	}
	if ends := of[events.SandboxTerminated](s); len(ends) != 1 || ends[0].Reason != "max_age" {
		t.Errorf("ends %+v", ends)
	}
}

// A new session gets a pooled sandbox with a started agent, and the pool is filled again. The pool's sandboxes end with
// their executor.
func TestPool_NewSessionGetsAStartedAgent(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	a := b.run(func(c *executor.Config) { c.Pool = []string{"claude-code=2"} })
	b.until("the pool is full", func() bool { return b.provider.count() == 2 })
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	ready := of[events.SandboxReady](s)
	if len(ready) != 1 || !ready[0].Pooled {
		t.Fatalf("ready %+v", ready)
	}
	if ops := b.provider.box(ready[0].SandboxID).runner.operations(); !slices.Contains(ops, runner.OpWarm) {
		t.Errorf("operations %v", ops)
	}
	b.until("the pool is full again", func() bool { return b.provider.count() == 3 })
	other := b.session(func(c *events.SessionCreated) {
		short(events.Options{Image: "another"})(c)
	})
	other.untilEnded(other.post("one"))
	if r := of[events.SandboxReady](other); len(r) != 1 || r[0].Pooled {
		t.Errorf("another image was taken from the pool: %+v", r)
	}
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	if n := b.provider.count(); n != 2 {
		t.Errorf("%d sandboxes are left, want those of the two sessions", n)
	}
}

// Another executor's sweep ends the pool of an executor that died.
func TestPool_OfADeadExecutorIsSwept(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	a := b.run(func(c *executor.Config) { c.Pool = []string{"claude-code=1"} })
	b.until("the pool is full", func() bool { return b.provider.count() == 1 })
	b.run(func(c *executor.Config) { c.SweepEvery = 50 * time.Millisecond })
	if b.provider.count() != 1 {
		t.Fatal("the pool of one that lives was swept")
	}
	a.wire.kill()
	b.until("the pool is swept", func() bool { return b.provider.count() == 0 })
}

// The log has each line of the proxy's journal once, although executors change, and the usage of a turn before its end.
func TestEgress_JournalIsStoredOnce(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, polite)
	b.egress = &fakeEgress{}
	a := b.run()
	s := b.session(short(events.Options{Egress: []string{"example.com"}}))
	execution := s.post("go")
	s.untilStarted()
	b.egress.say(execution, events.EgressDenied{Host: "evil.com", Code: "NOT_ALLOWED"})
	b.until("the denial is in the log", func() bool { return len(of[events.EgressDenied](s)) == 1 })
	a.wire.kill()
	b.run()
	b.until("another holds it", func() bool { return len(of[events.ExecutionClaimed](s)) == 2 })
	b.egress.say(execution, events.ModelCalled{Provider: "anthropic", CostUSD: 1})
	s.interrupt()
	s.untilEnded(execution)
	if len(of[events.EgressDenied](s)) != 1 || len(of[events.ModelCalled](s)) != 1 {
		t.Errorf("events %s", types(s.events()))
	}
	list := s.events()
	for i, e := range list {
		if _, ok := e.Data.(events.ModelCalled); ok && (e.ExecutionID != execution || i == len(list)-1) {
			t.Errorf("the call is of %q at %d of %d", e.ExecutionID, i, len(list))
		}
	}
	b.egress.mu.Lock()
	defer b.egress.mu.Unlock()
	first, last, end := b.egress.grants[0], b.egress.grants[len(b.egress.grants)-2], b.egress.grants[len(b.egress.grants)-1]
	if end.Execution != "" || end.Epoch != last.Epoch || !slices.Equal(end.Allow, last.Allow) {
		t.Errorf("at the end the proxy was told %+v", end)
	}
	if first.Token == "" || last.Token != "" || last.Execution != execution || !slices.Equal(last.Allow, []string{"example.com"}) || last.Epoch <= first.Epoch {
		t.Errorf("grants %+v … %+v", first, last)
	}
}

// away is a provider that fails while its engine does not answer.
type away struct {
	pausable
	until time.Time
}

func (p away) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if time.Now().Before(p.until) {
		return nil, &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Message: "the engine does not answer"}
	}
	return p.pausable.Create(ctx, spec)
}

// The executor waits for an engine that comes back. If the engine does not come back, the execution fails with its
// code.
func TestEngineAway_IsWaitedFor(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		away time.Duration
		code string
	}{"for a moment": {1500 * time.Millisecond, ""}, "for good": {time.Hour, sandbox.CodeEngineUnavailable}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStoreBench(t, quick)
			b.wrap = func(p sandbox.Provider) sandbox.Provider {
				return away{pausable{b.provider}, time.Now().Add(c.away)}
			}
			b.run(func(cfg *executor.Config) { cfg.EngineGone = 3 * time.Second })
			s := b.session(short(events.Options{}))
			execution := s.post("go")
			s.untilEnded(execution)
			f, failed := s.last(execution).(events.ExecutionFailed)
			if failed != (c.code != "") || f.Code != c.code {
				t.Errorf("end %+v", s.last(execution))
			}
			b.noJobs()
		})
	}
}

// The same holds for an egress proxy; an existing sandbox stays for the next turn.
func TestEgressAway_IsWaitedFor(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		away time.Duration
		code string
	}{"for a moment": {1500 * time.Millisecond, ""}, "for good": {time.Hour, sandbox.CodeEgressUnavailable}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStoreBench(t, quick)
			b.egress = &fakeEgress{}
			b.run(func(cfg *executor.Config) { cfg.EngineGone = 3 * time.Second })
			away := func(d time.Duration) {
				b.egress.mu.Lock()
				defer b.egress.mu.Unlock()
				b.egress.away = time.Now().Add(d)
			}
			check := func(s *talk, execution string) {
				t.Helper()
				s.untilEnded(execution)
				f, failed := s.last(execution).(events.ExecutionFailed)
				if failed != (c.code != "") || f.Code != c.code {
					t.Errorf("end %+v", s.last(execution))
				}
			}
			standing := b.session(short(events.Options{}))
			standing.untilEnded(standing.post("one"))
			away(c.away)
			check(standing, standing.post("two"))
			other := b.session(short(events.Options{}))
			check(other, other.post("go"))
			away(0)
			last := standing.post("three")
			standing.untilEnded(last)
			if _, ok := standing.last(last).(events.ExecutionCompleted); !ok || len(of[events.SandboxReady](standing)) != 1 {
				t.Errorf("after it the standing one ended with %+v, sandboxes %d", standing.last(last), len(of[events.SandboxReady](standing)))
			}
			b.noJobs()
		})
	}
}

// A sandbox whose runner does not answer is reported unhealthy, once, and healthy when the runner answers again.
func TestHealth_IsReportedOnce(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.metrics = prometheus.NewRegistry()
	b.run(func(c *executor.Config) { c.WarmEvery = 20 * time.Millisecond })
	s := b.session(short(events.Options{HealthIntervalMs: 1}))
	s.untilEnded(s.post("one"))
	b.until("the agent rests", func() bool { return metricValue(t, b.metrics, "spool_executor_agents", "resting") == 1 })
	b.provider.onlyBox().runner.die()
	b.until("it is said", func() bool { return len(of[events.SandboxHealth](s)) == 1 })
	if h := of[events.SandboxHealth](s)[0]; h.Status != events.Unhealthy || h.Reason == "" {
		t.Errorf("%+v", h)
	}
	s.untilEnded(s.post("two"))
	if got := types(s.events()); !strings.Contains(got, "sandbox_replaced") {
		t.Errorf("events %s", got)
	}
}

// A sandbox is not released while its files cannot be stored.
func TestSnapshot_FailureKeepsTheSandbox(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.run()
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	s.until("the turn's snapshot is there", func(l *eventlog.SessionState) bool { return l.Run.Snapshot.ID != "" })
	b.store.mu.Lock()
	b.store.fail = errors.New("the object store is away")
	b.store.mu.Unlock()
	for len(b.store.began) > 0 {
		<-b.store.began
	}
	s.idle()
	<-b.store.began
	<-b.store.began // tried again
	if l := s.load(); l.Run.Sandbox.ID == "" {
		t.Fatal("the sandbox was given up without a snapshot")
	}
	b.store.mu.Lock()
	b.store.fail = nil
	b.store.mu.Unlock()
	s.until("it is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	b.noJobs()
}

// Sandboxes end with the last executor of their engine, not with the first.
func TestStopSandboxes_OnlyWithTheLastExecutor(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	stops := func(c *executor.Config) { c.StopSandboxes = true }
	first, second := b.run(stops), b.run(stops)
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	if b.provider.count() != 1 {
		t.Fatal("the sandbox ended with the first executor")
	}
	if err := second.stop(); err != nil {
		t.Fatal(err)
	}
	if b.provider.count() != 0 {
		t.Error("the sandbox is left behind")
	}
	if ends := of[events.SandboxTerminated](s); len(ends) != 1 || ends[0].Kept {
		t.Errorf("ends %+v", ends)
	}
	if wiped, _ := b.provider.wiped(of[events.SandboxReady](s)[0].SandboxID); !wiped {
		t.Error("its workspace is left behind, although it was stored")
	}
}
