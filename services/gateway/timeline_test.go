package gateway_test

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// completedBlock returns the event of a completed block of a conversation.
func completedBlock(execution, conversation, id string, b events.Block) events.Event {
	b.ID = id
	return events.Event{ExecutionID: execution, ConversationID: conversation, Source: events.FromRunner, Data: events.BlockComplete{Block: b}}
}

// blockIDs returns the ids of the blocks of a page.
func (a answer) blockIDs() (list []string) {
	for i := 0; a.text("blocks", fmt.Sprint(i), "id") != ""; i++ {
		list = append(list, a.text("blocks", fmt.Sprint(i), "id"))
	}
	return list
}

// TestNewestBlocks_PagesAreStableWhileBlocksArrive tests that pages contain each block once, newest first, although
// blocks arrive between them, also such blocks as are displayed before the last one.
func TestNewestBlocks_PagesAreStableWhileBlocksArrive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	first, second := newID(t, events.KindExecution), newID(t, events.KindExecution)
	w.emit("default", id, events.Event{ExecutionID: first, Data: events.MessageAccepted{BlockID: "q1", Content: "one"}})
	for i := range 5 {
		w.emit("default", id, completedBlock(first, events.MainConversation, fmt.Sprint("a", i), events.Block{Kind: events.KindAssistantText, Content: "x"}))
	}
	w.emit("default", id, events.Event{ExecutionID: second, Data: events.MessageAccepted{BlockID: "q2", Content: "queued"}})
	var got []string
	path := "/api/sessions/" + id + "/blocks?order=newest&limit=2"
	for before, pages := "", 0; ; pages++ {
		page := g.get(path+before).want(t, 200)
		got = append(got, page.blockIDs()...)
		w.emit("default", id, completedBlock(first, events.MainConversation, fmt.Sprint("late", pages), events.Block{Kind: events.KindAssistantText, Content: "x"}))
		if page.text("next") == "" {
			break
		}
		before = "&before=" + page.text("next")
	}
	if want := "q2 a4 a3 a2 a1 a0 q1"; strings.Join(got, " ") != want {
		t.Errorf("pages have %v, want %s", got, want)
	}
	if got := g.get("/api/sessions/"+id+"/blocks?order=newest&limit=3").want(t, 200).blockIDs(); !slices.Equal(got, []string{"q2", "late3", "late2"}) {
		t.Errorf("a new first page has %v", got)
	}
}

// TestNewestBlocks_TextContinuesOnTheStream tests that an open block has its text in flight, and that the stream after
// the page's tip has the rest.
func TestNewestBlocks_TextContinuesOnTheStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	x := newID(t, events.KindExecution)
	w.emit("default", id, events.Event{ExecutionID: x, Data: events.MessageAccepted{BlockID: "q", Content: "one"}},
		events.Event{ExecutionID: x, ConversationID: events.MainConversation, Source: events.FromRunner, Data: events.BlockStart{Block: events.Block{ID: "open", Kind: events.KindAssistantText}}})
	long := strings.Repeat("text ", 4000)
	w.emitText("default", id, "open", long)
	page := g.get("/api/sessions/"+id+"/blocks?order=newest&limit=1").want(t, 200)
	if page.text("blocks", "0", "id") != "open" || page.text("blocks", "0", "content") != long || page.field("truncated", "0") != nil {
		t.Errorf("got %.300s", page)
	}
	tip := page.number("tip")
	w.emit("default", id, completedBlock(x, events.MainConversation, "open", events.Block{Kind: events.KindAssistantText, Content: long + "end"}))
	next := g.get(fmt.Sprintf("/api/sessions/%s/events?after=%.0f", id, tip)).want(t, 200)
	if next.number("events", "0", "seq") != tip+1 || next.text("events", "0", "type") != "block_complete" {
		t.Errorf("after %.0f: got %.300s", tip, next)
	}
}

// TestNewestBlocks_AreLimitedInBytes tests that long fields are cut, that a page ends at its limit of bytes, and that
// a block can be read whole.
func TestNewestBlocks_AreLimitedInBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	x := newID(t, events.KindExecution)
	output := strings.Repeat("\x01é", 100_000) // a control character has six bytes in JSON
	w.emit("default", id, events.Event{ExecutionID: x, Data: events.MessageAccepted{BlockID: "q", Content: "one"}})
	for i := range 40 {
		w.emit("default", id, completedBlock(x, events.MainConversation, fmt.Sprint("r", i), events.Block{Kind: events.KindToolResult, Output: output, Input: []byte(`"` + strings.Repeat("i", 9000) + `"`)}))
	}
	var got []string
	for before, pages := "", 0; ; pages++ {
		page := g.get("/api/sessions/"+id+"/blocks?order=newest&limit=200"+before).want(t, 200)
		got = append(got, page.blockIDs()...)
		if len(page.body) > 600<<10 {
			t.Errorf("a page has %d bytes", len(page.body))
		}
		for i, block := range page.blockIDs() {
			if block == "q" {
				continue
			}
			cut, input := fmt.Sprint(2*i), fmt.Sprint(2*i+1)
			if page.text("truncated", cut, "blockId") != block || page.text("truncated", cut, "field") != "output" || page.number("truncated", cut, "bytes") != float64(len(output)) ||
				page.text("truncated", input, "field") != "input" || page.number("truncated", input, "bytes") != 9002 || !strings.HasPrefix(output, page.text("blocks", fmt.Sprint(i), "output")) {
				t.Fatalf("block %s: truncated is %v", block, page.field("truncated"))
			}
		}
		if page.text("next") == "" {
			break
		}
		before = "&before=" + page.text("next")
	}
	if len(got) != 41 || got[0] != "r39" || got[40] != "q" {
		t.Errorf("pages have %v", got)
	}
	whole := g.get("/api/sessions/"+id+"/blocks/r7").want(t, 200)
	if whole.text("block", "output") != output || whole.number("tip") != 42 {
		t.Errorf("got a block with an output of %d bytes, tip %v", len(whole.text("block", "output")), whole.number("tip"))
	}
}

// TestNewestBlocks_OmitLongPlans tests that a plan, a step and a skill that are too long for a page are omitted, and that the block can be
// read whole.
func TestNewestBlocks_OmitLongPlans(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	x := newID(t, events.KindExecution)
	long := strings.Repeat("x", 9000)
	w.emit("default", id, events.Event{ExecutionID: x, Data: events.MessageAccepted{BlockID: "q", Content: "one"}})
	for name, b := range map[string]events.Block{
		"plan":  {Kind: events.KindPlan, Plan: &events.Plan{Items: []events.PlanItem{{Content: long, Status: events.PlanPending}}}},
		"step":  {Kind: events.KindStep, Step: &events.Step{Title: "write", Status: events.StepCompleted, Result: long}},
		"skill": {Kind: events.KindSkillLoad, Skill: &events.LoadedSkill{Name: "pdf", Path: long}},
	} {
		w.emit("default", id, completedBlock(x, events.MainConversation, name, b))
	}
	page := g.get("/api/sessions/"+id+"/blocks?order=newest").want(t, 200)
	omitted := map[string]bool{}
	for i := range 4 {
		n := fmt.Sprint(i)
		if omitted[page.text("truncated", n, "blockId")+"."+page.text("truncated", n, "field")] = true; page.number("truncated", n, "bytes") < 9000 {
			t.Errorf("truncated %v", page.field("truncated", n))
		}
	}
	if want := map[string]bool{"plan.todos": true, "plan.plan": true, "step.step": true, "skill.skill": true}; !maps.Equal(omitted, want) || bytes.Contains(page.body, []byte(long)) {
		t.Errorf("omitted %v in a page of %d bytes, want %v", omitted, len(page.body), want)
	}
	for path, want := range map[string][]string{"plan": {"block", "plan", "items", "0", "content"}, "step": {"block", "step", "result"}, "skill": {"block", "skill", "path"}} {
		if whole := g.get("/api/sessions/"+id+"/blocks/"+path).want(t, 200); whole.text(want...) != long {
			t.Errorf("the whole %s has %d bytes", path, len(whole.text(want...)))
		}
	}
}

// TestNewestBlocks_BadInputNamesTheField tests errors of pages of blocks, of one block and of a timeline.
func TestNewestBlocks_BadInputNamesTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, deleted := w.session("default"), w.session("default")
	x := newID(t, events.KindExecution)
	w.emit("default", id, events.Event{ExecutionID: x, Data: events.MessageAccepted{BlockID: "q", Content: "one"}},
		events.Event{ExecutionID: x, ConversationID: events.MainConversation, Source: events.FromRunner, Data: events.SubagentSpawned{Conversation: "sub", Parent: events.MainConversation}},
		completedBlock(x, "sub", "s1", events.Block{Kind: events.KindAssistantText, Content: "x"}))
	w.emit("default", deleted, events.Event{Data: events.SessionDeleted{}})
	foreign := w.session("other")
	path := "/api/sessions/" + id
	for _, c := range []struct{ path, code, field string }{
		{"/blocks?order=oldest", "INVALID_REQUEST", "order"},
		{"/blocks?limit=5", "INVALID_REQUEST", "limit"},
		{"/blocks?before=x", "INVALID_REQUEST", "before"},
		{"/blocks?order=newest&before=x", "INVALID_REQUEST", "before"},
		{"/blocks?order=newest&before=OTkvMC8x", "INVALID_REQUEST", "before"}, // 99/0/1: after the tip
		{"/blocks?order=newest&limit=201", "INVALID_REQUEST", "limit"},
		{"/blocks?order=newest&limit=-1", "INVALID_REQUEST", "limit"},
		{"/blocks?order=newest&conversationId=none", "INVALID_REQUEST", "conversationId"},
		{"/timeline?buckets=1001", "INVALID_REQUEST", "buckets"},
		{"/timeline?buckets=x", "INVALID_REQUEST", "buckets"},
	} {
		g.get(path+c.path).wantProblem(t, 400, c.code, c.field)
	}
	g.get(path+"/blocks/none").wantProblem(t, 404, "NOT_FOUND", "blockId")
	for _, other := range []string{deleted, foreign, newID(t, events.KindSession)} {
		for _, route := range []string{"/blocks?order=newest", "/blocks/q", "/timeline"} {
			g.get("/api/sessions/"+other+route).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
		}
	}
	if got := g.get(path+"/blocks?order=newest&conversationId=sub").want(t, 200).blockIDs(); !slices.Equal(got, []string{"s1"}) {
		t.Errorf("the conversation has %v", got)
	}
}

// TestTimeline_CountsEventsByLaneAndTime tests the lanes, the buckets and the marks of a timeline.
func TestTimeline_CountsEventsByLaneAndTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default") // seq 1, at 03:04:05
	x := newID(t, events.KindExecution)
	start := time.Date(2026, 1, 2, 3, 4, 5, 1000, time.UTC)
	at := func(seconds int, e events.Event) events.Event {
		e.Time, e.ExecutionID = start.Add(time.Duration(seconds)*time.Second), x
		return e
	}
	runner := func(conversation string, d events.Payload) events.Event {
		return events.Event{ConversationID: conversation, Source: events.FromRunner, Data: d}
	}
	w.emit("default", id,
		at(10, events.Event{Data: events.MessageAccepted{BlockID: "q", Content: "one"}}),
		at(20, events.Event{Data: events.ExecutionStarted{Attempt: 1}}),
		at(30, events.Event{Data: events.SandboxReady{}}),
		at(40, runner(events.MainConversation, events.SubagentSpawned{Conversation: "sub", Parent: events.MainConversation, Name: "helper"})),
		at(50, runner("sub", events.Log{Message: "x"})),
		at(55, runner("sub", events.Error{Code: "BROKEN", Message: strings.Repeat("m", 500)})),
		at(60, runner(events.MainConversation, events.ApprovalRequested{ApprovalID: "apr_1", Kind: "tool", ToolName: "Bash", Title: "Run it"})),
		at(70, events.Event{Data: events.ModelCalled{}}),
		at(80, events.Event{Data: events.ApprovalResolved{ApprovalID: "apr_1", Outcome: "approved"}}),
		at(100, events.Event{Data: events.ExecutionFailed{Code: "AGENT_EXITED", Message: "gone"}}))
	a := g.get("/api/sessions/"+id+"/timeline?buckets=10").want(t, 200)
	for i, want := range []string{
		"session   5 [1 1 1 0 0 0 0 0 1 1]", "sandbox   1 [0 0 0 1 0 0 0 0 0 0]", "model   1 [0 0 0 0 0 0 0 1 0 0]",
		"conversation main  2 [0 0 0 0 1 0 1 0 0 0]", "conversation sub helper 2 [0 0 0 0 0 2 0 0 0 0]",
	} {
		n := fmt.Sprint(i)
		if got := fmt.Sprintf("%s %s %s %.0f %v", a.text("lanes", n, "kind"), a.text("lanes", n, "conversationId"), a.text("lanes", n, "name"), a.number("lanes", n, "total"),
			a.field("lanes", n, "events")); got != want {
			t.Errorf("lane %d is %s, want %s", i, got, want)
		}
	}
	if a.field("lanes", "5") != nil || a.number("tip") != 11 || a.number("bucketMs") != 10_000 {
		t.Errorf("got %s", a)
	}
	for i, want := range []string{
		"3 execution_started execution_started    0", "7 error error BROKEN " + strings.Repeat("m", 200) + "…  0", "8 approval approval_requested  Run it approved 10",
		"11 execution_ended execution_failed AGENT_EXITED gone  0",
	} {
		n := fmt.Sprint(i)
		var ended float64
		if a.field("marks", n, "endedSeq") != nil {
			ended = a.number("marks", n, "endedSeq")
		}
		if got := fmt.Sprintf("%.0f %s %s %s %s %s %.0f", a.number("marks", n, "seq"), a.text("marks", n, "kind"), a.text("marks", n, "type"), a.text("marks", n, "code"),
			a.text("marks", n, "message"), a.text("marks", n, "status"), ended); got != want {
			t.Errorf("mark %d is %s, want %s", i, got, want)
		}
		if a.text("marks", n, "executionId") != x {
			t.Errorf("mark %d: execution %s", i, a.text("marks", n, "executionId"))
		}
	}
	if one := g.get("/api/sessions/"+w.session("default")+"/timeline").want(t, 200); one.number("tip") != 1 || one.number("lanes", "0", "total") != 1 {
		t.Errorf("a session with one event: %s", one)
	}
}

// fillSession adds events up to a seq to a session's read models, as the projector stores them: an execution that
// runs for hours, with results of tools of 20 KB each, a sub-agent's conversation, errors and model requests.
func (w *world) fillSession(session, execution string, first, last int) {
	w.t.Helper()
	w.exec(`INSERT INTO events SELECT 'default', $1::text, n, k.type, format('{"seq":%s,"position":"0-%s","id":"evt_%s","type":"%s","time":"%s","sessionId":"%s","executionId":"%s"%s,"source":"runner","data":%s}',
			n, n, n, k.type, to_char(t, 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), $1::text, $2::text, CASE WHEN c = '' THEN '' ELSE ',"conversationId":"' || c || '"' END, k.data), t, c
		FROM generate_series($3::int, $4::int) n, LATERAL (SELECT (timestamp '2026-01-02 04:00:00' + n * interval '100 ms') AS t,
			CASE WHEN n % 20 = 7 THEN '' WHEN n % 3 = 0 THEN 'sub' ELSE 'main' END AS c) x,
			LATERAL (SELECT CASE WHEN n % 20 = 7 THEN 'model_called' WHEN n % 500 = 8 THEN 'error' WHEN n % 2 = 0 THEN 'block_start' ELSE 'block_complete' END AS type,
			CASE WHEN n % 500 = 8 THEN '{"code":"BROKEN","message":"it broke"}' ELSE '{"block":{"id":"b' || n / 2 || '","kind":"tool_result","output":"' || repeat('o', 300) || '"}}' END AS data) k`,
		session, execution, first, last)
	w.exec(`INSERT INTO blocks SELECT 'default', $1::text, 'b' || n, $2::text, CASE WHEN n % 3 = 0 THEN 'sub' ELSE 'main' END, 'tool_result', 'complete', 0, 2 * n, 2 * n + 1,
			format('{"id":"b%s","kind":"tool_result","status":"complete","timestamp":"2026-01-02T04:00:00Z","conversationId":"%s","output":"%s"}', n, CASE WHEN n % 3 = 0 THEN 'sub' ELSE 'main' END, repeat('o', 20000))
		FROM generate_series($3::int / 2, $4::int / 2 - 1) n`, session, execution, first, last)
	w.exec("UPDATE sessions SET tip = $2 WHERE id = $1", session, last)
}

// TestOpen_RunningSessionOf100000EventsReadsLittle tests that a client that opens a long session reads less than 2 MB
// before it can show the end of it, and continues on the stream.
func TestOpen_RunningSessionOf100000EventsReadsLittle(t *testing.T) {
	t.Parallel()
	const events100k = 100_000
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, x := w.session("default"), newID(t, events.KindExecution)
	w.emit("default", id, events.Event{ExecutionID: x, Data: events.MessageAccepted{BlockID: "q", Content: "one"}},
		events.Event{ExecutionID: x, ConversationID: events.MainConversation, Source: events.FromRunner, Data: events.SubagentSpawned{Conversation: "sub", Parent: events.MainConversation, Name: "helper"}})
	w.fillSession(id, x, 4, events100k)
	path, read := "/api/sessions/"+id, 0
	get := func(path string) answer {
		a := g.get(path).want(t, 200)
		t.Logf("%s: %d bytes", strings.Replace(path, id, "{id}", 1), len(a.body))
		read += len(a.body)
		return a
	}
	get(path)
	blocks := get(path + "/blocks?order=newest")
	timeline := get(path + "/timeline")
	tip := uint32(blocks.number("tip"))
	stream := g.sse(id, tip)
	defer stream.close()
	w.sessions[id].seq = tip // the rows above were stored without the projection
	w.emit("default", id, events.Event{ExecutionID: x, Data: events.Error{Code: "BROKEN", Message: "now"}})
	e, err := stream.next()
	must(t, err)
	read += len(encode(t, e))
	if ids := blocks.blockIDs(); tip != events100k || e.Seq != tip+1 || len(ids) == 0 || ids[0] != "b49999" || timeline.number("tip") != events100k {
		t.Errorf("tip %d, blocks %v, the stream begins with %d", tip, ids, e.Seq)
	}
	var counted float64
	for i := 0; timeline.field("lanes", fmt.Sprint(i)) != nil; i++ {
		counted += timeline.number("lanes", fmt.Sprint(i), "total")
	}
	if counted != events100k || timeline.field("marks", "199") == nil {
		t.Errorf("the timeline counts %v events, with the marks %v", counted, timeline.field("marks", "0"))
	}
	if read >= 2<<20 {
		t.Errorf("a client reads %d bytes, want less than 2 MiB", read)
	}
}
