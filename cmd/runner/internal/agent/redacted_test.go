package agent_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

const hidden = `hunter-2 "quoted"`

func redacting(t *testing.T, values ...string) (*agent.Turn, *agenttest.Journal) {
	t.Helper()
	var j agenttest.Journal
	return agent.NewTurn(t.Context(), agent.TurnConfig{Journal: &j, ExecutionID: "exe_1", Redact: redact.New(values...)}), &j
}

// No line has a secret value in any field.
func TestTurnRedactsEverything(t *testing.T) {
	t.Parallel()
	turn, j := redacting(t, hidden)
	name, typed := "call "+hidden, fmt.Sprintf(`{"command":%q}`, hidden)
	id := turn.OpenBlock("sub "+hidden, events.Block{Kind: events.KindToolUse, ToolName: name, ToolUseID: name})
	for _, piece := range strings.SplitAfter(typed, "") {
		turn.AppendText(id, piece)
	}
	description := strings.Repeat("x", 195) + hidden
	turn.UpdateBlock(id, events.BlockUpdates{Description: &description, Input: json.RawMessage(typed)})
	turn.CompleteBlock(id, func(b *events.Block) { b.Description = description })
	turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindToolResult, Output: hidden})
	turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindTodo, Todos: []events.TodoItem{{Content: hidden}}})
	plan := events.Plan{Title: hidden, Explanation: hidden, Items: []events.PlanItem{{ItemID: hidden, Content: hidden, Priority: hidden}}}
	turn.SetPlan(events.MainConversation, plan)
	turn.SetPlan(events.MainConversation, plan)
	turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindStep, Step: &events.Step{
		StepID: hidden, Title: hidden, DependsOn: []string{hidden}, SubConversationID: hidden, SubExecutionID: hidden, Result: hidden, ErrorCode: hidden, ErrorMessage: hidden,
	}})
	turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindSkillLoad, ToolUseID: hidden, Skill: &events.LoadedSkill{Name: hidden, Version: hidden, Path: hidden}})
	turn.Emit(events.MainConversation, events.Log{Level: "info", Message: strings.Repeat("x", 16<<10-5) + hidden})
	turn.Emit(events.MainConversation, events.Error{Code: "X", Message: hidden})
	turn.Emit(events.MainConversation, events.SubagentSpawned{SubagentID: name, Conversation: name, Prompt: hidden})
	turn.Emit(events.MainConversation, events.PermissionDecided{ToolName: name, Reason: hidden})
	turn.Emit(events.MainConversation, events.MetadataUpdate{Model: hidden})
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: hidden, Message: hidden})
	lines := j.Lines()
	if len(lines) < 16 {
		t.Fatalf("only %d lines", len(lines))
	}
	for _, l := range lines {
		raw, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		// A cut text does not end with the beginning of the value either.
		if strings.Contains(string(raw), "hunter") && l.Type != events.TextDelta {
			t.Errorf("%s", raw)
		}
	}
	for _, l := range lines {
		if l.Type == (events.BlockComplete{}).EventType() {
			if b := data[events.BlockComplete](t, l).Block; b.Kind == events.KindToolUse && (string(b.Input) != `{"command":"[redacted]"}` || b.ID != id) {
				t.Errorf("block %+v", b)
			}
		}
	}
}

// The runner's own words stay, also if a secret has such a word as its value.
func TestTurnKeepsItsOwnWords(t *testing.T) {
	t.Parallel()
	turn, j := redacting(t, "main", "info", "assistant_text", "complete", "exe_1", "completed", "INTERNAL", "/state/spool")
	turn.AddBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText, Content: "main street"})
	turn.Emit(events.MainConversation, events.Log{Level: "info", Message: "info"})
	turn.Emit(events.MainConversation, events.TranscriptWritten{AgentSessionID: "main", Path: "/state/spool/x"})
	turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Code: "INTERNAL"})
	lines := j.Lines()
	b, log := data[events.BlockStart](t, lines[0]).Block, data[events.Log](t, lines[1])
	if b.Kind != events.KindAssistantText || b.Status != events.StatusComplete || b.ExecutionID != "exe_1" || b.ConversationID != events.MainConversation || b.Content != "[redacted] street" {
		t.Errorf("block %+v", b)
	}
	if lines[0].ConversationID != events.MainConversation || log.Level != "info" || log.Message != "[redacted]" {
		t.Errorf("log %+v in %s", log, lines[0].ConversationID)
	}
	if w := data[events.TranscriptWritten](t, lines[2]); w.AgentSessionID != "main" || w.Path != "/state/spool/x" {
		t.Errorf("transcript %+v", w)
	}
	if e := data[runner.TurnEnd](t, lines[3]); e.Outcome != runner.OutcomeCompleted || e.Code != "INTERNAL" {
		t.Errorf("ended %+v", e)
	}
}

// However a text is split, the text in flight is the redaction of the whole, offsets count redacted bytes, and the
// block has the same text.
func TestTurnTextInFlightIsRedacted(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		turn, j := redacting(t, hidden, "überall")
		pieces := rapid.SliceOf(rapid.SampledFrom([]string{"hunter", "-2", ` "quo`, `ted"`, hidden, "überall", "über", "all", "x", "ü"})).Draw(rt, "pieces")
		whole := strings.Join(pieces, "")
		id := turn.OpenBlock(events.MainConversation, events.Block{Kind: events.KindAssistantText})
		for rest := whole; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(rt, "n")
			turn.AppendText(id, rest[:n])
			if rapid.Bool().Draw(rt, "another line") {
				turn.Emit(events.MainConversation, events.Log{Message: "x"})
			}
			rest = rest[n:]
		}
		said := rapid.Bool().Draw(rt, "the agent says it again")
		turn.CompleteBlock(id, func(b *events.Block) {
			if said {
				b.Content = whole
			}
		})
		want, flown := redact.New(hidden, "überall").RedactString(whole), ""
		for _, l := range j.Lines() {
			switch l.Type {
			case events.TextDelta:
				d := data[runner.TextDelta](rt, l)
				if int(d.Offset) != len(flown) {
					rt.Fatalf("offset %d after %d bytes", d.Offset, len(flown))
				}
				flown += d.Delta
			case events.BlockComplete{}.EventType():
				if got := data[events.BlockComplete](rt, l).Block.Content; got != want {
					rt.Fatalf("block %q, want %q", got, want)
				}
			}
		}
		if flown != want {
			rt.Fatalf("flown %q, want %q", flown, want)
		}
	})
}
