package claudecode

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// stage is a session whose CLI is the test.
type stage struct {
	t       *testing.T
	in      agenttest.Stdin
	journal agenttest.Journal
	session agent.Session
	lossy   bool // queries allow a new conversation
	turn    *agent.Turn
	n       int
}

func newStage(t *testing.T) *stage {
	t.Helper()
	st := &stage{t: t, turn: agent.NewTurn(t.Context(), agent.TurnConfig{})}
	st.session = Adapter{Now: agenttest.FixedTime}.OpenSession(agent.Launch{Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}}, &st.in)
	return st
}

func (st *stage) begin() *stage {
	st.t.Helper()
	st.n++
	st.turn = agenttest.NewJournalTurn(st.t, &st.journal, fmt.Sprintf("exe_%d", st.n))
	if err := st.session.BeginTurn(runner.Query{Content: "hello", ContinueAfterLoss: st.lossy}, st.turn); err != nil {
		st.t.Fatal(err)
	}
	return st
}

// prints passes lines to the session, and fails the test if one is refused.
func (st *stage) prints(lines ...string) *stage {
	st.t.Helper()
	for _, l := range lines {
		if err := st.session.HandleLine([]byte(l), st.turn); err != nil {
			st.t.Errorf("%v: %s", err, l)
		}
	}
	return st
}

func (st *stage) ended() runner.TurnEnd {
	st.t.Helper()
	if st.turn.Ended() == nil {
		st.t.Fatal("the turn goes on")
	}
	return *st.turn.Ended()
}

func of[T any](st *stage, typ events.Type) []T {
	st.t.Helper()
	var out []T
	for _, l := range st.journal.Lines() {
		var v T
		if l.Type != typ {
			continue
		}
		if err := json.Unmarshal(l.Data, &v); err != nil {
			st.t.Fatal(err)
		}
		out = append(out, v)
	}
	return out
}

const (
	initLine = `{"type":"system","subtype":"init","session_id":"11111111-2222-4333-8444-555555555555","model":"m","claude_code_version":"` + TestedVersion + `"}`
	done     = `{"type":"result","subtype":"success","is_error":false,"result":"ok","terminal_reason":"completed"}`
)

func TestWhatIsNotUnderstoodIsLogged(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin().prints(initLine,
		`{"type":"something_new","x":1}`, `{"type":"system","subtype":"something_new","x":2}`, `{"type":"rate_limit_event","x":3}`,
		`{"type":"stream_event","event":{"type":"something_new","x":4}}`, `{"type":"assistant","message":{"id":"m","content":[{"type":"something_new"}]}}`,
		`{"x":5}`, `{"type":"control_cancel_request","request_id":"r7"}`, done)
	var all strings.Builder
	for _, l := range of[events.Log](st, "log") {
		all.WriteString(l.Message + "\n")
	}
	for _, want := range []string{`"x":1`, `"x":2`, `"x":3`, `"x":4`, `something_new`, `"x":5`, `r7`} {
		if !strings.Contains(all.String(), want) {
			t.Errorf("no %s in the log:\n%s", want, all.String())
		}
	}
	for _, bad := range []string{`[1]`, `"x"`, `{"type":5}`, `{"type":"stream_event","event":7}`, `{"type":"assistant","message":[]}`, `{"type":"result","usage":[]}`} {
		if err := st.session.HandleLine([]byte(bad), st.turn); err == nil {
			t.Errorf("%s is taken for the protocol's", bad)
		}
	}
}

// A version other than the tested one is reported, once.
func TestAnotherVersion(t *testing.T) {
	t.Parallel()
	agenttest.CheckPinnedVersion(t, "@anthropic-ai/claude-code", TestedVersion)
	other := strings.Replace(initLine, TestedVersion, "9.9.9", 1)
	for line, want := range map[string]int{initLine: 0, other: 1} {
		logs := of[events.Log](newStage(t).begin().prints(line, done).begin().prints(line, done), "log")
		if len(logs) != want || want > 0 && (logs[0].Level != "warn" || !strings.Contains(logs[0].Message, "9.9.9") || !strings.Contains(logs[0].Message, TestedVersion)) {
			t.Errorf("%s: logged %+v", line, logs)
		}
	}
}

func TestQuestionsAreAnsweredOnce(t *testing.T) {
	t.Parallel()
	ask := func(id, request string) string {
		return fmt.Sprintf(`{"type":"control_request","request_id":%q,"request":%s}`, id, request)
	}
	bash := `{"subtype":"can_use_tool","tool_name":"Bash","tool_use_id":"t1","input":{"command":"ls"}}`
	st := newStage(t).prints(ask("early", bash)).begin().prints(initLine,
		ask("shell", bash), ask("hook", `{"subtype":"hook_callback","input":{"tool_name":"Bash","tool_use_id":"t1"}}`), ask("broken", `7`), ask("empty", `{"subtype":"can_use_tool"}`), done, ask("late", bash))
	got := map[string]string{}
	for _, raw := range st.in.SentValues()[1:] {
		var a struct {
			Type     string
			Response struct {
				Subtype, RequestID string
				ID                 string `json:"request_id"`
				Response           struct{ Behavior, Message string }
			}
		}
		if err := json.Unmarshal(raw, &a); err != nil {
			t.Fatal(err)
		}
		if a.Type != "control_response" {
			continue
		}
		if got[a.Response.ID] != "" {
			t.Errorf("%s is answered twice", a.Response.ID)
		}
		got[a.Response.ID] = a.Response.Subtype + " " + a.Response.Response.Behavior
	}
	for id, want := range map[string]string{"early": "success deny", "shell": "success allow", "hook": "success ", "broken": "success deny", "empty": "success deny", "late": "success deny"} {
		if got[id] != want {
			t.Errorf("%s: answered %q, want %q", id, got[id], want)
		}
	}
	if d := of[events.PermissionDecided](st, "permission_decided"); len(d) != 3 || d[0].Rule != permission.RuleSandboxedShell || d[1].Rule != ruleUnreadableRequest || d[2].Rule != ruleUnreadableRequest {
		t.Errorf("decisions %+v", d)
	}
}

// The end of a turn that the CLI began by itself does not end the turn of a query.
func TestTurnsNobodyAskedFor(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin().prints(initLine, done)
	st.prints(initLine).begin().prints(`{"type":"result","subtype":"success","result":"of the background"}`)
	if st.turn.Ended() != nil {
		t.Fatal("ended by another's result")
	}
	st.prints(initLine, `{"type":"user","isReplay":true,"message":{"content":"hello"}}`, done)
	if e := st.ended(); e.Result != "ok" {
		t.Errorf("ended %+v", e)
	}
	// The CLI merged the query into the running turn, whose end is the end of the query.
	st.prints(initLine).begin().prints(`{"type":"user","isReplay":true,"message":{"content":"hello"}}`, done)
	if e := st.ended(); e.Result != "ok" {
		t.Errorf("ended %+v", e)
	}
}

// A request to stop that came too early is repeated.
func TestInterruptIsRepeated(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin()
	if err := st.session.Interrupt(); err != nil {
		t.Fatal(err)
	}
	start := `{"type":"stream_event","event":{"type":"message_start","message":{"id":"m1","model":"m"}}}`
	before := len(st.in.SentValues())
	st.prints(start)
	if len(st.in.SentValues()) != before {
		t.Error("asked again before the first was answered")
	}
	st.prints(`{"type":"control_response","response":{"subtype":"success","request_id":"spool-2"}}`, start)
	if sent := st.in.SentValues(); len(sent) != before+1 || !strings.Contains(string(sent[before]), `"interrupt"`) {
		t.Errorf("sent %s", sent[before:])
	}
	st.prints(`{"type":"result","subtype":"error_during_execution","is_error":true,"terminal_reason":"aborted_streaming"}`)
	if e := st.ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Errorf("ended %+v", e)
	}
}

func TestTurnEnd_HasTheCodeOfItsResult(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		result string
		want   runner.TurnEnd
	}{
		"answered":        {done, runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: "ok"}},
		"401":             {`{"subtype":"success","is_error":true,"api_error_status":401,"result":"key"}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_UNAUTHORIZED", Message: "key"}},
		"403":             {`{"subtype":"success","is_error":true,"api_error_status":403,"result":"key"}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_UNAUTHORIZED", Message: "key"}},
		"404":             {`{"subtype":"success","is_error":true,"api_error_status":404,"result":"no"}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_NOT_FOUND", Message: "no"}},
		"429":             {`{"subtype":"success","is_error":true,"api_error_status":429,"result":"slow"}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_RATE_LIMITED", Message: "slow"}},
		"529":             {`{"subtype":"success","is_error":true,"api_error_status":529,"result":"busy"}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_ERROR", Message: "busy"}},
		"too long":        {`{"subtype":"success","is_error":true,"api_error_status":400,"terminal_reason":"prompt_too_long","result":"Prompt is too long"}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_CONTEXT_EXCEEDED", Message: "Prompt is too long"}},
		"stop not asked":  {`{"subtype":"error_during_execution","is_error":true,"terminal_reason":"aborted_tools","errors":["x"]}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: "the agent gave up (aborted_tools): x"}},
		"too many turns":  {`{"subtype":"error_max_turns","is_error":true,"terminal_reason":"max_turns"}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "TURN_LIMIT", Message: "the agent gave up (max_turns): error_max_turns"}},
		"at the start":    {`{"subtype":"error_during_execution","is_error":true,"errors":["No conversation found"]}`, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: "the agent gave up (error_during_execution): No conversation found"}},
		"nothing is said": {`{}`, runner.TurnEnd{Outcome: runner.OutcomeCompleted}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			line := strings.Replace(c.result, "{", `{"type":"result"`+strings.Repeat(",", min(1, len(c.result)-2)), 1)
			if got := newStage(t).begin().prints(line).ended(); got != c.want {
				t.Errorf("ended %+v, want %+v", got, c.want)
			}
		})
	}
}

// The sums of the process are converted to those of the turn.
func TestUsageIsTheTurns(t *testing.T) {
	t.Parallel()
	sum := func(input, output int, cost float64) string {
		return fmt.Sprintf(`{"type":"result","subtype":"success","total_cost_usd":%g,"modelUsage":{"a":{"inputTokens":%d,"outputTokens":%d},"b":{"cacheReadInputTokens":5}}}`, cost, input, output)
	}
	st := newStage(t)
	for i, want := range []runner.TurnEnd{
		{Outcome: runner.OutcomeCompleted, CostUSD: 0.5, Usage: events.Usage{InputTokens: 100, OutputTokens: 10, CacheReadTokens: 5}},
		{Outcome: runner.OutcomeCompleted, CostUSD: 0.25, Usage: events.Usage{InputTokens: 50, OutputTokens: 5}},
		{Outcome: runner.OutcomeCompleted, CostUSD: 0.125, Usage: events.Usage{InputTokens: 7, OutputTokens: 1}}, // /clear reset the sums
	} {
		line := []string{sum(100, 10, 0.5), sum(150, 15, 0.75), sum(7, 1, 0.125)}[i]
		if got := st.begin().prints(line).ended(); got != want {
			t.Errorf("turn %d: %+v, want %+v", i+1, got, want)
		}
	}
}

func TestTodoWrite_UpdatesOneBlock(t *testing.T) {
	t.Parallel()
	call := func(id, todos string) []string {
		return []string{
			fmt.Sprintf(`{"type":"assistant","message":{"id":"m","content":[{"type":"tool_use","id":%q,"name":"TodoWrite","input":{"todos":%s}}]}}`, id, todos),
			fmt.Sprintf(`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":%q,"content":"ok"}]}}`, id),
		}
	}
	st := newStage(t).begin().prints(call("t1", `[{"content":"a","status":"pending"}]`)...)
	st.prints(call("t2", `[{"content":"a","status":"completed"},{"content":"b","status":"pending"}]`)...).prints(done)
	blocks := of[events.BlockComplete](st, "block_complete")
	want := events.Plan{Items: []events.PlanItem{{Content: "a", Status: events.PlanCompleted}, {Content: "b", Status: events.PlanPending}}}
	if len(blocks) != 1 || blocks[0].Block.Kind != events.KindPlan || !reflect.DeepEqual(*blocks[0].Block.Plan, want) || blocks[0].Block.Status != events.StatusComplete {
		t.Errorf("blocks %+v", blocks)
	}
}

// Each agent has a list of TodoWrite of its own, but the tasks of TaskCreate belong to the agent and its sub-agents.
func TestPlans_OfSubagents(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin().prints(startOf("t1"), mirrored("a1", metadataLine("t1", 1)), partLine("m", callPart("t2", "TodoWrite", `{"todos":[{"content":"main","status":"pending"}]}`)), resultOf("t2", "ok"),
		mirrored("a1", partLine("m1", callPart("t3", "TodoWrite", `{"todos":[{"content":"sub","status":"odd"}]}`)), resultOf("t3", "ok")),
		mirrored("a1", partLine("m1", callPart("t4", "TaskUpdate", `{"taskId":"7","status":"in_progress"}`)), resultOf("t4", "ok")), done)
	plans := map[string]events.Plan{}
	for _, b := range of[events.BlockComplete](st, "block_complete") {
		if b.Block.Kind == events.KindPlan {
			plans[b.Block.ConversationID] = *b.Block.Plan
		}
	}
	want := map[string]events.Plan{
		events.MainConversation: {Items: []events.PlanItem{{ItemID: "7", Content: "Task #7", Status: events.PlanInProgress}}},
		"t1":                    {Items: []events.PlanItem{{Content: "sub", Status: events.PlanPending}}},
	}
	if !reflect.DeepEqual(plans, want) {
		t.Errorf("plans %+v, want %+v", plans, want)
	}
}

func TestTasks_AreCreatedChangedAndRemoved(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin()
	for i, c := range []struct{ tool, input, result string }{
		{"TaskCreate", `{"subject":"a"}`, `{"task":{"id":"1"}}`},
		{"TaskCreate", `{"subject":"b"}`, `{"task":{"id":"2"}}`},
		{"TaskCreate", `{"subject":"without an id"}`, `{"task":7}`},
		{"TaskUpdate", `{"taskId":"2","status":"completed","subject":"B"}`, `{}`},
		{"TaskUpdate", `{"taskId":"1","status":"deleted"}`, `{}`},
		{"TaskUpdate", `{"taskId":"9","subject":"unknown, without a status"}`, `{}`},
		{"TaskUpdate", `{"taskId":7}`, `{}`},
	} {
		id := fmt.Sprint("t", i)
		st.prints(partLine("m", callPart(id, c.tool, c.input)),
			fmt.Sprintf(`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":%q,"content":"ok"}]},"tool_use_result":%s}`, id, c.result))
	}
	st.prints(done)
	var last events.Plan
	for _, b := range of[events.BlockComplete](st, "block_complete") {
		if b.Block.Kind == events.KindPlan {
			last = *b.Block.Plan
		}
	}
	if want := (events.Plan{Items: []events.PlanItem{{ItemID: "2", Content: "B", Status: events.PlanCompleted}}}); !reflect.DeepEqual(last, want) {
		t.Errorf("the plan is %+v, want %+v", last, want)
	}
}

func TestParts_BecomeBlocks(t *testing.T) {
	t.Parallel()
	for want, part := range map[string]events.Part{
		"query.parts[0].type":      {Type: "video"},
		"query.parts[0].mediaType": {Type: "image", MediaType: "image/tiff", Data: "AA=="},
		"query.parts[0].data":      {Type: "image", MediaType: "image/png", Data: "not base64"},
	} {
		err := newStage(t).session.BeginTurn(runner.Query{Parts: []events.Part{part}}, agent.NewTurn(t.Context(), agent.TurnConfig{}))
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%+v: %v", part, err)
		}
	}
}
