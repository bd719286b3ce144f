package agent_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

func data[T any](t require, l runner.JournalLine) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(l.Data, &v); err != nil {
		t.Fatalf("line %d %s: %v", l.N, l.Type, err)
	}
	return v
}

type require interface {
	Helper()
	Fatalf(string, ...any)
}

func types(lines []runner.JournalLine) string {
	var out []string
	for _, l := range lines {
		out = append(out, string(l.Type))
	}
	return strings.Join(out, " ")
}

func TestTurnFlushesTextBeforeAnyOtherLine(t *testing.T) {
	t.Parallel()
	var j agenttest.Journal
	turn := agenttest.NewJournalTurn(t, &j, "exe_1")
	turn.Start(runner.TurnStart{Attempt: 1, PID: 1})
	id := turn.OpenBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText})
	turn.AppendText(id, "one ")
	turn.AppendText(id, "two")
	turn.Emit(events.MainConversation, events.Log{Level: "info", Stream: "stderr", Message: "hi"})
	turn.AppendText(id, " three")
	turn.CompleteBlock(id, nil)
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	lines := j.Lines()
	want := "agent_started block_start text_delta text_delta log text_delta block_complete turn_ended"
	if got := types(lines); got != want {
		t.Fatalf("journal\n got %s\nwant %s", got, want)
	}
	if d := data[runner.TextDelta](t, lines[5]); d.Offset != 7 || d.Delta != " three" {
		t.Errorf("second delta %+v", d)
	}
	if b := data[events.BlockComplete](t, lines[6]).Block; b.Content != "one two three" || b.Status != events.StatusComplete {
		t.Errorf("block %+v", b)
	}
}

func TestTurnEndsOpenBlocksAndItselfOnce(t *testing.T) {
	t.Parallel()
	var j agenttest.Journal
	turn := agenttest.NewJournalTurn(t, &j, "exe_1")
	text := turn.OpenBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText})
	turn.AppendText(text, "half")
	tool := turn.OpenBlock(events.MainConversation, events.Block{Kind: events.KindToolUse, ToolName: "write_file"})
	turn.AppendText(tool, `{"path":"a`)
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeInterrupted})
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	turn.AppendText(text, "late")
	turn.Emit(events.MainConversation, events.Log{Message: "late"})
	lines := j.Lines()
	want := "block_start text_delta block_start text_delta block_complete block_complete turn_ended"
	if got := types(lines); got != want {
		t.Fatalf("journal\n got %s\nwant %s", got, want)
	}
	first, second := data[events.BlockComplete](t, lines[4]).Block, data[events.BlockComplete](t, lines[5]).Block
	if first.Status != events.StatusError || first.Content != "half" {
		t.Errorf("text block %+v", first)
	}
	if second.Status != events.StatusError || second.Input != nil {
		t.Errorf("input that is no JSON must be left out: %+v", second)
	}
	if data[runner.TurnEnd](t, lines[6]).Outcome != runner.OutcomeInterrupted {
		t.Error("the first end counts")
	}
}

// For bytes in any pieces, the deltas are the block's text in whole runes, without a gap.
func TestTurnTextIsWhatTheDeltasSay(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		var j agenttest.Journal
		turn := agenttest.NewJournalTurn(t, &j, "exe_1")
		id := turn.OpenBlock(events.MainConversation, events.Block{Kind: events.KindThinking})
		raw := rapid.OneOf(
			rapid.Map(rapid.String(), func(s string) []byte { return []byte(s) }),
			rapid.SliceOf(rapid.Byte()),
		).Draw(rt, "raw")
		for rest := raw; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(rt, "n")
			turn.AppendText(id, string(rest[:n]))
			if rapid.Bool().Draw(rt, "other line") {
				turn.Emit(events.MainConversation, events.Log{Message: "x"})
			}
			rest = rest[n:]
		}
		turn.CompleteBlock(id, nil)
		var joined strings.Builder
		for _, l := range j.Lines() {
			if l.Type != events.TextDelta {
				continue
			}
			d := data[runner.TextDelta](rt, l)
			if int(d.Offset) != joined.Len() {
				rt.Fatalf("offset %d after %d bytes", d.Offset, joined.Len())
			}
			joined.WriteString(d.Delta)
		}
		lines := j.Lines()
		whole := data[events.BlockComplete](rt, lines[len(lines)-1]).Block.Content
		if whole != joined.String() || !utf8.ValidString(whole) {
			rt.Fatalf("deltas %q, block %q", joined.String(), whole)
		}
		if utf8.Valid(raw) && whole != string(raw) {
			rt.Fatalf("text %q became %q", raw, whole)
		}
	})
}

func TestTurnCutsWhatDoesNotFitAndSaysSo(t *testing.T) {
	t.Parallel()
	for name, output := range map[string]string{
		"plain":              strings.Repeat("x", 50<<20),
		"escaped six times":  strings.Repeat("\x00", 3<<20),
		"two-byte runes":     strings.Repeat("é", 3<<20),
		"no UTF-8 and worse": strings.Repeat("\xff", 3<<20),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var j agenttest.Journal
			turn := agenttest.NewJournalTurn(t, &j, "exe_1")
			turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindToolResult, Output: output})
			turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: output})
			lines := j.Lines()
			if got, want := types(lines), "error block_start error turn_ended"; got != want {
				t.Fatalf("journal %s, want %s", got, want)
			}
			if e := data[events.Error](t, lines[0]); e.Code != "OUTPUT_CUT" {
				t.Errorf("note %+v", e)
			}
			for _, l := range lines {
				raw, err := json.Marshal(l)
				if err != nil || len(raw) > runner.MaxLineLength || !utf8.Valid(l.Data) {
					t.Errorf("line %s: %d bytes, valid %v, %v", l.Type, len(raw), utf8.Valid(l.Data), err)
				}
			}
		})
	}
}

// planOf returns a plan with one item.
func planOf(content string) events.Plan {
	return events.Plan{Items: []events.PlanItem{{Content: content, Status: events.PlanPending}}}
}

func TestTurn_HasOnePlanForEachConversation(t *testing.T) {
	t.Parallel()
	var j agenttest.Journal
	turn := agenttest.NewJournalTurn(t, &j, "exe_1")
	turn.SetPlan(events.MainConversation, planOf("first"))
	turn.SetPlan("sub", planOf("of the sub-agent"))
	turn.SetPlan(events.MainConversation, planOf("second"))
	turn.Emit(events.MainConversation, events.SubagentCompleted{SubagentID: "sub", Conversation: "sub"})
	turn.SetPlan(events.MainConversation, events.Plan{})
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeKilled})
	lines := j.Lines()
	if got, want := types(lines), "block_start block_start block_update block_complete subagent_completed block_update block_complete turn_ended"; got != want {
		t.Fatalf("journal %s, want %s", got, want)
	}
	main, sub := data[events.BlockStart](t, lines[0]).Block, data[events.BlockStart](t, lines[1]).Block
	if u := data[events.BlockUpdate](t, lines[2]); u.BlockID != main.ID || u.Updates.Plan.Items[0].Content != "second" {
		t.Errorf("update %+v", u)
	}
	if b := data[events.BlockComplete](t, lines[3]).Block; b.ID != sub.ID || b.ConversationID != "sub" || b.Status != events.StatusComplete || b.Plan.Items[0].Content != "of the sub-agent" {
		t.Errorf("the sub-agent's plan is %+v", b)
	}
	if b := data[events.BlockComplete](t, lines[6]).Block; b.ID != main.ID || b.Kind != events.KindPlan || b.Status != events.StatusComplete || b.Plan == nil || len(b.Plan.Items) != 0 {
		t.Errorf("the agent's plan is %+v", b)
	}
}

func TestTurnCutsAPlanThatDoesNotFit(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"plain": "x", "escaped six times": "\x00", "no UTF-8": "\xff"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var j agenttest.Journal
			turn := agenttest.NewJournalTurn(t, &j, "exe_1")
			long := strings.Repeat(text, 2<<20)
			p := events.Plan{Title: long, Explanation: long}
			for range 2000 {
				p.Items = append(p.Items, events.PlanItem{ItemID: long, Content: long, Status: events.PlanPending, Priority: long})
			}
			turn.SetPlan(events.MainConversation, p)
			lines := j.Lines()
			if got, want := types(lines), "error block_start"; got != want {
				t.Fatalf("journal %s, want %s", got, want)
			}
			if e := data[events.Error](t, lines[0]); e.Code != "OUTPUT_CUT" {
				t.Errorf("note %+v", e)
			}
			b := data[events.BlockStart](t, lines[1]).Block
			if raw, err := json.Marshal(lines[1]); err != nil || len(raw) > runner.MaxLineLength || len(b.Plan.Items) != 500 {
				t.Errorf("a line of %d bytes with %d items, %v", len(raw), len(b.Plan.Items), err)
			}
			if len(p.Items) != 2000 || len(p.Items[0].Content) != len(long) {
				t.Error("the adapter's plan was changed")
			}
		})
	}
}

func TestTurnKeepsInputReadable(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		`{"a":1}`:                 `{"a":1}`,
		`{"s":"\ud800","n":1e99}`: "{\"n\":1e99,\"s\":\"\uFFFD\"}",
		"{\"s\":\"\xff\"}":        "{\"s\":\"\uFFFD\"}",
		`{"half":`:                ``,
	} {
		var j agenttest.Journal
		turn := agenttest.NewJournalTurn(t, &j, "exe_1")
		turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindToolUse, Input: json.RawMessage(in)})
		lines := j.Lines()
		b := data[events.BlockStart](t, lines[len(lines)-1]).Block
		if string(b.Input) != want {
			t.Errorf("%q became %q, want %q", in, b.Input, want)
		}
	}
}

func TestTurnJournalsWhatIsSaidOfUnknownBlocks(t *testing.T) {
	t.Parallel()
	var j agenttest.Journal
	turn := agenttest.NewJournalTurn(t, &j, "exe_1")
	turn.AppendText("b99", "x")
	turn.UpdateBlock("b99", events.BlockUpdates{})
	turn.CompleteBlock("b99", nil)
	if got := types(j.Lines()); got != "error error error" {
		t.Fatalf("journal %s", got)
	}
}

// An agent that prints between turns writes to a turn without a journal. Nothing of it is lost.
func TestTurn_WithoutJournalKeepsEverythingForTheNextTurn(t *testing.T) {
	t.Parallel()
	var idle agent.IdleOutput
	turn := agent.NewTurn(context.Background(), agent.TurnConfig{Idle: &idle, Redact: redact.New("secret-value")})
	id := turn.OpenBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText})
	turn.AppendText(id, "the e")
	turn.AppendText(id, "nd, secret-value")
	turn.CompleteBlock(id, nil)
	turn.AppendText(turn.OpenBlock(events.MainConversation, events.Block{Kind: events.KindThinking}), "half")
	turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindToolUse, ToolName: "run", Input: json.RawMessage(`{"n":1}`)})
	turn.SetPlan(events.MainConversation, planOf("the plan"))
	turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindSkillLoad, Skill: &events.LoadedSkill{Name: "greet"}})
	turn.Emit(events.MainConversation, events.Log{Message: "a note"})
	turn.Emit(events.MainConversation, events.TranscriptWritten{AgentSessionID: "s9"})
	turn.RequestPermission(events.MainConversation, agent.PermissionRequest{Call: permission.Call{Tool: "rm"}}, func(a agent.PermissionAnswer) {
		if a.IsAllowed() {
			t.Error("a call between turns is allowed")
		}
	})
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	turn.AbortBlocks()
	var got strings.Builder
	for _, p := range idle.Take() {
		got.WriteString(p.(events.Log).Message + "\n")
	}
	for _, want := range []string{
		"sent assistant_text: the end, [redacted]", "sent thinking: half", `sent tool_use: run {"n":1}`, "sent plan: the plan (pending)", "sent skill_load: greet", "a note", `sent transcript_written: {"agentSessionId":"s9"`,
		`sent permission_decided: {"toolName":"rm"`, "ended a turn that did not run: completed",
	} {
		if !strings.Contains(got.String(), want) {
			t.Errorf("%q is lost:\n%s", want, got.String())
		}
	}
	if left := idle.Take(); len(left) > 0 {
		t.Errorf("taken twice: %v", left)
	}
}

// What an adapter writes after the end of a turn is kept as well.
func TestTurn_KeepsWhatComesAfterItsEnd(t *testing.T) {
	t.Parallel()
	var idle agent.IdleOutput
	var j agenttest.Journal
	turn := agent.NewTurn(t.Context(), agent.TurnConfig{Journal: &j, Idle: &idle})
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	turn.Emit(events.MainConversation, events.Log{Message: "late"})
	turn.AppendText("b1", "late text")
	if lines := j.Lines(); len(lines) != 1 {
		t.Errorf("journal %v", types(lines))
	}
	if kept := fmt.Sprint(idle.Take()); !strings.Contains(kept, "late}") || !strings.Contains(kept, "late text") {
		t.Errorf("kept %s", kept)
	}
}

// An agent that never stops between turns does not fill the memory, and an event says that something is missing.
func TestIdleOutput_IsBounded(t *testing.T) {
	t.Parallel()
	var idle agent.IdleOutput
	turn := agent.NewTurn(t.Context(), agent.TurnConfig{Idle: &idle})
	for range 1000 {
		turn.Emit(events.MainConversation, events.Log{Message: "noise"})
	}
	kept := idle.Take()
	last, ok := kept[len(kept)-1].(events.Error)
	if len(kept) != 257 || !ok || last.Code != "OUTPUT_CUT" || !strings.Contains(last.Message, "744 events") {
		t.Errorf("%d events, the last %+v", len(kept), kept[len(kept)-1])
	}
}

// An alarm of a turn runs once, unless it is replaced or the turn ends.
func TestTurn_Alarm(t *testing.T) {
	t.Parallel()
	var j agenttest.Journal
	turn, ran := agent.NewTurn(t.Context(), agent.TurnConfig{Journal: &j}), ""
	turn.SetAlarm(time.Hour, func() { ran += "a" })
	turn.SetAlarm(0, func() { ran += "b" })
	<-turn.Alarm()
	turn.RunAlarm()
	turn.RunAlarm()
	turn.SetAlarm(0, func() { ran += "c" })
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	if turn.RunAlarm(); ran != "b" || turn.Alarm() != nil {
		t.Errorf("ran %q", ran)
	}
}

func ExampleLaunch_Environment() {
	l := agent.Launch{Environ: []string{"PATH=/bin", "SPOOL_RUNNER_STATE=/s", "CLAUDECODE=1"}, Env: map[string]string{"KEY": "v", "HOME": "/x"}}
	fmt.Println(l.Environment(map[string]string{"HOME": "/home/agent"}, "CLAUDECODE"))
	// Output: [PATH=/bin KEY=v HOME=/home/agent]
}

// The first text is journaled at once; text within the coalescing time is held until its end, and is journaled in one
// piece.
func TestTurnTextWaitsAtMost20ms(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var j agenttest.Journal
		turn := agent.NewTurn(t.Context(), agent.TurnConfig{Journal: &j})
		id := turn.OpenBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText})
		turn.AppendText(id, "first")
		if lines := j.Lines(); len(lines) != 2 || data[runner.TextDelta](t, lines[1]).Delta != "first" {
			t.Fatalf("journal %s", types(lines))
		}
		turn.AppendText(id, "a")
		time.Sleep(10 * time.Millisecond)
		turn.AppendText(id, "b")
		time.Sleep(agent.DefaultCoalesce - 10*time.Millisecond - time.Nanosecond)
		synctest.Wait()
		if n := len(j.Lines()); n != 2 {
			t.Fatalf("%d lines before the time", n)
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		lines := j.Lines()
		if len(lines) != 3 || data[runner.TextDelta](t, lines[2]).Delta != "ab" {
			t.Fatalf("journal %s", types(lines))
		}
		turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
}
