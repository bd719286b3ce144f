package gateway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

// patience bounds how long a test's stream may last, and each wait for something that must arrive. It is long,
// because a stream of TestStalledClient_IsDisconnected transfers 24 MB, which took more than a minute with the race detector on
// a busy machine.
const patience = 3 * time.Minute

// stream is a client of one session, on WebSocket or SSE.
type stream interface {
	// next returns the next event or text delta.
	next() (events.WireEvent, error)
	// close closes the connection.
	close()
}

// errProblem is an error that the server sent on a stream.
type errProblem struct{ code, field, message string }

func (e errProblem) Error() string { return e.code + " " + e.field + " " + e.message }

// sse is a stream of server-sent events.
type sse struct {
	lines  *bufio.Reader
	cancel context.CancelFunc
	body   io.Closer
	lag    int // number of lag events
}

func (s *served) sse(session string, after uint32, query ...string) *sse {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	req, err := http.NewRequestWithContext(ctx, "GET", s.url+"/api/sessions/"+session+"/events/stream"+strings.Join(query, "&"), nil)
	must(s.t, err)
	req.Header.Set("Last-Event-ID", strconv.FormatUint(uint64(after), 10))
	if s.key != "" {
		req.Header.Set("Authorization", "Bearer "+s.key)
	}
	resp, err := s.client().Do(req)
	must(s.t, err)
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream" {
		b, _ := io.ReadAll(resp.Body)
		s.t.Fatalf("SSE: %d %s", resp.StatusCode, b)
	}
	return &sse{lines: bufio.NewReader(resp.Body), cancel: cancel, body: resp.Body}
}

func (s *sse) next() (events.WireEvent, error) {
	id, kind := "", ""
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			return events.WireEvent{}, err
		}
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch name {
		case "id":
			id = value
		case "event":
			kind = value
		case "data":
			switch kind {
			case "lag":
				s.lag++
				continue
			case "problem":
				a := answer{body: []byte(value)}
				return events.WireEvent{}, errProblem{a.text("code"), a.text("field"), a.text("detail")}
			}
			var w events.WireEvent
			if err := json.Unmarshal([]byte(value), &w); err != nil {
				return w, err
			}
			if id != strconv.FormatUint(uint64(w.Seq), 10) || kind != string(w.Type) {
				return w, fmt.Errorf("id %s and event %s are not those of %s", id, kind, value)
			}
			return w, nil
		}
	}
}

func (s *sse) close() {
	s.cancel()
	_ = s.body.Close()
}

// ws is a WebSocket.
type ws struct {
	t      testing.TB
	conn   *websocket.Conn
	ctx    context.Context
	cancel context.CancelFunc
	joined uint32
	lag    int
}

// received is any message of a WebSocket.
type received struct {
	Type, RequestID, SessionID, Code, Message, Field string
	ApprovalID, Position                             string
	Seq, Tip                                         *uint32
	Event                                            json.RawMessage
	Blocks                                           []json.RawMessage
	Lagging                                          bool
}

func (s *served) dial() *ws {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	opts := &websocket.DialOptions{HTTPHeader: http.Header{}, HTTPClient: s.client()}
	if s.key != "" {
		opts.HTTPHeader.Set("Authorization", "Bearer "+s.key)
	}
	conn, _, err := websocket.Dial(ctx, s.url+"/api/ws", opts)
	must(s.t, err)
	conn.SetReadLimit(16 << 20)
	c := &ws{t: s.t, conn: conn, ctx: ctx, cancel: cancel}
	s.t.Cleanup(c.close)
	return c
}

func (c *ws) send(message string) {
	c.t.Helper()
	must(c.t, c.conn.Write(c.ctx, websocket.MessageText, []byte(message)))
}

func (c *ws) receive() (received, error) {
	var r received
	_, b, err := c.conn.Read(c.ctx)
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	return r, err
}

func (c *ws) want(kind string) received {
	c.t.Helper()
	r, err := c.receive()
	if err != nil || r.Type != kind {
		c.t.Fatalf("got %+v, %v; want %s", r, err, kind)
	}
	return r
}

func (c *ws) wantError(code, field string) received {
	c.t.Helper()
	r := c.want("error")
	if r.Code != code || r.Field != field || r.Message == "" {
		c.t.Errorf("got %+v, want %s field %q", r, code, field)
	}
	return r
}

func (s *served) ws(session string, after uint32) *ws {
	s.t.Helper()
	c := s.dial()
	c.send(fmt.Sprintf(`{"type":"session:join","requestId":"r","sessionId":%q,"after":%d}`, session, after))
	r := c.want("session:joined")
	if r.RequestID != "r" || r.SessionID != session {
		s.t.Errorf("got %+v", r)
	}
	c.joined = *r.Seq
	return c
}

func (c *ws) next() (events.WireEvent, error) {
	for {
		r, err := c.receive()
		if err != nil {
			return events.WireEvent{}, err
		}
		switch r.Type {
		case "session:event":
			var w events.WireEvent
			return w, json.Unmarshal(r.Event, &w)
		case "session:lag":
			c.lag++
		case "error":
			return events.WireEvent{}, errProblem{r.Code, r.Field, r.Message}
		default:
			return events.WireEvent{}, fmt.Errorf("got %+v", r)
		}
	}
}

func (c *ws) close() {
	c.cancel()
	_ = c.conn.CloseNow()
}

// watcher is a client that keeps its state over several connections.
type watcher struct {
	view *blocks.BlockView
	seq  uint32
	list []uint32          // seqs of the stored events, in order of arrival
	text map[string]uint32 // by open block: end of the text received on this connection
}

func newWatcher() *watcher { return &watcher{view: blocks.NewBlockView(), text: map[string]uint32{}} }

// reconnected resets the state of one connection.
func (w *watcher) reconnected() { w.text = map[string]uint32{} }

// take checks the order of an event and folds it.
func (w *watcher) take(e events.WireEvent) error {
	if e.Type != events.TextDelta {
		if e.Seq != w.seq+1 {
			return fmt.Errorf("seq %d comes after %d", e.Seq, w.seq)
		}
		w.seq = e.Seq
		w.list = append(w.list, e.Seq)
		w.view.Apply(e.Event())
		return nil
	}
	var d struct {
		BlockID string
		Offset  uint32
		Delta   string
	}
	if err := json.Unmarshal(e.Data, &d); err != nil {
		return err
	}
	if e.Seq != w.seq || e.Position == "" {
		return fmt.Errorf("text has seq %d and position %q after event %d", e.Seq, e.Position, w.seq)
	}
	if d.Offset != w.text[d.BlockID] {
		return fmt.Errorf("text of %s begins at %d, not at %d", d.BlockID, d.Offset, w.text[d.BlockID])
	}
	if !slices.ContainsFunc(w.view.Blocks(), func(b events.Block) bool { return b.ID == d.BlockID && b.Status == events.StatusPending }) {
		return fmt.Errorf("text of %s, which is not open here", d.BlockID)
	}
	w.text[d.BlockID] += uint32(len(d.Delta))
	w.view.ApplyDelta(events.Delta{BlockID: d.BlockID, Offset: d.Offset, Text: d.Delta})
	return nil
}

// until reads until enough returns true.
func (w *watcher) until(t testing.TB, s stream, enough func() bool) {
	t.Helper()
	for !enough() {
		e, err := s.next()
		if err == nil {
			err = w.take(e)
		}
		if err != nil {
			t.Fatalf("after seq %d: %v", w.seq, err)
		}
	}
}

// turn is a part of a run that a test plays: events and text, in order.
type turn struct {
	events []events.Event
	block  string // block that gets the text, if there are no events
	text   string
}

// play returns a run with everything that can be streamed: two executions, and blocks that are open at the same time.
func play(t testing.TB) (out []turn) {
	for n := range 2 {
		exe := newID(t, events.KindExecution)
		ev := func(p ...events.Payload) {
			var list []events.Event
			for _, data := range p {
				list = append(list, events.Event{ExecutionID: exe, ConversationID: events.MainConversation, Source: events.FromRunner, Data: data})
			}
			out = append(out, turn{events: list})
		}
		id := func(name string) string { return events.DeriveID(events.KindBlock, exe, name) }
		say := func(name, text string) { out = append(out, turn{block: id(name), text: text}) }
		open := func(name string, kind events.BlockKind) events.Payload {
			return events.BlockStart{Block: events.Block{ID: id(name), Kind: kind}}
		}
		whole := func(name string, kind events.BlockKind, text string) events.Payload {
			return events.BlockComplete{Block: events.Block{ID: id(name), Kind: kind, Content: text}}
		}
		ev(events.MessageAccepted{BlockID: id("message"), Content: "question " + strconv.Itoa(n)}, events.ExecutionDispatched{})
		ev(events.ExecutionClaimed{Epoch: uint64(n + 1)}, events.ExecutionStarted{Attempt: 1})
		ev(open("thought", events.KindThinking))
		say("thought", "hm, ")
		ev(open("answer", events.KindAssistantText))
		say("answer", "é")
		say("thought", "well")
		say("answer", " and <more>")
		ev(whole("thought", events.KindThinking, "hm, well"))
		say("answer", " 😀 to come")
		ev(open("tool", events.KindToolUse), events.BlockUpdate{BlockID: id("tool"), Updates: events.BlockUpdates{Input: json.RawMessage(`{"n":1152921504606846976}`)}})
		say("answer", ".")
		ev(whole("tool", events.KindToolUse, ""), whole("answer", events.KindAssistantText, "é and <more> 😀 to come."))
		ev(events.ExecutionCompleted{Result: "done"})
	}
	return out
}

func (w *world) play(tenant, session string, list []turn) {
	for _, p := range list {
		if p.events != nil {
			w.emit(tenant, session, p.events...)
			continue
		}
		w.emitText(tenant, session, p.block, p.text)
	}
}

// wantText waits until the text of a pending block has the given length.
func (w *watcher) wantText(t testing.TB, s stream, block string, n int) {
	t.Helper()
	w.until(t, s, func() bool {
		i := slices.IndexFunc(w.view.Blocks(), func(b events.Block) bool { return b.ID == block })
		return i >= 0 && (len(w.view.Blocks()[i].Content) >= n || w.view.Blocks()[i].Status != events.StatusPending)
	})
}
