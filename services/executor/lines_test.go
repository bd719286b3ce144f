package executor_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
)

func refOf(s *talk) topology.SessionRef { return topology.SessionRef{Tenant: tenant, Session: s.id} }

func strayOf(t *testing.T, s *talk) sandbox.Spec {
	return sandbox.Spec{ID: mint(t, events.KindSandbox), Labels: sandbox.Labels{Tenant: tenant, Session: s.id, Engine: s.b.engine}}
}

// Lines that a runner must not write, or that cannot be read, are shown and change nothing.
func TestBadLines_AreShownAndChangeNothing(t *testing.T) {
	t.Parallel()
	other := mint(t, events.KindExecution)
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		t.Say("execution_completed", events.ExecutionCompleted{Result: "forged"})
		t.Say("session_deleted", events.SessionDeleted{})
		t.Say("block_start", map[string]any{"block": 7})
		t.Say("teleported", map[string]any{"to": "mars"})
		t.say(runner.JournalLine{Type: "block_start", ExecutionID: other}, events.BlockStart{Block: events.Block{ID: "x", Kind: events.KindAssistantText}}, "")
		t.Raw("this is no JSON", "log", events.Log{Message: "after no JSON"})
		t.Raw(`{"half":`, "log", events.Log{Message: "after half a line"})
		t.Raw(strings.Repeat("x", runner.MaxLineLength+10), "log", events.Log{Message: "after a long line"})
		t.Raw(`{}`, "log", events.Log{Message: "after nothing"})
		t.Text("b", "still here")
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: "real"})
	})
	b.run()
	s := b.session()
	execution := s.post("go")
	s.untilEnded(execution)
	if c, ok := s.last(execution).(events.ExecutionCompleted); !ok || c.Result != "real" {
		t.Errorf("end: %+v", s.last(execution))
	}
	var codes, logs []string
	for _, e := range s.events() {
		if e.ExecutionID == other {
			t.Errorf("an event of another execution: %+v", e)
		}
		switch d := e.Data.(type) {
		case events.Error:
			codes = append(codes, d.Code)
		case events.Log:
			logs = append(logs, d.Message)
		}
	}
	if got := strings.Join(codes, " "); got != "FORGED_EVENT FORGED_EVENT BAD_LINE" {
		t.Errorf("errors: %s", got)
	}
	all := strings.Join(logs, "\n")
	for _, want := range []string{"teleported", other, "this is no JSON", `{"half":`, "more than", "after no JSON", "after half a line", "after a long line", "after nothing"} {
		if !strings.Contains(all, want) {
			t.Errorf("no log says %q:\n%.2000s", want, all)
		}
	}
	if got := wrote(s.events()); got != "[still here]" {
		t.Errorf("wrote %s", got)
	}
}

func TestUnknownArchitecture_EndsTheExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run()
	s := b.session(func(c *events.SessionCreated) { c.Architecture = "nonesuch" })
	execution := s.post("go")
	s.untilEnded(execution)
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "UNKNOWN_ARCHITECTURE" || !strings.Contains(f.Message, "nonesuch") {
		t.Errorf("end: %+v", s.last(execution))
	}
	b.noJobs()
}

// A poison job goes to DEAD, and the queue continues.
func TestPoison_GoesToDead(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run()
	if _, err := b.js.Publish(b.ctx, topology.ProviderJobSubject("local"), []byte(`{"tenant":"default","session":"*"}`)); err != nil {
		t.Fatal(err)
	}
	s := b.session()
	s.untilEnded(s.post("go"))
	b.noJobs()
	dead, err := b.js.Stream(b.ctx, topology.StreamDead)
	if err != nil {
		t.Fatal(err)
	}
	msg, err := dead.GetLastMsgForSubject(b.ctx, topology.DeadSubject(topology.ProviderJobSubject("local")))
	if err != nil || !strings.Contains(msg.Header.Get(topology.HeaderDeadReason), "session") {
		t.Errorf("dead letter: %+v, %v", msg, err)
	}
}

// A long journal is split into several commits, and large data is kept.
func TestLargeTurn_IsSplitOverCommits(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("0123456789abcdef", 30_000) // 480 kB
	b := newBench(t, func(t *fakeTurn) {
		t.Start()
		for _, id := range []string{"a", "b", "c", "d"} {
			t.Say("block_start", events.BlockStart{Block: events.Block{ID: id, Kind: events.KindToolResult, ToolUseID: "toolu_" + id}})
			t.Say("block_complete", events.BlockComplete{Block: events.Block{ID: id, Kind: events.KindToolResult, ToolUseID: "toolu_" + id, Output: big + id}})
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	b.run()
	s := b.session()
	s.untilEnded(s.post("go"))
	var got string
	for _, e := range s.events() {
		if c, ok := e.Data.(events.BlockComplete); ok {
			if c.Block.Output != big+strings.TrimPrefix(c.Block.ToolUseID, "toolu_") {
				t.Errorf("block %s has %d bytes", c.Block.ToolUseID, len(c.Block.Output))
			}
			got += c.Block.ToolUseID
		}
	}
	if got != "toolu_atoolu_btoolu_ctoolu_d" {
		t.Errorf("blocks %s", got)
	}
}

// Lines between turns are stored for the session and stop nothing.
func TestLinesBetweenTurns_AreStored(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run()
	s := b.session()
	s.untilEnded(s.post("one"))
	b.provider.onlyBox().runner.between("the agent yawns")
	s.untilEnded(s.post("two"))
	found := false
	for _, e := range s.events() {
		if l, ok := e.Data.(events.Log); ok {
			found = l.Message == "the agent yawns" && e.ExecutionID == ""
		}
	}
	if !found {
		t.Errorf("what was said between the turns is not in the log: %s", types(s.events()))
	}
}
