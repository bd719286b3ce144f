package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/services/gateway"
)

// turn emits a turn with one query, a tool call and an answer, and returns its execution. It adds 6 events to the
// session.
func (w *world) turn(tenant, session, query, answer string) string {
	w.t.Helper()
	x := newID(w.t, events.KindExecution)
	call := events.Block{ID: "call_" + x, Kind: events.KindToolUse, ToolName: "bash", ToolUseID: "tool_" + x, Status: events.StatusPending}
	done := call
	done.Status, done.Input = events.StatusComplete, json.RawMessage(`{"command":"ls"}`)
	for _, d := range []events.Payload{
		events.MessageAccepted{BlockID: "blk_" + x, Content: query}, events.ExecutionDispatched{}, events.BlockStart{Block: call}, events.BlockComplete{Block: done},
		events.BlockComplete{Block: events.Block{ID: "text_" + x, Kind: events.KindAssistantText, Status: events.StatusComplete, Content: answer}},
		events.ExecutionCompleted{Result: answer, DurationMs: uint32(time.Now().UnixMilli() % 1000), Usage: events.Usage{InputTokens: 5}, CostUSD: 0.5},
	} {
		w.emit(tenant, session, events.Event{ExecutionID: x, ConversationID: events.MainConversation, Data: d})
	}
	return x
}

func TestState_BadNumbersNameTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default") // one event
	w.emit("default", id, events.Event{Data: events.SessionIdle{}})
	other := w.session("default")
	conn := g.conn()
	for _, route := range []struct{ path, field string }{
		{"/state?at=%s", "at"}, {"/files?at=%s", "at"}, {"/files/a?at=%s", "at"}, {"/diff?to=2&from=%s", "from"}, {"/diff?from=1&to=%s", "to"},
	} {
		for _, bad := range []string{"0", "-1", "1.5", "x", "", "4294967296", "18446744073709551616", "99999999999999999999999999", "1e3", "0x1"} {
			g.get("/api/sessions/"+id+fmt.Sprintf(route.path, url.QueryEscape(bad))).wantProblem(t, 400, "INVALID_REQUEST", route.field)
		}
		for _, ahead := range []string{"3", "4294967295"} {
			a := g.get("/api/sessions/" + id + fmt.Sprintf(route.path, ahead))
			if route.field == "from" { // from is then after to, too
				a.wantProblem(t, 400, "INVALID_REQUEST", "to")
			} else if a.wantProblem(t, 409, "CURSOR_AHEAD", route.field); a.number("tip") != 2 {
				t.Errorf("%s: %s, want the tip", route.path, a)
			}
		}
	}
	g.get("/api/sessions/"+id+"/diff?from=2&to=1").wantProblem(t, 400, "INVALID_REQUEST", "to")
	g.get("/api/sessions/"+id+"/diff").wantProblem(t, 400, "INVALID_REQUEST", "from")
	g.get("/api/sessions/"+id+"/files?at=1&live=1").wantProblem(t, 400, "INVALID_REQUEST", "at")
	g.get("/api/sessions/"+id+"/files?at=1&at=2").wantProblem(t, 400, "INVALID_REQUEST", "at")
	g.get("/api/sessions/"+id+"/files?at=2").wantProblem(t, 404, "NO_SNAPSHOT", "at")
	g.get("/api/sessions/"+id+"/state?pageSize=201").wantProblem(t, 400, "INVALID_REQUEST", "pageSize")
	for _, token := range []string{"x", "MS8tMS8w=", "LTEvMC8w", "OTk5OTk5OTk5OTk5LzAvMA"} {
		g.get("/api/sessions/"+id+"/state?pageToken="+token).wantProblem(t, 400, "INVALID_REQUEST", "pageToken")
	}
	g.get("/api/sessions/"+id+"/compare").wantProblem(t, 400, "INVALID_REQUEST", "with")
	g.get("/api/sessions/"+id+"/compare?with=x").wantProblem(t, 400, "INVALID_REQUEST", "with")
	g.get("/api/sessions/"+id+"/compare?with="+oldID(t, events.KindSession)).wantProblem(t, 404, "SESSION_NOT_FOUND", "with")
	g.get("/api/sessions/"+id+"/state?at=1&minPosition=0-999999").wantProblem(t, 503, "READ_MODEL_BEHIND", "minPosition")

	// While the read models are being folded again, they may not contain events that the session has.
	w.exec("UPDATE checkpoints SET caught_up = false")
	g.get("/api/sessions/"+id+"/state?at=3").wantProblem(t, 503, "UNAVAILABLE", "")
	g.get("/api/sessions/"+id+"/state?at=2").want(t, 200)
	w.exec("UPDATE checkpoints SET caught_up = true")

	zero, ahead := uint32(0), uint32(1<<32-1)
	_, err := spoolv1.NewSessionsClient(conn).GetSessionState(t.Context(), &spoolv1.GetSessionStateRequest{SessionId: id, At: &zero})
	wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "at")
	_, err = spoolv1.NewSessionsClient(conn).GetSessionState(t.Context(), &spoolv1.GetSessionStateRequest{SessionId: id, At: &ahead})
	wantCode(t, err, codes.OutOfRange, "CURSOR_AHEAD", "at")
	_, err = spoolv1.NewSessionsClient(conn).DiffSession(t.Context(), &spoolv1.DiffSessionRequest{SessionId: id, From: 1})
	wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "to")

	w.emit("default", other, events.Event{Data: events.SessionDeleted{}})
	for _, path := range []string{"/state", "/state?at=1", "/diff?from=1&to=1", "/files?at=1", "/compare?with=" + id} {
		g.get("/api/sessions/"+other+path).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	}
}

func TestState_IsTheStateAfterTheEvent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	first := w.turn("default", id, "one", "first answer")
	second := w.turn("default", id, "two", "second answer")
	path := "/api/sessions/" + id + "/state?at="
	at := g.get(path+"4").want(t, 200) // the tool call is open
	if at.text("executions", "0", "phase") != "queued" || at.text("session", "activeExecutionId") != first || at.text("blocks", "1", "status") != "pending" ||
		at.field("blocks", "1", "input") != nil || at.number("blockCount") != 2 || at.number("executionCount") != 1 || at.text("session", "title") != "one" {
		t.Errorf("at 4: %s", at)
	}
	at = g.get(path+"7").want(t, 200)
	if at.text("executions", "0", "phase") != "completed" || at.text("executions", "0", "result") != "first answer" || at.number("reported", "inputTokens") != 5 || at.number("reported", "costUsd") != 0.5 {
		t.Errorf("at 7: %s", at)
	}
	if at = g.get(path+"1").want(t, 200); at.text("session", "title") != "" || at.number("blockCount") != 0 || at.text("session", "agent") != "default" {
		t.Errorf("at 1: %s", at)
	}
	// The pages belong to one state although the session continues; the token contains the event.
	page := g.get(path+"13&pageSize=2").want(t, 200)
	w.turn("default", id, "three", "third answer")
	var ids []string
	for {
		for i := 0; page.text("blocks", fmt.Sprint(i), "id") != ""; i++ {
			ids = append(ids, page.text("blocks", fmt.Sprint(i), "id"))
		}
		if page.text("nextPageToken") == "" {
			break
		}
		page = g.get("/api/sessions/"+id+"/state?pageSize=2&pageToken="+page.text("nextPageToken")).want(t, 200)
	}
	want := "blk_" + first + " call_" + first + " text_" + first + " blk_" + second + " call_" + second + " text_" + second
	if strings.Join(ids, " ") != want || page.number("seq") != 13 {
		t.Errorf("pages of the state at %v have %v, want %s", page.number("seq"), ids, want)
	}
	token := g.get(path + "13&pageSize=2").text("nextPageToken")
	g.get(path+"12&pageToken="+token).wantProblem(t, 400, "INVALID_REQUEST", "pageToken")
}

// TestSandboxUsage_IsShownForSessionAndExecution tests that the sandbox cost is part of the session and the execution, and of
// their state after an event.
func TestSandboxUsage_IsShownForSessionAndExecution(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	x := newID(t, events.KindExecution)
	emit := func(execution string, d events.Payload) {
		w.emit("default", id, events.Event{ExecutionID: execution, Data: d})
	}
	emit(x, events.MessageAccepted{BlockID: "b", Content: "go"})
	emit("", events.SandboxUsage{DurationMs: 1000, CostUSD: 0.25})
	emit(x, events.SandboxUsage{DurationMs: 500, CostUSD: 0.125})
	w.exec("UPDATE sessions SET sandbox_ms = 1500, sandbox_cost_usd = 0.375 WHERE id = $1", id)
	w.exec("UPDATE executions SET sandbox_ms = 500, sandbox_cost_usd = 0.125 WHERE id = $1", x)
	check := func(a answer, ms, usd float64, path ...string) {
		t.Helper()
		if a.number(append(path[:len(path):len(path)], "sandboxMs")...) != ms || a.number(append(path[:len(path):len(path)], "sandboxCostUsd")...) != usd {
			t.Errorf("%v of %s: want %g ms and $%g", path, a, ms, usd)
		}
	}
	check(g.get("/api/sessions/"+id).want(t, 200), 1500, 0.375)
	check(g.get("/api/sessions").want(t, 200), 1500, 0.375, "sessions", "0")
	check(g.get("/api/executions/"+x).want(t, 200), 500, 0.125)
	check(g.get("/api/executions").want(t, 200), 500, 0.125, "executions", "0")
	for at, want := range map[int][2]float64{2: {}, 3: {1000, 0.25}, 4: {1500, 0.375}} {
		state := g.get("/api/sessions/"+id+"/state?at="+fmt.Sprint(at)).want(t, 200)
		check(state, want[0], want[1], "session")
		if at < 4 {
			check(state, 0, 0, "executions", "0")
		} else {
			check(state, 500, 0.125, "executions", "0")
		}
	}
}

// TestState_ContinuesFromASavedState tests that a fold starts at a saved state, unless the state has another version.
func TestState_ContinuesFromASavedState(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.turn("default", id, "one", "first answer")
	marked := func(seq uint32, agent string, version int) {
		s := history.State{V: history.StateVersion, Seq: seq, Session: history.Session{Status: "open", Agent: agent}, Count: history.Counts{Executions: 1, Blocks: 3}}
		w.exec("INSERT INTO session_states VALUES ('default', $1, $2, $3, $4)", id, int64(seq), version, string(encode(t, s)))
	}
	marked(5, "saved at 5", history.StateVersion)
	marked(6, "of another version", history.StateVersion+1)
	for at, want := range map[int]string{4: "default", 5: "saved at 5", 6: "saved at 5", 7: "saved at 5"} {
		a := g.get(fmt.Sprintf("/api/sessions/%s/state?at=%d", id, at)).want(t, 200)
		if a.text("session", "agent") != want || a.number("seq") != float64(at) || a.text("position") == "" {
			t.Errorf("at %d: %s, want agent %q", at, a, want)
		}
	}
}

func TestFiles_AreThoseOfTheEvent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	at := "/api/sessions/" + id
	one := w.snapshot("default", id, snapshotTime, [2]string{"a", "old\n"}) // event 2
	w.emit("default", id, events.Event{ExecutionID: "exe_1", Data: events.FileModified{Path: "a", Size: 4}})
	w.snapshot("default", id, snapshotTime, [2]string{"a", "new\n"}, [2]string{"b", "x"}) // event 4
	if got := g.get(at+"/files/a?at=3").want(t, 200); string(got.body) != "old\n" {
		t.Errorf("at 3: %s", got)
	}
	if got := g.get(at+"/files/a?at=4").want(t, 200); string(got.body) != "new\n" {
		t.Errorf("at 4: %s", got)
	}
	if got := g.get(at+"/files?at=2").want(t, 200); got.text("snapshot") != one || got.text("files", "0", "path") != "a" || got.text("files", "0", "executionId") != "" || got.field("files", "1") != nil {
		t.Errorf("listing at 2: %s", got)
	}
	g.get(at+"/files?at=1").wantProblem(t, 404, "NO_SNAPSHOT", "at")
	g.get(at+"/files/b?at=3").wantProblem(t, 404, "FILE_NOT_FOUND", "path")
	state := g.get(at+"/state?at=3").want(t, 200)
	if state.number("files", "snapshotSeq") != 2 || state.field("files", "available") != true || state.number("files", "changeCount") != 1 ||
		state.text("files", "changes", "0", "path") != "a" || state.number("files", "changes", "0", "seq") != 3 ||
		state.text("files", "summary") != "The last snapshot is that of event 2; 1 event of a file lies between it and event 3." {
		t.Errorf("state at 3: %s", state)
	}
	if got := g.get(at+"/state?at=1").text("files", "summary"); got != "No snapshot of the workspace had been taken at event 1; 0 events of files lie between the session's beginning and event 1." {
		t.Errorf("summary %q", got)
	}
	// The retention removes the first snapshot.
	must(t, w.bucket().Delete(t.Context(), "default/"+id+"/"+one))
	gone := g.get(at+"/files/a?at=3").wantProblem(t, 410, "SNAPSHOT_GONE", "at")
	if !strings.Contains(gone.text("detail"), "the snapshot of event 2, which was removed") || !strings.Contains(gone.text("detail"), "left is that of event 4") {
		t.Errorf("got %s", gone)
	}
	state = g.get(at+"/state?at=3").want(t, 200)
	if state.field("files", "available") != false || state.number("files", "oldestSeq") != 4 {
		t.Errorf("state at 3: %s", state)
	}
	if d := g.get(at+"/diff?from=3&to=4").want(t, 200); !strings.HasPrefix(d.text("files", "summary"), "The files cannot be compared: ") || d.field("files", "snapshotGone") != true {
		t.Errorf("diff: %s", d)
	}
}

func TestDiff_ShowsWhatChangedBetweenTwoEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	at := "/api/sessions/" + id
	large, largeNow := strings.Repeat("x", 300<<10), strings.Repeat("y", 300<<10)
	w.snapshot("default", id, snapshotTime, [2]string{"bin", "\x00old"}, [2]string{"gone", "g\n"}, [2]string{"large", large}, [2]string{"same", "s"}, [2]string{"text", "one\ntwo\n"})
	x := w.turn("default", id, "one", "first answer")
	w.snapshot("default", id, snapshotTime, [2]string{"bin", "\x00new"}, [2]string{"fresh", "f\n"}, [2]string{"large", largeNow}, [2]string{"@link", "text"}, [2]string{"same", "s"}, [2]string{"text", "one\n2\n"})
	d := g.get(at+"/diff?from=5&to=9").want(t, 200) // from the open tool call to after the second snapshot
	if d.number("blockCount") != 2 || d.text("blocks", "0", "change") != "completed" || d.text("blocks", "0", "block", "id") != "call_"+x ||
		d.text("blocks", "1", "change") != "added" || d.text("blocks", "1", "block", "content") != "first answer" || d.field("blocks", "2") != nil {
		t.Errorf("blocks: %s", d)
	}
	if d.text("statuses", "0", "kind") != "execution" || d.text("statuses", "0", "from") != "queued" || d.text("statuses", "0", "to") != "completed" || d.field("statuses", "1") != nil {
		t.Errorf("statuses: %s", d)
	}
	if d.number("reported", "inputTokens") != 5 || d.number("reported", "costUsd") != 0.5 {
		t.Errorf("usage: %s", d)
	}
	got := []string{}
	for i := 0; d.text("files", "files", fmt.Sprint(i), "path") != ""; i++ {
		f := func(path ...string) string {
			return d.text(append([]string{"files", "files", fmt.Sprint(i)}, path...)...)
		}
		got = append(got, fmt.Sprintf("%s %s %s %q %s %s", f("change"), f("path"), f("omitted"), f("text"), f("from", "sha256"), f("to", "sha256")))
	}
	want := []string{
		fmt.Sprintf("changed bin binary %q %s %s", "", sum("\x00old"), sum("\x00new")),
		fmt.Sprintf("added fresh  %q  ", "--- a/fresh\n+++ b/fresh\n@@ -0,0 +1 @@\n+f\n"),
		fmt.Sprintf("removed gone  %q  ", "--- a/gone\n+++ b/gone\n@@ -1 +0,0 @@\n-g\n"),
		fmt.Sprintf("changed large too_large %q %s %s", "", sum(large), sum(largeNow)),
		fmt.Sprintf("added link mode %q  ", ""),
		fmt.Sprintf("changed text  %q  ", "--- a/text\n+++ b/text\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"),
	}
	if fmt.Sprint(got) != fmt.Sprint(want) || d.number("files", "fileCount") != 6 || d.field("files", "cut") != false {
		t.Errorf("files:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	same := g.get(at+"/diff?from=3&to=3").want(t, 200)
	if same.number("blockCount") != 0 || same.field("statuses", "0") != nil || same.text("files", "summary") != "Both events have the same files, those of the snapshot of event 2." {
		t.Errorf("diff of an event with itself: %s", same)
	}
	if first := g.get(at+"/diff?from=1&to=2").want(t, 200); first.number("files", "fileCount") != 5 || first.text("files", "files", "0", "change") != "added" {
		t.Errorf("from before the first snapshot: %s", first)
	}
}

// TestDiff_IsBounded tests that the files of a diff are limited, and that the diff reports when a limit is reached.
func TestDiff_IsBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	var before, after [][2]string
	for i := range 1100 {
		before, after = append(before, [2]string{fmt.Sprintf("f%04d", i), "a\n"}), append(after, [2]string{fmt.Sprintf("f%04d", i), "b\n"})
	}
	w.snapshot("default", id, snapshotTime, before...)
	w.snapshot("default", id, snapshotTime, after...)
	d := g.get("/api/sessions/"+id+"/diff?from=2&to=3").want(t, 200)
	if d.number("files", "fileCount") != 1100 || d.field("files", "files", "999", "path") != "f0999" || d.field("files", "files", "1000") != nil ||
		d.field("files", "cut") != true || d.text("files", "files", "99", "text") == "" || d.text("files", "files", "100", "omitted") != "cut" {
		t.Errorf("%v files, cut %v, the 101st omitted %q", d.number("files", "fileCount"), d.field("files", "cut"), d.text("files", "files", "100", "omitted"))
	}
	// The diff takes its memory from the bytes in flight of the tenant.
	w.gateway(gateway.Config{MaxTenantBytes: 10 << 20, MaxRequest: 8 << 20}).get("/api/sessions/"+id+"/diff?from=2&to=3").wantProblem(t, 429, "TOO_MUCH_IN_FLIGHT", "")
}

func TestCompare_FindsTheFirstDifference(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	a, b, c := w.session("default"), w.session("default"), w.session("default")
	w.emit("default", b, events.Event{Data: events.SessionIdle{}}) // events before the first message are ignored
	for _, id := range []string{a, b, c} {
		w.turn("default", id, "one", "in "+id)
	}
	w.turn("default", b, "two", "second")
	w.turn("default", c, "one", "another")
	if got := g.get("/api/sessions/"+a+"/compare?with="+a).want(t, 200); got.field("equal") != true || got.number("equalEvents") != 4 {
		t.Errorf("with itself: %s", got)
	}
	got := g.get("/api/sessions/"+a+"/compare?with="+b).want(t, 200)
	if got.field("equal") != false || got.number("equalEvents") != 4 || got.field("event") != nil || got.number("withEvent", "seq") != 9 || got.text("field") != "" {
		t.Errorf("one has more: %s", got)
	}
	got = g.get("/api/sessions/"+b+"/compare?with="+c).want(t, 200)
	if got.field("equal") != false || got.text("field") != "data.content" || got.number("event", "seq") != 9 || got.number("withEvent", "seq") != 8 || got.number("equalEvents") != 4 ||
		got.text("summary") != fmt.Sprintf("Event 9 of %s and event 8 of %s (message_accepted) differ in data.content.", b, c) {
		t.Errorf("another message: %s", got)
	}
	// A fork is compared with the part of its parent after the fork.
	fork := w.session("default")
	w.emit("default", fork, events.Event{Data: events.OpaquePayload{Name: "session_forked", Raw: json.RawMessage(fmt.Sprintf(`{"parent":%q,"asked":7,"effective":7}`, c))}})
	w.turn("default", fork, "one", "another")
	for _, pair := range [][2]string{{c, fork}, {fork, c}} {
		if got := g.get("/api/sessions/"+pair[0]+"/compare?with="+pair[1]).want(t, 200); got.field("equal") != true || got.field("fork") != true || got.number("equalEvents") != 4 {
			t.Errorf("a fork that did the same: %s", got)
		}
	}
}
