package history_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/events/history"
)

// anEvent draws any event, also one that makes no sense: a fold accepts every event.
func anEvent(t *rapid.T) events.Event {
	name := func(kind string, n int) string { return fmt.Sprint(kind, "_", rapid.IntRange(1, n).Draw(t, kind)) }
	execution, sandbox, conversation := name("exe", 3), name("sbx", 2), name("con", 2)
	b := events.Block{
		ID:     name("blk", 4),
		Kind:   rapid.SampledFrom([]events.BlockKind{events.KindAssistantText, events.KindToolUse, events.KindTodo, events.KindPlan}).Draw(t, "kind"),
		Status: rapid.SampledFrom([]events.BlockStatus{"", events.StatusPending, events.StatusError}).Draw(t, "status"),
		Input:  json.RawMessage(`{"a": "<&>"}`), Todos: []events.TodoItem{{Content: name("todo", 3), Status: "pending"}},
		Plan: &events.Plan{Items: []events.PlanItem{{Content: name("item", 3), Status: events.PlanPending}}[rapid.IntRange(0, 1).Draw(t, "empty"):]},
	}
	output := name("output", 3)
	used := events.Usage{InputTokens: 3, OutputTokens: 1, CacheReadTokens: 4, CacheWriteTokens: 1}
	return events.Event{
		Time: time.Date(2026, 1, 2, 3, 4, rapid.IntRange(0, 59).Draw(t, "second"), 0, time.UTC), ExecutionID: execution, ConversationID: conversation,
		Data: rapid.SampledFrom([]events.Payload{
			events.SessionCreated{Agent: "a", Metadata: json.RawMessage(`{"m": [1]}`), Environments: []events.Reference{{Slug: "e"}}, Options: events.Options{Model: "m"}},
			events.SessionOptionsUpdated{Options: events.Options{Model: "n"}}, events.SessionIdle{}, events.SessionClosed{}, events.SessionDeleted{},
			events.MessageAccepted{BlockID: name("message", 3), Content: "hello"}, events.ExecutionQueued{}, events.ExecutionDispatched{}, events.ExecutionClaimed{Executor: "x"},
			events.ExecutionStarted{Attempt: 1}, events.AttemptFailed{}, events.ExecutionPaused{}, events.ExecutionResumed{}, events.ExecutionWithdrawn{},
			events.ExecutionCompleted{Usage: used, CostUSD: 0.25}, events.ExecutionFailed{Usage: used}, events.ExecutionCancelled{Usage: used},
			events.MetadataUpdate{Usage: used, CostUSD: 0.5, Model: "m"}, events.ModelCalled{Status: 200, Usage: used, CostUSD: 0.5}, events.ModelCalled{Status: 500},
			events.BlockStart{Block: b}, events.BlockUpdate{BlockID: b.ID, Updates: events.BlockUpdates{Output: &output}}, events.BlockComplete{Block: b},
			events.BlockUpdate{BlockID: b.ID, Updates: events.BlockUpdates{Plan: b.Plan}},
			events.ApprovalRequested{ApprovalID: b.ID}, events.ApprovalDecided{ApprovalID: b.ID, Decision: "approve"}, events.ApprovalResolved{ApprovalID: b.ID}, events.ApprovalRetracted{ApprovalID: b.ID},
			events.SubagentSpawned{Conversation: conversation}, events.SubagentCompleted{Conversation: conversation},
			events.SandboxCreating{SandboxID: sandbox}, events.SandboxReady{SandboxID: sandbox}, events.SandboxPaused{SandboxID: sandbox},
			events.SandboxResumed{SandboxID: sandbox}, events.SandboxHealth{SandboxID: sandbox, Status: "unhealthy", Reason: "r"},
			events.SandboxReplaced{SandboxID: sandbox}, events.SandboxTerminated{SandboxID: sandbox}, events.SandboxFailed{SandboxID: sandbox},
			events.WorkspaceSynced{Snapshot: "s", Files: 1, Bytes: 2}, events.WorkspaceSynced{}, events.FileModified{Path: "p"}, events.FilePut{Path: "p"},
			events.ExecutionResolved{Agent: events.Reference{Slug: "a"}, Variables: []events.Provenance{{Name: "TOKEN", Value: "value"}}},
			events.OpaquePayload{Name: "from_the_future", Raw: json.RawMessage(`{}`)}, events.Log{Message: "line"},
		}).Draw(t, "data"),
	}
}

func encode(t *rapid.T, s history.State) string {
	t.Helper()
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestFold_InTwoPiecesWithJSONBetweenIsTheSame(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.Custom(anEvent), 0, 60).Draw(t, "events")
		cut := rapid.IntRange(0, len(list)).Draw(t, "cut")
		want := encode(t, history.Fold(history.State{}, list...))
		first := history.Fold(history.State{}, list[:cut]...)
		saved := encode(t, first)
		var read history.State
		if err := json.Unmarshal([]byte(saved), &read); err != nil {
			t.Fatal(err)
		}
		if got := encode(t, history.Fold(read, list[cut:]...)); got != want {
			t.Errorf("cut after %d events:\n%s\nwant\n%s", cut, got, want)
		}
		if got := encode(t, first); got != saved {
			t.Errorf("Evolve changed the state that it was given:\n%s\nwas\n%s", got, saved)
		}
	})
}

// TestFold_HoldsThePendingBlocksOfAView tests that the pending blocks of the state are those that a client would show
// as pending, and that a block begins once.
func TestFold_HoldsThePendingBlocksOfAView(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		view, state := blocks.NewBlockView(), history.State{}
		done := map[string]bool{}
		for _, e := range rapid.SliceOfN(rapid.Custom(anEvent), 0, 80).Draw(t, "events") {
			id := blocks.ChangedBlockID(e)
			if done[id] {
				continue // run.Decide appends no event for a block that is final
			}
			view.Apply(e)
			state = history.Fold(state, e)
			for _, b := range view.Blocks() {
				done[b.ID] = b.Status != events.StatusPending
			}
			want := map[string]events.Block{}
			for _, b := range view.Blocks() {
				if b.Status == events.StatusPending {
					want[b.ID] = b
				}
			}
			got := map[string]events.Block{}
			for _, b := range state.Blocks {
				got[b.Block.ID] = b.Block
			}
			if !reflect.DeepEqual(got, want) || int(state.Count.Blocks) != len(view.Blocks()) {
				t.Fatalf("after %s: %d blocks, pending %+v\nwant %d, pending %+v", e.Type(), state.Count.Blocks, got, len(view.Blocks()), want)
			}
		}
	})
}

func TestEvolve_UnknownTypesChangeOnlyThePosition(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := history.Fold(history.State{}, rapid.SliceOfN(rapid.Custom(anEvent), 1, 30).Draw(t, "events")...)
		next := history.Evolve(s, s.Seq+1, events.Event{Time: s.Time.Add(time.Hour), Data: events.OpaquePayload{Name: "approval_requested", Raw: json.RawMessage(`{"blockId":"blk_1"}`)}})
		s.Seq, s.Time = s.Seq+1, s.Time.Add(time.Hour)
		if encode(t, next) != encode(t, s) {
			t.Errorf("got\n%s\nwant\n%s", encode(t, next), encode(t, s))
		}
	})
}

func TestFold_FollowsATurn(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	turn := func(list ...events.Payload) (out []events.Event) {
		for _, d := range list {
			out = append(out, events.Event{Time: at, ExecutionID: "exe_1", ConversationID: "main", Data: d})
		}
		return out
	}
	s := history.Fold(history.State{}, events.Event{Time: at, Data: events.SessionCreated{Agent: "a"}})
	s = history.Fold(s, turn(
		events.MessageAccepted{BlockID: "blk_m"}, events.ExecutionDispatched{}, events.ExecutionStarted{Attempt: 1},
		events.ExecutionResolved{Variables: []events.Provenance{{Name: "TOKEN", Value: "plain"}}, Skills: []events.SkillUsed{{Name: "s"}}},
		events.MetadataUpdate{Usage: events.Usage{InputTokens: 7}, CostUSD: 0.5},
		events.BlockStart{Block: events.Block{ID: "blk_t", Kind: events.KindTodo, Status: events.StatusComplete, Todos: []events.TodoItem{{Content: "c"}}}},
		events.BlockStart{Block: events.Block{ID: "blk_p", Kind: events.KindPlan, Plan: &events.Plan{Items: []events.PlanItem{{Content: "d"}}}}},
		events.SubagentSpawned{Conversation: "con"}, events.WorkspaceSynced{Snapshot: "s"}, events.FileModified{Path: "p"})...)
	switch x := s.ActiveExecution(); {
	case x == nil || x.Phase != history.PhaseRunning || s.QueuedCount() != 0:
		t.Errorf("active is %+v with %d queued, want a running one alone", x, s.QueuedCount())
	case s.ReportedUsage().InputTokens != 7 || s.ReportedUsage().CostUSD != 0.5:
		t.Errorf("reported %+v", s.ReportedUsage())
	case len(s.Todos) != 1 || s.Todos[0].Items[0].Content != "d" || len(s.Conversations) != 1 || s.Snapshot.Seq != 10 || s.FileChanges != 1 || s.Resolved.Seq != 5 || len(s.Resolved.Skills) != 1:
		t.Errorf("state %+v", s)
	}
	// A failure without a cost keeps the cost that the agent last reported, and ends the sub-agents.
	s = history.Fold(s, turn(events.ExecutionFailed{Usage: events.Usage{InputTokens: 9}})...)
	if s.ActiveExecution() != nil || s.ReportedUsage().InputTokens != 9 || s.ReportedUsage().CostUSD != 0.5 || len(s.Conversations) != 0 {
		t.Errorf("after the end: %+v", s)
	}
	// Events after the end do not begin the execution again.
	if s = history.Fold(s, turn(events.FileModified{}, events.ModelCalled{Status: 200})...); len(s.Executions) != 0 || s.Count.Executions != 1 {
		t.Errorf("executions %+v, %d in all", s.Executions, s.Count.Executions)
	}
}
