package gateway_test

import (
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

func TestWebSocket_JoinsLeavesAndRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	a, b, foreign := w.session("default"), w.session("default"), w.session("other")
	c := g.dial()
	join := func(id string) {
		c.send(fmt.Sprintf(`{"type":"session:join","requestId":"j","sessionId":%q,"after":0}`, id))
	}
	leave := func(id string) { c.send(fmt.Sprintf(`{"type":"session:leave","requestId":"l","sessionId":%q}`, id)) }

	join(a)
	if r := c.want("session:joined"); r.SessionID != a || r.RequestID != "j" || *r.Seq != 1 {
		t.Errorf("got %+v", r)
	}
	if r := c.want("session:event"); r.SessionID != a || !strings.Contains(string(r.Event), `"session_created"`) {
		t.Errorf("got %+v", r)
	}
	join(a)
	c.wantError("ALREADY_JOINED", "sessionId")
	join(b)
	c.want("session:joined")
	c.want("session:event")
	w.emit("default", a, events.Event{Data: events.Log{Message: "a"}})
	if r := c.want("session:event"); r.SessionID != a {
		t.Errorf("got %+v", r)
	}
	leave(a)
	if r := c.want("session:left"); r.SessionID != a || r.RequestID != "l" || *r.Seq != 2 {
		t.Errorf("got %+v", r)
	}
	w.emit("default", a, events.Event{Data: events.Log{Message: "unseen"}})
	w.emit("default", b, events.Event{Data: events.Log{Message: "b"}})
	if r := c.want("session:event"); r.SessionID != b {
		t.Errorf("got %+v", r)
	}
	leave(a)
	c.wantError("NOT_JOINED", "sessionId")
	c.send(fmt.Sprintf(`{"type":"session:join","requestId":"again","sessionId":%q,"after":2}`, a))
	c.want("session:joined")
	if r := c.want("session:event"); !strings.Contains(string(r.Event), "unseen") {
		t.Errorf("got %+v", r)
	}

	join(foreign)
	other := c.wantError("SESSION_NOT_FOUND", "sessionId")
	join(oldID(t, events.KindSession))
	if none := c.wantError("SESSION_NOT_FOUND", "sessionId"); none.Message != other.Message {
		t.Errorf("another tenant's session can be distinguished from a missing one: %q, %q", other.Message, none.Message)
	}
	for _, m := range []struct{ message, field string }{
		{`{"type":"session:delete"}`, "type"},
		{`[]`, "type"},
		{`{}`, "type"},
		{`{"type":"session:join","sessionId":"ses_*"}`, "sessionId"},
		{`{"type":"session:leave","sessionId":"a.b"}`, "sessionId"},
		{`{"type":"session:join","sessionId":5}`, "sessionId"},
		{`{"type":"session:join","session":"x"}`, "type"},
		{`{"type":"session:join","requestId":"` + strings.Repeat("x", 200) + `"}`, "requestId"},
	} {
		c.send(m.message)
		c.wantError("INVALID_REQUEST", m.field)
	}
}

// TestWebSocket_JoinsBeforeTheProjectorHasFolded tests that a new session can be joined before the projector has folded it.
func TestWebSocket_JoinsBeforeTheProjectorHasFolded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := newID(t, events.KindSession)
	log, err := jslog.New(jslog.Config{JetStream: w.js, Partitions: topology.DefaultPartitions})
	must(t, err)
	_, err = log.Append(t.Context(), eventlog.Head{Subject: events.LifeSubject("default", id)}, eventlogtest.Draft(id, "accepted"))
	must(t, err)
	c := g.dial()
	c.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q}`, id))
	w.emit("default", id, events.Event{Data: events.SessionCreated{Options: events.Options{}}})
	c.want("session:joined")
	c.want("session:event")
}

// TestWebSocket_BadFramesEndTheConnection tests that an invalid message ends the connection with a code, and that the server keeps
// running.
func TestWebSocket_BadFramesEndTheConnection(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	for _, f := range []struct {
		name  string
		kind  websocket.MessageType
		frame string
		code  websocket.StatusCode
	}{
		{"10 MB", websocket.MessageText, strings.Repeat("x", 10<<20), websocket.StatusMessageTooBig},
		{"100,000 deep", websocket.MessageText, `{"type":` + strings.Repeat("[", 30_000), websocket.StatusInvalidFramePayloadData},
		{"invalid UTF-8", websocket.MessageText, "{\"type\":\"\xff\"}", websocket.StatusInvalidFramePayloadData},
		{"no JSON", websocket.MessageText, `{"type":`, websocket.StatusInvalidFramePayloadData},
		{"binary", websocket.MessageBinary, `{}`, websocket.StatusUnsupportedData},
	} {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			c := g.dial()
			_ = c.conn.Write(c.ctx, f.kind, []byte(f.frame)) // the server may close the connection before the whole frame was sent
			var err error
			for err == nil {
				_, err = c.receive()
			}
			// A connection that is closed while 10 MB are being sent may be reset before its code arrives.
			if got := websocket.CloseStatus(err); got != f.code && f.name != "10 MB" {
				t.Errorf("closed with %v (%v), want %v", got, err, f.code)
			}
			g.get("/health").want(t, 200)
		})
	}
}

// TestStalledClient_IsDisconnected tests that a client that does not read is disconnected without an effect on the others.
func TestStalledClient_IsDisconnected(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{WriteTimeout: time.Second})
	id := w.session("default")
	stalled, resumes := g.ws(id, 0), g.ws(id, 0)
	raw := rawSSE(t, g, id)
	steady := newWatcher()
	s := g.sse(id, 0)
	defer s.close()
	for range 40 {
		var list []events.Event
		for range 10 {
			list = append(list, events.Event{Data: events.Log{Message: strings.Repeat("x", 60_000)}})
		}
		w.emit("default", id, list...)
		steady.until(t, s, func() bool { return steady.seq == w.tip(id) })
	}
	g.wantMetric(t, `spool_gateway_clients_cut_total{code="SLOW_CLIENT",kind="ws"} 2`)
	g.wantMetric(t, `spool_gateway_clients_cut_total{code="SLOW_CLIENT",kind="sse"} 1`)
	g.wantMetric(t, `spool_gateway_readers 1`)
	w.emit("default", id, events.Event{Data: events.Log{Message: "after"}})
	steady.until(t, s, func() bool { return steady.seq == w.tip(id) })
	// A client that reconnects with its cursor, to any gateway, continues exactly.
	one := newWatcher()
	for {
		e, err := resumes.next()
		if err != nil {
			break
		}
		must(t, one.take(e))
	}
	if one.seq == 0 || one.seq == w.tip(id) {
		t.Fatalf("cut after %d", one.seq)
	}
	again := w.gateway(gateway.Config{}).ws(id, one.seq)
	one.until(t, again, func() bool { return one.seq == w.tip(id) })
	stalled.close()
	_ = raw.Close()
}

// rawSSE requests a stream and does not read it.
func rawSSE(t *testing.T, g *served, id string, query ...string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(g.url, "http://"))
	must(t, err)
	_, err = fmt.Fprintf(conn, "GET /api/sessions/%s/events/stream%s HTTP/1.1\r\nHost: localhost\r\n\r\n", id, strings.Join(query, ""))
	must(t, err)
	return conn
}

// wantMetric waits for a line of /metrics.
func (s *served) wantMetric(t *testing.T, line string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		lines := strings.Split(string(s.get("/metrics").body), "\n")
		if slices.Contains(lines, line) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no line %s in\n%s", line, strings.Join(slices.DeleteFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "spool_gateway_") }), "\n"))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestStop_NotifiesConnectedClients tests that a gateway that stops notifies its connected clients.
func TestStop_NotifiesConnectedClients(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	c, s, r := g.ws(id, 1), g.sse(id, 1), g.rpc(id, 1)
	defer s.close()
	defer r.close()
	w.emit("default", id, events.Event{Data: events.Log{}})
	for _, one := range []stream{c, s, r} {
		_, err := one.next()
		must(t, err)
	}
	go g.stop()
	for _, one := range []stream{s, r} {
		if _, err := one.next(); err == nil || !strings.Contains(err.Error(), "UNAVAILABLE") && !strings.Contains(err.Error(), "Unavailable") {
			t.Errorf("got %v", err)
		}
	}
	var err error
	for err == nil {
		_, err = c.receive()
	}
	if websocket.CloseStatus(err) != websocket.StatusGoingAway {
		t.Errorf("got %v", err)
	}
	g.stop()
}

// TestShutdownGrace_BoundsRunningRequests tests that running requests may finish within the shutdown grace, but not later.
func TestShutdownGrace_BoundsRunningRequests(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for grace, finishes := range map[time.Duration]bool{time.Minute: true, 200 * time.Millisecond: false} {
		t.Run(grace.String(), func(t *testing.T) {
			t.Parallel()
			g := w.gateway(gateway.Config{ShutdownGrace: grace})
			id := w.session("default")
			status := make(chan int, 1)
			go func() {
				resp, err := client.Get(g.url + "/api/sessions/" + id + "?minPosition=0-999999")
				if err != nil {
					status <- 0
					return
				}
				_ = resp.Body.Close()
				status <- resp.StatusCode
			}()
			g.wantMetric(t, "spool_gateway_http_requests_in_flight 2") // this request and the other one
			began := time.Now()
			g.stop()
			if took := time.Since(began); (took > 2*time.Second) != finishes {
				t.Errorf("the gateway stopped after %s", took)
			}
			if got := <-status; (got == 503) != finishes {
				t.Errorf("the request was answered %d", got)
			}
		})
	}
}

// TestSSE_CommentsKeepAnIdleStreamOpen tests that comments keep an idle stream open.
func TestSSE_CommentsKeepAnIdleStreamOpen(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.gateway(gateway.Config{}).sse(w.session("default"), 1)
	defer s.close()
	began := time.Now()
	for line := ""; !strings.HasPrefix(line, ":"); {
		var err error
		line, err = s.lines.ReadString('\n')
		must(t, err)
	}
	if took := time.Since(began); took < 14*time.Second || took > 20*time.Second {
		t.Errorf("a comment came after %s", took)
	}
}

// TestWebSocket_UsesLittleMemoryWhenIdle tests that an idle WebSocket with a joined session uses less than 40 KB, excluding the
// client.
func TestWebSocket_UsesLittleMemoryWhenIdle(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	const clients = 300
	ids := make([]string, clients)
	for i := range ids {
		ids[i] = w.session("default")
	}
	consumers := func() int {
		t.Helper()
		info, err := w.js.AccountInfo(t.Context())
		must(t, err)
		return info.Consumers
	}
	var conns []net.Conn
	measure := func() uint64 {
		for range 6 { // each collection halves stacks that are mostly unused
			runtime.GC()
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	_ = g.dial() // warms up what is allocated once
	before, consumersBefore := measure(), consumers()
	for _, id := range ids {
		conns = append(conns, g.rawWebSocket(t, id))
	}
	g.wantMetric(t, fmt.Sprintf("spool_gateway_readers %d", clients))
	each := (measure() - before) / clients
	if n := consumers(); n != consumersBefore {
		t.Errorf("%d clients changed the number of JetStream consumers from %d to %d", clients, consumersBefore, n)
	}
	t.Logf("%d bytes for each, of gateway and test together", each)
	if each > 40<<10 {
		t.Errorf("an idle WebSocket costs %d bytes", each)
	}
	for _, c := range conns {
		_ = c.Close()
	}
	g.wantMetric(t, "spool_gateway_feeds 0")
}

// rawWebSocket joins a session with minimal memory of its own.
func (s *served) rawWebSocket(t *testing.T, id string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	must(t, err)
	_, err = fmt.Fprintf(conn, "GET /api/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
	must(t, err)
	var b [1]byte
	for head := ""; !strings.HasSuffix(head, "\r\n\r\n"); head += string(b[:]) {
		_, err := conn.Read(b[:])
		must(t, err)
	}
	body := fmt.Sprintf(`{"type":"session:join","sessionId":%q,"after":1}`, id)
	_, err = conn.Write(append([]byte{0x81, 0x80 | byte(len(body)), 0, 0, 0, 0}, body...))
	must(t, err)
	return conn
}
