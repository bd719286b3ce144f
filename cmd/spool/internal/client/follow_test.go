package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	sesID = "ses_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	exeID = "exe_01ARZ3NDEKTSV4RRFFQ69G5FAV"
)

var at = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// script returns the messages of a session: stored events with deltas between them.
func script(t *testing.T) []events.WireEvent {
	t.Helper()
	var out []events.WireEvent
	var seq uint32
	keep := func(p events.Payload) {
		seq++
		e := events.Event{ID: fmt.Sprintf("evt_%d", seq), Time: at, ExecutionID: exeID, ConversationID: events.MainConversation, Source: events.FromRunner, Data: p}
		w, err := e.ToWire(sesID, seq, fmt.Sprintf("0-%d", seq))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, w)
	}
	say := func(block string, offset int, text string) {
		w, err := events.Delta{BlockID: block, ExecutionID: exeID, ConversationID: events.MainConversation, Offset: uint32(offset), Text: text, Time: at}.ToWire(sesID, seq, fmt.Sprintf("0-%d", seq))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, w)
	}
	keep(events.MessageAccepted{BlockID: "blk_q", Content: "hello"})
	keep(events.ExecutionStarted{Attempt: 1})
	for _, id := range []string{"blk_a", "blk_b"} {
		keep(events.BlockStart{Block: events.Block{ID: id, Kind: events.KindAssistantText, Status: events.StatusPending}})
		text := ""
		for _, piece := range []string{"one ", "zwö ", "three ", "四 ", "five"} {
			say(id, len(text), piece)
			text += piece
		}
		keep(events.MetadataUpdate{Model: "m"})
		say(id, len(text), " six")
		keep(events.BlockComplete{Block: events.Block{ID: id, Kind: events.KindAssistantText, Status: events.StatusComplete, Content: text + " six"}})
	}
	keep(events.ExecutionCompleted{DurationMs: 1})
	return out
}

// gateway is a fake gateway that serves a script over WebSocket: after a join the stored events after the cursor, then
// the whole text of open blocks, then new messages.
type gateway struct {
	t      *testing.T
	script []events.WireEvent
	cut    func(sent int) bool // reports whether to close the connection after the nth message since the start

	mu    sync.Mutex
	now   int // number of messages of the script that exist
	sent  int
	joins []uint32
}

var errCut = errors.New("cut")

func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		g.t.Error(err)
		return
	}
	defer func() { _ = conn.CloseNow() }()
	var join struct {
		Type, SessionID string
		After           uint32
	}
	_, data, err := conn.Read(r.Context())
	if err != nil || json.Unmarshal(data, &join) != nil || join.Type != "session:join" || join.SessionID != sesID {
		g.t.Errorf("join: %s %v", data, err)
		return
	}
	if err := g.serve(r.Context(), conn, join.After); err != nil {
		return
	}
	<-conn.CloseRead(r.Context()).Done() // until the client closes the connection
}

func (g *gateway) serve(ctx context.Context, conn *websocket.Conn, after uint32) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.joins = append(g.joins, after)
	if err := g.send(ctx, conn, map[string]any{"type": "session:joined", "requestId": "1", "sessionId": sesID, "seq": after}); err != nil {
		return err
	}
	view, texts := blocks.NewBlockView(), map[string]*blocks.StreamedText{}
	var last events.WireEvent
	for _, w := range g.script[:g.now] {
		if w.Type == events.TextDelta {
			var d events.Delta
			if err := json.Unmarshal(w.Data, &d); err != nil {
				return err
			}
			view.ApplyDelta(d)
			if texts[d.BlockID] == nil {
				texts[d.BlockID] = &blocks.StreamedText{}
			}
			texts[d.BlockID].Add(d)
			continue
		}
		view.Apply(w.Event())
		last = w
		if w.Seq > after {
			if err := g.event(ctx, conn, w); err != nil {
				return err
			}
		}
	}
	for _, b := range view.Blocks() {
		if b.Status != events.StatusPending || b.Content == "" {
			continue
		}
		w, err := events.Delta{BlockID: b.ID, ExecutionID: exeID, ConversationID: "main", Text: b.Content, Time: at}.ToWire(sesID, last.Seq, last.Position)
		if err != nil {
			return err
		}
		if err := g.event(ctx, conn, w); err != nil {
			return err
		}
	}
	for g.now < len(g.script) {
		w := g.script[g.now]
		g.now++
		if err := g.event(ctx, conn, w); err != nil {
			return err
		}
	}
	return nil
}

func (g *gateway) event(ctx context.Context, conn *websocket.Conn, w events.WireEvent) error {
	return g.send(ctx, conn, map[string]any{"type": "session:event", "sessionId": sesID, "event": w})
}

func (g *gateway) send(ctx context.Context, conn *websocket.Conn, m any) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := conn.Write(ctx, websocket.MessageText, data); err != nil {
		return err
	}
	if g.sent++; g.cut(g.sent) {
		return errCut
	}
	return nil
}

func connect(t *testing.T, h http.Handler, cfg client.Config) *client.Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	cfg.URL, cfg.HTTP = srv.URL, srv.Client()
	c, err := client.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// collect follows to the end of the script and returns the stored events and the text of each block.
func collect(t *testing.T, c *client.Client, after uint32) (kept []events.WireEvent, texts map[string]string, lost int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	texts = map[string]string{}
	for m, err := range c.Follow(ctx, sesID, after) {
		if err != nil {
			t.Fatalf("follow: %v", err)
		}
		if m.Lost != nil {
			lost++
		}
		if m.Event == nil {
			continue
		}
		var again events.WireEvent
		if err := json.Unmarshal(m.Raw, &again); err != nil || again.Seq != m.Event.Seq || string(again.Data) != string(m.Event.Data) {
			t.Fatalf("raw %s is not event %+v (%v)", m.Raw, m.Event, err)
		}
		if m.Event.Type != events.TextDelta {
			kept = append(kept, *m.Event)
			if events.IsTerminal(m.Event.Type) {
				return kept, texts, lost
			}
			continue
		}
		var d events.Delta
		if err := json.Unmarshal(m.Event.Data, &d); err != nil {
			t.Fatal(err)
		}
		if int(d.Offset) != len(texts[d.BlockID]) {
			t.Fatalf("text of %s at %d came after %q", d.BlockID, d.Offset, texts[d.BlockID])
		}
		texts[d.BlockID] += d.Text
	}
	t.Fatal("the stream ended")
	return nil, nil, 0
}

// TestFollow_ResumesAfterEachMessage tests that the result is the same when the connection is closed once after each
// message of the stream.
func TestFollow_ResumesAfterEachMessage(t *testing.T) {
	t.Parallel()
	list := script(t)
	var want []events.WireEvent
	for _, w := range list {
		if w.Type != events.TextDelta {
			want = append(want, w)
		}
	}
	check := func(t *testing.T, cut func(int) bool, cuts int) {
		g := &gateway{t: t, script: list, cut: cut}
		kept, texts, lost := collect(t, connect(t, g, client.Config{}), 0)
		if !reflect.DeepEqual(kept, want) {
			t.Errorf("events:\n got %+v\nwant %+v", kept, want)
		}
		for id, text := range texts {
			if whole := "one zwö three 四 five six"; len(text) > len(whole) || text != whole[:len(text)] {
				t.Errorf("text of %s is %q", id, text)
			}
		}
		if lost < cuts {
			t.Errorf("%d connections were lost, want %d", lost, cuts)
		}
	}
	for n := 1; n <= len(list); n++ { // the last message ends the test, so the one before is the last cut
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			check(t, func(sent int) bool { return sent == n }, 1)
		})
	}
	t.Run("each", func(t *testing.T) {
		t.Parallel()
		// Each connection delivers joined, the text of an open block, and one further message.
		check(t, func(sent int) bool { return sent%3 == 0 }, len(list)/3)
	})
}

func TestFollow_StartsAtTheCursor(t *testing.T) {
	t.Parallel()
	list := script(t)
	g := &gateway{t: t, script: list, cut: func(int) bool { return false }, now: len(list)}
	kept, _, _ := collect(t, connect(t, g, client.Config{}), 4)
	if len(kept) != 5 || kept[0].Seq != 5 {
		t.Errorf("after 4 came %d events from %d", len(kept), kept[0].Seq)
	}
}

// speak returns a handler that sends fixed messages after a join.
func speak(t *testing.T, messages ...string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.CloseNow() }()
		if _, _, err := conn.Read(r.Context()); err != nil {
			return
		}
		for _, m := range messages {
			if err := conn.Write(r.Context(), websocket.MessageText, []byte(m)); err != nil {
				return
			}
		}
		<-conn.CloseRead(r.Context()).Done()
	})
}

// first returns the first message that is neither Joined nor Lost, or the error.
func first(t *testing.T, c *client.Client, after uint32) (client.FollowItem, error) {
	t.Helper()
	for m, err := range c.Follow(t.Context(), sesID, after) {
		if err != nil || !m.Joined && m.Lost == nil {
			return m, err
		}
	}
	t.Fatal("nothing came")
	return client.FollowItem{}, nil
}

func TestFollow_ReturnsErrors(t *testing.T) {
	t.Parallel()
	t.Run("session not found", func(t *testing.T) {
		t.Parallel()
		c := connect(t, speak(t, `{"type":"error","code":"SESSION_NOT_FOUND","message":"there is no such session","requestId":"1"}`), client.Config{})
		if _, err := first(t, c, 0); !client.IsCode(err, client.CodeSessionNotFound) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("cursor expired", func(t *testing.T) {
		t.Parallel()
		c := connect(t, speak(t,
			`{"type":"error","code":"CURSOR_EXPIRED","message":"events after 3 are no longer kept","field":"after","tip":9,"requestId":"1"}`,
			`{"type":"session:snapshot","sessionId":"`+sesID+`","seq":9,"blocks":[{"id":"blk_a","kind":"assistant_text","status":"complete","timestamp":"2026-01-02T03:04:05Z","content":"hi"}]}`), client.Config{})
		m, err := first(t, c, 3)
		if err != nil || m.Snapshot == nil || m.Snapshot.Seq != 9 || m.Snapshot.Cause.Code != client.CodeCursorExpired || m.Snapshot.Blocks[0].Content != "hi" {
			t.Errorf("got %+v %v", m, err)
		}
	})
	t.Run("left out", func(t *testing.T) {
		t.Parallel()
		c := connect(t, speak(t, `{"type":"session:joined","seq":0}`, `{"type":"session:event","event":{"seq":3,"type":"log","data":{}}}`), client.Config{})
		if _, err := first(t, c, 0); err == nil || err.Error() != "the server left out events 1 to 2 of the session" {
			t.Errorf("got %v", err)
		}
	})
	t.Run("wrong key", func(t *testing.T) {
		t.Parallel()
		c := connect(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer spool_sk_wrong" {
				t.Errorf("authorization %q", r.Header.Get("Authorization"))
			}
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprint(w, `{"type":"urn:spool:error:UNAUTHENTICATED","code":"UNAUTHENTICATED","status":401,"detail":"the key is not valid"}`)
		}), client.Config{Key: "spool_sk_wrong"})
		_, err := first(t, c, 0)
		if want := "the key is not valid (UNAUTHENTICATED); pass a valid key with --key or SPOOL_API_KEY"; err == nil || err.Error() != want {
			t.Errorf("got %v", err)
		}
	})
	t.Run("gone for good", func(t *testing.T) {
		t.Parallel()
		srv := httptest.NewServer(http.NotFoundHandler())
		url := srv.URL
		srv.Close()
		c, err := client.New(client.Config{URL: url, GiveUp: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		_, err = first(t, c, 0)
		if want := "cannot reach " + url + ": connection refused; start it with `spool up` or pass --url"; err == nil || err.Error() != want {
			t.Errorf("got %v", err)
		}
	})
	t.Run("the caller ends it", func(t *testing.T) {
		t.Parallel()
		c := connect(t, speak(t, `{"type":"session:joined","seq":0}`), client.Config{})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for _, err := range c.Follow(ctx, sesID, 0) {
			if cancel(); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
		}
	})
}
