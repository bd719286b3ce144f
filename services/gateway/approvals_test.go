package gateway_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// ask adds an approval request to a new execution of a session, and returns the ids of both.
func (w *world) ask(tenant, session string, r events.ApprovalRequested) (approval, execution string) {
	w.t.Helper()
	execution = newID(w.t, events.KindExecution)
	w.emit(tenant, session, events.Event{ExecutionID: execution, Data: events.MessageAccepted{BlockID: "blk_" + execution, Content: "hello"}})
	return w.askIn(tenant, session, execution, r), execution
}

// askIn adds an approval request to an execution of a session, and returns its id.
func (w *world) askIn(tenant, session, execution string, r events.ApprovalRequested) string {
	w.t.Helper()
	r.ApprovalID = newID(w.t, events.KindApproval)
	w.emit(tenant, session, events.Event{ExecutionID: execution, ConversationID: events.MainConversation, Data: r})
	return r.ApprovalID
}

// editable is a request to run a command, whose arguments can be changed.
func editable() events.ApprovalRequested {
	return events.ApprovalRequested{
		Kind: events.ApprovalTool, ToolName: "Bash", ToolUseID: "call_1", Title: "Run ls", Class: "commands that begin with `ls`", Editable: true,
		Input: json.RawMessage(`{"command":"ls","n":1152921504606846977}`), Schema: json.RawMessage(`{"type":"object","properties":{"command":{"type":"string"},"paths":{"items":{"type":"string"}}},"required":["command"]}`),
	}
}

// questions asks a question with options, one without, and one with a secret answer.
func questions() events.ApprovalRequested {
	return events.ApprovalRequested{Kind: events.ApprovalQuestion, Questions: []events.Question{
		{ID: "color", Question: "Which color?", Options: []events.QuestionOption{{Label: "Blue"}, {Label: "Red"}}},
		{ID: "name", Question: "Which names?", Multiple: true},
		{ID: "token", Question: "Which token?", Secret: true},
	}}
}

func TestApprovals_AreListedAndShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	sid, other := w.session("default"), w.session("default")
	first, exe := w.ask("default", sid, editable())
	second := w.askIn("default", sid, exe, events.ApprovalRequested{Kind: events.ApprovalPlan, Title: "Plan"})
	third, _ := w.ask("default", other, events.ApprovalRequested{Kind: events.ApprovalTool, ToolName: "Edit"})
	foreign, _ := w.ask("acme", w.session("acme"), editable())
	w.emit("default", sid,
		events.Event{ExecutionID: exe, Data: events.ApprovalDecided{ApprovalID: second, Decision: events.DecisionReject, Comment: "<no>"}},
		events.Event{ExecutionID: exe, Data: events.ApprovalResolved{ApprovalID: second, Outcome: events.OutcomeRejected, Cause: events.ResolvedByPerson}})

	ids := func(query string) string {
		t.Helper()
		var list []string
		token := ""
		for {
			a := g.get("/api/approvals?pageSize=1&"+query+"&pageToken="+token).want(t, 200)
			if a.text("approvals", "0", "approvalId") != "" {
				list = append(list, map[string]string{first: "first", second: "second", third: "third"}[a.text("approvals", "0", "approvalId")])
			}
			if token = a.text("nextPageToken"); token == "" {
				return strings.Join(list, " ")
			}
		}
	}
	for query, want := range map[string]string{
		"":                             "second third first",
		"status=open":                  "third first",
		"status=pending":               "third first",
		"status=rejected":              "second",
		"status=retracted":             "",
		"sessionId=" + sid:             "second first",
		"executionId=" + exe:           "second first",
		"sessionId=" + other:           "third",
		"status=open&sessionId=" + sid: "first",
	} {
		if got := ids(query); got != want {
			t.Errorf("%s: listed %q, want %q", query, got, want)
		}
	}
	a := g.get("/api/approvals/"+first).want(t, 200)
	if a.text("status") != "pending" || a.text("toolName") != "Bash" || a.text("title") != "Run ls" || a.text("sessionId") != sid || a.text("executionId") != exe || a.text("conversationId") != "main" ||
		!strings.Contains(string(a.body), `"n":1152921504606846977`) || a.field("request", "editable") != true || a.field("decision") != nil || a.field("decidedBy") != nil || a.field("endedSeq") != nil {
		t.Errorf("got %s", a)
	}
	a = g.get("/api/approvals/"+second).want(t, 200)
	if a.text("status") != "rejected" || a.text("cause") != "person" || a.text("decision") != "reject" || a.text("decided", "comment") != "<no>" || a.text("decidedBy", "user") != "ann" ||
		a.text("decidedBy", "keyId") != "key_1" || a.number("decidedSeq") != 5 || a.number("endedSeq") != 6 || a.text("endedAt") == "" {
		t.Errorf("got %s", a)
	}
	g.get("/api/approvals/"+foreign).wantProblem(t, 404, "APPROVAL_NOT_FOUND", "approvalId")
	g.get("/api/approvals/"+oldID(t, events.KindApproval)).wantProblem(t, 404, "APPROVAL_NOT_FOUND", "approvalId")
	g.get("/api/approvals/apr_1").wantProblem(t, 400, "INVALID_REQUEST", "approvalId")
	g.get("/api/approvals?sessionId="+oldID(t, events.KindSession)).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	g.get("/api/approvals?executionId="+oldID(t, events.KindExecution)).wantProblem(t, 404, "EXECUTION_NOT_FOUND", "executionId")
	for query, field := range map[string]string{"status=done": "status", "sessionId=x": "sessionId", "executionId=x": "executionId", "pageSize=201": "pageSize", "pageToken=x": "pageToken"} {
		g.get("/api/approvals?"+query).wantProblem(t, 400, "INVALID_REQUEST", field)
	}
	token := g.get("/api/approvals?pageSize=1").text("nextPageToken")
	g.get("/api/approvals?status=open&pageToken="+token).wantProblem(t, 400, "INVALID_REQUEST", "pageToken")

	w.exec("UPDATE checkpoints SET caught_up = false")
	g.get("/api/approvals").wantProblem(t, 503, "UNAVAILABLE", "")
	g.get("/api/approvals/"+oldID(t, events.KindApproval)).wantProblem(t, 503, "UNAVAILABLE", "")
}

// TestApprovals_PagesAreLimitedInBytes tests that a page of large requests ends early, and that all requests are on some page.
func TestApprovals_PagesAreLimitedInBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	sid := w.session("default")
	large := editable()
	large.Preview.Text = strings.Repeat("x", 300<<10)
	_, exe := w.ask("default", sid, large)
	for range 19 {
		w.askIn("default", sid, exe, large)
	}
	seen, token, pages := map[string]bool{}, "", 0
	for {
		a := g.get("/api/approvals?pageToken="+token).want(t, 200)
		pages++
		if len(a.body) > 3<<20 {
			t.Errorf("a page has %d bytes", len(a.body))
		}
		for i := 0; a.text("approvals", fmt.Sprint(i), "approvalId") != ""; i++ {
			if len(a.text("approvals", fmt.Sprint(i), "request", "preview", "text")) != 300<<10 {
				t.Error("a request is incomplete")
			}
			seen[a.text("approvals", fmt.Sprint(i), "approvalId")] = true
		}
		if token = a.text("nextPageToken"); token == "" {
			break
		}
	}
	if len(seen) != 20 || pages < 3 {
		t.Errorf("%d requests on %d pages", len(seen), pages)
	}
}

// TestDecideApproval_SendsTheDecision tests the command that the session service receives, the answer, and that a repeat with the same
// Idempotency-Key has the same answer.
func TestDecideApproval_SendsTheDecision(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	sealed := w.newSealer()
	g := w.gateway(gateway.Config{})
	sid := w.session("default")
	id, exe := w.ask("default", sid, editable())
	path := "/api/approvals/" + id + "/decide"
	body := `{"decision":"approve","arguments":{"command":"ls -l","n":1152921504606846977}}`
	first := g.do("POST", path, body, header("Idempotency-Key", "once")).want(t, 202)
	if first.text("position") == "" {
		t.Errorf("got %s", first)
	}
	if again := g.do("POST", path, body, header("Idempotency-Key", "once")).want(t, 202); string(again.body) != string(first.body) {
		t.Errorf("the repeat is answered with %s, the first request with %s", again, first)
	}
	g.do("POST", path, `{"decision":"skip"}`, header("Idempotency-Key", "once")).wantProblem(t, 409, "IDEMPOTENCY_MISMATCH", "Idempotency-Key")
	sent := s.commands(t)
	if len(sent) != 1 || sent[0].Type != command.TypeDecideApproval || sent[0].SessionID != sid || sent[0].ExecutionID != exe {
		t.Fatalf("sent %+v", sent)
	}
	if want := `{"approvalId":"` + id + `","decision":"approve","arguments":{"command":"ls -l","n":1152921504606846977}}`; string(sent[0].Body) != want {
		t.Errorf("sent %s, want %s", sent[0].Body, want)
	}
	if a := g.get("/api/approvals/"+id+"?minPosition="+first.text("position")).want(t, 200); a.text("status") != "decided" || a.text("decision") != "approve" {
		t.Errorf("got %s", a)
	}

	id, _ = w.ask("default", sid, questions())
	answers := `{"decision":"answer","answers":{"color":["Blue"],"name":["a","b"],"token":["` + topSecret + `"]}}`
	g.do("POST", "/api/approvals/"+id+"/decide", answers).want(t, 202)
	var d command.DecideApproval
	s.bodyOf(command.TypeDecideApproval, &d)
	last := s.commands(t)[1]
	must(t, json.Unmarshal(last.Body, &d))
	if d.Answers["color"][0] != "Blue" || len(d.Answers["name"]) != 2 || d.Answers["token"] != nil || sealed.values[d.Sealed["token"]] != `["`+topSecret+`"]` || strings.Contains(string(last.Body), topSecret) {
		t.Errorf("sent %s; sealed are %v", last.Body, sealed.values)
	}
	if !strings.HasPrefix(d.Sealed["token"], "default.x."+last.ExecutionID+".") {
		t.Errorf("the answer is sealed under %s", d.Sealed["token"])
	}

	id, _ = w.ask("default", sid, events.ApprovalRequested{Kind: events.ApprovalElicitation, Schema: json.RawMessage(`{"type":"object","properties":{"n":{"type":"integer","maximum":3}}}`)})
	answer, err := spoolv1.NewApprovalsClient(g.conn()).DecideApproval(t.Context(), &spoolv1.DecideApprovalRequest{ApprovalId: id, Decision: "answer", Content: &spoolv1.Json{Text: `{"n": 3}`}})
	if err != nil || answer.Position == "" {
		t.Errorf("over gRPC: %v, %v", answer, err)
	}
	_, err = spoolv1.NewApprovalsClient(g.conn()).DecideApproval(t.Context(), &spoolv1.DecideApprovalRequest{ApprovalId: id, Decision: "answer", Content: &spoolv1.Json{Text: `{"n": 3`}})
	wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "content")
}

// TestDecideApproval_RefusalsHaveTypes tests the problems that the gateway finds, and those of the session service.
func TestDecideApproval_RefusalsHaveTypes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	sid := w.session("default")
	tool, exe := w.ask("default", sid, editable())
	question := w.askIn("default", sid, exe, questions())
	elicitation := w.askIn("default", sid, exe, events.ApprovalRequested{Kind: events.ApprovalElicitation, Schema: json.RawMessage(`{"properties":{"age":{"$ref":"#/$defs/n"}},"$defs":{"n":{"type":"integer"}}}`)})
	foreign, _ := w.ask("acme", w.session("acme"), editable())
	for _, c := range []struct {
		id, body    string
		status      int
		code, field string
	}{
		{oldID(t, events.KindApproval), `{"decision":"approve"}`, 404, "APPROVAL_NOT_FOUND", "approvalId"},
		{foreign, `{"decision":"approve"}`, 404, "APPROVAL_NOT_FOUND", "approvalId"},
		{"apr_1", `{"decision":"approve"}`, 400, "INVALID_REQUEST", "approvalId"},
		{tool, `{}`, 400, "INVALID_REQUEST", "decision"},
		{tool, `{"decision":"approve","yes":true}`, 400, "INVALID_REQUEST", "yes"},
		{tool, `{"decision":"approve","arguments":{"command":7}}`, 400, "INVALID_REQUEST", "arguments.command"},
		{tool, `{"decision":"approve","arguments":{"command":"ls","paths":["a",2]}}`, 400, "INVALID_REQUEST", "arguments.paths[1]"},
		{tool, `{"decision":"approve","arguments":{}}`, 400, "INVALID_REQUEST", "arguments"},
		{tool, `{"decision":"approve","arguments":{"command":"` + strings.Repeat("x", 128<<10) + `"}}`, 413, "PAYLOAD_TOO_LARGE", "arguments"},
		{tool, `{"decision":"answer","answers":{"color":["Blue"]}}`, 400, "INVALID_REQUEST", "answers"},
		{question, `{"decision":"skip","answers":{"color":["Blue"]}}`, 400, "INVALID_REQUEST", "answers"},
		{question, `{"decision":"answer","answers":{"color":"Blue"}}`, 400, "INVALID_REQUEST", "answers"},
		{question, `{"decision":"answer","answers":[]}`, 400, "INVALID_REQUEST", "answers"},
		{question, `{"decision":"answer","answers":{"color":["Green"],"name":["a"],"token":["abc"]}}`, 400, "INVALID_REQUEST", "answers.color"},
		{question, `{"decision":"answer","answers":{"color":["Blue","Red"],"name":["a"],"token":["abc"]}}`, 400, "INVALID_REQUEST", "answers.color"},
		{question, `{"decision":"answer","answers":{"color":["Blue"],"token":["abc"]}}`, 400, "INVALID_REQUEST", "answers.name"},
		{question, `{"decision":"answer","answers":{"color":["Blue"],"name":["a"],"token":["abc"]}}`, 503, "SECRETS_UNAVAILABLE", "answers.token"},
		{question, `{"decision":"answer","content":{}}`, 202, "", ""},
		{elicitation, `{"decision":"answer","content":{"age":"old"}}`, 400, "INVALID_REQUEST", "content.age"},
		{elicitation, `{"decision":"skip","content":{"age":1}}`, 400, "INVALID_REQUEST", "content"},
	} {
		a := g.do("POST", "/api/approvals/"+c.id+"/decide", c.body)
		if c.status == 202 { // the session service decides
			a.want(t, 202)
			continue
		}
		a.wantProblem(t, c.status, c.code, c.field)
	}
	before := len(s.commands(t))
	for code, c := range map[string]struct {
		status int
		field  string
	}{
		"APPROVAL_DECIDED": {409, "approvalId"}, "APPROVAL_NOT_OPEN": {409, "approvalId"}, "ARGUMENTS_NOT_SUPPORTED": {422, "arguments"}, "INVALID_REQUEST": {400, "decision"}, "SESSION_NOT_FOUND": {404, "sessionId"},
	} {
		s.mu.Lock()
		s.answer = &command.Answer{Error: &command.Error{Code: code, Field: map[bool]string{true: "decision"}[code == "INVALID_REQUEST"], Detail: "no"}}
		s.mu.Unlock()
		g.do("POST", "/api/approvals/"+tool+"/decide", `{"decision":"approve"}`).wantProblem(t, c.status, code, c.field)
	}
	if n := len(s.commands(t)) - before; n != 5 {
		t.Errorf("%d commands were sent", n)
	}
}

// TestDecideApproval_OtherAgentsRequestIsNotFound tests that a key that is limited to agents cannot decide a request of another agent.
func TestDecideApproval_OtherAgentsRequestIsNotFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	key := g.withKey(g.withKey(root).do("POST", "/api/keys", `{"name":"x","agents":["mine"]}`).want(t, 201).text("key"))
	before := len(s.commands(t))
	theirs, _ := w.ask("default", w.sessionOf("default", "theirs"), editable())
	mine, _ := w.ask("default", w.sessionOf("default", "mine"), editable())
	key.do("POST", "/api/approvals/"+theirs+"/decide", `{"decision":"approve"}`).wantProblem(t, 404, "APPROVAL_NOT_FOUND", "approvalId")
	key.do("POST", "/api/approvals/"+mine+"/decide", `{"decision":"approve"}`).want(t, 202)
	if n := len(s.commands(t)) - before; n != 1 {
		t.Errorf("%d commands were sent", n)
	}
	if a := key.get("/api/approvals").want(t, 200); strings.Contains(string(a.body), theirs) || !strings.Contains(string(a.body), mine) {
		t.Errorf("got %s", a)
	}
}

// TestPermissions_ArePartOfTheMessage tests that a message and a new execution pass permissions to the session service.
func TestPermissions_ArePartOfTheMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	const permissions = `{"rules":[{"tool":"Bash","command":["git status"],"then":"allow"},{"path":["a/**"],"host":["*.example.com"],"then":"deny"}],"unattended":true}`
	sid := g.do("POST", "/api/executions", `{"content":"hello","permissions":`+permissions+`}`).want(t, 202).text("sessionId")
	g.do("POST", "/api/sessions/"+sid+"/messages", `{"content":"again","permissions":`+permissions+`}`).want(t, 202)
	for rules, field := range map[string]string{
		`{"tool":"Bash"}`: "permissions.rules[0].then", `{"then":"maybe"}`: "permissions.rules[0].then", `{"command":[""],"then":"deny"}`: "permissions.rules[0].command[0]",
		`{"then":"allow"},{"tool":"Bash","then":"deny"}`: "permissions.rules[1]",
	} {
		g.do("POST", "/api/sessions/"+sid+"/messages", `{"content":"x","permissions":{"rules":[`+rules+`]}}`).wantProblem(t, 400, "INVALID_REQUEST", field)
	}
	var start command.StartExecution
	var post command.PostMessage
	s.bodyOf(command.TypeStartExecution, &start)
	s.bodyOf(command.TypePostMessage, &post)
	for _, p := range []events.ExecutionPermissions{start.Post.Permissions, post.Permissions} {
		if got := string(encode(t, p)); got != permissions {
			t.Errorf("sent %s, want %s", got, permissions)
		}
	}
}

// TestState_ListsApprovals tests the requests, and the phase of their execution, in the state after each event, and their changes
// between events.
func TestState_ListsApprovals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	sid := w.session("default") // event 1
	exe := newID(t, events.KindExecution)
	emit := func(list ...events.Payload) {
		for _, d := range list {
			w.emit("default", sid, events.Event{ExecutionID: exe, Data: d})
		}
	}
	emit(events.MessageAccepted{BlockID: "b", Content: "hello"}, events.ExecutionDispatched{}, events.ExecutionStarted{Attempt: 1})
	first := w.askIn("default", sid, exe, editable())                                           // 5
	second := w.askIn("default", sid, exe, events.ApprovalRequested{Kind: events.ApprovalPlan}) // 6
	emit(events.ApprovalDecided{ApprovalID: first, Decision: events.DecisionApprove},           // 7
		events.ApprovalResolved{ApprovalID: first, Outcome: "approved", Cause: "person"},        // 8
		events.ApprovalRetracted{ApprovalID: second, Reason: "withdrawn"}, events.SessionIdle{}) // 9, 10
	states := map[int]string{
		4: "running", 5: "waiting_for_approval pending", 6: "waiting_for_approval pending pending", 7: "waiting_for_approval decided/approve/ann pending",
		8: "waiting_for_approval approved/approve/ann pending", 9: "running approved/approve/ann retracted", 10: "running approved/approve/ann retracted",
	}
	for seq, want := range states {
		a := g.get(fmt.Sprintf("/api/sessions/%s/state?at=%d", sid, seq)).want(t, 200)
		got := a.text("executions", "0", "phase")
		for i := 0; a.text("approvals", fmt.Sprint(i), "approvalId") != ""; i++ {
			at := func(path ...string) string { return a.text(append([]string{"approvals", fmt.Sprint(i)}, path...)...) }
			got += " " + at("status")
			if at("decision") != "" {
				got += "/" + at("decision") + "/" + at("decidedBy", "user")
			}
			if open := at("status") == "pending" || at("status") == "decided"; open != (a.field("approvals", fmt.Sprint(i), "endedSeq") == nil) || at("request") != "" {
				t.Errorf("at %d: %s", seq, a)
			}
		}
		if got != want {
			t.Errorf("at %d: got %q, want %q", seq, got, want)
		}
	}
	name := map[string]string{first: "first", second: "second"}
	for span, want := range map[[2]int]string{
		{4, 5}: "first:-pending", {5, 6}: "second:-pending", {5, 7}: "first:pending-decided second:-pending", {7, 8}: "first:decided-approved", {8, 10}: "second:pending-retracted",
		{4, 10}: "first:-approved second:-retracted", {9, 10}: "",
	} {
		a := g.get(fmt.Sprintf("/api/sessions/%s/diff?from=%d&to=%d", sid, span[0], span[1])).want(t, 200)
		var got []string
		for i := 0; a.text("statuses", fmt.Sprint(i), "kind") != ""; i++ {
			at := func(field string) string { return a.text("statuses", fmt.Sprint(i), field) }
			if at("kind") == "approval" {
				got = append(got, name[at("id")]+":"+at("from")+"-"+at("to"))
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("from %d to %d: got %q, want %q", span[0], span[1], got, want)
		}
	}
}

// TestWebSocket_DecidesApprovals tests decisions over a WebSocket: the answers, the command, and errors that name the request.
func TestWebSocket_DecidesApprovals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	sid, other := w.session("default"), w.session("default")
	id, exe := w.ask("default", sid, editable())
	foreign, _ := w.ask("acme", w.session("acme"), editable())
	c := g.dial()
	for _, m := range []struct{ body, code, field string }{
		{`"approvalId":"apr_1","decision":"approve"`, "INVALID_REQUEST", "approvalId"},
		{`"approvalId":"` + oldID(t, events.KindApproval) + `","decision":"approve"`, "APPROVAL_NOT_FOUND", "approvalId"},
		{`"approvalId":"` + foreign + `","decision":"approve"`, "APPROVAL_NOT_FOUND", "approvalId"},
		{`"approvalId":"` + id + `","sessionId":"` + other + `","decision":"approve"`, "APPROVAL_NOT_FOUND", "approvalId"},
		{`"approvalId":"` + id + `","sessionId":"x","decision":"approve"`, "INVALID_REQUEST", "sessionId"},
		{`"approvalId":"` + id + `","sessionId":7,"decision":"approve"`, "INVALID_REQUEST", "sessionId"},
		{`"approvalId":"` + id + `"`, "INVALID_REQUEST", "decision"},
		{`"approvalId":"` + id + `","decision":7`, "INVALID_REQUEST", "decision"},
		{`"approvalId":"` + id + `","decision":"approve","after":7`, "INVALID_REQUEST", "after"},
		{`"approvalId":"` + id + `","decision":"approve","arguments":{"command":7}`, "INVALID_REQUEST", "arguments.command"},
	} {
		c.send(`{"type":"approval:decide","requestId":"d",` + m.body + `}`)
		if r := c.wantError(m.code, m.field); r.RequestID != "d" {
			t.Errorf("%s: got %+v", m.body, r)
		}
	}
	if n := len(s.commands(t)); n != 0 {
		t.Fatalf("%d commands were sent", n)
	}
	c.send(fmt.Sprintf(`{"type":"session:join","requestId":"j","sessionId":%q,"after":3}`, sid))
	c.want("session:joined")
	c.send(`{"type":"approval:decide","requestId":"ok","sessionId":"` + sid + `","approvalId":"` + id + `","decision":"approve","arguments":{"command":"<b>"}}`)
	var decided, event received
	for decided.Type == "" || event.Type == "" { // in any order
		r, err := c.receive()
		must(t, err)
		if r.Type == "approval:decided" {
			decided = r
		} else {
			event = r
		}
	}
	if decided.RequestID != "ok" || decided.SessionID != sid || decided.ApprovalID != id || decided.Position == "" {
		t.Errorf("got %+v", decided)
	}
	if !strings.Contains(string(event.Event), `"approval_decided"`) {
		t.Errorf("got %+v", event)
	}
	sent := s.commands(t)
	if want := `{"approvalId":"` + id + `","decision":"approve","arguments":{"command":"<b>"}}`; len(sent) != 1 || sent[0].ExecutionID != exe || string(sent[0].Body) != want {
		t.Errorf("sent %+v, want %s", sent, want)
	}
	s.mu.Lock()
	s.answer = &command.Answer{Error: &command.Error{Code: "APPROVAL_DECIDED", Detail: "no"}}
	s.mu.Unlock()
	c.send(`{"type":"approval:decide","requestId":"late","approvalId":"` + id + `","decision":"skip"}`)
	if r := c.wantError("APPROVAL_DECIDED", "approvalId"); r.RequestID != "late" {
		t.Errorf("got %+v", r)
	}
}
