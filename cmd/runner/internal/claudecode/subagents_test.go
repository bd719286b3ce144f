package claudecode

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// mirrored returns the line with which the CLI prints lines of the transcript of the sub-agent id.
func mirrored(id string, lines ...string) string {
	return fmt.Sprintf(`{"type":"transcript_mirror","filePath":"/c/projects/w/s/subagents/agent-%s.jsonl","entries":[%s]}`, id, strings.Join(lines, ","))
}

// Lines of the transcripts of sub-agents.
func metadataLine(call string, depth int) string {
	return fmt.Sprintf(`{"type":"agent_metadata","agentType":"x","toolUseId":%q,"spawnDepth":%d}`, call, depth)
}

func partLine(message, part string) string {
	return fmt.Sprintf(`{"type":"assistant","message":{"id":%q,"content":[%s],"usage":{"input_tokens":10}}}`, message, part)
}

func resultOf(call, text string) string {
	return fmt.Sprintf(`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":%q,"content":%q}]}}`, call, text)
}

func textPart(text string) string { return fmt.Sprintf(`{"type":"text","text":%q}`, text) }

func callPart(id, tool, input string) string {
	return fmt.Sprintf(`{"type":"tool_use","id":%q,"name":%q,"input":%s}`, id, tool, input)
}

// startOf returns the line of the main agent with the call of a sub-agent.
func startOf(call string) string {
	return partLine("m-"+call, callPart(call, "Agent", `{"prompt":"p","subagent_type":"x"}`))
}

// hookLine returns the line with which the CLI calls the hook before a call.
func hookLine(request, agentID, tool, call string) string {
	return controlLine(request, fmt.Sprintf(`{"subtype":"hook_callback","input":{"hook_event_name":"PreToolUse","tool_name":%q,"tool_use_id":%q,"agent_id":%q}}`, tool, call, agentID))
}

// A sub-agent that is cut off ends with the turn, after those that it has started.
func TestSubagents_EndWithTheTurnFromTheDeepestUp(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin().prints(
		startOf("t1"), mirrored("a1", metadataLine("t1", 1)),
		mirrored("a1", partLine("m1", textPart("within")), partLine("m1", callPart("t2", "Agent", `{"prompt":"q","subagent_type":"y"}`))),
		mirrored("a2", metadataLine("t2", 2)), mirrored("a2", partLine("m2", textPart("deeper"))),
		mirrored("a9", partLine("m3", textPart("of an unknown one"))), mirrored("a8", partLine("m4", textPart("of an earlier process"))), mirrored("a8", metadataLine("t8", 1)),
		done)
	s, c := of[events.SubagentSpawned](st, "subagent_spawned"), of[events.SubagentCompleted](st, "subagent_completed")
	if len(s) != 2 || s[0].Depth != 1 || s[1].Depth != 2 || s[1].Parent != "t1" || len(c) != 2 || c[0].SubagentID != "t2" || !c[0].IsError || c[1].SubagentID != "t1" || !c[1].IsError {
		t.Errorf("spawned %+v, completed %+v", s, c)
	}
	for text, conversation := range map[string]string{"within": "t1", "deeper": "t2", "of an unknown one": "a9", "of an earlier process": "t8"} {
		in := ""
		for _, l := range st.journal.Lines() {
			if strings.Contains(string(l.Data), text) {
				in = l.ConversationID
			}
		}
		if in != conversation {
			t.Errorf("%q is in conversation %q, want %q", text, in, conversation)
		}
	}
}

// The CLI may print the first lines of a transcript before the line that names the sub-agent's call.
func TestSubagents_AreKnownFromTheirTaskBeforeTheirTranscript(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin().prints(
		startOf("t1"), `{"type":"system","subtype":"task_started","task_id":"a1","tool_use_id":"t1"}`,
		mirrored("a1", partLine("m1", textPart("first"))), mirrored("a1", metadataLine("t1", 1)), done)
	starts := of[events.BlockStart](st, "block_start")
	if i := slices.IndexFunc(starts, func(b events.BlockStart) bool { return b.Block.Content == "first" }); i < 0 || starts[i].Block.ConversationID != "t1" {
		t.Errorf("blocks %+v", starts)
	}
}

// Lines that came before the CLI named the sub-agent's call are journaled before those that come after it, and their calls wait no longer.
func TestSubagents_KeepTheOrderOfLinesThatCameBeforeTheirCall(t *testing.T) {
	t.Parallel()
	st := newPolicyStage(t, agent.Launch{Permissions: askAll}).prints(startOf("t1"), hookLine("held", "a1", "Bash", "t2"),
		mirrored("a1", partLine("m1", textPart("first")), partLine("m1", callPart("t2", "Bash", `{}`))),
		`{"type":"system","subtype":"task_started","task_id":"a1","tool_use_id":"t1"}`)
	if st.answers()["held"] == nil {
		t.Error("the call waits although its line has come")
	}
	st.prints(mirrored("a1", partLine("m2", textPart("second"))), done)
	var texts []string
	for _, b := range of[events.BlockStart](st, "block_start") {
		if b.Block.Content != "" {
			texts = append(texts, b.Block.Content)
		}
	}
	if !slices.Equal(texts, []string{"first", "second"}) {
		t.Errorf("texts %q", texts)
	}
}

// The CLI prints the result of a sub-agent before the sub-agent's last text: the text is in the conversation before its end.
func TestSubagents_EndAfterTheirLastText(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin().prints(
		startOf("t1"), mirrored("a1", metadataLine("t1", 1)), mirrored("a1", partLine("m1", textPart("first"))),
		`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"the last"},{"type":"text","text":"agentId: a1 (note)"}]}]}}`)
	if c := of[events.SubagentCompleted](st, "subagent_completed"); len(c) != 0 {
		t.Errorf("completed before the last text: %+v", c)
	}
	st.prints(mirrored("a1", partLine("m2", textPart("the last"))))
	var types []string
	for _, l := range st.journal.Lines() {
		types = append(types, string(l.Type))
	}
	c, blocks := of[events.SubagentCompleted](st, "subagent_completed"), of[events.BlockComplete](st, "block_complete")
	if len(c) != 1 || c[0].IsError || len(blocks) != 1 || blocks[0].Block.Output != "the last" || types[len(types)-1] != "subagent_completed" {
		t.Errorf("completed %+v, blocks %+v, lines %q", c, blocks, types)
	}
	// A result that is no text of the sub-agent ends it with the turn at the latest.
	st.prints(startOf("t2"), resultOf("t2", "nothing was said"), done)
	if c := of[events.SubagentCompleted](st, "subagent_completed"); len(c) != 2 || c[1].IsError {
		t.Errorf("completed %+v", c)
	}
}

// A call of a sub-agent waits until its line was journaled, and no longer.
func TestHook_HoldsACallOfASubagentUntilItWasJournaled(t *testing.T) {
	t.Parallel()
	st := newPolicyStage(t, agent.Launch{Permissions: askAll}).prints(
		startOf("t1"), hookLine("main", "", "Agent", "t1"), mirrored("a1", metadataLine("t1", 1)),
		hookLine("held", "a1", "Bash", "t2"), hookLine("withdrawn", "a1", "Bash", "t3"),
		`{"type":"control_cancel_request","request_id":"withdrawn"}`)
	if a := st.answers(); a["main"] == nil || a["held"] != nil {
		t.Errorf("answers before the call was journaled: %s", a)
	}
	st.prints(mirrored("a1", partLine("m1", callPart("t2", "Bash", `{"command":"ls"}`)), partLine("m1", callPart("t3", "Bash", `{"command":"ls"}`))))
	if a := st.answers(); !strings.Contains(string(a["held"]), `"ask"`) || a["withdrawn"] != nil {
		t.Errorf("answers %s", a)
	}
	st.prints(hookLine("known", "a1", "Bash", "t2"))
	if a := st.answers(); a["known"] == nil {
		t.Error("a known call waits")
	}
}

// Two calls that wait are both answered, also if a model gave them the same id, and none waits after the turn.
func TestHook_AnswersEveryCall(t *testing.T) {
	t.Parallel()
	st := newPolicyStage(t, agent.Launch{Permissions: askAll}).prints(
		startOf("t1"), startOf("t2"), mirrored("a1", metadataLine("t1", 1)), mirrored("a2", metadataLine("t2", 1)),
		hookLine("one", "a1", "Bash", "call_0"), hookLine("two", "a2", "Bash", "call_0"), hookLine("three", "a2", "Bash", "call_1"),
		mirrored("a1", partLine("m1", callPart("call_0", "Bash", `{}`))))
	if a := st.answers(); a["one"] == nil || a["two"] != nil {
		t.Errorf("answers before the second call was journaled: %s", a)
	}
	st.prints(mirrored("a2", partLine("m2", callPart("call_0", "Bash", `{}`))))
	if a := st.answers(); a["two"] == nil {
		t.Errorf("answers %s", a)
	}
	st.prints(done)
	if a := st.answers(); !strings.Contains(string(a["three"]), `"deny"`) {
		t.Errorf("answers after the turn: %s", a)
	}
}

// The calls of sub-agents keep their conversation and their level if a model gives them ids that it has given to others.
func TestSubagents_WithRepeatedIDs(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin()
	st.session.(*session).turn.maxDepth = 1
	st.prints(startOf("t1"), mirrored("a1", metadataLine("t1", 1)), hookLine("held", "a1", "Bash", "t1"))
	if st.answers()["held"] != nil {
		t.Error("the call runs before it was journaled")
	}
	st.prints(mirrored("a1", partLine("m1", callPart("t1", "Bash", `{}`)), resultOf("t1", "listing")))
	if c := of[events.SubagentCompleted](st, "subagent_completed"); len(c) != 0 || st.answers()["held"] == nil {
		t.Errorf("the result of a call ended the sub-agent: %+v", c)
	}
	st.prints(hookLine("deep", "a1", "Agent", "t1"), mirrored("a1", partLine("m2", callPart("t1", "Agent", `{}`))),
		mirrored("a2", metadataLine("t1", 2)), mirrored("a2", partLine("m3", textPart("deep"))), mirrored("a1", resultOf("t1", "deep")))
	if a := string(st.answers()["deep"]); !strings.Contains(a, `"deny"`) {
		t.Errorf("the start below the limit is answered with %s", a)
	}
	spawned, ended := of[events.SubagentSpawned](st, "subagent_spawned"), of[events.SubagentCompleted](st, "subagent_completed")
	if len(spawned) != 2 || spawned[1].Depth != 2 || spawned[1].Parent != "t1" || spawned[1].Conversation == "t1" || len(ended) != 1 || ended[0].Conversation != spawned[1].Conversation {
		t.Fatalf("spawned %+v, ended %+v", spawned, ended)
	}
	for _, l := range st.journal.Lines() {
		if strings.Contains(string(l.Data), `"content":"deep"`) && l.ConversationID != spawned[1].Conversation {
			t.Errorf("the text is in conversation %q", l.ConversationID)
		}
	}
	st.prints(resultOf("t1", "done"), startOf("t1"), done)
	if s, c := of[events.SubagentSpawned](st, "subagent_spawned"), of[events.SubagentCompleted](st, "subagent_completed"); len(s) != 3 || len(c) != 3 || c[1].Conversation != "t1" || c[1].IsError {
		t.Errorf("spawned %+v, ended %+v", s, c)
	}
}

// Lines of a sub-agent whose call never comes do not wait without limit.
func TestSubagents_WhoseCallNeverComes(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin()
	st.prints(mirrored("a1", partLine("m1", textPart("first"))))
	for range 9 {
		st.prints(mirrored("a1", partLine("m1", textPart(strings.Repeat("x", 1<<20)))))
	}
	var first string
	for _, l := range st.journal.Lines() {
		if strings.Contains(string(l.Data), `"first"`) {
			first = l.ConversationID
		}
	}
	if waiting := st.session.(*session).turn.early["a1"]; first != "a1" || len(waiting) > 0 {
		t.Errorf("%d lines wait, the first is in conversation %q", len(waiting), first)
	}
}

// A model cannot name the conversation of a sub-agent as the main agent's is named.
func TestSubagents_AreNotTheMainAgent(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"", events.MainConversation} {
		st := newStage(t).begin().prints(startOf(id), mirrored("a1", metadataLine(id, 1)), mirrored("a1", partLine("m1", textPart("within"))), done)
		if s := of[events.SubagentSpawned](st, "subagent_spawned"); len(s) != 1 || s[0].Conversation == id || s[0].Depth != 1 {
			t.Errorf("%q: spawned %+v", id, s)
		}
		for _, l := range st.journal.Lines() {
			if strings.Contains(string(l.Data), "within") && (l.ConversationID == "" || l.ConversationID == events.MainConversation) {
				t.Errorf("%q: the text is the main agent's: %s", id, l.Data)
			}
		}
	}
}

// A sub-agent whose transcript comes before the line with its call has its level and its parent.
func TestSubagents_WhoseCallComesLate(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin().prints(
		startOf("t1"), mirrored("a1", metadataLine("t1", 1)), mirrored("a2", metadataLine("t2", 2)), mirrored("a2", partLine("m2", textPart("deep"))),
		mirrored("a1", partLine("m1", callPart("t2", "Agent", `{}`))), done)
	s, c := of[events.SubagentSpawned](st, "subagent_spawned"), of[events.SubagentCompleted](st, "subagent_completed")
	if len(s) != 2 || s[1].Depth != 2 || s[1].Parent != "t1" || len(c) != 2 || c[0].SubagentID != "t2" {
		t.Errorf("spawned %+v, ended %+v", s, c)
	}
}

// A sub-agent below the limit is denied; its siblings above it are not, and neither are other calls at the limit.
func TestHook_DeniesSubagentsBelowTheLimit(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin()
	st.session.(*session).turn.maxDepth = 1
	st.prints(
		startOf("t1"), hookLine("first", "", "Agent", "t1"), mirrored("a1", metadataLine("t1", 1)), hookLine("second", "a1", "Task", "t2"), hookLine("other", "a1", "Bash", "t3"),
		mirrored("a1", partLine("m1", callPart("t2", "Task", `{}`)), partLine("m1", callPart("t3", "Bash", `{}`))))
	a := st.answers()
	if string(a["first"]) != `{}` || string(a["other"]) != `{}` || !strings.Contains(string(a["second"]), `"permissionDecision":"deny"`) || !strings.Contains(string(a["second"]), "limits.subagentDepth") {
		t.Errorf("answers %s", a)
	}
	// The level of a sub-agent of an earlier turn is known.
	st.prints(done).begin()
	st.session.(*session).turn.maxDepth = 2
	st.prints(mirrored("a5", metadataLine("t5", 2)), hookLine("later", "a5", "Agent", "t6"), mirrored("a5", partLine("m5", callPart("t6", "Agent", `{}`))))
	if got := string(st.answers()["later"]); !strings.Contains(got, `"deny"`) {
		t.Errorf("answered %s", got)
	}
	s := of[events.SubagentSpawned](st, "subagent_spawned")
	if i := slices.IndexFunc(s, func(x events.SubagentSpawned) bool { return x.SubagentID == "t6" }); i < 0 || s[i].Depth != 3 || s[i].Parent != "t5" {
		t.Errorf("spawned %+v", s)
	}
}
