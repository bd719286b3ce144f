package executor_test

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
)

// steps is an agent that writes a block each time the test allows it.
func steps(n int, allow <-chan struct{}) script {
	return func(t *fakeTurn) {
		t.Start()
		for i := range n {
			if !t.Wait(allow) {
				t.End(runner.TurnEnd{Outcome: runner.OutcomeKilled})
				return
			}
			t.Text("b"+string(rune('a'+i)), string(rune('a'+i)))
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: "all"})
	}
}

// blocksStored counts the complete blocks in the log.
func blocksStored(s *talk) int {
	return strings.Count(types(s.events()), "block_complete")
}

func (s *talk) untilBlocks(n int) {
	s.b.t.Helper()
	s.b.until("blocks are stored", func() bool { return blocksStored(s) == n })
}

// Fault 1: the executor is killed during a turn. Another one follows the agent, which continues undisturbed.
func TestExecutorKilled_AnotherFollowsTheAgent(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(3, allow))
	a := b.run()
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	a.wire.kill()
	b.run()
	allow <- struct{}{} // while nobody follows
	s.until("the other has claimed", func(l *eventlog.SessionState) bool { return l.Run.Epoch == 2 })
	allow <- struct{}{}
	l := s.untilEnded(execution)
	if l.Run.Phase != run.Completed || l.Run.Attempt != 1 || len(b.provider.onlyBox().runner.receivedQueries()) != 1 {
		t.Errorf("after the takeover: %+v, agent started %d times", l.Run, len(b.provider.onlyBox().runner.receivedQueries()))
	}
	if got := wrote(s.events()); got != "[a b c]" {
		t.Errorf("wrote %s", got)
	}
	b.noJobs()
}

// Fault 4: on SIGTERM the execution is handed over at once, without waiting for a lease to expire.
func TestHandover_HappensAtOnce(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	a := b.run()
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	b.run()
	began := time.Now()
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	s.until("the other has claimed", func(l *eventlog.SessionState) bool { return l.Run.Epoch == 2 })
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("handed over after %s", took)
	}
	allow <- struct{}{}
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed || b.provider.made != 1 {
		t.Errorf("after the handover: %+v", l.Run)
	}
	b.noJobs()
}

// A warm sandbox stays for the next executor, which reuses it.
func TestHandover_KeepsTheWarmSandbox(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	a := b.run()
	s := b.session()
	s.untilEnded(s.post("one"))
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	b.run()
	s.untilEnded(s.post("two"))
	if b.provider.made != 1 {
		t.Errorf("%d sandboxes", b.provider.made)
	}
	if got := wrote(s.events()); got != "[Hello, one Hello, two]" {
		t.Errorf("wrote %s", got)
	}
}

// Fault 3: an executor that was frozen and continues later is fenced.
func TestFrozenExecutor_IsFenced(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(3, allow))
	a := b.run()
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	a.wire.freeze()
	allow <- struct{}{} // it reads this block and tries to append it
	b.run()
	s.until("the other has claimed", func(l *eventlog.SessionState) bool { return l.Run.Epoch == 2 })
	s.untilBlocks(2)
	a.wire.thaw()
	// The log refuses its append, or the runner its command, whichever it sends first.
	b.until("the zombie has given the execution up", func() bool { return a.log.refusals() > 0 || !a.runs(s) })
	allow <- struct{}{}
	s.untilEnded(execution)
	if got := wrote(s.events()); got != "[a b c]" {
		t.Errorf("wrote %s", got)
	}
	b.noJobs()
	for _, e := range s.events() {
		if c, ok := e.Data.(events.ExecutionClaimed); ok && c.Epoch > 2 {
			t.Errorf("claimed again under epoch %d", c.Epoch)
		}
	}
}

// Fault 6, and the rule for redeliveries: a second job for an execution does not run it twice.
func TestJobs_SecondJobDoesNotRunAnExecutionTwice(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	b.run()
	b.run()
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	for range 3 {
		s.job()
		s.jobAt("job.local.any")
	}
	// Longer than the ack wait: the first job must not be delivered again either.
	time.Sleep(6 * time.Second)
	allow <- struct{}{}
	if l := s.untilEnded(execution); l.Run.Epoch != 1 {
		t.Errorf("epoch %d after the end", l.Run.Epoch)
	}
	if n := len(b.provider.onlyBox().runner.receivedQueries()); n != 1 {
		t.Errorf("the agent was started %d times", n)
	}
	b.noJobs()
}

// TestJobs_SurviveAStaleAcknowledgement: a process that was suspended with a job acknowledges it after it was delivered again.
// The executor that runs the execution may die then: a job of the session must still be there.
func TestJobs_SurviveAStaleAcknowledgement(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	s := b.session()
	execution := s.post("go")
	// The suspended process: it receives the job, and neither handles it nor sends heartbeats.
	durable := topology.ProviderJobsConsumer(b.sandbox)
	durable.Config.MaxWaiting = 8192 // as pkg/bus creates it
	consumer, err := b.js.CreateOrUpdateConsumer(t.Context(), durable.Stream, durable.Config)
	if err != nil {
		t.Fatal(err)
	}
	stale, err := consumer.Next()
	if err != nil {
		t.Fatal(err)
	}
	b.run()
	allow <- struct{}{}
	s.untilBlocks(1)
	s.jobAt(topology.ProviderJobSubject(b.sandbox))
	b.until("the delivery of the second job", func() bool {
		info, err := consumer.Info(t.Context())
		return err == nil && info.NumPending == 0
	})
	if err := stale.DoubleAck(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		time.Sleep(50 * time.Millisecond) // the second job may be acknowledged a little later
		if b.jobs() == 0 {
			t.Fatal("an execution runs, and JOBS holds no job for its session")
		}
	}
	allow <- struct{}{}
	s.untilEnded(execution)
	b.noJobs()
}

// Fault 5: the end is stored, and the job is not acknowledged.
func TestJobs_EndedExecutionIsNotRunAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run()
	s := b.session()
	s.untilEnded(s.post("once"))
	s.job()
	b.noJobs()
	if n := len(b.provider.onlyBox().runner.receivedQueries()); n != 1 {
		t.Errorf("the agent was started %d times", n)
	}
}

// Fault 2: the sandbox is lost. The execution continues in another one as attempt 2; open blocks are closed with the
// text so far.
func TestSandboxLost_AnotherAttemptRuns(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		if t.Query.Attempt == 1 {
			t.Say("transcript_written", events.TranscriptWritten{AgentSessionID: "agent-session-7"})
			t.Text("whole", "one")
			t.Open("torn")
			t.Stream("torn", 0, "half a ", "sentence")
			t.Say("log", events.Log{Level: "info", Stream: "runner", Message: "torn"})
			<-t.killed
			return
		}
		t.Text("whole", "two")
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	b.run()
	s := b.session()
	execution := s.post("go")
	b.until("the text is out", func() bool {
		return strings.Contains(types(s.events()), "log") && slices.ContainsFunc(b.texts(), func(d events.Delta) bool { return strings.HasSuffix(d.Text, "sentence") })
	})
	first := b.provider.onlyBox()
	first.runner.die()
	l := s.untilEnded(execution)
	if l.Run.Phase != run.Completed || l.Run.Attempt != 2 || b.provider.made != 2 {
		t.Errorf("after the loss: %+v", l.Run)
	}
	var torn, replaced bool
	for _, e := range s.events() {
		switch d := e.Data.(type) {
		case events.SandboxReplaced:
			replaced = d.SandboxID == first.spec.ID && d.Lost != ""
		case events.BlockComplete:
			torn = torn || d.Block.Status == events.StatusError && d.Block.Content == "half a sentence"
		}
	}
	if !torn || !replaced {
		t.Errorf("the torn block is closed: %v; the loss is told: %v", torn, replaced)
	}
	if got := wrote(s.events()); got != "[one two]" {
		t.Errorf("wrote %s", got)
	}
	q := b.provider.onlyBox().runner.receivedQueries()
	if len(q) != 1 || q[0].Attempt != 2 || q[0].Resume != "agent-session-7" {
		t.Errorf("the second attempt: %+v", q)
	}
	if _, terminated := b.provider.wiped(first.spec.ID); !terminated {
		t.Error("what was left of the lost sandbox was not ended")
	}
}

func (b *bench) texts() []events.Delta {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.deltas)
}

// Another executor may be ending the sandbox when a query is sent, for example after a request to terminate it. The
// execution then runs in another sandbox.
func TestSandboxLost_WhenItsRunnerRefusesTheQueryBecauseItStops(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	b.run()
	s := b.session()
	s.untilEnded(s.post("first"))
	first := b.provider.onlyBox()
	first.runner.mu.Lock()
	first.runner.stopping = true
	first.runner.mu.Unlock()
	if l := s.untilEnded(s.post("second")); l.Run.Phase != run.Completed || b.provider.made != 2 {
		t.Errorf("after the refusal %d sandboxes were made: %+v", b.provider.made, l.Run)
	}
}

// An execution whose sandbox is lost repeatedly ends.
func TestSandboxLost_RepeatedlyEndsTheExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		go t.r.die()
		<-t.killed
	})
	b.run()
	s := b.session()
	execution := s.post("go")
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "SANDBOX_LOST" {
		t.Errorf("end: %+v", s.last(execution))
	}
	if b.provider.made != 3 {
		t.Errorf("%d sandboxes", b.provider.made)
	}
}

// Executor and sandbox are lost together.
func TestSandboxLost_WithItsExecutor(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		if t.Query.Attempt == 1 {
			t.Open("torn")
			t.Say("log", events.Log{Message: "torn"})
			<-t.killed
			return
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	a := b.run()
	s := b.session()
	execution := s.post("go")
	b.until("the block is open", func() bool { return strings.Contains(types(s.events()), "log") })
	a.wire.kill()
	b.provider.onlyBox().runner.die()
	b.run()
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed || l.Run.Attempt != 2 {
		t.Errorf("end: %+v", l.Run)
	}
	b.noJobs()
}

// The stream to the runner breaks while the runner lives: nothing is lost or stored twice.
func TestStreamCut_LosesNothing(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(3, allow))
	b.run()
	s := b.session()
	execution := s.post("go")
	for i := range 2 {
		allow <- struct{}{}
		s.untilBlocks(i + 1)
		r := b.provider.onlyBox().runner
		r.mu.Lock()
		r.follower.cut()
		r.mu.Unlock()
	}
	allow <- struct{}{}
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed || l.Run.Epoch != 1 {
		t.Errorf("end: %+v", l.Run)
	}
	if got := wrote(s.events()); got != "[a b c]" || len(b.provider.onlyBox().runner.receivedQueries()) != 1 {
		t.Errorf("wrote %s", got)
	}
}

func TestSandboxFails_EndsTheExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.provider.createErr = errNoRoom
	b.run()
	s := b.session()
	execution := s.post("go")
	l := s.untilEnded(execution)
	f, ok := s.last(execution).(events.ExecutionFailed)
	if !ok || f.Code != "SANDBOX_FAILED" || !strings.Contains(f.Message, "no room") || l.Run.Sandbox.ID != "" {
		t.Errorf("end: %+v, sandbox %+v", s.last(execution), l.Run.Sandbox)
	}
	if got := types(s.events()); got != "execution_claimed sandbox_creating sandbox_failed execution_failed" {
		t.Errorf("events: %s", got)
	}
	b.noJobs()
	// The next message tries again.
	b.provider.mu.Lock()
	b.provider.createErr = nil
	b.provider.mu.Unlock()
	s.untilEnded(s.post("again"))
}

// If a holder dies after it announced a sandbox, the next holder creates that sandbox.
func TestSandboxAnnounced_IsCreatedByTheNextHolder(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	s := b.session()
	execution := s.post("go")
	gone := mint(t, events.KindExecutor)
	s.claimAs(gone)
	id := mint(t, events.KindSandbox)
	m := events.NewEventList(events.CommandMeta{CommandID: mint(t, events.KindCommand), Now: time.Now().UTC()})
	m.Add(execution, events.SandboxCreating{SandboxID: id, Provider: "local", Engine: b.engine})
	s.decide(events.Actor{Kind: "executor", ID: gone}, func(l *eventlog.SessionState) run.Command {
		return run.RecordEvents{Epoch: l.Run.Epoch, Events: m.Events()}
	})
	b.run()
	if l := s.untilEnded(execution); l.Run.Sandbox.ID != id || l.Run.Epoch != 2 {
		t.Errorf("sandbox %s, epoch %d", l.Run.Sandbox.ID, l.Run.Epoch)
	}
}

func TestClaimsExhausted_EndsTheExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	s := b.session()
	execution := s.post("go")
	for range run.MaxClaimsWithoutProgress {
		s.claimAs(mint(t, events.KindExecutor))
	}
	b.run()
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "CLAIMS_EXHAUSTED" {
		t.Errorf("end: %+v", s.last(execution))
	}
	b.noJobs()
}

// The jobs for a sandbox on an engine that has been gone for long are adopted.
func TestAdoption_RunsJobsOfAGoneEngine(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.engine = "elsewhere"
	a := b.run()
	s := b.session()
	s.untilEnded(s.post("one"))
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	first := b.provider.onlyBox().spec.ID
	b.engine = "here"
	b.run(func(c *executor.Config) { c.EngineGone = time.Second })
	execution := s.post("two") // on job.local.on.elsewhere
	l := s.untilEnded(execution)
	if l.Run.Sandbox.Engine != "here" || l.Run.Sandbox.ID == first || l.Run.Phase != run.Completed {
		t.Errorf("after the adoption: %+v", l.Run)
	}
	if _, terminated := b.provider.wiped(first); terminated {
		t.Error("a sandbox of another engine was ended")
	}
	b.noJobs()
}

// Fault 7: NATS is restarted during a turn. The agent's events from that time are stored later.
func TestNATSRestart_LosesNothing(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	server := natstest.RunRestartable(t)
	b := newBenchOn(t, steps(3, allow), server.URL(), server.Conn())
	e := b.run()
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	server.Stop()
	allow <- struct{}{}
	time.Sleep(time.Second) // appends fail meanwhile
	server.Start()
	allow <- struct{}{}
	b.until("the lease is renewed", func() bool {
		kv, err := b.js.KeyValue(b.ctx, topology.BucketLeases)
		if err != nil {
			return false
		}
		_, err = kv.Get(b.ctx, e.ID())
		return err == nil
	})
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed {
		t.Errorf("end: %+v", l.Run)
	}
	if got := wrote(s.events()); got != "[a b c]" || len(b.provider.onlyBox().runner.receivedQueries()) != 1 {
		t.Errorf("wrote %s", got)
	}
	b.noJobs()
	second := s.post("more")
	for range 3 {
		allow <- struct{}{}
	}
	s.untilEnded(second)
}

// An executor that starts before its bucket exists, because NATS is being installed, logs that and continues once the
// bucket exists.
func TestRun_WaitsForItsBucket(t *testing.T) {
	t.Parallel()
	b := newBench(t, steps(1, nil))
	if err := b.js.DeleteKeyValue(b.ctx, topology.BucketLeases); err != nil {
		t.Fatal(err)
	}
	installed := make(chan error, 1)
	b.logger = slog.New(slog.NewTextHandler(&lineTrigger{text: topology.BucketLeases, call: func() {
		installed <- topology.Provision(b.ctx, b.js, topology.ProvisionConfig{Shards: 1})
	}}, nil))
	b.run()
	if err := <-installed; err != nil {
		t.Fatal(err)
	}
}

// lineTrigger is a log writer that calls a function at the first line that contains a text.
type lineTrigger struct {
	text string
	call func()
	once sync.Once
}

func (l *lineTrigger) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte(l.text)) {
		l.once.Do(l.call)
	}
	return len(line), nil
}

// An execution that the session service gave up may still occupy the runner. The next execution runs all the same.
func TestAbandonedExecution_DoesNotBlockTheNext(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		if t.Query.Content == "hang" {
			t.Open("torn")
			<-t.killed
			t.End(runner.TurnEnd{Outcome: runner.OutcomeKilled})
			return
		}
		t.Text("b", "free")
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	a := b.run()
	s := b.session()
	first := s.post("hang")
	b.until("the block is open", func() bool { return strings.Contains(types(s.events()), "block_start") })
	a.wire.kill()
	s.decide(events.Actor{Kind: "service", ID: "session"}, func(l *eventlog.SessionState) run.Command {
		return run.AbandonExecution{
			CommandMeta: events.CommandMeta{CommandID: mint(t, events.KindCommand), Now: time.Now().UTC()},
			ExecutionID: first, Turn: l.Life.Active.Turn, By: "session/test", Outcome: events.ExecutionFailed{Code: "EXECUTOR_LOST", Message: "gone"},
		}
	})
	b.run()
	second := s.post("next")
	l := s.untilEnded(second)
	if l.Run.Phase != run.Completed || b.provider.made != 1 {
		t.Errorf("after the abandoned one: %+v", l.Run)
	}
	if got := wrote(s.events()); got != "[free]" {
		t.Errorf("wrote %s", got)
	}
	b.noJobs()
}
