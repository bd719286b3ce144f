package fold_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// name draws one of n names.
func name(t *rapid.T, kind string, n int) string {
	return fmt.Sprintf("%s_%d", kind, rapid.IntRange(1, n).Draw(t, kind))
}

// anEvent draws any event, valid or not, because a fold must accept every event.
func anEvent(t *rapid.T) events.Event {
	execution := name(t, "exe", 3)
	block := name(t, "blk", 2) + "_" + execution // each block belongs to one execution
	tool := name(t, "tool", 2)
	kind := rapid.SampledFrom([]events.BlockKind{events.KindAssistantText, events.KindToolUse, events.KindToolResult}).Draw(t, "kind")
	status := rapid.SampledFrom([]events.BlockStatus{"", events.StatusPending, events.StatusComplete, events.StatusError}).Draw(t, "status")
	b := events.Block{ID: block, Kind: kind, Status: status, ToolUseID: tool, ToolName: "bash", Content: rapid.SampledFrom([]string{"", "whole\x00text", "<&>"}).Draw(t, "content")}
	text := "text"
	sandbox, conversation := name(t, "sbx", 2), name(t, "con", 2)
	approval := name(t, "apr", 3)
	path := rapid.SampledFrom([]string{"a.txt", "b/\x00.bin", strings.Repeat("p/", 300) + "x", strings.Repeat("p/", 300) + "y"}).Draw(t, "path")
	data := rapid.SampledFrom([]events.Payload{
		events.SessionCreated{Agent: "default", Architecture: "spool", Provider: "local", Metadata: json.RawMessage(`{"a": [1, null]}`),
			AgentRef: events.Reference{Slug: "a", Version: "1\x00"}, Environments: []events.Reference{{Org: "o", Slug: "e"}}},
		events.SessionOptionsUpdated{Options: events.Options{Model: "m"}}, events.SessionIdle{}, events.SessionClosed{},
		events.MessageAccepted{BlockID: "blk_" + execution, Content: "hello", Metadata: json.RawMessage(`"m"`)},
		events.MessageAccepted{BlockID: "blk_" + execution, Content: "hello", RecoveredFrom: "exe\x00", Continue: true},
		events.ExecutionQueued{}, events.ExecutionDispatched{}, events.ExecutionWithdrawn{Reason: "cancelled"},
		events.ExecutionClaimed{Executor: "xtr"}, events.ExecutionStarted{Attempt: 2}, events.ExecutionCompleted{DurationMs: 7, CostUSD: 0.5},
		events.ExecutionFailed{Code: "C", Message: "m\x00"}, events.ExecutionCancelled{Reason: "interrupted"},
		events.ExecutionResolved{Agent: events.Reference{Slug: "a"}, Variables: []events.Provenance{{Name: "A", Secret: true, Value: "never"}, {Name: "B", Value: "\xff"}}},
		events.MetadataUpdate{Usage: events.Usage{InputTokens: 3}, CostUSD: 1, Model: "m"},
		events.BlockStart{Block: b}, events.BlockStart{Block: b}, events.BlockUpdate{BlockID: block, Updates: events.BlockUpdates{Output: &text}},
		events.BlockComplete{Block: b}, events.PermissionDecided{ToolUseID: tool, Decision: "deny", ToolName: "bash"},
		events.ApprovalRequested{ApprovalID: approval, Kind: events.ApprovalTool, ToolName: "bash\x00", ToolUseID: tool, Input: json.RawMessage(`{"a":"\u0000"}`)},
		events.ApprovalRequested{ApprovalID: approval, Kind: events.ApprovalQuestion}, events.ApprovalRequested{ApprovalID: approval, Kind: events.ApprovalPlan},
		events.ApprovalDecided{ApprovalID: approval, Decision: events.DecisionApprove, Arguments: json.RawMessage(`{}`)},
		events.ApprovalResolved{ApprovalID: approval, Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson},
		events.ApprovalRetracted{ApprovalID: approval, Reason: "withdrawn"},
		events.SubagentSpawned{Conversation: conversation, Parent: "main"}, events.SubagentCompleted{Conversation: conversation},
		events.SandboxCreating{SandboxID: sandbox}, events.SandboxReady{SandboxID: sandbox, Provider: "local"},
		events.SandboxTerminated{SandboxID: sandbox, Reason: "idle"}, events.SandboxFailed{SandboxID: sandbox, Code: "X"},
		events.SandboxPaused{SandboxID: sandbox}, events.SandboxResumed{SandboxID: sandbox}, events.ExecutionPaused{}, events.ExecutionResumed{PausedMs: 5},
		events.SandboxHealth{SandboxID: sandbox, Status: "unhealthy", Reason: "no answer", MemoryBytes: 1 << 63, DiskBytes: 7},
		events.SandboxUsage{SandboxID: sandbox, Provider: "modal", DurationMs: 1500, CostUSD: 0.125}, events.SandboxUsage{SandboxID: sandbox, DurationMs: 1 << 63},
		events.FileCreated{Path: path, Size: 3}, events.FileModified{Path: path, Size: 1 << 63, Binary: true}, events.FileDeleted{Path: path},
		events.FilePut{N: 1, Path: path, Size: 9}, events.FileRemoved{N: 2, Path: path}, events.FilesApplied{N: 2}, events.EgressDenied{Host: "x"},
		events.WorkspaceSyncStarted{SandboxID: "s", Executor: "x"}, events.WorkspaceSynced{Snapshot: "snap\x00", Files: 3, Bytes: 12, Stored: 20}, events.WorkspaceTrimmed{Objects: 1, Bytes: 12}, events.WorkspaceRestored{Snapshot: "snap"},
		events.ModelCalled{Provider: "openai", Model: name(t, "model", 2), Status: 200, Usage: events.Usage{InputTokens: 5, OutputTokens: 2}, CostUSD: 0.25, Prices: "1", FirstByteMs: 3, DurationMs: 4},
		events.ModelCalled{Provider: "openai", Model: name(t, "model", 2), Status: uint32(rapid.SampledFrom([]int{0, 429}).Draw(t, "status of a call")), DurationMs: 4},
		events.OpaquePayload{Name: "from_the_future", Raw: json.RawMessage("{\"x\":\"\xff\"}")}, events.Log{Message: "line"},
	}).Draw(t, "data")
	e := events.Event{ID: "evt", Time: time.Date(2026, 1, 2, 3, 4, rapid.IntRange(0, 59).Draw(t, "second"), 123456789, time.UTC), Source: events.FromRunner, Data: data}
	switch data.(type) {
	case events.SessionCreated, events.SessionOptionsUpdated, events.SessionIdle, events.SessionClosed, events.SandboxTerminated:
	default:
		e.ExecutionID, e.ConversationID = execution, events.MainConversation
	}
	return e
}

// anEntryEvent draws any event of the catalogue, of any kind. Events of another kind than their subject's have no
// effect.
func anEntryEvent(t *rapid.T) events.Event {
	ref := events.Reference{Slug: "a\x00", Version: rapid.SampledFrom([]string{"", "1", "2", "3\xff", strings.Repeat("4", 300)}).Draw(t, "version")}
	tags := rapid.SliceOfN(rapid.SampledFrom([]string{"stable", "beta\x00\xff"}), 0, 2).Draw(t, "tags")
	return events.Event{Time: time.Date(2026, 1, 2, 3, 4, rapid.IntRange(0, 59).Draw(t, "second"), 0, time.UTC), Data: rapid.SampledFrom([]events.Payload{
		events.AgentApplied{Ref: ref, Tags: tags, Spec: events.AgentSpec{Name: "n\x00"}}, events.AgentRemoved{Ref: ref}, events.AgentRemoved{},
		events.InstanceApplied{Ref: ref, Tags: tags, Spec: events.InstanceSpec{Agent: events.Reference{Slug: "a"}}}, events.InstanceRemoved{Ref: ref},
		events.EnvironmentApplied{Ref: ref, Tags: tags, Spec: events.EnvironmentSpec{Description: "\xff"}}, events.EnvironmentRemoved{},
		events.SkillPushed{Ref: ref, Tags: tags, Document: "#\x00", Bytes: 1 << 40}, events.SkillTagged{Ref: ref, Tag: "stable"}, events.SkillRemoved{Ref: ref},
		events.OpaquePayload{Name: "agent_applied", Raw: json.RawMessage(`{"$sha256":"gone"}`)}, events.Log{},
	}).Draw(t, "entry event")}
}

func records(t *rapid.T) []eventlog.Record {
	n := rapid.IntRange(1, 40).Draw(t, "commits")
	out := make([]eventlog.Record, n)
	for i := range out {
		s := events.LifeSubject("default", name(t, "ses", 2))
		out[i] = eventlog.Record{Subject: s, Position: eventlog.Position{Seq: uint64(i + 1)}, Events: rapid.SliceOfN(rapid.Custom(anEvent), 1, 3).Draw(t, "events"), Bytes: int64(100 + i)}
		out[i].Commit.Actor = rapid.SampledFrom([]events.Actor{{Kind: "key", ID: "key_1", User: "ann\x00", Address: "192.0.2.1"}, {Kind: "user", ID: "local"}, {Kind: "service", ID: "session"}}).Draw(t, "actor")
		switch rapid.IntRange(0, 31).Draw(t, "special") {
		case 0:
			out[i].Events = append(out[i].Events, events.Event{ID: "end", Data: events.SessionDeleted{}})
		case 31:
			out[i].Events = append(out[i].Events, events.Event{ID: "retired", Data: events.RunRetired{}})
		case 1:
			out[i].Subject = events.Subject{Tenant: "default", ID: "cat", Aspect: events.Key}
			id := name(t, "key", 2)
			out[i].Events = []events.Event{{Data: rapid.SampledFrom([]events.Payload{events.KeyCreated{KeyID: id}, events.KeyRevoked{KeyID: id}}).Draw(t, "key event")}}
		case 11, 12:
			out[i].Subject = events.LimitsSubject("default")
			out[i].Events = []events.Event{{Data: rapid.SampledFrom([]events.Payload{
				events.TenantLimitsSet{Limits: events.TenantLimits{Slots: 7, RequestsPerSecond: 0.5}}, events.TenantLimitsRemoved{},
			}).Draw(t, "limits event")}}
		case 9, 10:
			out[i].Subject = events.Subject{Tenant: "default", ID: "cat_budget", Aspect: events.TenantBudget}
			out[i].Events = []events.Event{{Data: rapid.SampledFrom([]events.Payload{
				events.TenantBudgetSet{Period: events.PeriodDay, Budget: events.Budget{Tokens: 7, CostUSD: 0.5}}, events.TenantBudgetRemoved{Period: events.PeriodDay},
			}).Draw(t, "budget event")}}
		case 2, 3, 4, 5, 6, 7, 8:
			kind := rapid.SampledFrom([]events.Aspect{events.Agent, events.Instance, events.Environment, events.Skill}).Draw(t, "aspect")
			out[i].Subject = events.Subject{Tenant: "default", ID: "cat_" + string(kind), Aspect: kind}
			out[i].Events = rapid.SliceOfN(rapid.Custom(anEntryEvent), 1, 12).Draw(t, "entry events")
		}
	}
	return lawful(out)
}

// lawful removes events that run.Decide never appends: a second start of a block, and blocks of an execution that has
// ended.
func lawful(list []eventlog.Record) []eventlog.Record {
	begun, ended := map[string]bool{}, map[string]bool{}
	for i, rec := range list {
		var kept []events.Event
		for _, e := range rec.Events {
			id := rec.Subject.ID + " " + blocks.ChangedBlockID(e)
			execution := rec.Subject.ID + " " + e.ExecutionID
			_, begins := e.Data.(events.BlockStart)
			_, completes := e.Data.(events.BlockComplete)
			if blocks.ChangedBlockID(e) != "" && ended[execution] || begins && begun[id] {
				continue
			}
			begun[id] = begun[id] || begins || completes
			ended[execution] = ended[execution] || events.IsTerminal(e.Type())
			kept = append(kept, e)
		}
		list[i].Events = kept
	}
	return list
}

func TestFold_InPiecesEqualsTheWhole(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		recs := records(rt)
		whole := newMemory(t)
		model := fold.New(3, 1000)
		model.SaveStatesEvery(4)
		whole.fold(model, fold.CommitBatch{Records: recs})

		pieces := newMemory(t)
		limit := rapid.SampledFrom([]int{1, 3, 1000}).Draw(rt, "present rows")
		model = fold.New(3, limit)
		model.SaveStatesEvery(4)
		for len(recs) > 0 {
			n := rapid.IntRange(0, len(recs)).Draw(rt, "records")
			pieces.fold(model, fold.CommitBatch{Records: recs[:n]})
			if rapid.IntRange(0, 5).Draw(rt, "restart") == 0 {
				model = fold.New(3, limit)
				model.SaveStatesEvery(4)
			}
			recs = recs[n:]
		}
		if err := whole.equal(pieces); err != nil {
			rt.Fatal(err)
		}
	})
}

// TestLive_ShowsWhatAReloadShows tests that a blocks.BlockView that is fed with LIVE shows the same as the rows.
func TestLive_ShowsWhatAReloadShows(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		recs := records(rt)
		m := newMemory(t)
		model := fold.New(3, rapid.SampledFrom([]int{1, 1000}).Draw(rt, "present rows"))
		views, seqs := map[string]*blocks.BlockView{}, map[string]int64{}
		for len(recs) > 0 {
			n := rapid.IntRange(0, len(recs)).Draw(rt, "records")
			for _, l := range m.fold(model, fold.CommitBatch{Records: recs[:n]}).Announcements {
				if views[l.Session.ID] == nil {
					views[l.Session.ID] = blocks.NewBlockView()
				}
				follow(rt, views[l.Session.ID], seqs, l)
			}
			recs = recs[n:]
		}
		for id, view := range views {
			if _, there := m.sessions[fold.RowKey{Tenant: "default", ID: id}]; there {
				sameBlocks(rt, id, view.Blocks(), reload(rt, m, id))
			}
		}
	})
}

// follow applies LIVE to a view like a client. It accepts no gap in seqs.
func follow(t *rapid.T, v *blocks.BlockView, seqs map[string]int64, l fold.Announcement) {
	for _, e := range l.Events {
		if seqs[l.Session.ID]++; e.Seq != seqs[l.Session.ID] {
			t.Fatalf("%s: seq %d follows %d", l.Session.ID, e.Seq, seqs[l.Session.ID]-1)
		}
		var w events.WireEvent
		if err := json.Unmarshal([]byte(e.JSON), &w); err != nil {
			t.Fatal(err)
		}
		v.Apply(w.Event())
	}
	if tip := seqs[l.Session.ID]; l.Tip != 0 && l.Tip != tip {
		t.Fatalf("tip is %d, the last event %d", l.Tip, tip)
	}
}

// reload returns the blocks that a gateway would read from the rows.
func reload(t *rapid.T, m *memory, session string) []events.Block {
	var rows []fold.Block
	for k, r := range m.blocks {
		if k.Session.ID == session {
			rows = append(rows, r)
		}
	}
	slices.SortFunc(rows, func(a, b fold.Block) int {
		if a.ExecutionOrd != b.ExecutionOrd {
			return int(a.ExecutionOrd - b.ExecutionOrd)
		}
		return int(a.FirstSeq - b.FirstSeq)
	})
	out := []events.Block{}
	for _, r := range rows {
		var b events.Block
		if err := json.Unmarshal([]byte(r.JSON), &b); err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

func sameBlocks(t *rapid.T, session string, live, reloaded []events.Block) {
	a, err := json.Marshal(live)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(reloaded)
	if err != nil {
		t.Fatal(err)
	}
	if string(a) != string(b) {
		t.Fatalf("%s: live and reload differ:\n%s\n%s", session, a, b)
	}
}

// usageRecords draws commits that mostly hold events that usage depends on, so that the same executions often start,
// are metered and end.
func usageRecords(t *rapid.T) []eventlog.Record {
	usage := events.Usage{InputTokens: 5, OutputTokens: 2}
	call := events.ModelCalled{Provider: "p", Model: "m", Status: 200, Usage: usage, CostUSD: 0.25}
	payloads := []events.Payload{
		events.ExecutionStarted{Attempt: 1}, events.ExecutionStarted{Attempt: 1}, events.ExecutionStarted{Attempt: 2}, events.ExecutionStarted{Attempt: 2}, call, call, events.SandboxUsage{SandboxID: "sbx", CostUSD: 0.125},
		events.MetadataUpdate{Usage: events.Usage{InputTokens: 3}, CostUSD: 1}, events.MetadataUpdate{CostUSD: 2}, events.MetadataUpdate{CostUSD: 2}, events.MetadataUpdate{},
		events.ExecutionCompleted{DurationMs: 7, CostUSD: 0.5, Usage: usage}, events.ExecutionCompleted{DurationMs: 7}, events.ExecutionFailed{DurationMs: 8, Usage: usage},
		events.ExecutionCancelled{DurationMs: 9, Usage: usage}, events.ExecutionWithdrawn{}, events.OpaquePayload{Name: "execution_failed", Raw: json.RawMessage("{}")}, events.Log{Message: "line"},
	}
	event := rapid.Custom(func(t *rapid.T) events.Event {
		at := time.Date(2026, 1, rapid.IntRange(1, 2).Draw(t, "day"), 3, 4, 5, 0, time.UTC)
		return events.Event{ID: "evt", Time: at, ExecutionID: rapid.SampledFrom([]string{"", "exe_1", "exe_2", "exe_3", "exe_4"}).Draw(t, "execution"), Data: rapid.SampledFrom(payloads).Draw(t, "data")}
	})
	var list []eventlog.Record
	for i := range rapid.IntRange(1, 60).Draw(t, "commits") {
		rec := eventlog.Record{Subject: events.RunSubject("default", name(t, "ses", 2)), Position: eventlog.Position{Seq: uint64(i + 1)}, Events: rapid.SliceOfN(event, 1, 3).Draw(t, "events")}
		switch rapid.IntRange(0, 31).Draw(t, "special") {
		case 0:
			rec.Events = append(rec.Events, events.Event{ID: "end", Data: events.SessionDeleted{}})
		case 1, 2:
			rec.Events = append(rec.Events, events.Event{ID: "retired", Data: events.RunRetired{
				Usage: []events.DayUsage{{Day: "2026-01-02", Spent: events.BudgetUsage{Turns: 2, Tokens: 9, CostUSD: 1.5}, Logged: events.OutputSize{Events: 4, Bytes: 900}}},
			}})
		}
		list = append(list, rec)
	}
	return list
}

// TestUsage_EqualsTheUsageOfDispatch tests that the read model counts the same as the fold with which the session
// service applies budgets.
func TestUsage_EqualsTheUsageOfDispatch(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		recs := usageRecords(rt)
		rows := newMemory(t)
		rows.fold(fold.New(3, 1000), fold.CommitBatch{Records: recs})
		have := map[string]budget.Usage{}
		for _, r := range rows.tenantUsage {
			if r.Day != "" {
				have[r.Day] = budget.Usage{Turns: r.Turns, Tokens: r.Tokens, CostUSD: r.CostUSD, TimeMs: r.TimeMs, Events: r.Events, EventBytes: r.EventBytes}
			}
		}
		sessions, want := map[string]*budget.SessionUsage{}, map[string]budget.Usage{}
		for _, rec := range recs {
			s := sessions[rec.Subject.ID]
			if s == nil {
				s = &budget.SessionUsage{}
				sessions[rec.Subject.ID] = s
			}
			for day, u := range s.AddCommit(rec) {
				want[day] = want[day].Add(u)
			}
		}
		for day := range want {
			if want[day] == (budget.Usage{}) {
				delete(want, day)
			}
		}
		if !reflect.DeepEqual(have, want) {
			rt.Fatalf("the read model has\n%+v\ndispatch counts\n%+v", have, want)
		}
	})
}
