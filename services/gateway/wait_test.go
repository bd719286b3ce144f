package gateway_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// longWait is a wait that a test never waits to its end.
const longWait = "?wait=10m"

// post sends a request in the background.
func (s *served) post(path, body string, opts ...option) <-chan answer {
	answered := make(chan answer, 1)
	go func() { answered <- s.do("POST", path, body, opts...) }()
	return answered
}

// receive returns the answer of a request that was sent in the background.
func receive(t *testing.T, answered <-chan answer) answer {
	t.Helper()
	select {
	case a := <-answered:
		return a
	case <-time.After(patience):
		t.Fatal("the request was not answered")
		return answer{}
	}
}

// wantReaders waits until n streams or requests follow sessions.
func (s *served) wantReaders(t *testing.T, n int) {
	t.Helper()
	s.wantMetric(t, fmt.Sprintf("spool_gateway_readers %d", n))
}

// lastCommand returns the last command that was sent, after it was sent.
func (s *sessions) lastCommand(t *testing.T) command.Command {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if list := s.commands(t); len(list) > 0 {
			return list[len(list)-1]
		}
		if time.Now().After(deadline) {
			t.Fatal("no command was sent")
		}
	}
}

// finish ends an execution and returns the seq of its end.
func (w *world) finish(session, execution string, end events.Payload) uint32 {
	w.t.Helper()
	w.emit("default", session, events.Event{ExecutionID: execution, ConversationID: events.MainConversation, Data: end})
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sessions[session].seq
}

// wantEnded fails the test unless the response has the ended execution as GET returns it, and the cursor.
func (a answer) wantEnded(t *testing.T, g *served, phase string, cursor uint32) {
	t.Helper()
	a.want(t, http.StatusOK)
	stored := g.get("/api/executions/"+a.text("executionId")).want(t, http.StatusOK)
	if got, want := fmt.Sprint(a.field("execution")), fmt.Sprint(stored.field()); got != want {
		t.Errorf("the execution is %s, want %s", got, want)
	}
	if a.text("execution", "phase") != phase || a.number("cursor") != float64(cursor) || a.text("position") == "" || a.text("sessionId") == "" {
		t.Errorf("got %s, want phase %s and cursor %d", a, phase, cursor)
	}
}

// TestWait_AnswersWhenTheExecutionEnds tests that a request with wait is answered with the execution, however it ends, and
// that the end of another execution does not answer it.
func TestWait_AnswersWhenTheExecutionEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	s := w.serveCommands()
	for _, c := range []struct {
		phase string
		end   events.Payload
		field string
		want  string
	}{
		{"completed", events.ExecutionCompleted{Result: "done", DurationMs: 5}, "result", "done"},
		{"failed", events.ExecutionFailed{Code: "MODEL_ERROR", Message: "no model"}, "code", "MODEL_ERROR"},
		{"cancelled", events.ExecutionCancelled{Reason: "interrupted"}, "reason", "interrupted"},
		{"cancelled", events.ExecutionWithdrawn{Reason: "cancelled"}, "reason", "cancelled"},
	} {
		for _, path := range []string{"/api/executions", "/api/sessions/{id}/messages"} {
			t.Run(string(c.end.EventType())+" "+path, func(t *testing.T) {
				path := strings.Replace(path, "{id}", w.session("default"), 1)
				answered := g.post(path+longWait, `{"content":"x"}`)
				g.wantReaders(t, 1)
				sent := s.lastCommand(t)
				earlier := newID(t, events.KindExecution)
				w.emit("default", sent.SessionID, events.Event{ExecutionID: earlier, Data: events.MessageAccepted{BlockID: events.DeriveID(events.KindBlock, earlier, "m"), Content: "y"}})
				w.finish(sent.SessionID, earlier, events.ExecutionCompleted{})
				w.emit("default", sent.SessionID, events.Event{ExecutionID: sent.ExecutionID, Data: events.ExecutionStarted{Attempt: 1}})
				cursor := w.finish(sent.SessionID, sent.ExecutionID, c.end)
				w.emit("default", sent.SessionID, events.Event{Data: events.Log{Message: "afterwards"}})
				a := receive(t, answered)
				a.wantEnded(t, g, c.phase, cursor)
				if a.text("execution", c.field) != c.want {
					t.Errorf("%s of the execution is %q, want %q", c.field, a.text("execution", c.field), c.want)
				}
				g.wantReaders(t, 0)
			})
		}
	}
}

// TestWait_WithoutItNothingChanges tests that a request without wait, or with a wait of 0, is answered as before.
func TestWait_WithoutItNothingChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{MaxTenantStreams: 1})
	w.serveCommands()
	defer g.sse(w.session("default"), 1).close() // uses the only stream
	for _, query := range []string{"", "?wait=0", "?wait=0s"} {
		a := g.do("POST", "/api/executions"+query, `{"content":"x"}`).want(t, http.StatusAccepted)
		want := fmt.Sprintf(`{"sessionId":%q,"executionId":%q,"position":%q}`, a.text("sessionId"), a.text("executionId"), a.text("position"))
		if strings.TrimSpace(string(a.body)) != want {
			t.Errorf("%q: got %s, want %s", query, a.body, want)
		}
	}
}

// TestWait_TimeUp tests the answer when the time is up, and that a client which follows the session after its cursor
// receives the end.
func TestWait_TimeUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	w.serveCommands()
	a := g.do("POST", "/api/executions?wait=300ms", `{"content":"x"}`).want(t, http.StatusAccepted)
	if a.text("execution", "phase") != "queued" || a.text("execution", "executionId") != a.text("executionId") || a.number("cursor") != 2 {
		t.Errorf("got %s", a)
	}
	w.finish(a.text("sessionId"), a.text("executionId"), events.ExecutionCompleted{Result: "late"})
	one, stream := newWatcher(), g.sse(a.text("sessionId"), uint32(a.number("cursor")))
	defer stream.close()
	one.seq = uint32(a.number("cursor"))
	one.until(t, stream, func() bool { return one.seq == 3 })
}

// TestWait_RepeatedRequest tests that a repeat with the same Idempotency-Key is answered at once if the execution has
// ended, whether the first request waited or not, and that two requests can wait for one execution.
func TestWait_RepeatedRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g, other := w.gateway(gateway.Config{}), w.gateway(gateway.Config{})
	s := w.serveCommands()
	const body = `{"content":"x"}`
	first := g.do("POST", "/api/executions", body, header("Idempotency-Key", "k")).want(t, http.StatusAccepted)
	one := g.post("/api/executions"+longWait, body, header("Idempotency-Key", "k"))
	two := other.post("/api/executions?wait=9m", body, header("Idempotency-Key", "k"))
	g.wantReaders(t, 1)
	other.wantReaders(t, 1)
	cursor := w.finish(first.text("sessionId"), first.text("executionId"), events.ExecutionCompleted{Result: "done"})
	receive(t, one).wantEnded(t, g, "completed", cursor)
	receive(t, two).wantEnded(t, other, "completed", cursor)

	w.emit("default", first.text("sessionId"), events.Event{Data: events.Log{Message: "afterwards"}})
	g.do("POST", "/api/executions"+longWait, body, header("Idempotency-Key", "k")).wantEnded(t, g, "completed", cursor)
	again := g.do("POST", "/api/executions", body, header("Idempotency-Key", "k")).want(t, http.StatusAccepted)
	if string(again.body) != string(first.body) {
		t.Errorf("a repeat without wait is answered %s, the first request %s", again, first)
	}
	if n := len(s.commands(t)); n != 1 {
		t.Errorf("%d commands were sent, want 1", n)
	}
}

// TestWait_RefusesInvalidValues tests that an invalid wait is refused by its name, before anything is done.
func TestWait_RefusesInvalidValues(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	s := w.serveCommands()
	id := w.session("default")
	for name, c := range map[string]struct{ query, body string }{
		"a number without a unit": {"?wait=30", `{"content":"x"}`},
		"no value":                {"?wait=", `{"content":"x"}`},
		"not a duration":          {"?wait=soon", `{"content":"x"}`},
		"negative":                {"?wait=-1s", `{"content":"x"}`},
		"above the maximum":       {"?wait=10m1ms", `{"content":"x"}`},
		"more than int64 holds":   {"?wait=9999999999999h", `{"content":"x"}`},
		"given twice":             {"?wait=1s&wait=2s", `{"content":"x"}`},
		"not UTF-8":               {"?wait=%ff", `{"content":"x"}`},
		"in the body":             {"", `{"content":"x","wait":"30s"}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, path := range []string{"/api/executions", "/api/sessions/" + id + "/messages"} {
				g.do("POST", path+c.query, c.body).wantProblem(t, http.StatusBadRequest, "INVALID_REQUEST", "wait")
			}
		})
	}
	t.Run("a route that does not wait", func(t *testing.T) {
		t.Parallel()
		g.do("POST", "/api/sessions?wait=1s", `{}`).wantProblem(t, http.StatusBadRequest, "INVALID_REQUEST", "wait")
		g.do("POST", "/api/executions?content=x", `{}`).wantProblem(t, http.StatusBadRequest, "INVALID_REQUEST", "content")
	})
	t.Run("gRPC", func(t *testing.T) {
		t.Parallel()
		conn := g.conn()
		for _, wait := range []string{"30", "-1s", "11m"} {
			_, err := spoolv1.NewExecutionsClient(conn).StartExecution(t.Context(), &spoolv1.StartExecutionRequest{Content: "x", Wait: wait})
			wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "wait")
			_, err = spoolv1.NewSessionsClient(conn).PostMessage(t.Context(), &spoolv1.PostMessageRequest{SessionId: id, Content: "x", Wait: wait})
			wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "wait")
		}
	})
	t.Cleanup(func() {
		if list := s.commands(t); len(list) > 0 {
			t.Errorf("commands were sent: %+v", list)
		}
	})
}

// TestWait_OverGRPC tests both methods over gRPC: the end of an execution, the time that is up, and a call that its client
// cancels.
func TestWait_OverGRPC(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	s := w.serveCommands()
	conn := g.conn()
	executions, messages := spoolv1.NewExecutionsClient(conn), spoolv1.NewSessionsClient(conn)
	started := make(chan *spoolv1.StartExecutionResponse, 1)
	go func() {
		r, err := executions.StartExecution(t.Context(), &spoolv1.StartExecutionRequest{Content: "x", Wait: "10m"})
		if err != nil {
			t.Error(err)
		}
		started <- r
	}()
	g.wantReaders(t, 1)
	sent := s.lastCommand(t)
	cursor := w.finish(sent.SessionID, sent.ExecutionID, events.ExecutionCompleted{Result: "done"})
	if r := <-started; r.GetExecution().GetResult() != "done" || r.GetCursor() != cursor || r.GetExecutionId() != sent.ExecutionID {
		t.Errorf("got %v", r)
	}
	r, err := messages.PostMessage(t.Context(), &spoolv1.PostMessageRequest{SessionId: sent.SessionID, Content: "x", Wait: "100ms"})
	must(t, err)
	if r.GetExecution().GetPhase() != "queued" || r.Cursor == nil || r.GetCursor() != cursor+1 {
		t.Errorf("got %v", r)
	}

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := messages.PostMessage(ctx, &spoolv1.PostMessageRequest{SessionId: sent.SessionID, Content: "x", Wait: "10m"})
		ended <- err
	}()
	g.wantReaders(t, 1)
	cancel()
	if err := <-ended; err == nil {
		t.Error("the cancelled call succeeded")
	}
	g.wantReaders(t, 0)
}

// TestWait_EndsWithItsClient tests that the wait of a client that disconnects ends, while the execution continues.
func TestWait_EndsWithItsClient(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	s := w.serveCommands()
	c := dialFrom(t, "127.0.0.1", g.url)
	_, err := fmt.Fprintf(c, "POST /api/executions%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n{\"content\":\"x\"}", longWait)
	must(t, err)
	g.wantReaders(t, 1)
	g.wantMetric(t, `spool_gateway_streams{kind="wait"} 1`)
	must(t, c.Close())
	g.wantReaders(t, 0)
	g.wantMetric(t, `spool_gateway_streams{kind="wait"} 0`)
	g.get("/api/executions/"+s.lastCommand(t).ExecutionID).want(t, http.StatusOK)
}

// TestWait_EndsWithTheGateway tests that a gateway that stops answers waiting requests at once with what it knows, also those
// whose command is not in the read models yet.
func TestWait_EndsWithTheGateway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{ShutdownGrace: time.Hour})
	s := w.serveCommands()
	followed := g.post("/api/executions"+longWait, `{"content":"x"}`)
	g.wantReaders(t, 1)
	ahead := command.Answer{SessionID: w.session("default"), ExecutionID: newID(t, events.KindExecution), Position: "0-5000"}
	s.mu.Lock()
	s.answer = &ahead
	s.mu.Unlock()
	behind := g.post("/api/executions"+longWait, `{"content":"y"}`)
	g.wantMetric(t, `spool_gateway_streams{kind="wait"} 2`)
	g.wantMetric(t, `spool_gateway_commands_total{outcome="ok",type="start_execution"} 2`)
	g.stop()
	if a := receive(t, followed).want(t, http.StatusAccepted); a.text("execution", "phase") != "queued" || a.number("cursor") != 2 {
		t.Errorf("got %s", a)
	}
	if a := receive(t, behind).want(t, http.StatusAccepted); a.text("executionId") != ahead.ExecutionID || a.field("execution") != nil || a.field("cursor") == nil {
		t.Errorf("got %s", a)
	}
}

// TestWait_ReadModelsBehind tests that a wait finds the end of its execution when the read models are behind, when an
// announcement is lost, and when it comes before the rows.
func TestWait_ReadModelsBehind(t *testing.T) {
	t.Parallel()
	accept := func(execution string) events.Event {
		return events.Event{ExecutionID: execution, Data: events.MessageAccepted{BlockID: events.DeriveID(events.KindBlock, execution, "message"), Content: "x"}}
	}
	t.Run("the command is not in the read models", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		g := w.gateway(gateway.Config{})
		s := w.serveCommands()
		created := events.Event{Data: events.SessionCreated{Agent: "default", AgentVersion: "1", Architecture: "spool", Provider: "local"}}
		session, execution := newID(t, events.KindSession), newID(t, events.KindExecution)
		s.answer = &command.Answer{SessionID: session, ExecutionID: execution, Position: "0-1"}
		a := g.do("POST", "/api/executions?wait=50ms", `{"content":"x"}`).want(t, http.StatusAccepted)
		if a.field("execution") != nil || a.field("cursor") == nil || a.number("cursor") != 0 {
			t.Errorf("got %s", a)
		}
		answered := g.post("/api/executions"+longWait, `{"content":"x"}`)
		g.wantMetric(t, `spool_gateway_commands_total{outcome="ok",type="start_execution"} 2`)
		w.emit("default", session, created, accept(execution))
		g.wantReaders(t, 1)
		cursor := w.finish(session, execution, events.ExecutionCompleted{Result: "done"})
		receive(t, answered).wantEnded(t, g, "completed", cursor)
	})
	t.Run("the command and the end are folded at once", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		g := w.gateway(gateway.Config{})
		s := w.serveCommands()
		session, execution := w.session("default"), newID(t, events.KindExecution)
		s.answer = &command.Answer{SessionID: session, ExecutionID: execution, Position: "0-2"}
		answered := g.post("/api/sessions/"+session+"/messages"+longWait, `{"content":"x"}`)
		g.wantMetric(t, `spool_gateway_commands_total{outcome="ok",type="post_message"} 1`)
		w.emit("default", session, accept(execution), events.Event{ExecutionID: execution, Data: events.ExecutionCompleted{}})
		receive(t, answered).wantEnded(t, g, "completed", 3)
	})
	t.Run("the announcement is lost", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		g := w.gateway(gateway.Config{})
		s := w.serveCommands()
		answered := g.post("/api/executions"+longWait, `{"content":"x"}`)
		g.wantReaders(t, 1)
		sent := s.lastCommand(t)
		w.mu.Lock()
		w.unannounced = true
		w.mu.Unlock()
		cursor := w.finish(sent.SessionID, sent.ExecutionID, events.ExecutionCompleted{})
		receive(t, answered).wantEnded(t, g, "completed", cursor)
	})
	t.Run("the announcement comes before the rows", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		g := w.gateway(gateway.Config{})
		s := w.serveCommands()
		answered := g.post("/api/executions"+longWait, `{"content":"x"}`)
		g.wantReaders(t, 1)
		sent := s.lastCommand(t)
		stream := g.sse(sent.SessionID, 2)
		defer stream.close()
		w.emit("default", sent.SessionID, events.Event{ExecutionID: sent.ExecutionID, Data: events.ExecutionStarted{Attempt: 1}})
		_, err := stream.next() // now the gateway needs no row to take the next event from its announcement
		must(t, err)
		end := events.Event{ID: newID(t, events.KindEvent), ExecutionID: sent.ExecutionID, Source: events.FromServer, Time: time.Now(), Data: events.ExecutionCompleted{}}
		wire, err := end.ToWire(sent.SessionID, 4, "0-9")
		must(t, err)
		w.announce("default", readmodel.LiveMessage{Session: sent.SessionID, Tip: 4, Events: []events.WireEvent{wire}})
		g.wantReaders(t, 1) // the wait has found that the rows are missing
		w.mu.Lock()
		w.unannounced = true
		w.mu.Unlock()
		cursor := w.finish(sent.SessionID, sent.ExecutionID, events.ExecutionCompleted{})
		receive(t, answered).wantEnded(t, g, "completed", cursor)
	})
}

// TestWait_SurvivesAPostgresOutage tests that a wait whose execution ends while Postgres is not available is answered when
// Postgres is back, and that a wait whose time is up meanwhile is answered with a cursor before the end.
func TestWait_SurvivesAPostgresOutage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	l := newLink(t, w.url)
	nc, err := w.nats.ConnectAs(topology.UserGateway)
	must(t, err)
	t.Cleanup(nc.Close)
	g := w.gatewayOn(gateway.Config{}, nc, w.openPool(l.url))
	id := w.session("default")
	short := g.post("/api/sessions/"+id+"/messages?wait=5s", `{"content":"x"}`, header("Idempotency-Key", "k"))
	long := g.post("/api/sessions/"+id+"/messages"+longWait, `{"content":"x"}`, header("Idempotency-Key", "k"))
	g.wantReaders(t, 2)
	l.set(false)
	sent := s.lastCommand(t)
	cursor := w.finish(id, sent.ExecutionID, events.ExecutionCompleted{Result: "done"})
	if a := receive(t, short).want(t, http.StatusAccepted); a.field("cursor") == nil || a.number("cursor") >= float64(cursor) {
		t.Errorf("got %s, want a cursor before the end at %d", a, cursor)
	}
	l.set(true)
	receive(t, long).wantEnded(t, g, "completed", cursor)
}

// TestWait_CountsAsAStream tests that waiting requests count against the tenant's streams, over REST and gRPC, and that a
// refused request has no effect.
func TestWait_CountsAsAStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantStreams: 2})
	one, other := g.withNewKey(root, "one"), g.withNewKey(root, "other")
	id := w.session("one")
	defer one.sse(id, 1).close()
	answered := one.post("/api/sessions/"+id+"/messages"+longWait, `{"content":"x"}`)
	g.wantStreams(root, 2)
	admin := g.withKey(root)
	admin.wantReaders(t, 2)
	sent := len(s.commands(t))
	one.do("POST", "/api/executions?wait=1s", `{"content":"x"}`).wantProblem(t, http.StatusTooManyRequests, "TOO_MANY_STREAMS", "").wantRetryAfter(t)
	_, err := spoolv1.NewExecutionsClient(one.conn()).StartExecution(one.context(t.Context()), &spoolv1.StartExecutionRequest{Content: "x", Wait: "1s"})
	wantCode(t, err, codes.ResourceExhausted, "TOO_MANY_STREAMS", "")
	if n := len(s.commands(t)); n != sent {
		t.Errorf("%d commands were sent for refused requests", n-sent)
	}
	other.do("POST", "/api/executions?wait=1ms", `{"content":"x"}`).want(t, http.StatusAccepted)
	one.do("POST", "/api/executions", `{"content":"x"}`).want(t, http.StatusAccepted)
	w.emit("one", id, events.Event{ExecutionID: s.commands(t)[sent-1].ExecutionID, Data: events.ExecutionCompleted{}})
	receive(t, answered).want(t, http.StatusOK)
	one.do("POST", "/api/executions?wait=1ms", `{"content":"x"}`).want(t, http.StatusAccepted)
}

// TestWait_EndsWithItsKeyOrSession tests that a wait ends when its API key is revoked, and when its session is deleted.
func TestWait_EndsWithItsKeyOrSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	admin := g.withKey(root)
	made := admin.do("POST", "/api/keys", `{"name":"a","tenant":"acme"}`).want(t, http.StatusCreated)
	mine, id := g.withKey(made.text("key")), w.session("acme")
	answered := mine.post("/api/sessions/"+id+"/messages"+longWait, `{"content":"x"}`)
	admin.wantReaders(t, 1)
	admin.do("DELETE", "/api/keys/"+made.text("keyId")+"?tenant=acme", "").want(t, http.StatusOK)
	receive(t, answered).wantProblem(t, http.StatusUnauthorized, "UNAUTHENTICATED", "Authorization")

	other := g.withNewKey(root, "acme")
	answered = other.post("/api/sessions/"+id+"/messages"+longWait, `{"content":"x"}`)
	admin.wantReaders(t, 1)
	other.do("DELETE", "/api/sessions/"+id, "").want(t, http.StatusOK)
	receive(t, answered).wantProblem(t, http.StatusNotFound, "SESSION_NOT_FOUND", "sessionId")
}
