package progress_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/progress"
)

const (
	mine  = "exe_1"
	other = "exe_2"
)

// of returns events of the execution mine.
func of(list ...events.Payload) (out []events.Event) {
	for _, d := range list {
		out = append(out, events.Event{ExecutionID: mine, ConversationID: events.MainConversation, Data: d})
	}
	return out
}

// running returns events that start the execution mine, and then further ones, whose seqs begin at 5.
func running(more ...events.Payload) []events.Event {
	return of(append([]events.Payload{
		events.MessageAccepted{BlockID: "blk_m", Content: "do it"}, events.ExecutionDispatched{}, events.ExecutionClaimed{Epoch: 1}, events.ExecutionStarted{Attempt: 1},
	}, more...)...)
}

// fold returns the status after events. The seqs of the events begin at 1. An event with seq 5 is 5 seconds past the minute, and nanoseconds
// that only the times of blocks keep.
func fold(list []events.Event) *spoolv1.ExecutionStatus {
	s := progress.New("ses_1", mine)
	for i, e := range list {
		e.Time = time.Date(2026, 1, 2, 3, 4, i+1, 999, time.UTC)
		progress.Apply(s, uint32(i+1), e)
	}
	return s
}

func start(b events.Block) events.BlockStart       { return events.BlockStart{Block: b} }
func complete(b events.Block) events.BlockComplete { return events.BlockComplete{Block: b} }

// TestApply tests the effect of events on a status. want is JSON of the fields that are compared.
func TestApply(t *testing.T) {
	t.Parallel()
	accepted := events.MessageAccepted{BlockID: "blk_m", Content: "do it"}
	ofOther := func(d events.Payload) events.Event { return events.Event{ExecutionID: other, Data: d} }
	long := strings.Repeat("x", progress.MaxResultBytes)
	for name, c := range map[string]struct {
		events []events.Event
		want   string
	}{
		"a message is queued": {of(accepted), `{"seq":1,"sessionId":"ses_1","executionId":"exe_1","phase":"queued","final":false,"queuedAt":"2026-01-02T03:04:01Z","updatedAt":"2026-01-02T03:04:01Z",
			"messageCounts":{"user":1,"assistant":0},
			"messages":[{"blockId":"blk_m","kind":"user_message","status":"complete","conversationId":"main","time":"2026-01-02T03:04:01.000000999Z","text":"do it","cut":false}]}`},
		"a claim":                    {of(accepted, events.ExecutionClaimed{}), `{"phase":"starting"}`},
		"a start of the agent":       {running(), `{"phase":"running","attempt":1,"dispatchedAt":"2026-01-02T03:04:02Z","startedAt":"2026-01-02T03:04:04Z"}`},
		"a second claim":             {running(events.ExecutionClaimed{Epoch: 2}), `{"phase":"running"}`},
		"a failed attempt":           {running(events.AttemptFailed{Attempt: 1}), `{"phase":"starting"}`},
		"a second attempt":           {running(events.AttemptFailed{}, events.ExecutionStarted{Attempt: 2}), `{"phase":"running","attempt":2,"startedAt":"2026-01-02T03:04:04Z"}`},
		"a pause":                    {running(events.ExecutionPaused{}), `{"phase":"paused"}`},
		"the end of a pause":         {running(events.ExecutionPaused{}, events.ExecutionResumed{}), `{"phase":"running"}`},
		"an event that is not shown": {running(events.Log{Message: "x"}), `{"seq":5,"phase":"running","updatedAt":"2026-01-02T03:04:05Z"}`},
		"events of another execution": {
			append(running(), ofOther(events.MessageAccepted{BlockID: "blk_x"}), ofOther(events.ExecutionCompleted{})),
			`{"seq":6,"phase":"running","final":false,"messageCounts":{"user":1,"assistant":0},"updatedAt":"2026-01-02T03:04:06Z"}`,
		},
		"events of another execution before this one is dispatched": {
			append(of(accepted), ofOther(events.ExecutionCompleted{})), `{"seq":2,"phase":"queued","final":false,"updatedAt":"2026-01-02T03:04:01Z"}`,
		},
		"an open message": {of(start(events.Block{ID: "blk_t", Kind: events.KindAssistantText})), `{"messageCounts":{"user":0,"assistant":1},
			"messages":[{"blockId":"blk_t","kind":"assistant_text","status":"pending","conversationId":"main","time":"2026-01-02T03:04:01.000000999Z","text":"","cut":false}]}`},
		"a message keeps the time of its start, and does not change when it is complete": {
			of(start(events.Block{ID: "blk_t", Kind: events.KindAssistantText}), complete(events.Block{ID: "blk_t", Kind: events.KindAssistantText, Content: "done"}),
				complete(events.Block{ID: "blk_t", Kind: events.KindAssistantText, Content: "again"})),
			`{"messageCounts":{"user":0,"assistant":1},
			"messages":[{"blockId":"blk_t","kind":"assistant_text","status":"complete","conversationId":"main","time":"2026-01-02T03:04:01.000000999Z","text":"done","cut":false}]}`,
		},
		"thinking is not a message": {of(complete(events.Block{ID: "blk_t", Kind: events.KindThinking, Content: "hm"})), `{"messageCounts":{"user":0,"assistant":0},"messages":[]}`},
		"a long message in parts": {
			of(events.MessageAccepted{BlockID: "blk_m", Parts: []events.Part{{Type: "image"}, {Type: "text", Text: strings.Repeat("ä", 600)}}}),
			`{"messages":[{"blockId":"blk_m","kind":"user_message","status":"complete","conversationId":"main","time":"2026-01-02T03:04:01.000000999Z","text":"` + strings.Repeat("ä", 512) + `","cut":true}]}`,
		},
		"an open tool call": {
			of(start(events.Block{ID: "blk_c", Kind: events.KindToolUse, ToolUseID: "call", ToolName: "Bash"}), complete(events.Block{ID: "blk_c", Kind: events.KindToolUse, ToolUseID: "call", ToolName: "Bash"})),
			`{"toolCallCounts":{"pending":1,"complete":0,"error":0},
			"toolCalls":[{"toolUseId":"call","toolName":"Bash","status":"pending","conversationId":"main","startedAt":"2026-01-02T03:04:01Z","durationMs":0}]}`,
		},
		"a tool call with a permission and a result": {
			of(events.PermissionDecided{ToolUseID: "call", ToolName: "Bash"}, start(events.Block{ID: "blk_c", Kind: events.KindToolUse, ToolUseID: "call", ToolName: "Bash"}),
				start(events.Block{ID: "blk_r", Kind: events.KindToolResult, ToolUseID: "call", Status: events.StatusPending}),
				complete(events.Block{ID: "blk_r", Kind: events.KindToolResult, ToolUseID: "call", DurationMs: 7}),
				complete(events.Block{ID: "blk_r", Kind: events.KindToolResult, ToolUseID: "call", IsError: true})),
			`{"toolCallCounts":{"pending":0,"complete":1,"error":0},
			"toolCalls":[{"toolUseId":"call","toolName":"Bash","status":"complete","conversationId":"main","startedAt":"2026-01-02T03:04:01Z","endedAt":"2026-01-02T03:04:04Z","durationMs":7}]}`,
		},
		"a failed tool call without an id of the agent": {
			of(start(events.Block{ID: "blk_c", Kind: events.KindToolUse}), complete(events.Block{ID: "blk_r", Kind: events.KindToolResult, ToolUseID: "blk_c", IsError: true})),
			`{"toolCallCounts":{"pending":0,"complete":0,"error":1}}`,
		},
		"a permission without a tool call": {of(events.PermissionDecided{ToolName: "Bash"}), `{"toolCalls":[],"toolCallCounts":{"pending":0,"complete":0,"error":0}}`},
		"results of unknown calls": {
			of(complete(events.Block{ID: "blk_r", Kind: events.KindToolResult, ToolUseID: "x"}), complete(events.Block{ID: "blk_s", Kind: events.KindToolResult})),
			`{"toolCalls":[],"toolCallCounts":{"pending":0,"complete":0,"error":0}}`,
		},
		"the newest todo list": {
			of(complete(events.Block{ID: "blk_1", Kind: events.KindTodo, Todos: []events.TodoItem{{Content: "a", Status: "pending"}, {Content: "b", Status: "pending"}}}),
				complete(events.Block{ID: "blk_2", Kind: events.KindTodo, Todos: []events.TodoItem{{Content: "a", Status: "completed"}}}), complete(events.Block{ID: "blk_3", Kind: events.KindTodo})),
			`{"todos":[{"content":"a","status":"completed"}],"todoCount":1}`,
		},
		"an update of a todo list": {
			of(start(events.Block{ID: "blk_1", Kind: events.KindTodo}), events.BlockUpdate{BlockID: "blk_1", Updates: events.BlockUpdates{Todos: []events.TodoItem{{Content: "a", Status: "pending"}}}}),
			`{"todos":[{"content":"a","status":"pending"}],"todoCount":1}`,
		},
		"a plan after a todo list": {
			of(complete(events.Block{ID: "blk_1", Kind: events.KindTodo, Todos: []events.TodoItem{{Content: "a", Status: "pending"}}}),
				complete(events.Block{ID: "blk_2", Kind: events.KindPlan, Plan: &events.Plan{Title: "t", Items: []events.PlanItem{{ItemID: "1", Content: "b", Status: events.PlanCancelled, Priority: "high"}}}})),
			`{"todos":[{"content":"b","status":"cancelled"}],"todoCount":1}`,
		},
		"an update that empties a plan": {
			of(start(events.Block{ID: "blk_1", Kind: events.KindPlan, Plan: &events.Plan{Items: []events.PlanItem{{Content: "a", Status: events.PlanPending}}}}),
				events.BlockUpdate{BlockID: "blk_1", Updates: events.BlockUpdates{Plan: &events.Plan{}}}),
			`{"todos":[],"todoCount":0}`,
		},
		"the plan of a sub-agent": {
			[]events.Event{{ExecutionID: mine, ConversationID: "sub", Data: complete(events.Block{ID: "blk_1", Kind: events.KindPlan, Plan: &events.Plan{Items: []events.PlanItem{{Content: "a"}}}})}},
			`{"todos":[],"todoCount":0}`,
		},
		"the todo list of a sub-agent": {
			[]events.Event{{ExecutionID: mine, ConversationID: "sub", Data: complete(events.Block{ID: "blk_1", Kind: events.KindTodo, Todos: []events.TodoItem{{Content: "a"}}})}},
			`{"todos":[],"todoCount":0}`,
		},
		"a running sub-agent": {
			of(events.SubagentSpawned{SubagentID: "a", Conversation: "sub", Name: "searcher"}, events.SubagentSpawned{SubagentID: "a", Conversation: "sub"}),
			`{"subagentCounts":{"running":1,"completed":0,"failed":0},
			"subagents":[{"subagentId":"a","conversationId":"sub","name":"searcher","status":"running","startedAt":"2026-01-02T03:04:01Z","durationMs":0}]}`,
		},
		"ended sub-agents": {
			of(events.SubagentSpawned{Conversation: "s1"}, events.SubagentSpawned{Conversation: "s2"}, events.SubagentCompleted{Conversation: "s1", DurationMs: 3},
				events.SubagentCompleted{Conversation: "s2", IsError: true}, events.SubagentCompleted{Conversation: "s2"}, events.SubagentCompleted{Conversation: "unknown"}),
			`{"subagentCounts":{"running":0,"completed":1,"failed":1}, "subagents":[
			{"subagentId":"","conversationId":"s1","name":"","status":"completed","startedAt":"2026-01-02T03:04:01Z","endedAt":"2026-01-02T03:04:03Z","durationMs":3},
			{"subagentId":"","conversationId":"s2","name":"","status":"failed","startedAt":"2026-01-02T03:04:02Z","endedAt":"2026-01-02T03:04:04Z","durationMs":0}]}`,
		},
		"usage": {
			of(events.MetadataUpdate{Usage: events.Usage{InputTokens: 1}}, events.MetadataUpdate{Usage: events.Usage{InputTokens: 5, OutputTokens: 2, CacheReadTokens: 3, CacheWriteTokens: 4}, CostUSD: 0.5, Model: "m"}),
			`{"usage":{"inputTokens":5,"outputTokens":2,"cacheReadTokens":3,"cacheWriteTokens":4},"costUsd":0.5,"model":"m"}`,
		},
		"metered usage": {
			of(events.ModelCalled{Status: 200, Usage: events.Usage{InputTokens: 1, OutputTokens: 2, CacheReadTokens: 3, CacheWriteTokens: 4}, CostUSD: 0.25},
				events.ModelCalled{Status: 500, Usage: events.Usage{InputTokens: 1}, CostUSD: 0.25}),
			`{"metered":{"inputTokens":2,"outputTokens":2,"cacheReadTokens":3,"cacheWriteTokens":4,"costUsd":0.5,"requests":2,"failed":1}}`,
		},
		"an approval request": {
			running(events.ApprovalRequested{ApprovalID: "apr_1", Kind: events.ApprovalTool, ToolName: "Bash", Title: "rm -r build"}, events.ApprovalRequested{ApprovalID: "apr_1"}),
			`{"phase":"waiting_for_approval","pendingApprovalCount":1,"pendingApprovals":[
			{"approvalId":"apr_1","kind":"tool","toolName":"Bash","title":"rm -r build","requestedAt":"2026-01-02T03:04:05Z","decided":false}]}`,
		},
		"a decision that the agent has not received": {
			running(events.ApprovalRequested{ApprovalID: "apr_1"}, events.ApprovalDecided{ApprovalID: "apr_1"}, events.ApprovalDecided{ApprovalID: "apr_2"}),
			`{"phase":"waiting_for_approval","pendingApprovalCount":1,
			"pendingApprovals":[{"approvalId":"apr_1","kind":"","toolName":"","title":"","requestedAt":"2026-01-02T03:04:05Z","decided":true}]}`,
		},
		"one of two approval requests has ended": {
			running(events.ApprovalRequested{ApprovalID: "apr_1"}, events.ApprovalRequested{ApprovalID: "apr_2"}, events.ApprovalResolved{ApprovalID: "apr_1"}, events.ApprovalResolved{ApprovalID: "apr_1"}),
			`{"phase":"waiting_for_approval","pendingApprovalCount":1,
			"pendingApprovals":[{"approvalId":"apr_2","kind":"","toolName":"","title":"","requestedAt":"2026-01-02T03:04:06Z","decided":false}]}`,
		},
		"all approval requests have ended": {
			running(events.ApprovalRequested{ApprovalID: "apr_1"}, events.ApprovalRequested{ApprovalID: "apr_2"}, events.ApprovalRetracted{ApprovalID: "apr_1"}, events.ApprovalResolved{ApprovalID: "apr_2"}),
			`{"phase":"running","pendingApprovalCount":0,"pendingApprovals":[]}`,
		},
		"a pause with an open approval request": {running(events.ApprovalRequested{ApprovalID: "apr_1"}, events.ExecutionPaused{}), `{"phase":"paused","pendingApprovalCount":1}`},
		"the end of such a pause": {
			running(events.ApprovalRequested{ApprovalID: "apr_1"}, events.ExecutionPaused{}, events.ExecutionResumed{}), `{"phase":"waiting_for_approval","pendingApprovalCount":1}`,
		},
		"an approval request that ends in a pause": {
			running(events.ApprovalRequested{ApprovalID: "apr_1"}, events.ExecutionPaused{}, events.ApprovalRetracted{ApprovalID: "apr_1"}), `{"phase":"paused","pendingApprovalCount":0}`,
		},
		"an end with open approval requests": {
			running(events.ApprovalRequested{ApprovalID: "apr_1"}, events.ExecutionCancelled{}), `{"phase":"cancelled","pendingApprovalCount":0,"pendingApprovals":[]}`,
		},
		"sandbox time": {of(events.SandboxUsage{DurationMs: 10, CostUSD: 0.5}, events.SandboxUsage{DurationMs: 5, CostUSD: 0.5}), `{"sandboxMs":15,"sandboxCostUsd":1}`},
		"completed": {
			running(events.MetadataUpdate{CostUSD: 2}, events.ExecutionCompleted{DurationMs: 9, Usage: events.Usage{InputTokens: 6}, Result: "done"}),
			`{"phase":"completed","final":true,"durationMs":9,"usage":{"inputTokens":6,"outputTokens":0,"cacheReadTokens":0,"cacheWriteTokens":0},"costUsd":2,"result":"done","resultCut":false,"endedAt":"2026-01-02T03:04:06Z"}`,
		},
		"completed with a cost and a long result": {running(events.ExecutionCompleted{CostUSD: 3, Result: long + "y"}), `{"costUsd":3,"result":"` + long + `","resultCut":true}`},
		"failed": {
			running(events.ExecutionFailed{Code: "C", Message: "why", DurationMs: 9, Usage: events.Usage{InputTokens: 6}}),
			`{"phase":"failed","final":true,"durationMs":9,"usage":{"inputTokens":6,"outputTokens":0,"cacheReadTokens":0,"cacheWriteTokens":0},"code":"C","message":"why"}`,
		},
		"cancelled":                     {running(events.ExecutionCancelled{Reason: "interrupted", DurationMs: 9}), `{"phase":"cancelled","final":true,"durationMs":9,"reason":"interrupted"}`},
		"withdrawn":                     {of(accepted, events.ExecutionWithdrawn{Reason: "cancelled"}), `{"phase":"cancelled","final":true,"reason":"cancelled"}`},
		"an end that cannot be decoded": {running(events.OpaquePayload{Name: events.ExecutionCompleted{}.EventType()}), `{"phase":"failed","final":true}`},
		"an end with open calls and running sub-agents": {
			of(start(events.Block{ID: "blk_c", Kind: events.KindToolUse, ToolUseID: "call"}), events.SubagentSpawned{Conversation: "sub"}, events.ExecutionCancelled{}),
			`{"toolCallCounts":{"pending":0,"complete":0,"error":1},"subagentCounts":{"running":0,"completed":0,"failed":1},
			"toolCalls":[{"toolUseId":"call","toolName":"","status":"error","conversationId":"main","startedAt":"2026-01-02T03:04:01Z","endedAt":"2026-01-02T03:04:03Z","durationMs":0}],
			"subagents":[{"subagentId":"","conversationId":"sub","name":"","status":"failed","startedAt":"2026-01-02T03:04:02Z","endedAt":"2026-01-02T03:04:03Z","durationMs":0}]}`,
		},
		"events after the end": {
			running(events.ExecutionCompleted{}, events.ExecutionStarted{Attempt: 9}, events.ExecutionFailed{}, events.ModelCalled{}),
			`{"seq":8,"phase":"completed","final":true,"attempt":1,"updatedAt":"2026-01-02T03:04:05Z","endedAt":"2026-01-02T03:04:05Z",
			"metered":{"inputTokens":0,"outputTokens":0,"cacheReadTokens":0,"cacheWriteTokens":0,"costUsd":0,"requests":0,"failed":0}}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got, want map[string]any
			for text, into := range map[string]*map[string]any{string(wirejson.Marshal(fold(c.events))): &got, c.want: &want} {
				if err := json.Unmarshal([]byte(text), into); err != nil {
					t.Fatal(err)
				}
			}
			for field, value := range want {
				if !reflect.DeepEqual(got[field], value) {
					t.Errorf("%s is %v, want %v", field, got[field], value)
				}
			}
		})
	}
}

// TestApply_LimitsLists tests which elements of long lists are sent: open ones before others, and newer ones before older ones.
// All elements are counted, also while more are open than are sent.
func TestApply_LimitsLists(t *testing.T) {
	t.Parallel()
	const n, parallel = 500, 50 // an element ends when 50 newer ones have begun; the first stays open
	var list []events.Payload
	end := func(i int) {
		list = append(list, complete(events.Block{ID: fmt.Sprint("result", i), Kind: events.KindToolResult, ToolUseID: fmt.Sprint("call", i)}),
			events.SubagentCompleted{Conversation: fmt.Sprint("sub", i)}, complete(events.Block{ID: fmt.Sprint("text", i), Kind: events.KindAssistantText}))
	}
	for i := range n {
		call := fmt.Sprint("call", i)
		list = append(list, start(events.Block{ID: call, Kind: events.KindToolUse, ToolUseID: call}), events.SubagentSpawned{Conversation: fmt.Sprint("sub", i)},
			start(events.Block{ID: fmt.Sprint("text", i), Kind: events.KindAssistantText}))
		if i > parallel {
			end(i - parallel)
		}
	}
	check := func(first, last string, pending, ended uint32) {
		t.Helper()
		s := fold(of(list...))
		progress.TrimForSending(s)
		if l := s.ToolCalls; len(l) != progress.MaxCalls || l[0].ToolUseId != "call"+first || l[len(l)-1].ToolUseId != "call"+last {
			t.Errorf("the tool calls are %v", l)
		}
		if l := s.Subagents; len(l) != progress.MaxSubagents || l[0].ConversationId != "sub"+first || l[len(l)-1].ConversationId != "sub"+last {
			t.Errorf("the sub-agents are %v", l)
		}
		if l := s.Messages; len(l) != progress.MaxMessages || pending == 1 && l[0].BlockId != "text"+first || l[len(l)-1].BlockId != "text"+last {
			t.Errorf("the messages are %v", l)
		}
		if c, a, m := s.ToolCallCounts, s.SubagentCounts, s.MessageCounts; c.Pending != pending || c.Complete != ended || c.Error != 0 || a.Running != pending || a.Completed != ended || a.Failed != 0 || m.Assistant != n {
			t.Errorf("the counts are %v, %v and %v", c, a, m)
		}
	}
	check("480", "499", parallel+1, n-parallel-1)
	for i := n - parallel; i < n; i++ {
		end(i)
	}
	check("0", "499", 1, n-1)
}

// TestApply_HoldsFewOpenElements tests that elements that never end do not fill the memory, and are counted at the end.
func TestApply_HoldsFewOpenElements(t *testing.T) {
	t.Parallel()
	const n = 2 * progress.MaxOpenElements
	var list []events.Payload
	for i := range n {
		list = append(list, start(events.Block{ID: fmt.Sprint("call", i), Kind: events.KindToolUse}), events.SubagentSpawned{Conversation: fmt.Sprint("sub", i)},
			start(events.Block{ID: fmt.Sprint("text", i), Kind: events.KindAssistantText}))
	}
	if s := fold(of(list...)); len(s.ToolCalls) != progress.MaxOpenElements || len(s.Subagents) != progress.MaxOpenElements || len(s.Messages) != progress.MaxOpenElements {
		t.Errorf("the status holds %d calls, %d sub-agents and %d messages", len(s.ToolCalls), len(s.Subagents), len(s.Messages))
	}
	s := fold(of(append(list, events.ExecutionCancelled{})...))
	if s.ToolCallCounts.Error != n || s.SubagentCounts.Failed != n || len(s.ToolCalls) != progress.MaxCalls || len(s.Subagents) != progress.MaxSubagents {
		t.Errorf("the status has the counts %v and %v", s.ToolCallCounts, s.SubagentCounts)
	}
}

// TestApply_IsBounded tests that a status stays below 64 KiB and can be encoded, whatever the texts of the events are.
func TestApply_IsBounded(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"long": strings.Repeat("x", 5000), "not UTF-8": strings.Repeat("\xff", 5000), "three bytes": strings.Repeat("€", 5000), "NUL": strings.Repeat("\x00", 5000)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var list []events.Event
			for i := range 50 {
				id := text + fmt.Sprint(i)
				for _, d := range []events.Payload{
					events.MessageAccepted{BlockID: id, Content: text}, start(events.Block{ID: "c" + id, Kind: events.KindToolUse, ToolUseID: id, ToolName: text}),
					events.SubagentSpawned{SubagentID: id, Conversation: id, Name: text}, events.ApprovalRequested{ApprovalID: id, Kind: events.ApprovalKind(text), ToolName: text, Title: text},
				} {
					list = append(list, events.Event{ExecutionID: mine, ConversationID: text, Data: d})
				}
			}
			var todos []events.TodoItem
			for range 100 {
				todos = append(todos, events.TodoItem{Content: text, Status: text})
			}
			list = append(list, of(complete(events.Block{ID: "t", Kind: events.KindTodo, Todos: todos}), events.MetadataUpdate{Model: text})...)
			for _, end := range []events.Payload{events.Log{}, events.ExecutionCompleted{Result: text}, events.ExecutionFailed{Code: text, Message: text}, events.ExecutionCancelled{Reason: text}, events.ExecutionWithdrawn{Reason: text}} {
				s := fold(append(list[:len(list):len(list)], of(end)...))
				progress.TrimForSending(s)
				if b, err := proto.Marshal(s); err != nil || len(b) > 64<<10 {
					t.Errorf("%s: the status has %d bytes, error %v", end.EventType(), len(b), err)
				}
				if len(s.Messages) != progress.MaxMessages || len(s.ToolCalls) != progress.MaxCalls || len(s.Subagents) != progress.MaxSubagents || s.TodoCount != 100 {
					t.Errorf("%s: the status has %d messages, %d calls, %d sub-agents, %d todos", end.EventType(), len(s.Messages), len(s.ToolCalls), len(s.Subagents), s.TodoCount)
				}
			}
		})
	}
}

// TestApply_IsTotal tests that Apply accepts each type of event, also without any field.
func TestApply_IsTotal(t *testing.T) {
	t.Parallel()
	for _, entry := range events.EventTypes() {
		t.Run(string(entry.Type), func(t *testing.T) {
			t.Parallel()
			empty := events.WireEvent{ExecutionID: mine, ConversationID: events.MainConversation, Type: entry.Type, Data: []byte("{}")}.Event()
			s := fold(append(running(), empty, empty))
			if s.Seq != 6 || s.Final != events.IsTerminal(entry.Type) {
				t.Errorf("the status is %v", s)
			}
		})
	}
}
