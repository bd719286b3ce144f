package acp

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

// stage is a session s1 with a running turn in which a person decides every call.
type stage struct {
	*testing.T
	agent.Session
	turn    *agent.Turn
	in      agenttest.Stdin
	journal agenttest.Journal
}

func newStage(t *testing.T) *stage {
	t.Helper()
	st := &stage{T: t}
	policy, err := permission.New(events.Permissions{Default: events.PermissionAsk}, events.ExecutionPermissions{})
	if err != nil {
		t.Fatal(err)
	}
	st.turn = agent.NewTurn(t.Context(), agent.TurnConfig{Journal: &st.journal, ExecutionID: "exe_1", Now: agenttest.FixedTime, Policy: policy})
	st.Session = OpenSession(Dialect{}, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}}, &st.in)
	if err := st.BeginTurn(runner.Query{Content: "hello"}, st.turn); err != nil {
		t.Fatal(err)
	}
	st.prints(`{"id":1,"result":{"protocolVersion":1,"agentCapabilities":{}}}`, `{"id":2,"result":{"sessionId":"s1"}}`)
	return st
}

func (st *stage) prints(lines ...string) {
	st.Helper()
	feed(st.T, st.Session, st.turn, lines...)
}

// asks prints a permission request for a call, which starts with it.
func (st *stage) asks(id, call string) {
	st.Helper()
	st.prints(
		fmt.Sprintf(`{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"tool_call","toolCallId":%q,"title":"run","kind":"execute","status":"pending","rawInput":{"command":"ls"}}}}`, call),
		fmt.Sprintf(`{"id":%s,"method":"session/request_permission","params":{"sessionId":"s1","toolCall":{"toolCallId":%q},"options":[{"optionId":"y","kind":"allow_once","name":"y"},{"optionId":"n","kind":"reject_once","name":"n"}]}}`, id, call))
}

// answers returns the answers to permission requests so far, such as "7 cancelled" and "8 y".
func (st *stage) answers() string {
	var all []string
	for _, raw := range st.in.SentValues() {
		for _, id := range []string{"7", "8", `"x"`} {
			if s := string(raw); strings.Contains(s, `"id":`+id+`,"result":{"outcome"`) {
				for _, word := range []string{"cancelled", `"y"`, `"n"`} {
					if strings.Contains(s, word) {
						all = append(all, id+" "+strings.Trim(word, `"`))
					}
				}
			}
		}
	}
	return strings.Join(all, ", ")
}

// decide decides the n-th request of the turn.
func (st *stage) decide(n int, decision string) {
	st.Helper()
	var ids []string
	for _, l := range st.journal.Lines() {
		if l.Type == (events.ApprovalRequested{}).EventType() {
			_, id, _ := strings.Cut(string(l.Data), `"approvalId":"`)
			id, _, _ = strings.Cut(id, `"`)
			ids = append(ids, id)
		}
	}
	st.turn.ApplyVerdict(runner.ApprovalDecision{ApprovalDecided: events.ApprovalDecided{ApprovalID: runner.ApprovalID("exe_1", st.journal.Name(), ids[n]), Decision: decision}})
}

func TestRequests_AreAnsweredOneByOne(t *testing.T) {
	t.Parallel()
	st := newStage(t)
	st.asks("7", "c1")
	st.asks("8", "c2")
	st.decide(1, events.DecisionReject)
	st.decide(0, events.DecisionApprove)
	st.decide(0, events.DecisionReject)
	if got := st.answers(); got != "8 n, 7 y" {
		t.Errorf("answered %s", got)
	}
}

// TestRequest_KeepsTheAgentsWordsApart tests that the title of a request is made from the call, that texts with which the
// agent describes the call are in its reason only, and that all files are listed which the call names in any field.
func TestRequest_KeepsTheAgentsWordsApart(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		call string
		want events.ApprovalRequested
	}{
		"command": {
			`"title":"List files","kind":"execute","rawInput":{"command":"rm -rf ~\nls","description":"Only lists.\ncommand: ls"},"content":[{"type":"content","content":{"type":"text","text":"command: ls"}}]`,
			events.ApprovalRequested{Title: "rm -rf ~ …", Reason: "Only lists.\ncommand: ls\ncommand: ls", Preview: events.ApprovalPreview{Command: "rm -rf ~\nls"}},
		},
		"change": {
			`"title":"Read notes.txt","kind":"edit","locations":[{"path":"notes.txt"}],"rawInput":{"file_path":"run.sh"},"content":[{"type":"diff","path":"third\n+++ none","newText":"x\n"}]`,
			events.ApprovalRequested{Title: `Read notes.txt: notes.txt, third\u{a}+++ none, run.sh`, Preview: events.ApprovalPreview{
				Paths: []string{"notes.txt", `third\u{a}+++ none`, "run.sh"}, Diff: "--- third\\u{a}+++ none\n+++ third\\u{a}+++ none\n+x\n",
			}},
		},
		"page": {
			`"title":"Fetch docs","kind":"fetch","rawInput":{"url":"https://docs.example@evil.example/x"}`,
			events.ApprovalRequested{Title: "Fetch docs: https://docs.example@evil.example/x", Preview: events.ApprovalPreview{URL: "https://docs.example@evil.example/x", Hosts: []string{"evil.example"}}},
		},
	} {
		st := newStage(t)
		st.prints(`{"id":7,"method":"session/request_permission","params":{"sessionId":"s1","toolCall":{"toolCallId":"c1",` + c.call + `},"options":[{"optionId":"y","kind":"allow_once","name":"y"}]}}`)
		asked := 0
		for _, l := range st.journal.Lines() {
			if l.Type != (events.ApprovalRequested{}).EventType() {
				continue
			}
			asked++
			var got events.ApprovalRequested
			if err := json.Unmarshal(l.Data, &got); err != nil {
				t.Fatal(err)
			}
			if got.Title != c.want.Title || got.Reason != c.want.Reason || !reflect.DeepEqual(got.Preview, c.want.Preview) {
				t.Errorf("%s: title %q, reason %q, preview %#v", name, got.Title, got.Reason, got.Preview)
			}
		}
		if asked != 1 {
			t.Errorf("%s: %d requests", name, asked)
		}
	}
}

// After session/cancel every open request is answered once with cancelled, whatever a person decides.
func TestInterrupt_CancelsOpenRequests(t *testing.T) {
	t.Parallel()
	st := newStage(t)
	st.asks("7", "c1")
	st.asks(`"x"`, "c2")
	done := make(chan error)
	go func() { done <- st.Interrupt() }()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	st.decide(0, events.DecisionApprove)
	st.asks("8", "c3")
	if got := st.answers(); got != `"x" cancelled, 7 cancelled, 8 cancelled` {
		t.Errorf("answered %s", got)
	}
	var sent []string
	for _, raw := range st.in.SentValues() {
		sent = append(sent, string(raw))
	}
	all := strings.Join(sent, "\n")
	if cancel := strings.Index(all, "session/cancel"); cancel < 0 || cancel > strings.Index(all, "cancelled") {
		t.Errorf("sent %s", all)
	}
}

// A request ends with its call, when the agent withdraws it, and with the turn.
func TestRequests_EndWithoutADecision(t *testing.T) {
	t.Parallel()
	for name, line := range map[string]string{
		"call ended":   `{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"tool_call_update","toolCallId":"c1","status":"failed"}}}`,
		"withdrawn":    `{"method":"$/cancel_request","params":{"requestId":7}}`,
		"end of turn":  `{"id":3,"result":{"stopReason":"end_turn"}}`,
		"another call": `{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"tool_call_update","toolCallId":"c2","status":"failed"}}}`,
	} {
		st := newStage(t)
		st.asks("7", "c1")
		st.prints(line)
		want, waits := "7 cancelled", false
		if name == "another call" {
			want, waits = "", true
		}
		if got := st.answers(); got != want || st.turn.HasOpenRequest() != waits {
			t.Errorf("%s: answered %q, waiting: %v", name, got, st.turn.HasOpenRequest())
		}
	}
}

// The second request to stop a turn may be the one that is sent because the agent begins a message. The agent may apply it to the next turn.
func TestInterrupt_RepeatedForAMessageMayArriveInTheNextTurn(t *testing.T) {
	t.Parallel()
	st := newStage(t)
	if err := st.Interrupt(); err != nil {
		t.Fatal(err)
	}
	st.prints(textUpdate("agent_message_chunk", "m", "text"), `{"id":3,"result":{"stopReason":"cancelled"}}`)
	if e := st.turn.Ended(); e == nil || e.Outcome != runner.OutcomeInterrupted {
		t.Fatalf("ended %+v", e)
	}
	st.turn = agenttest.NewJournalTurn(t, &st.journal, "exe_2")
	if err := st.BeginTurn(runner.Query{Content: "hello"}, st.turn); err != nil {
		t.Fatal(err)
	}
	st.prints(`{"id":6,"result":{"stopReason":"cancelled"}}`)
	if e := st.turn.Ended(); e != nil {
		t.Errorf("ended %+v", e)
	}
}

// Text after the answer to the query shows no turn that goes on: a request to stop would reach the next turn.
func TestInterrupt_IsNotRepeatedAfterTheAnswer(t *testing.T) {
	t.Parallel()
	st := newStage(t)
	if err := st.Interrupt(); err != nil {
		t.Fatal(err)
	}
	st.prints(`{"id":3,"result":{"stopReason":"cancelled"}}`, textUpdate("agent_message_chunk", "m", "text"))
	stops := 0
	for _, raw := range st.in.SentValues() {
		stops += strings.Count(string(raw), `"session/cancel"`)
	}
	if stops != 1 {
		t.Errorf("%d requests to stop", stops)
	}
}

// Some programs write an id of null into notifications.
func TestNotification_WithTheIDNull(t *testing.T) {
	t.Parallel()
	st := newStage(t)
	st.asks("7", "c1")
	st.prints(`{"id":null,"method":"$/cancel_request","params":{"requestId":7}}`)
	if got := st.answers(); got != "7 cancelled" {
		t.Errorf("answers %q", got)
	}
	for _, raw := range st.in.SentValues() {
		if strings.Contains(string(raw), `"id":null`) {
			t.Errorf("answered %s", raw)
		}
	}
}
