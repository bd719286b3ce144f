package executor_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/topology"
)

// Call journals a tool call and its result in a conversation.
func (t *fakeTurn) Call(conversation, id, tool, input, output string) {
	use := events.Block{ID: "use-" + id, Kind: events.KindToolUse, Status: events.StatusPending, ToolName: tool, ToolUseID: id}
	t.sayIn(conversation, events.BlockStart{Block: use})
	use.Status, use.Input = events.StatusComplete, json.RawMessage(input)
	t.sayIn(conversation, events.BlockComplete{Block: use})
	result := events.Block{ID: "result-" + id, Kind: events.KindToolResult, Status: events.StatusPending, ToolUseID: id}
	t.sayIn(conversation, events.BlockStart{Block: result})
	result.Status, result.Output = events.StatusComplete, output
	t.sayIn(conversation, events.BlockComplete{Block: result})
}

func (t *fakeTurn) sayIn(conversation string, p events.Payload) {
	t.say(runner.JournalLine{Type: p.EventType(), ExecutionID: t.Query.ExecutionID, ConversationID: conversation}, p, "")
}

// repeats is an agent that makes the same call n times, and then waits until it is interrupted if it is stuck, or else answers.
func repeats(n int, stuck bool) script {
	return func(t *fakeTurn) {
		t.Start()
		for i := range n {
			t.Call("main", fmt.Sprint("call-", i), "read_file", fmt.Sprintf(`{"path":"a","line":%d}`, 7), "no such file")
		}
		if stuck {
			t.endInterrupted()
			return
		}
		t.Text("b", "done")
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	}
}

// endInterrupted ends the turn when it is interrupted.
func (t *fakeTurn) endInterrupted() {
	outcome := runner.OutcomeInterrupted
	if !t.Wait(t.interrupted) {
		outcome = runner.OutcomeKilled
	}
	t.End(runner.TurnEnd{Outcome: outcome})
}

// loopingSession returns a session of an agent.
func (b *bench) loopingSession(spec events.AgentSpec) *talk {
	b.t.Helper()
	spec.Architecture, spec.Instructions = "claude-code", "Read the file."
	return b.session(of1(b.agent("looper", 11, spec)))
}

// The log has one warning for a series of equal calls, and the execution goes on below the limit at which it is stopped.
func TestLoops_WarnOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t, repeats(4, false))
	b.run()
	s := b.session() // of the built-in definition, which has the defaults
	if l := s.untilEnded(s.post("go")); l.Run.Phase != run.Completed {
		t.Errorf("end: %+v", l.Run)
	}
	want := events.LoopDetected{ToolName: "read_file", Calls: 3, Limit: 3, StopAt: 5}
	if got := of[events.LoopDetected](s); len(got) != 1 || got[0] != want {
		t.Errorf("warnings %+v, want one: %+v", got, want)
	}
	var before []string
	for _, e := range s.events() {
		if r, ok := e.Data.(events.BlockComplete); ok && r.Block.Kind == events.KindToolResult {
			before = append(before, r.Block.ToolUseID)
		}
		if e.Type() == (events.LoopDetected{}).EventType() {
			if len(before) != 3 || e.Source != events.FromServer || e.ConversationID != "main" {
				t.Errorf("after the results %v: %+v", before, e)
			}
		}
	}
	b.noJobs()
}

// At the limit the turn is interrupted, and retries do not follow.
func TestLoops_StopTheExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, repeats(5, true))
	b.run()
	s := b.loopingSession(events.AgentSpec{Retries: events.Retries{Attempts: 3}})
	execution := s.post("go")
	s.untilEnded(execution)
	f, ok := s.last(execution).(events.ExecutionFailed)
	if !ok || f.Code != "LOOP_DETECTED" || !strings.HasPrefix(f.Message, "the agent called read_file 5 times in a row with the same arguments and the same result") {
		t.Errorf("end: %+v", s.last(execution))
	}
	r := b.provider.onlyBox().runner
	if ops := r.operations(); !slices.Contains(ops, runner.OpInterrupt) || slices.Contains(ops, runner.OpKill) || len(r.receivedQueries()) != 1 {
		t.Errorf("operations %v, %d attempts", ops, len(r.receivedQueries()))
	}
	if n := len(of[events.LoopDetected](s)); n != 1 {
		t.Errorf("%d warnings", n)
	}
	b.noJobs()
}

// Each attempt begins anew: an agent that repeats a call because its process dies is limited by its retries.
func TestLoops_BeginAnewWithEachAttempt(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.Call("main", fmt.Sprint("call-", t.Query.Attempt), "read_file", `{}`, "x")
		t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_EXITED", Message: "the agent's process ended"})
	})
	b.run()
	s := b.loopingSession(events.AgentSpec{Retries: events.Retries{Attempts: 6}})
	execution := s.post("go")
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "AGENT_EXITED" || !strings.HasSuffix(f.Message, "(attempt 6 of 6)") {
		t.Errorf("end: %+v", s.last(execution))
	}
	if n := len(of[events.LoopDetected](s)); n != 0 {
		t.Errorf("%d warnings", n)
	}
	b.noJobs()
}

// An agent that does not obey the interrupt is killed after the grace, and retries do not follow.
func TestLoops_KillAnAgentThatDoesNotObey(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		for i := range 7 {
			t.Call("main", fmt.Sprint(i), "read_file", `{}`, "x")
		}
		<-t.killed
		t.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_EXITED", Message: "killed"})
	})
	b.run()
	s := b.loopingSession(events.AgentSpec{Retries: events.Retries{Attempts: 3}})
	execution := s.post("go")
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "LOOP_DETECTED" {
		t.Errorf("end: %+v", s.last(execution))
	}
	if r := b.provider.onlyBox().runner; !slices.Contains(r.operations(), runner.OpKill) || len(r.receivedQueries()) != 1 {
		t.Errorf("operations %v, %d attempts", r.operations(), len(r.receivedQueries()))
	}
	b.noJobs()
}

// The fields of the agent set the limits, or turn detection off.
func TestLoops_FollowTheAgentsDefinition(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		loops    events.Loops
		calls    int
		stuck    bool
		warnings int
		code     string // "" if the execution is completed
	}{
		"off":           {events.Loops{Action: "none"}, 20, false, 0, ""},
		"only warnings": {events.Loops{Action: "warn", Warn: 2}, 20, false, 1, ""},
		"lower limits":  {events.Loops{Warn: 2, Stop: 3}, 3, true, 1, "LOOP_DETECTED"},
		"higher limits": {events.Loops{Warn: 8, Stop: 10}, 9, false, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, repeats(c.calls, c.stuck))
			b.run()
			s := b.loopingSession(events.AgentSpec{Loops: c.loops})
			execution := s.post("go")
			s.untilEnded(execution)
			f, _ := s.last(execution).(events.ExecutionFailed)
			if n := len(of[events.LoopDetected](s)); n != c.warnings || f.Code != c.code {
				t.Errorf("%d warnings, end: %+v", n, s.last(execution))
			}
			b.noJobs()
		})
	}
}

// Sub-agents are looked at separately, and their warnings are in their conversations.
func TestLoops_WarnInTheConversationOfASubagent(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.Say("subagent_spawned", events.SubagentSpawned{SubagentID: "s", Conversation: "sub", Parent: "main", Name: "helper"})
		for i := range 3 {
			t.Call("sub", fmt.Sprint("sub-", i), "read_file", `{}`, "x")
			if i < 2 {
				t.Call("main", fmt.Sprint("main-", i), "read_file", `{}`, "x")
			}
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	b.run()
	s := b.session()
	s.untilEnded(s.post("go"))
	var where []string
	for _, e := range s.events() {
		if e.Type() == (events.LoopDetected{}).EventType() {
			where = append(where, e.ConversationID)
		}
	}
	if len(where) != 1 || where[0] != "sub" {
		t.Errorf("warnings in %v", where)
	}
}

// The count survives the executor: the next one knows the calls and the warning that the log has.
func TestLoops_ContinueAfterATakeover(t *testing.T) {
	t.Parallel()
	resume := make(chan struct{})
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		for i := range 5 {
			if i == 4 {
				<-resume
			}
			t.Call("main", fmt.Sprint(i), "read_file", `{}`, "x")
		}
		t.endInterrupted()
	})
	a := b.run()
	s := b.session()
	execution := s.post("go")
	b.until("four calls and the warning are stored", func() bool {
		n := 0
		for _, p := range of[events.BlockComplete](s) {
			if p.Block.Kind == events.KindToolResult {
				n++
			}
		}
		return n == 4 && len(of[events.LoopDetected](s)) == 1
	})
	a.wire.kill()
	b.run()
	b.until("another executor has claimed the execution", func() bool { return len(of[events.ExecutionClaimed](s)) == 2 })
	close(resume)
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "LOOP_DETECTED" {
		t.Errorf("end: %+v", s.last(execution))
	}
	if got := of[events.LoopDetected](s); len(got) != 1 || got[0].Calls != 3 {
		t.Errorf("warnings %+v", got)
	}
	b.noJobs()
}

// An executor that dies after it has stored the last call leaves the stop to the next one.
func TestLoops_StopAfterATakeover(t *testing.T) {
	t.Parallel()
	b := newBench(t, repeats(5, true))
	s := b.loopingSession(events.AgentSpec{Loops: events.Loops{Warn: 5, Stop: 5}})
	cut := make(chan *runningExecutor, 1)
	b.stored = func(d events.Draft) {
		for _, e := range d.Events {
			if r, ok := e.Data.(events.BlockComplete); ok && r.Block.Kind == events.KindToolResult && r.Block.ToolUseID == "call-4" {
				select {
				case x := <-cut:
					x.wire.kill()
				default:
				}
			}
		}
	}
	cut <- b.run()
	execution := s.post("go")
	b.until("the last call is stored and the executor is dead", func() bool { return len(cut) == 0 })
	b.stored = nil
	b.run()
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "LOOP_DETECTED" {
		t.Errorf("end: %+v", s.last(execution))
	}
	if n := len(of[events.LoopDetected](s)); n != 1 {
		t.Errorf("%d warnings", n)
	}
}

// Data that is missing in the object store does not keep the next executor from the execution; the count begins anew.
func TestLoops_ContinueWithoutDamagedEvents(t *testing.T) {
	t.Parallel()
	resume := make(chan struct{})
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		for i := range 4 {
			if i == 2 {
				<-resume
			}
			t.Call("main", fmt.Sprint(i), "read_file", `{}`, strings.Repeat("x", 300_000))
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	a := b.run()
	s := b.session()
	execution := s.post("go")
	b.until("the first calls are stored", func() bool { return s.load().Run.Output.Events == 9 })
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	store, err := b.js.ObjectStore(b.ctx, topology.BucketPayloads)
	if err != nil {
		t.Fatal(err)
	}
	objects, err := store.List(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if err := store.Delete(b.ctx, o.Name); err != nil {
			t.Fatal(err)
		}
	}
	b.run()
	s.job()
	b.until("another executor has claimed the execution", func() bool { return s.load().Run.Epoch == 2 })
	close(resume)
	if l := s.until("the execution has ended", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(execution) }); l.Run.Phase != run.Completed {
		t.Errorf("end: %+v", l.Run)
	}
}

// Sub-agents that start sub-agents too deep stop the execution.
func TestRecursionLimit_StopsTheExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		parent := "main"
		for i := range 3 {
			child := fmt.Sprint("sub-", i)
			t.sayIn(parent, events.SubagentSpawned{SubagentID: child, Conversation: child, Parent: parent, Name: "digger"})
			parent = child
		}
		t.endInterrupted()
	})
	b.run()
	s := b.loopingSession(events.AgentSpec{Limits: events.Limits{SubagentDepth: 2}, Retries: events.Retries{Attempts: 3}})
	execution := s.post("go")
	s.untilEnded(execution)
	f, ok := s.last(execution).(events.ExecutionFailed)
	if !ok || f.Code != "RECURSION_LIMIT" || f.Message != `sub-agent "digger" was started 3 levels below the agent; the limit is 2 (limits.subagentDepth)` {
		t.Errorf("end: %+v", s.last(execution))
	}
	if q := b.provider.onlyBox().runner.receivedQueries(); len(q) != 1 || q[0].SubagentDepth != 2 {
		t.Errorf("queries %+v", q)
	}
	b.noJobs()
}

// loopScript makes the model call the same tool five times, and then write until the turn is interrupted.
const loopScript = `
rules:
  - name: loop
    match: {tools: [run_code]}
    steps:
      - tool: {name: run_code, input: {language: bash, code: "cat missing.txt"}}
      - tool: {name: run_code, input: {language: bash, code: "cat missing.txt"}}
      - tool: {name: run_code, input: {language: bash, code: "cat missing.txt"}}
      - tool: {name: run_code, input: {language: bash, code: "cat missing.txt"}}
      - tool: {name: run_code, input: {language: bash, code: "cat missing.txt"}}
      - endless: {text: "I try again. ", delay: 10ms}
`

// The built-in agent, whose model repeats a failing command, is stopped.
func TestLoops_StopTheBuiltInAgent(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, loopScript)
	agent := b.agent("looper", 11, events.AgentSpec{Architecture: "spool", Instructions: "Read the file."})
	e := b.run()
	s := b.session(of1(agent), func(c *events.SessionCreated) { c.Architecture = "spool" })
	execution := s.post("go")
	s.untilEnded(execution)
	f, ok := s.last(execution).(events.ExecutionFailed)
	if !ok || f.Code != "LOOP_DETECTED" || !strings.Contains(f.Message, "run_code 5 times in a row") {
		t.Errorf("end: %+v\n%s", s.last(execution), types(s.events()))
	}
	if got := of[events.LoopDetected](s); len(got) != 1 || got[0].ToolName != "run_code" {
		t.Errorf("warnings %+v", got)
	}
	s.removeAll(e)
}
