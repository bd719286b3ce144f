package codex

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
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
	idle    agent.IdleOutput // as the supervisor has it
	n       int
}

func newStage(t *testing.T) *stage {
	t.Helper()
	st := &stage{t: t}
	st.turn = agent.NewTurn(t.Context(), agent.TurnConfig{Idle: &st.idle})
	st.session = Adapter{}.OpenSession(agent.Launch{Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}}, &st.in)
	return st
}

func (st *stage) begin() *stage {
	st.t.Helper()
	st.n++
	st.turn = agenttest.NewJournalTurn(st.t, &st.journal, fmt.Sprintf("exe_%d", st.n))
	for _, p := range st.idle.Take() {
		st.turn.Emit(events.MainConversation, p)
	}
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

// inTurn returns a stage with a running turn.
func inTurn(t *testing.T) *stage {
	t.Helper()
	return newStage(t).begin().prints(greeting, thread1, `{"id":3,"result":{"turn":{"id":"u1"}}}`)
}

func (st *stage) ended() runner.TurnEnd {
	st.t.Helper()
	if st.turn.Ended() == nil {
		st.t.Fatal("the turn goes on")
	}
	return *st.turn.Ended()
}

func (st *stage) last() message {
	st.t.Helper()
	all := sentMessages(st.t, &st.in)
	return all[len(all)-1]
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

// log returns all log messages.
func (st *stage) log() string {
	var all strings.Builder
	for _, l := range of[events.Log](st, "log") {
		all.WriteString(l.Level + " " + l.Message + "\n")
	}
	return all.String()
}

const (
	greeting = `{"id":1,"result":{"userAgent":"spool/` + TestedVersion + ` (Linux)"}}`
	thread1  = `{"id":2,"result":{"thread":{"id":"t1","path":"/p"},"model":"m"}}`
	done     = `{"method":"turn/completed","params":{"threadId":"t1","turn":{"id":"u1","status":"completed"}}}`
)

func about(method, rest string) string {
	return fmt.Sprintf(`{"method":%q,"params":{"threadId":"t1","turnId":"u1"%s}}`, method, rest)
}

func TestWhatIsNotUnderstoodIsLogged(t *testing.T) {
	t.Parallel()
	st := inTurn(t).prints(
		about("something/new", `,"x":1`), `{"x":2}`,
		about("item/started", `,"item":{"type":"newKind","id":"i1"}`), about("item/completed", `,"item":{"type":"newKind","id":"i1","x":3}`),
		about("warning", `,"message":"look out"`), about("configWarning", `,"summary":"no bubblewrap"`), about("model/rerouted", `,"toModel":"m2"`), done)
	for _, want := range []string{`"x":1`, `"x":2`, `"x":3`, "warn look out", "debug no bubblewrap", "m2"} {
		if !strings.Contains(st.log(), want) {
			t.Errorf("no %s in the log:\n%s", want, st.log())
		}
	}
	for _, bad := range []string{`[1]`, `"x"`, `{"method":5}`, about("item/started", `,"item":[]`), `{"id":77,"result":{}}`, `{"method":"item/fileChange/requestApproval","id":1,"params":[]}`} {
		if err := st.session.HandleLine([]byte(bad), st.turn); err == nil {
			t.Errorf("%s is taken for the protocol's", bad)
		}
	}
}

func TestAnotherVersionIsSaid(t *testing.T) {
	t.Parallel()
	other := strings.Replace(greeting, TestedVersion, "9.9.9", 1)
	if log := newStage(t).begin().prints(other, thread1).log(); !strings.Contains(log, "warn") || !strings.Contains(log, `"9.9.9"`) || !strings.Contains(log, TestedVersion) {
		t.Errorf("log %q", log)
	}
	// A process that was started before any query reports it in the first turn.
	if log := newStage(t).prints(other, thread1).begin().log(); !strings.Contains(log, `"9.9.9"`) {
		t.Errorf("log %q", log)
	}
	if log := newStage(t).begin().prints(greeting, thread1).log(); log != "" {
		t.Errorf("log %q", log)
	}
}

// A warmed process has its thread before the first query, which is then sent at once.
func TestWarmProcess_OpensItsThreadBeforeTheFirstQuery(t *testing.T) {
	t.Parallel()
	st := newStage(t).prints(greeting, thread1)
	if n := len(st.in.SentValues()); n != 3 {
		t.Fatalf("sent %d lines before the query", n)
	}
	st.begin()
	if m := st.last(); m.Method != "turn/start" || m.Params["threadId"] != "t1" {
		t.Errorf("sent %+v", m)
	}
}

// If the CLI refuses to begin a thread, the turn and each later one end.
func TestNoThread_EndsEachTurn(t *testing.T) {
	t.Parallel()
	for name, lines := range map[string][]string{
		"initialize": {`{"id":1,"error":{"code":-32601,"message":"unknown method"}}`},
		"thread":     {greeting, `{"id":2,"error":{"code":-32600,"message":"bad config"}}`},
		"no id":      {greeting, `{"id":2,"result":{"thread":{}}}`},
	} {
		st := newStage(t).begin().prints(lines...)
		if e := st.ended(); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_PROTOCOL" || e.Message == "" {
			t.Errorf("%s: ended %+v", name, e)
		}
		if err := st.session.BeginTurn(runner.Query{Content: "again"}, st.turn); err == nil {
			t.Errorf("%s: the next query is taken", name)
		}
	}
}

func TestRefusedResumeBeginsAnew(t *testing.T) {
	t.Parallel()
	l := installed(t)
	l.Resume = id
	write(t, filepath.Join(l.State, "codex/sessions/2026/11/21/rollout-2026-11-21T20-49-08-"+id+".jsonl"), "damaged", 0o600)
	const refused = `{"id":2,"error":{"code":-32600,"message":"cannot read the rollout"}}`
	strict := &stage{t: t}
	strict.session = Adapter{}.OpenSession(l, &strict.in)
	if e := strict.begin().prints(greeting, refused).ended(); e.Code != runner.CodeConversationLost || strict.session.BeginTurn(runner.Query{Content: "again"}, strict.turn) == nil {
		t.Errorf("ended %+v", e)
	}
	l.ContinueAfterLoss = true
	st := &stage{t: t, lossy: true}
	st.session = Adapter{}.OpenSession(l, &st.in)
	st.begin().prints(greeting, refused)
	if m := st.last(); m.Method != "thread/start" {
		t.Fatalf("sent %+v", m)
	}
	if e := of[events.Error](st, "error"); len(e) != 1 || e[0].Code != "TRANSCRIPT_LOST" || !strings.Contains(e[0].Message, id) {
		t.Errorf("errors %+v", e)
	}
	st.prints(`{"id":3,"result":{"thread":{"id":"t1"}}}`)
	if m := st.last(); m.Method != "turn/start" {
		t.Errorf("sent %+v", m)
	}
}

func TestTurn_FailsWhenTheCLIRefusesIt(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin().prints(greeting, thread1, `{"id":3,"error":{"code":-32600,"message":"no such model"}}`)
	if e := st.ended(); e.Code != "AGENT_PROTOCOL" || !strings.Contains(e.Message, "no such model") {
		t.Errorf("ended %+v", e)
	}
	st.begin().prints(`{"id":4,"result":{"turn":{"id":"u1"}}}`, done)
	if e := st.ended(); e.Outcome != runner.OutcomeCompleted {
		t.Errorf("ended %+v", e)
	}
}

// A turn that no query asked for is stopped, and does not end the turn of a query.
func TestForeignTurn_IsStopped(t *testing.T) {
	t.Parallel()
	st := newStage(t).prints(greeting, thread1, about("turn/started", `,"turn":{"id":"u0"}`))
	if m := st.last(); m.Method != "turn/interrupt" || m.Params["turnId"] != "u0" {
		t.Fatalf("sent %+v", m)
	}
	st.begin().prints(`{"id":4,"result":{"turn":{"id":"u1"}}}`,
		`{"method":"turn/completed","params":{"threadId":"t1","turn":{"id":"u0","status":"completed"}}}`)
	if st.turn.Ended() != nil {
		t.Fatalf("ended %+v", st.turn.Ended())
	}
	if e := st.prints(done).ended(); e.Outcome != runner.OutcomeCompleted || !strings.Contains(st.log(), "no query asked for") {
		t.Errorf("ended %+v, log %s", e, st.log())
	}
}

func TestQuestionsAreAnsweredOnce(t *testing.T) {
	t.Parallel()
	ask := func(n int, method, rest string) string {
		return fmt.Sprintf(`{"id":%d,"method":%q,"params":{"threadId":"t1","turnId":"u1","itemId":"i1"%s}}`, n, method, rest)
	}
	st := inTurn(t)
	before := len(st.in.SentValues())
	st.prints(
		ask(10, "item/commandExecution/requestApproval", `,"command":"ls"`),
		ask(11, "item/fileChange/requestApproval", ""),
		ask(12, "item/permissions/requestApproval", `,"permissions":{"network":{}}`),
		ask(13, "mcpServer/elicitation/request", `,"serverName":"x","mode":"form"`),
		ask(14, "item/tool/requestUserInput", `,"questions":[{"id":"q","question":"Which?"}]`),
		ask(15, "attestation/generate", ""),
		`{"id":"a text","method":"item/tool/call","params":{}}`, done,
		ask(16, "item/commandExecution/requestApproval", `,"command":"ls"`))
	want := []string{
		`{"id":10,"result":{"decision":"accept"}}`,
		`{"id":11,"result":{"decision":"decline"}}`,
		`{"id":12,"result":{"permissions":{},"scope":"turn"}}`,
		`{"id":13,"result":{"_meta":null,"action":"decline","content":null}}`,
		`{"id":14,"result":{"answers":{"q":{"answers":["The workspace policy does not know the tool \"request_user_input\" and so does not allow it. Go on without it."]}}}}`,
		`{"id":15,"error":{"code":-32601,"message":"\"attestation/generate\" is not offered"}}`,
		`{"id":"a text","error":{"code":-32601,"message":"\"item/tool/call\" is not offered"}}`,
		`{"id":16,"result":{"decision":"decline"}}`,
	}
	var got []string
	for _, raw := range st.in.SentValues()[before:] {
		if s := string(raw); strings.Contains(s, `"result"`) || strings.Contains(s, `"error"`) {
			got = append(got, s)
		}
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("answered\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	var rules []string
	for _, d := range of[events.PermissionDecided](st, "permission_decided") {
		rules = append(rules, d.Decision+" "+d.Rule)
	}
	if got := strings.Join(rules, ", "); got != "allow sandboxed-shell, deny unreadable-request, deny unknown-tool, deny unknown-tool, deny unknown-tool" {
		t.Errorf("decided %s", got)
	}
}

func TestInterruptBeforeTheTurnIsKnown(t *testing.T) {
	t.Parallel()
	st := newStage(t).begin()
	if err := st.session.Interrupt(); err != nil {
		t.Fatal(err)
	}
	st.prints(greeting, thread1)
	if m := st.last(); m.Method != "turn/start" {
		t.Fatalf("sent %+v", m)
	}
	st.prints(`{"id":3,"result":{"turn":{"id":"u1"}}}`)
	if m := st.last(); m.Method != "turn/interrupt" || m.Params["turnId"] != "u1" {
		t.Fatalf("sent %+v", m)
	}
	// The first request was too early: it is repeated once, when the turn has begun.
	st.prints(`{"id":4,"error":{"code":-32600,"message":"no active turn"}}`, about("turn/started", `,"turn":{"id":"u1"}`), about("turn/started", `,"turn":{"id":"u1"}`))
	if n := len(st.in.SentValues()); n != 6 {
		t.Errorf("sent %d lines", n)
	}
	st.prints(`{"method":"turn/completed","params":{"threadId":"t1","turn":{"id":"u1","status":"interrupted"}}}`)
	if e := st.ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Errorf("ended %+v", e)
	}
	// The next turn is not asked to stop.
	st.begin().prints(`{"id":6,"result":{"turn":{"id":"u2"}}}`)
	if m := st.last(); m.Method != "turn/start" {
		t.Errorf("sent %+v", m)
	}
}

func TestTurnEnd_HasTheCodeOfItsStatus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ turn, outcome, code, message string }{
		{`"status":"interrupted"`, "failed", "AGENT_PROTOCOL", "gave up (interrupted)"},
		{`"status":"odd"`, "failed", "AGENT_PROTOCOL", "gave up (odd)"},
		{`"status":"failed"`, "failed", "MODEL_ERROR", "the turn failed"},
		{`"status":"failed","error":{"message":"x","codexErrorInfo":"unauthorized"}`, "failed", "MODEL_UNAUTHORIZED", "x"},
		{`"status":"failed","error":{"message":"x","codexErrorInfo":"modelNotFound"}`, "failed", "MODEL_NOT_FOUND", "x"},
		{`"status":"failed","error":{"message":"x","codexErrorInfo":"contextWindowExceeded"}`, "failed", "MODEL_CONTEXT_EXCEEDED", "x"},
		{`"status":"failed","error":{"message":"x","codexErrorInfo":"usageLimitExceeded"}`, "failed", "MODEL_RATE_LIMITED", "x"},
		{`"status":"failed","error":{"message":"x","codexErrorInfo":{"responseTooManyFailedAttempts":{"httpStatusCode":429}}}`, "failed", "MODEL_RATE_LIMITED", "x"},
		{`"status":"failed","error":{"message":"x","codexErrorInfo":{"httpConnectionFailed":{"httpStatusCode":null}}}`, "failed", "MODEL_ERROR", "x"},
		{`"status":"failed","error":{"message":"x","codexErrorInfo":{"new":5}}`, "failed", "MODEL_ERROR", "x"},
		{`"status":"failed","error":{"message":"x","codexErrorInfo":"sandboxError"}`, "failed", "AGENT_PROTOCOL", "x"},
		{`"status":"failed","error":{"message":"{\"error\":{\"message\":\"inside\"}}","codexErrorInfo":"other"}`, "failed", "MODEL_ERROR", "inside"},
	} {
		e := inTurn(t).prints(`{"method":"turn/completed","params":{"threadId":"t1","turn":{"id":"u1",` + c.turn + `}}}`).ended()
		if string(e.Outcome) != c.outcome || e.Code != c.code || !strings.Contains(e.Message, c.message) {
			t.Errorf("%s: ended %+v", c.turn, e)
		}
	}
}

// Types of items that the recordings do not contain are shown.
func TestOtherItems_AreShown(t *testing.T) {
	t.Parallel()
	whole := func(item string) []string {
		return []string{about("item/started", `,"item":{`+item+`}`), about("item/completed", `,"item":{`+item+`}`)}
	}
	st := inTurn(t)
	st.prints(whole(`"type":"mcpToolCall","id":"c1","server":"files","tool":"read","arguments":{"p":1},"status":"completed","durationMs":5,"result":{"content":[{"type":"text","text":"hi"},{"type":"image"}]}`)...)
	st.prints(whole(`"type":"mcpToolCall","id":"c2","server":"files","tool":"read","arguments":null,"status":"failed","error":{"message":"gone"}`)...)
	st.prints(about("item/completed", `,"item":{"type":"webSearch","id":"c3","query":"weather"}`))
	st.prints(whole(`"type":"imageView","id":"c4","path":"/ws/a.png"`)...)
	st.prints(whole(`"type":"contextCompaction","id":"c5"`)...)
	st.prints(whole(`"type":"plan","id":"c6","text":"1. do"`)...)
	st.prints(whole(`"type":"reasoning","id":"c7","summary":["a","b"],"content":["raw"]`)...)
	st.prints(whole(`"type":"reasoning","id":"c8","summary":[],"content":[]`)...)
	st.prints(done)
	var got []string
	for _, b := range of[events.BlockStart](st, "block_start") {
		b := b.Block
		got = append(got, strings.TrimSpace(fmt.Sprintf("%s %s %s%s%s%s %v", b.Kind, b.ToolName, b.Output, b.Content, b.Message, b.Subtype, b.IsError)))
	}
	want := []string{
		"tool_use mcp__files__read  false", "tool_result  hi\n[image] false",
		"tool_use mcp__files__read  false", "tool_result  gone true",
		"tool_use web_search  false", "tool_result   false",
		"tool_use view_image  false", "tool_result   false",
		"system  The conversation was compacted.compact_boundary false", "system  1. doplan false", "thinking  raw false",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("blocks\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// A resumed thread reports its earlier usage, which is not charged to the turn.
func TestUsageIsTheTurnsOwn(t *testing.T) {
	t.Parallel()
	usage := func(turn string, total, last int) string {
		return fmt.Sprintf(`{"method":"thread/tokenUsage/updated","params":{"threadId":"t1","turnId":%q,"tokenUsage":{`+
			`"total":{"inputTokens":%d,"cachedInputTokens":%d,"outputTokens":1},"last":{"inputTokens":%d,"outputTokens":1}}}}`, turn, total, total/10, last)
	}
	st := newStage(t).begin().prints(greeting, usage("u0", 1000, 100), thread1, usage("u0", 1000, 100), `{"id":3,"result":{"turn":{"id":"u1"}}}`,
		usage("u1", 1500, 500), usage("u1", 1500, 500), usage("u1", 1800, 300), done)
	if u := st.ended().Usage; u.InputTokens != 720 || u.CacheReadTokens != 80 {
		t.Errorf("usage %+v", u)
	}
	if n := len(of[events.MetadataUpdate](st, "metadata_update")); n != 2 {
		t.Errorf("%d updates", n)
	}
}

func TestQueriesThatCannotBeSent(t *testing.T) {
	t.Parallel()
	for _, p := range []events.Part{{Type: "image", MediaType: "image/tiff", Data: "AA=="}, {Type: "image", MediaType: "image/png", Data: "no"}, {Type: "video"}} {
		st := newStage(t)
		if err := st.session.BeginTurn(runner.Query{Parts: []events.Part{p}}, st.turn); err == nil || !strings.Contains(err.Error(), "query.parts[0]") {
			t.Errorf("%+v: %v", p, err)
		}
	}
}

// The CLI orders the notifications of one thread, not of two threads: the turn and the command of a sub-agent may come
// before the sub-agent itself. They are recorded, and stopped with the turn.
func TestEarlySubagent_IsRecordedAndStopped(t *testing.T) {
	t.Parallel()
	sub := func(method, rest string) string {
		return fmt.Sprintf(`{"method":%q,"params":{"threadId":"t2","turnId":"v1"%s}}`, method, rest)
	}
	command := `,"item":{"type":"commandExecution","id":"c1","command":"sleep 300","status":"inProgress"}`
	spawned := about("item/completed", `,"item":{"type":"collabAgentToolCall","id":"s1","tool":"spawnAgent","status":"completed","receiverThreadIds":["t2"],"prompt":"sleep"}`)
	st := inTurn(t).prints(sub("turn/started", `,"turn":{"id":"v1"}`), sub("item/started", command), spawned, done)
	if b := of[events.BlockStart](st, "block_start"); len(b) != 3 { // the call, the sub-agent, the command
		t.Errorf("blocks %+v", b)
	}
	if m := st.last(); m.Method != "turn/interrupt" || m.Params["threadId"] != "t2" || m.Params["turnId"] != "v1" {
		t.Fatalf("sent %+v", m)
	}
	st.prints(sub("turn/completed", `,"turn":{"id":"v1","status":"interrupted"}`))
	if m := st.last(); m.Method != "thread/backgroundTerminals/list" || m.Params["threadId"] != "t2" {
		t.Errorf("sent %+v", m)
	}
	// A sub-agent of an earlier turn gets another prompt.
	again := about("item/completed", `,"item":{"type":"collabAgentToolCall","id":"s2","tool":"sendInput","status":"completed","receiverThreadIds":["t2"]}`)
	st.begin().prints(`{"id":6,"result":{"turn":{"id":"u1"}}}`, sub("turn/started", `,"turn":{"id":"v3"}`), again, done)
	if m := st.last(); m.Method != "turn/interrupt" || m.Params["turnId"] != "v3" {
		t.Fatalf("sent %+v", m)
	}
	st.prints(sub("turn/completed", `,"turn":{"id":"v3","status":"interrupted"}`))
	// A sub-agent that begins after the end of its turn is stopped too.
	st.prints(sub("turn/started", `,"turn":{"id":"v2"}`))
	if m := st.last(); m.Method != "turn/interrupt" || m.Params["turnId"] != "v2" {
		t.Errorf("sent %+v", m)
	}
}

func TestPlans_AreOnePerThread(t *testing.T) {
	t.Parallel()
	spawned := about("item/completed", `,"item":{"type":"collabAgentToolCall","id":"s1","tool":"spawnAgent","status":"completed","receiverThreadIds":["t2"],"prompt":"plan"}`)
	plan := func(thread, turn, explanation, status string) string {
		return fmt.Sprintf(`{"method":"turn/plan/updated","params":{"threadId":%q,"turnId":%q,"explanation":%s,"plan":[{"step":"of %s","status":%q}]}}`, thread, turn, explanation, thread, status)
	}
	st := inTurn(t).prints(spawned, `{"method":"turn/started","params":{"threadId":"t2","turnId":"v1","turn":{"id":"v1"}}}`,
		plan("t1", "u1", `"why"`, "inProgress"), plan("t2", "v1", `null`, "pending"), plan("t1", "u1", `null`, "completed"), done)
	var got []events.Block
	for _, b := range of[events.BlockComplete](st, "block_complete") {
		if b.Block.Kind == events.KindPlan {
			got = append(got, b.Block)
		}
	}
	if len(got) != 2 || got[0].ConversationID == got[1].ConversationID {
		t.Fatalf("plans %+v", got)
	}
	for _, b := range got {
		want := events.PlanItem{Content: "of t2", Status: events.PlanPending}
		if b.ConversationID == events.MainConversation {
			want = events.PlanItem{Content: "of t1", Status: events.PlanCompleted}
		}
		if !reflect.DeepEqual(*b.Plan, events.Plan{Items: []events.PlanItem{want}}) {
			t.Errorf("the plan of %s is %+v", b.ConversationID, *b.Plan)
		}
	}
	if first := of[events.BlockStart](st, "block_start"); !slices.ContainsFunc(first, func(b events.BlockStart) bool {
		return b.Block.Plan != nil && b.Block.Plan.Explanation == "why" && b.Block.Plan.Items[0].Status == events.PlanInProgress
	}) {
		t.Errorf("blocks %+v", first)
	}
}

// Notes that come too late for their turn are sent with the next query, in order and once.
func TestNote_LateForItsTurnGoesWithTheNextQuery(t *testing.T) {
	t.Parallel()
	st := inTurn(t)
	st.prints(done)
	for _, note := range []string{"first note", "second note"} {
		st.session.(*session).sendDenialReason("t1", "u1", &runningItem{denied: note})
		steer := st.last()
		if steer.Method != "turn/steer" {
			t.Fatalf("sent %+v", steer)
		}
		st.prints(fmt.Sprintf(`{"id":%s,"error":{"code":-32600,"message":"no active turn"}}`, steer.ID))
	}
	st.begin()
	next := st.last()
	text := fmt.Sprint(next.Params)
	first, second, query := strings.Index(text, "first note"), strings.Index(text, "second note"), strings.Index(text, "hello")
	if next.Method != "turn/start" || first < 0 || second < first || query < second {
		t.Errorf("sent %s %s", next.Method, text)
	}
	st.prints(fmt.Sprintf(`{"id":%s,"result":{"turn":{"id":"u2"}}}`, next.ID), strings.ReplaceAll(done, "u1", "u2"))
	st.begin()
	if again := fmt.Sprint(st.last().Params); strings.Contains(again, "note") {
		t.Errorf("told twice: %s", again)
	}
}
