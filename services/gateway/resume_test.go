package gateway_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// transports are the ways to follow a session.
var transports = []struct {
	name string
	join func(*served, string, uint32) stream
}{
	{"WebSocket", func(s *served, id string, after uint32) stream { return s.ws(id, after) }},
	{"SSE", func(s *served, id string, after uint32) stream { return s.sse(id, after) }},
	{"gRPC", func(s *served, id string, after uint32) stream { return s.rpc(id, after) }},
}

// TestStream_ResumesAfterEveryEvent tests that a client that is disconnected after every event and text delta, and reconnects
// to the other gateway each time, ends with the same state as a client that was never disconnected.
func TestStream_ResumesAfterEveryEvent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	gateways := []*served{w.gateway(gateway.Config{}), w.gateway(gateway.Config{})}
	for _, tr := range transports {
		t.Run(tr.name, func(t *testing.T) {
			t.Parallel()
			id := w.session("default")
			steady, cut := newWatcher(), newWatcher()
			whole, parts := tr.join(gateways[0], id, 0), tr.join(gateways[1], id, 0)
			defer whole.close()
			total := map[string]int{}
			for i, p := range play(t) {
				w.play("default", id, []turn{p})
				total[p.block] += len(p.text)
				for who, s := range map[*watcher]stream{steady: whole, cut: parts} {
					if p.events == nil {
						who.wantText(t, s, p.block, total[p.block])
						continue
					}
					who.until(t, s, func() bool { return who.seq == w.tip(id) })
				}
				parts.close()
				cut.reconnected()
				parts = tr.join(gateways[i%2], id, cut.seq)
			}
			parts.close()
			requireSameState(t, w, id, gateways[0], steady, cut)
		})
	}
}

// TestStream_ResumesAtRandomTimes tests that a client that joins and is disconnected at random times during a run ends with
// the same state as a client that was never disconnected.
func TestStream_ResumesAtRandomTimes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	gateways := []*served{w.gateway(gateway.Config{}), w.gateway(gateway.Config{})}
	for seed := range uint64(9) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, 1))
			id := w.session("default")
			list := append(play(t), play(t)...)
			played := make(chan struct{})
			go func() {
				defer close(played)
				w.play("default", id, list)
			}()
			end := uint32(1)
			for _, p := range list {
				end += uint32(len(p.events))
			}
			one := newWatcher()
			for one.seq < end {
				s := transports[random.IntN(len(transports))].join(gateways[random.IntN(2)], id, one.seq)
				one.reconnected()
				frames := random.IntN(12)
				one.until(t, s, func() bool { frames--; return frames < 0 || one.seq == end })
				s.close()
			}
			<-played
			fresh := newWatcher()
			s := gateways[0].sse(id, 0)
			defer s.close()
			fresh.until(t, s, func() bool { return fresh.seq == end })
			requireSameState(t, w, id, gateways[1], fresh, one)
		})
	}
}

// tip returns the seq of a session's last event.
func (w *world) tip(session string) uint32 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sessions[session].seq
}

// requireSameState compares the states of two clients with each other and with the blocks that REST returns.
func requireSameState(t *testing.T, w *world, id string, g *served, a, b *watcher) {
	t.Helper()
	if a.view.String() != b.view.String() || a.seq != b.seq || !slices.Equal(a.list, b.list) {
		t.Errorf("one client has, up to %d:\n%s\nthe other, up to %d:\n%s", a.seq, a.view, b.seq, b.view)
	}
	if a.seq != w.tip(id) || len(a.list) != int(a.seq) {
		t.Errorf("got %d events up to seq %d of %d", len(a.list), a.seq, w.tip(id))
	}
	var got struct{ Blocks []json.RawMessage }
	must(t, json.Unmarshal(g.get("/api/sessions/"+id+"/blocks").want(t, 200).body, &got))
	var want []string
	for _, block := range a.view.Blocks() {
		want = append(want, string(encode(t, block)))
	}
	var have []string
	for _, block := range got.Blocks {
		have = append(have, string(block))
	}
	if !slices.Equal(have, want) {
		t.Errorf("REST has the blocks\n%s\nthe stream gave\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
}

// TestStream_BytesAreTheStoredOnes tests that an event has the same bytes over REST, SSE and WebSocket as in the read
// models.
func TestStream_BytesAreTheStoredOnes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	s, c := g.sse(id, 1), g.ws(id, 1)
	defer s.close()
	w.emit("default", id, events.Event{ExecutionID: newID(t, events.KindExecution), ConversationID: "main", Data: events.OpaquePayload{
		Name: "from_a_newer_version", Raw: json.RawMessage(`{"n":1152921504606846976,"f":1.50,"t":"<&>\u0000 é","a":{"b":[[]]},"a":1}`)}})
	var stored string
	must(t, w.pool.QueryRow(t.Context(), "SELECT event FROM events WHERE session = $1 AND seq = 2", id).Scan(&stored))
	if got := c.want("session:event"); string(got.Event) != stored {
		t.Errorf("WebSocket: %s\nstored: %s", got.Event, stored)
	}
	for line := ""; !strings.HasPrefix(line, "data: "); {
		var err error
		line, err = s.lines.ReadString('\n')
		must(t, err)
		if strings.HasPrefix(line, "data: ") && strings.TrimSpace(strings.TrimPrefix(line, "data: ")) != stored {
			t.Errorf("SSE: %s\nstored: %s", line, stored)
		}
	}
	if page := g.get("/api/sessions/"+id+"/events?after=1").want(t, 200); string(page.body) != `{"events":[`+stored+`],"tip":2,"next":2}`+"\n" {
		t.Errorf("REST: %s\nstored: %s", page, stored)
	}
}

// TestStream_RecoversFromAnUnreliableLIVE tests that duplicate, late and missing messages of LIVE are corrected from Postgres.
func TestStream_RecoversFromAnUnreliableLIVE(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	one := newWatcher()
	s := g.ws(id, 0)
	emitEvent := func(unannounced bool) {
		w.mu.Lock()
		w.unannounced = unannounced
		w.mu.Unlock()
		w.emit("default", id, events.Event{Data: events.Log{Message: "x"}})
	}
	all := func() bool { return one.seq == w.tip(id) }
	emitEvent(false)
	one.until(t, s, all)

	t.Run("repeated", func(t *testing.T) {
		again := w.announced(id, 1, 2)
		w.announce("default", again)
		w.announce("default", again)
		emitEvent(false)
		one.until(t, s, all)
	})
	t.Run("lost, and another follows", func(t *testing.T) {
		emitEvent(true)
		emitEvent(true)
		emitEvent(false)
		began := time.Now()
		one.until(t, s, all)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the hole was filled after %s", took)
		}
	})
	t.Run("announced by its seq only", func(t *testing.T) {
		emitEvent(true)
		w.announce("default", readmodel.LiveMessage{Session: id, Tip: w.tip(id)})
		began := time.Now()
		one.until(t, s, all)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the event was read after %s", took)
		}
	})
	t.Run("a message that is not JSON", func(t *testing.T) {
		emitEvent(true)
		must(t, w.projector.Publish(events.LiveSubject("default", id), []byte(`{"tip":`)))
		one.until(t, s, all)
	})
	t.Run("lost, and a projector starts", func(t *testing.T) {
		emitEvent(true)
		must(t, w.projector.Publish(topology.ProjectorStartSubject, encode(t, readmodel.ProjectorStarted{Group: events.Partitioning(topology.DefaultPartitions).GroupOfID(id)})))
		began := time.Now()
		one.until(t, s, all)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the comparison ran after %s", took)
		}
	})
	t.Run("lost, and no other follows", func(t *testing.T) {
		emitEvent(true)
		one.until(t, s, all)
	})
	t.Run("text lost", func(t *testing.T) {
		w.mu.Lock()
		w.unannounced = false
		w.mu.Unlock()
		w.emit("default", id, events.Event{ConversationID: "main", Data: events.BlockStart{Block: events.Block{ID: "b", Kind: events.KindAssistantText}}})
		w.emitText("default", id, "b", "one ")
		w.mu.Lock()
		w.unannounced = true
		w.mu.Unlock()
		w.emitText("default", id, "b", "two ")
		one.wantText(t, s, "b", len("one two "))
	})
}

// TestStream_LosesNothingWhileLIVEFails tests that clients of all transports receive every event and all text once and in
// order while announcements are dropped, the gateway's connection to NATS is cut, the gateway receives more
// announcements than it can queue, and NATS restarts.
func TestStream_LosesNothingWhileLIVEFails(t *testing.T) {
	t.Parallel()
	srv := natstest.RunRestartable(t)
	w := newWorldOn(t, srv.Conn())
	w.projector = srv.Conn()
	var link natsLink
	var overflows atomic.Int64
	nc := srv.Conn(nats.SetCustomDialer(&link), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		if errors.Is(err, nats.ErrSlowConsumer) {
			overflows.Add(1)
		}
	}))
	g := w.gatewayOn(gateway.Config{}, nc, w.openPool(w.url))
	id := w.session("default")
	type client struct {
		*watcher
		from stream
	}
	var clients []client
	for _, tr := range transports {
		c := client{newWatcher(), readAhead(tr.join(g, id, 0))}
		defer c.from.close()
		c.until(t, c.from, func() bool { return c.seq == 1 })
		clients = append(clients, c)
	}
	announce := func(yes bool) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.unannounced = !yes
	}
	repeated := w.announced(id, 1, 1)
	for _, fault := range []struct {
		name   string
		before func(turn int) // called before each turn is played
	}{
		{"announcements are dropped", func(turn int) { announce(turn%3 == 0) }},
		{"the connection is cut", func(turn int) {
			if turn%4 == 0 {
				link.cut()
			}
		}},
		{"more announcements than fit into the queue", func(int) {
			for range 5000 {
				w.announce("default", repeated)
			}
		}},
		{"NATS restarts", func(turn int) {
			switch turn {
			case 3:
				srv.Stop()
			case 9:
				srv.Start()
			}
		}},
	} {
		list := play(t)
		for i, p := range list {
			fault.before(i)
			w.play("default", id, []turn{p})
		}
		announce(true)
		for _, c := range clients {
			c.until(t, c.from, func() bool { return c.seq == w.tip(id) })
			requireSameState(t, w, id, g, clients[0].watcher, c.watcher)
		}
		if t.Failed() {
			t.Fatalf("after %s", fault.name)
		}
	}
	if overflows.Load() == 0 {
		t.Error("the gateway never dropped an announcement: the test did not fill its queue")
	}
}

// A readAheadStream reads its stream all the time, as a client does that answers the gateway's pings.
type readAheadStream struct {
	stream
	results chan readResult
}

type readResult struct {
	event events.WireEvent
	err   error
}

func readAhead(s stream) *readAheadStream {
	r := &readAheadStream{s, make(chan readResult, 1<<16)}
	go func() {
		for {
			e, err := s.next()
			r.results <- readResult{e, err}
			if err != nil {
				return
			}
		}
	}()
	return r
}

func (r *readAheadStream) next() (events.WireEvent, error) {
	result := <-r.results
	return result.event, result.err
}

// natsLink dials NATS and can cut the connection.
type natsLink struct {
	mu   sync.Mutex
	conn net.Conn
}

func (l *natsLink) Dial(network, address string) (net.Conn, error) {
	conn, err := net.Dial(network, address)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = conn
	return conn, err
}

func (l *natsLink) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.conn.Close()
}

// announced returns the message that announced the events.
func (w *world) announced(session string, from, to int) readmodel.LiveMessage {
	w.t.Helper()
	l := readmodel.LiveMessage{Session: session, Tip: uint32(to)}
	rows, err := w.pool.Query(w.t.Context(), "SELECT event FROM events WHERE session = $1 AND seq BETWEEN $2 AND $3 ORDER BY seq", session, from, to)
	must(w.t, err)
	defer rows.Close()
	for rows.Next() {
		var raw string
		var e events.WireEvent
		must(w.t, rows.Scan(&raw))
		must(w.t, json.Unmarshal([]byte(raw), &e))
		l.Events = append(l.Events, e)
	}
	return l
}

// TestStream_SendsALongHistoryInPages tests that a long history is sent in pages, followed by the events that were added
// meanwhile.
func TestStream_SendsALongHistoryInPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	for range 20 {
		var list []events.Event
		for range 100 {
			list = append(list, events.Event{Data: events.Log{Message: strings.Repeat("x", 500)}})
		}
		w.emit("default", id, list...)
	}
	for _, tr := range transports {
		t.Run(tr.name, func(t *testing.T) {
			one := newWatcher()
			s := tr.join(g, id, 0)
			defer s.close()
			one.until(t, s, func() bool { return one.seq > 700 })
			w.emit("default", id, events.Event{Data: events.Log{Message: "new"}})
			one.until(t, s, func() bool { return one.seq == w.tip(id) })
		})
	}
}

// TestStream_EndsWithTheSession tests that the stream of a deleted session ends with the event of the deletion.
func TestStream_EndsWithTheSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	for _, tr := range transports {
		t.Run(tr.name, func(t *testing.T) {
			id := w.session("default")
			s := tr.join(g, id, 0)
			defer s.close()
			if _, err := s.next(); err != nil { // the client has joined, over gRPC too
				t.Fatal(err)
			}
			w.emit("default", id, events.Event{Data: events.SessionDeleted{}})
			e, err := s.next()
			if err != nil || e.Type != "session_deleted" {
				t.Errorf("got %v, %v", e, err)
			}
			if _, err := s.next(); err == nil || !strings.Contains(err.Error(), "SESSION_NOT_FOUND") {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestStream_BadCursorIsRefused tests that an invalid cursor yields a typed error and, on a WebSocket, a snapshot of the
// blocks.
func TestStream_BadCursorIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.play("default", id, play(t))
	c := g.dial()
	join := func(after string) {
		c.send(fmt.Sprintf(`{"type":"session:join","requestId":"q","sessionId":%q,"after":%s}`, id, after))
	}
	snapshot := func(code string) {
		t.Helper()
		if r := c.wantError(code, "after"); r.Tip == nil || *r.Tip != w.tip(id) || r.RequestID != "q" {
			t.Errorf("got %+v", r)
		}
		if r := c.want("session:snapshot"); r.RequestID != "q" || *r.Seq != w.tip(id) || len(r.Blocks) != 8 {
			t.Errorf("got %+v", r)
		}
	}
	join("99")
	snapshot("CURSOR_AHEAD")
	join("4294967295")
	snapshot("CURSOR_AHEAD")
	for _, bad := range []string{"-1", "18446744073709551616", "4294967296", `"5"`, "1.5"} {
		join(bad)
		c.wantError("INVALID_REQUEST", "after")
	}
	w.exec("DELETE FROM events WHERE session = $1 AND seq < 4", id)
	join("1")
	snapshot("CURSOR_EXPIRED")
	g.get("/api/sessions/"+id+"/events/stream?after=1").wantProblem(t, 410, "CURSOR_EXPIRED", "after")
	g.get("/api/sessions/"+id+"/events?after=0").wantProblem(t, 410, "CURSOR_EXPIRED", "after")
	join("3")
	c.want("session:joined")
}
