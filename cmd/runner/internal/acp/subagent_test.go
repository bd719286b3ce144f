package acp

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// delegatingSession returns a session of an agent that runs sub-agents with the tool task, and its turn.
func delegatingSession(t *testing.T, j *agenttest.Journal) (agent.Session, *agent.Turn) {
	t.Helper()
	d := Dialect{
		Notice: func(_ string, raw json.RawMessage) *Notice {
			var n Notice
			if err := json.Unmarshal(raw, &n); err != nil {
				t.Error(err)
			}
			return &n
		},
		Tool: func(c ToolCall) *ToolInfo {
			if c.Name == "task" {
				return &ToolInfo{Kind: permission.KindAgent, Subagent: &SubagentCall{Name: "sub"}}
			}
			return &ToolInfo{Kind: permission.KindShell}
		},
	}
	s := OpenSession(d, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}}, &agenttest.Stdin{})
	turn := agenttest.NewJournalTurn(t, j, "exe_1")
	if err := s.BeginTurn(runner.Query{Content: "hello"}, turn); err != nil {
		t.Fatal(err)
	}
	feed(t, s, turn, `{"id":1,"result":{"protocolVersion":1,"agentCapabilities":{}}}`, `{"id":2,"result":{"sessionId":"s1"}}`)
	return s, turn
}

// journaled returns the conversations with the types of their lines, and with what blocks hold.
func journaled(t *testing.T, j *agenttest.Journal) []string {
	t.Helper()
	var out []string
	for _, l := range j.Lines() {
		var data struct {
			Block events.Block `json:"block"`
		}
		switch l.Type {
		case (events.BlockComplete{}).EventType(), (events.BlockStart{}).EventType():
			if err := json.Unmarshal(l.Data, &data); err != nil {
				t.Fatal(err)
			}
			if b := data.Block; b.Status != events.StatusPending || b.Kind == events.KindSubagent && l.Type == (events.BlockStart{}).EventType() {
				out = append(out, strings.TrimSpace(fmt.Sprintf("%s: %s %s%s", l.ConversationID, b.Kind, b.Content, b.Output)))
			}
		case (events.SubagentSpawned{}).EventType():
			out = append(out, l.ConversationID+": "+string(l.Type))
		}
	}
	return out
}

// callUpdate returns the update of a call.
func callUpdate(kind, id, tool, status string) string {
	return fmt.Sprintf(`{"sessionUpdate":%q,"toolCallId":%q,"title":%q,"status":%q,"rawInput":{"command":"x"},"content":[{"type":"content","content":{"type":"text","text":%q}}]}`, kind, id, tool, status, id+" of "+tool)
}

// What sub-agents do is journaled in the order of its arrival, but not before the call that runs the sub-agent.
func TestSubagents_AreJournaledAfterTheirCalls(t *testing.T) {
	t.Parallel()
	update := func(raw string) string {
		return `{"method":"session/update","params":{"sessionId":"s1","update":` + raw + `}}`
	}
	of := func(session, parent, call, raw string) string {
		return tells(t, Notice{Session: session, Parent: parent, ParentCall: call, Update: json.RawMessage(raw)})
	}
	says := func(text string) string {
		return fmt.Sprintf(`{"sessionUpdate":"agent_message_chunk","messageId":"m","content":{"type":"text","text":%q}}`, text)
	}
	task := callUpdate("tool_call_update", "c", "task", "in_progress")
	done := callUpdate("tool_call_update", "c", "task", "completed")
	for name, c := range map[string]struct{ lines, want []string }{
		"the call is known": {
			[]string{update(task), of("s2", "s1", "c", says("a")), of("s1", "s1", "c", done)},
			[]string{"main: subagent", "main: subagent_spawned", "c: assistant_text a", "main: subagent c of task"},
		},
		"the call comes later, after text": {
			[]string{of("s1", "s1", "c", task), of("s2", "s1", "c", says("a")), textUpdate("agent_message_chunk", "m", "first"), update(task), update(done)},
			[]string{"main: assistant_text first", "main: subagent", "main: subagent_spawned", "c: assistant_text a", "main: subagent c of task"},
		},
		"the call never comes": {
			[]string{of("s1", "s1", "c", task), of("s2", "s1", "c", says("a")), of("s1", "s1", "c", done)},
			[]string{"main: subagent", "main: subagent_spawned", "c: assistant_text a", "main: subagent c of task"},
		},
		"calls of all levels have one id": {
			[]string{
				update(task), of("s2", "s1", "c", task), of("s3", "s2", "c", callUpdate("tool_call", "c", "bash", "completed")), of("s2", "s1", "c", callUpdate("tool_call_update", "c", "task", "completed")),
				update(done),
			},
			[]string{
				"main: subagent", "main: subagent_spawned", "c: subagent", "c: subagent_spawned", "c.c: tool_use", "c.c: tool_result c of bash", "c: subagent c of task", "main: subagent c of task",
			},
		},
		"text after the end": {
			[]string{update(task), update(done), of("s2", "s1", "c", says("late"))},
			[]string{"main: subagent", "main: subagent_spawned", "main: subagent c of task", "c: assistant_text late"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := &agenttest.Journal{}
			s, turn := delegatingSession(t, j)
			for _, l := range c.lines {
				if err := s.HandleLine([]byte(l), turn); err != nil {
					t.Errorf("%s: %v", l, err)
				}
			}
			feed(t, s, turn, promptDone)
			if got := journaled(t, j); !slices.Equal(got, c.want) {
				t.Errorf("journaled\n%q, want\n%q", got, c.want)
			}
		})
	}
}

// A permission request follows the call that it is about; it does not wait for ever for the call that runs the sub-agent.
func TestSubagents_RequestsFollowTheirCalls(t *testing.T) {
	t.Parallel()
	j := &agenttest.Journal{}
	s, turn := delegatingSession(t, j)
	for _, n := range []Notice{
		{Session: "s1", Parent: "s1", ParentCall: "c", Update: json.RawMessage(callUpdate("tool_call_update", "c", "task", "in_progress"))},
		{Session: "s2", Parent: "s1", ParentCall: "c", Update: json.RawMessage(callUpdate("tool_call", "d", "bash", "in_progress"))},
		{Session: "s2", Parent: "s1", ParentCall: "c", Request: &SubagentRequest{ID: "r", Call: ToolCall{ID: "d", Name: "bash"}}},
	} {
		if err := s.HandleLine([]byte(tells(t, n)), turn); err != nil {
			t.Fatal(err)
		}
	}
	if got := journaled(t, j); len(got) > 0 {
		t.Errorf("journaled before the call: %q", got)
	}
	turn.RunAlarm()
	if got := journaled(t, j); !slices.Equal(got, []string{"main: subagent", "main: subagent_spawned", "c: tool_use"}) {
		t.Errorf("journaled %q", got)
	}
	if l := j.Lines()[len(j.Lines())-1]; l.Type != (events.PermissionDecided{}).EventType() || l.ConversationID != "c" {
		t.Errorf("the last line is %s of %s", l.Type, l.ConversationID)
	}
}

// Lines that arrive meanwhile do not prolong the time for which a notice waits for its call.
func TestSubagents_AStreamOfLinesDoesNotHoldNotices(t *testing.T) {
	t.Parallel()
	j := &agenttest.Journal{}
	s, turn := delegatingSession(t, j)
	now := agenttest.FixedTime()
	s.(*session).now = func() time.Time { return now }
	lines := []string{tells(t, Notice{Session: "s2", Parent: "s1", ParentCall: "c", Request: &SubagentRequest{ID: "r", Call: ToolCall{ID: "d", Name: "bash"}}})}
	for range 5 {
		lines = append(lines, textUpdate("agent_message_chunk", "m", "text"))
	}
	for _, l := range lines {
		if err := s.HandleLine([]byte(l), turn); err != nil {
			t.Fatal(err)
		}
		now = now.Add(maxHoldTime / 4)
	}
	if !slices.ContainsFunc(j.Lines(), func(l runner.JournalLine) bool { return l.Type == (events.PermissionDecided{}).EventType() }) {
		t.Error("the request still waits")
	}
}

// Models may use the id of a call again in a turn, and some agents pass it on. The later call is another one; a repeated end of a call is not.
func TestCalls_OneIDForSeveralCalls(t *testing.T) {
	t.Parallel()
	update := func(kind, status, rest string) string {
		return fmt.Sprintf(`{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":%q,"toolCallId":"c","title":"run","status":%q%s}}}`, kind, status, rest)
	}
	const one, two = `,"rawInput":{"command":"one","n":1}`, `,"rawInput":{"command":"two"}`
	for name, c := range map[string]struct {
		lines []string
		want  []string
	}{
		"the second begins with its input":    {[]string{update("tool_call", "in_progress", two)}, []string{"c one", "c_2 two"}},
		"the second is complete at once":      {[]string{update("tool_call", "completed", two)}, []string{"c one", "c_2 two"}},
		"the input of the second comes later": {[]string{update("tool_call", "pending", `,"rawInput":{}`), update("tool_call_update", "in_progress", two)}, []string{"c one", "c_2 two"}},
		"the second has another title":        {[]string{strings.Replace(update("tool_call", "pending", ""), `"run"`, `"walk"`, 1)}, []string{"c one", "c_2 "}},
		"the end is repeated":                 {[]string{update("tool_call_update", "completed", one), update("tool_call_update", "completed", two)}, []string{"c one"}},
		"the beginning is repeated late":      {[]string{update("tool_call", "pending", `,"rawInput":{"n":1,"command":"one"}`), update("tool_call", "pending", "")}, []string{"c one"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := &agenttest.Journal{}
			s, turn := delegatingSession(t, j)
			feed(t, s, turn, update("tool_call", "in_progress", one), update("tool_call_update", "completed", ""))
			feed(t, s, turn, c.lines...)
			feed(t, s, turn, promptDone)
			var got []string
			for _, l := range j.Lines() {
				var data events.BlockComplete
				if l.Type != data.EventType() {
					continue
				}
				if err := json.Unmarshal(l.Data, &data); err != nil {
					t.Fatal(err)
				}
				if b := data.Block; b.Kind == events.KindToolUse {
					in, _ := parseCallArguments(b.Input)
					got = append(got, b.ToolUseID+" "+in.Command)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("calls %q, want %q", got, c.want)
			}
		})
	}
}

// A call that has not begun when the turn ends is journaled with what is known of it.
func TestCalls_ThatNeverBegin(t *testing.T) {
	t.Parallel()
	j := &agenttest.Journal{}
	s, turn := delegatingSession(t, j)
	for _, tool := range []string{"run", "task"} {
		input := `,"rawInput":{"command":"x"}`
		if tool == "task" {
			input = ""
		}
		feed(t, s, turn, fmt.Sprintf(`{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"tool_call","toolCallId":%q,"title":%q,"status":"pending"%s}}}`, tool, tool, input))
	}
	feed(t, s, turn, promptDone)
	inputs := map[events.BlockKind]string{}
	for _, l := range j.Lines() {
		var data events.BlockComplete
		if l.Type != data.EventType() {
			continue
		}
		if err := json.Unmarshal(l.Data, &data); err != nil {
			t.Fatal(err)
		}
		if data.Block.Status != events.StatusError {
			t.Errorf("block %+v", data.Block)
		}
		inputs[data.Block.Kind] = string(data.Block.Input)
	}
	want := map[events.BlockKind]string{events.KindToolUse: `{"command":"x"}`, events.KindSubagent: ""}
	if !maps.Equal(inputs, want) {
		t.Errorf("inputs %q, want %q", inputs, want)
	}
	if got := journaled(t, j); !slices.Contains(got, "main: subagent_spawned") {
		t.Errorf("journaled %q", got)
	}
}

// An update between two turns, or of an unknown session, is journaled as a log event.
func TestSubagents_NothingIsDropped(t *testing.T) {
	t.Parallel()
	j := &agenttest.Journal{}
	s, turn := delegatingSession(t, j)
	feed(t, s, turn, tells(t, Notice{Session: "s9", Parent: "s8", ParentCall: "c", Update: json.RawMessage(`{"sessionUpdate":"LOST"}`)}))
	n := 0
	for _, l := range j.Lines() {
		if l.Type == (events.Log{}).EventType() && strings.Contains(string(l.Data), "LOST") {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d log events", n)
	}
}
