package blocks_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

// vector is a test case for every implementation of the reducer: feed holds the wire events in the order in which a
// client receives them; blocks holds the blocks that the client must show.
type vector struct {
	Doc    string            `json:"doc"`
	Feed   []json.RawMessage `json:"feed"`
	Blocks json.RawMessage   `json:"blocks"`
}

// feed applies one wire event to a view.
func feed(t testing.TB, v *blocks.BlockView, raw json.RawMessage) {
	t.Helper()
	var w events.WireEvent
	if err := json.Unmarshal(raw, &w); err != nil {
		t.Fatal(err)
	}
	if w.Type != events.TextDelta {
		v.Apply(w.Event())
		return
	}
	d := events.Delta{ExecutionID: w.ExecutionID, ConversationID: w.ConversationID}
	if err := json.Unmarshal(w.Data, &d); err != nil {
		t.Fatal(err)
	}
	v.ApplyDelta(d)
}

var update = flag.Bool("update", false, "write the vectors of generatedVectors")

// goldenEvents returns one event of each type that a session can have, from the golden files of pkg/events, and the types.
func goldenEvents(t *testing.T) (feed []json.RawMessage, types []events.Type) {
	t.Helper()
	for _, info := range events.EventTypes() {
		if info.Aspect.IsCatalogue() {
			continue // these belong to no session
		}
		raw, err := os.ReadFile("../testdata/golden/" + string(info.Type) + ".json")
		if err != nil {
			t.Fatal(err)
		}
		commit, err := events.DecodeCommit(raw)
		if err != nil {
			t.Fatal(err)
		}
		list, err := commit.DecodeEvents()
		if err != nil || len(list) != 1 {
			t.Fatalf("%s has %d events, %v", info.Type, len(list), err)
		}
		feed = append(feed, wire(t, uint32(len(feed)+1), list[0]))
		types = append(types, info.Type)
	}
	return feed, types
}

// wire returns the JSON of an event as clients receive it.
func wire(t *testing.T, seq uint32, e events.Event) json.RawMessage {
	t.Helper()
	b, err := e.AppendWire(nil, "ses_1", seq, fmt.Sprintf("0-%d", seq))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// blocksOfEveryKind are blocks with every field that their kind has.
func blocksOfEveryKind() []events.Block {
	todos := []events.TodoItem{{Content: "look", Status: "completed"}, {Content: "write", Status: "in_progress"}}
	plan := &events.Plan{Title: "Fix it", Explanation: "The test shows where.", Items: []events.PlanItem{
		{ItemID: "1", Content: "look", Status: events.PlanCompleted, Priority: "high"}, {Content: "write", Status: events.PlanInProgress},
		{Content: "measure", Status: events.PlanCancelled}, {Content: "tell", Status: events.PlanPending, Priority: "low"},
	}}
	began := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ended := began.Add(time.Minute)
	step := &events.Step{
		StepID: "2", Title: "write", Status: events.StepFailed, DependsOn: []string{"1"}, SubConversationID: "agent_1", SubExecutionID: "exe_2",
		Result: "half of it", ErrorCode: "TIMEOUT", ErrorMessage: "It took too long.", StartedAt: &began, EndedAt: &ended,
	}
	return []events.Block{
		{Kind: events.KindUserMessage, Parts: []events.Part{{Type: "text", Text: "what is this?"}, {Type: "image", MediaType: "image/png", Data: "aGk="}}},
		{Kind: events.KindAssistantText, Content: "It is é, 漢字, 𝄞.", Model: "model-1", Anchor: "msg_1"},
		{Kind: events.KindThinking, Content: "Let me see.", Summary: "Looks"},
		{Kind: events.KindToolUse, ToolName: "Bash", ToolUseID: "toolu_1", Input: json.RawMessage(`{"command":"ls","timeout":0}`), DisplayName: "Bash", Description: "Lists the folder"},
		{Kind: events.KindToolResult, ToolUseID: "toolu_1", Output: "no such file", IsError: true, DurationMs: 12},
		{Kind: events.KindSubagent, SubagentID: "agent_1", Name: "reviewer", ToolUseID: "toolu_2", Input: json.RawMessage(`"look"`), Output: "done", DurationMs: 7},
		{Kind: events.KindTodo, Todos: todos},
		{Kind: events.KindPlan, Plan: plan},
		{Kind: events.KindStep, Step: step},
		{Kind: events.KindSkillLoad, ToolUseID: "toolu_3", Skill: &events.LoadedSkill{Name: "pdf", Version: strings.Repeat("0a", 32), Path: "/bin/skills/pdf"}},
		{Kind: events.KindSystem, Subtype: "compacted", Message: "The conversation was shortened."},
		{Kind: events.KindError, Code: "MODEL_ERROR", Message: "The model does not answer."},
	}
}

// generatedVectors returns the vectors that -update writes. The other vectors in testdata are written by hand.
func generatedVectors(t *testing.T) map[string]vector {
	t.Helper()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	newFeed := func() (*[]json.RawMessage, func(conversation string, p events.Payload)) {
		feed := &[]json.RawMessage{}
		return feed, func(conversation string, p events.Payload) {
			n := uint32(len(*feed) + 1)
			at = at.Add(time.Second)
			*feed = append(*feed, wire(t, n, events.Event{ID: fmt.Sprintf("evt_%d", n), Time: at, ExecutionID: "exe_1", ConversationID: conversation, Source: events.FromRunner, Data: p}))
		}
	}
	everyType, _ := goldenEvents(t)
	kinds, add := newFeed()
	for _, open := range []bool{false, true} {
		for _, b := range blocksOfEveryKind() {
			b.ID = fmt.Sprintf("blk_%s_%v", b.Kind, open)
			add(events.MainConversation, events.BlockStart{Block: events.Block{ID: b.ID, Kind: b.Kind, ToolName: b.ToolName, Name: b.Name}})
			text := "changed"
			add(events.MainConversation, events.BlockUpdate{BlockID: b.ID, Updates: events.BlockUpdates{Input: b.Input, Todos: b.Todos, Plan: b.Plan, Step: b.Step, Summary: &text, Output: &b.Output}})
			if !open {
				add(events.MainConversation, events.BlockComplete{Block: b})
			}
		}
	}
	updates, add := newFeed()
	empty := ""
	add(events.MainConversation, events.BlockUpdate{BlockID: "blk_a", Updates: events.BlockUpdates{Output: &empty}})
	add(events.MainConversation, events.BlockStart{Block: events.Block{ID: "blk_a", Kind: events.KindToolUse, Input: json.RawMessage(`{}`), Description: "first", Todos: []events.TodoItem{{Content: "x"}}}})
	add(events.MainConversation, events.BlockUpdate{BlockID: "blk_a", Updates: events.BlockUpdates{Input: json.RawMessage(`null`), Description: &empty}})
	add("agent_1", events.BlockStart{Block: events.Block{ID: "blk_a", Kind: events.KindToolUse, Content: "ignored"}})
	add("", events.BlockStart{Block: events.Block{ID: "blk_b", Kind: events.KindToolUse, Status: "unknown status", Input: json.RawMessage(`false`)}})
	add("", events.BlockUpdate{BlockID: "blk_b", Updates: events.BlockUpdates{Input: json.RawMessage(`1`)}})
	add("", events.BlockComplete{Block: events.Block{ID: "blk_c", Kind: "kind_of_a_later_build", ConversationID: "agent_2"}})
	plans, add := newFeed()
	planned := func(status events.PlanStatus) *events.Plan {
		return &events.Plan{Explanation: "Two things.", Items: []events.PlanItem{{Content: "look", Status: status}, {Content: "write", Status: events.PlanPending}}}
	}
	add(events.MainConversation, events.BlockComplete{Block: events.Block{ID: "blk_todo", Kind: events.KindTodo, Todos: []events.TodoItem{{Content: "of an earlier build", Status: "pending"}}}})
	add(events.MainConversation, events.BlockStart{Block: events.Block{ID: "blk_plan", Kind: events.KindPlan, Plan: planned(events.PlanPending)}})
	add("agent_1", events.BlockStart{Block: events.Block{ID: "blk_sub", Kind: events.KindPlan, Plan: planned(events.PlanInProgress)}})
	add(events.MainConversation, events.BlockUpdate{BlockID: "blk_plan", Updates: events.BlockUpdates{Plan: planned(events.PlanCompleted)}})
	add("agent_1", events.BlockUpdate{BlockID: "blk_sub", Updates: events.BlockUpdates{Plan: &events.Plan{}}})
	add(events.MainConversation, events.BlockUpdate{BlockID: "blk_plan", Updates: events.BlockUpdates{Todos: []events.TodoItem{{Content: "ignored, because the block has a plan"}}}})
	add(events.MainConversation, events.BlockStart{Block: events.Block{ID: "blk_step", Kind: events.KindStep, Step: &events.Step{StepID: "1", Title: "look", Status: events.StepReady}}})
	add(events.MainConversation, events.BlockUpdate{BlockID: "blk_step", Updates: events.BlockUpdates{Step: &events.Step{StepID: "1", Title: "look", Status: events.StepRunning}}})
	approvals, add := newFeed()
	call := events.Block{ID: "blk_a", Kind: events.KindToolUse, ToolName: "Bash", ToolUseID: "toolu_1", Input: json.RawMessage(`{"command":"rm x"}`)}
	add(events.MainConversation, events.MessageAccepted{BlockID: "blk_m", Content: "remove x"})
	add(events.MainConversation, events.BlockStart{Block: call})
	add(events.MainConversation, events.ApprovalRequested{})
	add(events.MainConversation, events.ApprovalDecided{})
	add(events.MainConversation, events.BlockComplete{Block: call})
	add(events.MainConversation, events.BlockComplete{Block: events.Block{ID: "blk_r", Kind: events.KindToolResult, ToolUseID: "toolu_1"}})
	forks, add := newFeed()
	add("", events.SessionForked{})
	add(events.MainConversation, events.MessageAccepted{BlockID: "blk_m", Content: "and now the other way"})
	add(events.MainConversation, events.SubagentSpawned{})
	add("agent_1", events.BlockComplete{Block: events.Block{ID: "blk_s", Kind: events.KindAssistantText, Content: "from the sub-agent"}})
	add(events.MainConversation, events.SubagentCompleted{})
	return map[string]vector{
		"every-event-type": {Doc: "One event of each type with every field set: types that are not about blocks change none.", Feed: everyType},
		"every-block-kind": {Doc: "A complete and an open block of each kind.", Feed: *kinds},
		"block-updates":    {Doc: "Updates to empty values, to null, of unknown and of final blocks; a block that starts twice; an unknown kind.", Feed: *updates},
		"plans":            {Doc: "A todo list, then plans of two conversations: an update replaces the whole plan, and the todos of its block. A step.", Feed: *plans},
		"approval":         {Doc: "A tool call that a person decides.", Feed: *approvals},
		"fork":             {Doc: "A fork begins with session_forked; its sub-agent has a conversation of its own.", Feed: *forks},
	}
}

// TestVectors_AreUpToDate tests that the generated vectors contain what generatedVectors returns, and together every type of
// event and every kind of block. With -update it writes them.
func TestVectors_AreUpToDate(t *testing.T) {
	for name, vec := range generatedVectors(t) {
		v := blocks.NewBlockView()
		for _, e := range vec.Feed {
			feed(t, v, e)
		}
		var err error
		if vec.Blocks, err = json.Marshal(v.Blocks()); err != nil {
			t.Fatal(err)
		}
		want, err := json.MarshalIndent(vec, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		path := "testdata/" + name + ".json"
		if *update {
			if err := os.WriteFile(path, append(want, '\n'), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != string(want)+"\n" {
			t.Errorf("%s is not up to date, run the test with -update: %v", path, err)
		}
	}
	var all bytes.Buffer
	files, err := filepath.Glob("testdata/*.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(b)
	}
	_, types := goldenEvents(t)
	for _, name := range append(types, events.TextDelta) {
		if !bytes.Contains(all.Bytes(), fmt.Appendf(nil, `"type": %q`, name)) {
			t.Errorf("no vector has an event of type %s", name)
		}
	}
	for _, b := range blocksOfEveryKind() {
		if !bytes.Contains(all.Bytes(), fmt.Appendf(nil, `"kind": %q`, b.Kind)) {
			t.Errorf("no vector has a block of kind %s", b.Kind)
		}
	}
	if declared := declaredKinds(t); len(declared) != len(blocksOfEveryKind()) {
		t.Errorf("blocksOfEveryKind has %d kinds, package events declares %v", len(blocksOfEveryKind()), declared)
	}
}

// declaredKinds returns the kinds of blocks that pkg/events/block.go declares.
func declaredKinds(t *testing.T) (kinds []string) {
	t.Helper()
	source, err := os.ReadFile("../block.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`\bKind\w+ +BlockKind = "(\w+)"`).FindAllSubmatch(source, -1) {
		kinds = append(kinds, string(m[1]))
	}
	return kinds
}

func TestView_MatchesTheSharedVectors(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.json")
	if err != nil || len(files) < 8 {
		t.Fatalf("%d vectors, %v", len(files), err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".json"), func(t *testing.T) {
			t.Parallel()
			raw, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			var vec vector
			dec := json.NewDecoder(bytes.NewReader(raw))
			dec.DisallowUnknownFields()
			if err := dec.Decode(&vec); err != nil {
				t.Fatal(err)
			}
			v := blocks.NewBlockView()
			for _, e := range vec.Feed {
				feed(t, v, e)
			}
			got, err := json.Marshal(v.Blocks())
			if err != nil {
				t.Fatal(err)
			}
			var want bytes.Buffer
			if err := json.Compact(&want, vec.Blocks); err != nil {
				t.Fatal(err)
			}
			if string(got) != want.String() {
				t.Fatalf("%s\n got %s\nwant %s", vec.Doc, got, want.String())
			}
		})
	}
}

// TestStreamedText_AnyOrderOfPiecesGivesTheText tests that the pieces of a text, in any order, overlapping and repeated, add
// up to the text, and that a view shows only prefixes of it.
func TestStreamedText_AnyOrderOfPiecesGivesTheText(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		whole := rapid.StringN(0, 60, -1).Draw(t, "text")
		var pieces []events.Delta
		for i := 0; i < len(whole); {
			n := rapid.IntRange(1, len(whole)-i).Draw(t, "length")
			pieces = append(pieces, events.Delta{Offset: uint32(i), Text: whole[i : i+n]})
			i += n
		}
		for range rapid.IntRange(0, 5).Draw(t, "extra") {
			if len(whole) == 0 {
				break
			}
			i := rapid.IntRange(0, len(whole)-1).Draw(t, "from")
			j := rapid.IntRange(i, len(whole)).Draw(t, "to")
			pieces = append(pieces, events.Delta{Offset: uint32(i), Text: whole[i:j]})
		}
		var text blocks.StreamedText
		var shown string
		for _, d := range rapid.Permutation(pieces).Draw(t, "order") {
			shown += text.Add(d)
			if shown != text.Known || !strings.HasPrefix(whole, shown) {
				t.Fatalf("shown %q, known %q, of %q", shown, text.Known, whole)
			}
		}
		if shown != whole || len(text.Waiting) != 0 {
			t.Fatalf("shown %q of %q, %d pieces wait", shown, whole, len(text.Waiting))
		}
	})
}

// addSmallPieces adds a text of the given size in pieces of 100 bytes, and calls check now and then.
func addSmallPieces(text *blocks.StreamedText, size int, check func()) {
	piece := strings.Repeat("x", 100)
	for n := 0; n < size; n += len(piece) {
		text.Add(events.Delta{Offset: uint32(n), Text: piece})
		if check != nil && n%(1<<20) < len(piece) {
			check()
		}
	}
}

// TestStreamedText_AllocatesInProportionToTheText tests that a block of 50 MB that grows by small pieces does not copy its text
// at each of them. It counts the allocations of the process, so it does not run beside other tests.
func TestStreamedText_AllocatesInProportionToTheText(t *testing.T) {
	const size, most = 50_000_000, 8 * 50_000_000
	allocated := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.TotalAlloc
	}
	before := allocated()
	var text blocks.StreamedText
	addSmallPieces(&text, size, func() {
		if n := allocated() - before; n > most {
			t.Fatalf("%d bytes were allocated for the first %d bytes of the text, at most %d are allowed for all", n, len(text.Known), most)
		}
	})
	if n := allocated() - before; len(text.Known) != size || n > most {
		t.Errorf("a text of %d bytes allocated %d", len(text.Known), n)
	}
}

// BenchmarkText adds a text of 1 MB in pieces of 100 bytes.
func BenchmarkText(b *testing.B) {
	b.ReportAllocs()
	b.SetBytes(1 << 20)
	for b.Loop() {
		addSmallPieces(&blocks.StreamedText{}, 1<<20, nil)
	}
}

// TestStreamedText_ContinuesFromAKnownText tests that a caller may set Known, before and after pieces were added.
func TestStreamedText_ContinuesFromAKnownText(t *testing.T) {
	t.Parallel()
	text := blocks.StreamedText{Known: "Hello"}
	if fresh := text.Add(events.Delta{Offset: 3, Text: "lo, wo"}); fresh != ", wo" || text.Known != "Hello, wo" {
		t.Errorf("fresh %q, known %q", fresh, text.Known)
	}
	before := text.Known
	text.Known = "Adieu, wo"
	text.Add(events.Delta{Offset: 11, Text: "d"})
	if fresh := text.Add(events.Delta{Offset: 9, Text: "rl"}); fresh != "rld" || text.Known != "Adieu, world" {
		t.Errorf("fresh %q, known %q", fresh, text.Known)
	}
	if before != "Hello, wo" {
		t.Errorf("a text that was returned became %q", before)
	}
}

// TestView_LostDeltasDoNotChangeTheResult tests that a client ends with the same blocks, independent of which deltas
// it receives and where among the events.
func TestView_LostDeltasDoNotChangeTheResult(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		kept, deltas := history(t)
		full := blocks.NewBlockView()
		for _, e := range kept {
			full.Apply(e)
		}
		partial := blocks.NewBlockView()
		for _, e := range kept {
			for _, d := range deltas {
				if rapid.IntRange(0, 3).Draw(t, "deliver") == 0 {
					partial.ApplyDelta(d)
				}
			}
			partial.Apply(e)
		}
		if full.String() != partial.String() {
			t.Fatalf("with deltas\n%swithout\n%s", partial, full)
		}
	})
}

// history draws complete blocks and the deltas that precede them.
func history(t *rapid.T) ([]events.Event, []events.Delta) {
	var kept []events.Event
	var deltas []events.Delta
	for i := range rapid.IntRange(1, 4).Draw(t, "blocks") {
		b := events.Block{ID: string(rune('a' + i)), Kind: events.KindAssistantText, Status: events.StatusPending, Time: time.Unix(int64(i), 0).UTC()}
		kept = append(kept, events.Event{ExecutionID: "x", Time: b.Time, Data: events.BlockStart{Block: b}})
		text := rapid.StringN(1, 12, -1).Draw(t, "text")
		cut := rapid.IntRange(0, len(text)).Draw(t, "cut")
		deltas = append(deltas, events.Delta{BlockID: b.ID, Text: text[:cut]}, events.Delta{BlockID: b.ID, Offset: uint32(cut), Text: text[cut:]})
		b.Content, b.Status = text, events.StatusComplete
		kept = append(kept, events.Event{ExecutionID: "x", Time: b.Time, Data: events.BlockComplete{Block: b}})
	}
	return kept, deltas
}
