package gateway_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// recordedAt is the time of the first event of a recorded session.
var recordedAt = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// record plays a run like a runner: each event and text delta is one step after the one before, and text is published
// on DELTAS only.
func (w *world) record(tenant, session string, step time.Duration, list []turn) {
	w.t.Helper()
	at, offsets := recordedAt, map[string]int{}
	for _, p := range list {
		at = at.Add(step)
		for i := range p.events {
			p.events[i].Time = at
		}
		if p.events != nil {
			w.emit(tenant, session, p.events...)
			continue
		}
		d := events.Delta{BlockID: p.block, ConversationID: events.MainConversation, Epoch: 1, Offset: uint32(offsets[p.block]), Text: p.text, Time: at}
		offsets[p.block] += len(p.text)
		w.emitDelta(tenant, session, d)
	}
}

// stored returns the events of a session in the read models.
func (w *world) stored(session string) (list []string) {
	w.t.Helper()
	rows, err := w.pool.Query(w.t.Context(), "SELECT event FROM events WHERE session = $1 ORDER BY seq", session)
	must(w.t, err)
	defer rows.Close()
	for rows.Next() {
		var one string
		must(w.t, rows.Scan(&one))
		list = append(list, one)
	}
	must(w.t, rows.Err())
	return list
}

// sentPiece is one item of a replay: its kind, and its JSON as received.
type sentPiece struct{ kind, data string }

// replayed is a client of one replay.
type replayed interface {
	// next returns the next item, or io.EOF after the end.
	next() (sentPiece, error)
	close()
}

// sseReplay is a replay over SSE.
type sseReplay struct {
	lines  *bufio.Reader
	cancel context.CancelFunc
	body   io.Closer
}

func (s *served) replaySSE(session, query string) replayed {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	req, err := http.NewRequestWithContext(ctx, "GET", s.url+"/api/sessions/"+session+"/events/stream?metadata=0&replay=1"+query, nil)
	must(s.t, err)
	if s.key != "" {
		req.Header.Set("Authorization", "Bearer "+s.key)
	}
	resp, err := s.client().Do(req)
	must(s.t, err)
	if resp.StatusCode != 200 {
		b, _ := io.ReadAll(resp.Body)
		s.t.Fatalf("%d %s", resp.StatusCode, b)
	}
	return &sseReplay{bufio.NewReader(resp.Body), cancel, resp.Body}
}

func (s *sseReplay) next() (sentPiece, error) {
	kind := ""
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			return sentPiece{}, err
		}
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch {
		case name == "event":
			kind = value
		case name == "data" && kind == "problem":
			a := answer{body: []byte(value)}
			return sentPiece{}, errProblem{a.text("code"), a.text("field"), a.text("detail")}
		case name == "data":
			return sentPiece{kind, value}, nil
		}
	}
}

func (s *sseReplay) close() {
	s.cancel()
	_ = s.body.Close()
}

// wsReplay is a replay over a WebSocket.
type wsReplay struct {
	*ws
	session string
}

func (s *served) replayWS(session, fields string) replayed {
	s.t.Helper()
	c := s.dial()
	c.send(fmt.Sprintf(`{"type":"session:join","requestId":"r","sessionId":%q,"metadata":false,"replay":true%s}`, session, fields))
	c.want("session:joined")
	return wsReplay{c, session}
}

func (c wsReplay) next() (sentPiece, error) {
	_, b, err := c.conn.Read(c.ctx)
	if err != nil {
		return sentPiece{}, err
	}
	var r received
	must(c.t, json.Unmarshal(b, &r))
	if r.Type != "error" && r.SessionID != c.session { // an error may concern the connection
		return sentPiece{}, fmt.Errorf("got %s", b)
	}
	switch r.Type {
	case "session:event":
		var w events.WireEvent
		must(c.t, json.Unmarshal(r.Event, &w))
		return sentPiece{string(w.Type), string(r.Event)}, nil
	case "session:left":
		return sentPiece{}, io.EOF
	case "error":
		return sentPiece{}, errProblem{r.Code, r.Field, r.Message}
	}
	kind := strings.TrimPrefix(r.Type, "session:")
	return sentPiece{kind, strings.Replace(string(b), fmt.Sprintf(`"type":%q,"sessionId":%q,`, r.Type, c.session), "", 1)}, nil
}

// rpcReplay is a replay over gRPC. next converts items to the form of SSE.
type rpcReplay struct {
	stream grpc.ServerStreamingClient[spoolv1.ReplayEventsResponse]
	cancel context.CancelFunc
}

func (s *served) replayRPC(r *spoolv1.ReplayEventsRequest) replayed {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	st, err := spoolv1.NewEventsClient(s.conn()).ReplayEvents(s.context(ctx), r)
	must(s.t, err)
	return rpcReplay{st, cancel}
}

func (c rpcReplay) next() (sentPiece, error) {
	m, err := c.stream.Recv()
	if errors.Is(err, io.EOF) {
		return sentPiece{}, err
	}
	if err != nil {
		return sentPiece{}, problemOf(err)
	}
	switch n := m.Message.(type) {
	case *spoolv1.ReplayEventsResponse_Event:
		b, err := live(n.Event)
		return sentPiece{n.Event.Type, string(b)}, err
	case *spoolv1.ReplayEventsResponse_Started:
		return sentPiece{"replay_started", fmt.Sprintf(`{"from":%d,"to":%d,"tip":%d,"speed":%q}`, n.Started.From, n.Started.To, n.Started.Tip, n.Started.Speed)}, nil
	case *spoolv1.ReplayEventsResponse_GapShortened:
		return sentPiece{"gap_shortened", fmt.Sprintf(`{"seq":%d,"gapMs":%.0f,"leftOutMs":%.0f}`, n.GapShortened.Seq, n.GapShortened.GapMs, n.GapShortened.LeftOutMs)}, nil
	case *spoolv1.ReplayEventsResponse_BlockWhole:
		return sentPiece{"block_whole", fmt.Sprintf(`{"seq":%d,"blockId":%q,"shownBytes":%d}`, n.BlockWhole.Seq, n.BlockWhole.BlockId, n.BlockWhole.ShownBytes)}, nil
	case *spoolv1.ReplayEventsResponse_Ended:
		return sentPiece{"replay_ended", fmt.Sprintf(`{"seq":%d}`, n.Ended.Seq)}, nil
	}
	return sentPiece{}, fmt.Errorf("got %v", m)
}

func (c rpcReplay) close() { c.cancel() }

// live returns an event of gRPC as the stored bytes of the log.
func live(e *spoolv1.Event) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(events.WireEvent{
		Seq: e.Seq, Position: e.Position, ID: e.GetId(), Type: events.Type(e.Type), Time: e.Time.AsTime(), SessionID: e.SessionId,
		ExecutionID: e.GetExecutionId(), ConversationID: e.GetConversationId(), Source: events.Source(e.Source), Data: json.RawMessage(e.Data.GetText()),
	})
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// all reads a replay to its end.
func all(t *testing.T, c replayed) (list []sentPiece) {
	t.Helper()
	defer c.close()
	for {
		one, err := c.next()
		if errors.Is(err, io.EOF) {
			return list
		}
		must(t, err)
		list = append(list, one)
	}
}

// split divides the items of a replay by their kind.
func split(list []sentPiece) (kept []string, text []events.WireEvent, notices []sentPiece) {
	for _, one := range list {
		switch one.kind {
		case "replay_started", "gap_shortened", "block_whole", "replay_ended":
			notices = append(notices, one)
		case string(events.TextDelta):
			var w events.WireEvent
			if err := json.Unmarshal([]byte(one.data), &w); err != nil {
				panic(err)
			}
			text = append(text, w)
		default:
			kept = append(kept, one.data)
		}
	}
	return kept, text, notices
}

// replays are the transports of a replay; from and to are 0 if they are not sent.
var replays = []struct {
	name string
	open func(s *served, session, speed string, from, to uint32) replayed
}{
	{"SSE", func(s *served, session, speed string, from, to uint32) replayed {
		q := "&speed=" + speed
		if from > 0 {
			q += fmt.Sprint("&from=", from)
		}
		if to > 0 {
			q += fmt.Sprint("&to=", to)
		}
		return s.replaySSE(session, q)
	}},
	{"WebSocket", func(s *served, session, speed string, from, to uint32) replayed {
		f := `,"speed":` + speed
		if speed == "max" {
			f = `,"speed":"max"`
		}
		if from > 0 {
			f += fmt.Sprint(`,"from":`, from)
		}
		if to > 0 {
			f += fmt.Sprint(`,"to":`, to)
		}
		return s.replayWS(session, f)
	}},
	{"gRPC", func(s *served, session, speed string, from, to uint32) replayed {
		no := false
		r := &spoolv1.ReplayEventsRequest{SessionId: session, Speed: speed, Metadata: &no}
		if from > 0 {
			r.From = &from
		}
		if to > 0 {
			r.To = &to
		}
		return s.replayRPC(r)
	}},
}

// TestReplay_SendsStoredEventsAndText tests that a replay sends the stored events byte for byte and in order, and between
// them the recorded text in flight, so that a client has the same state at each event as one that followed live.
func TestReplay_SendsStoredEventsAndText(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	list := append(play(t), play(t)...)
	w.record("default", id, 30*time.Millisecond, list)
	stored := w.stored(id)
	for _, tr := range replays {
		for _, speed := range []string{"max", "1000"} {
			t.Run(tr.name+" "+speed, func(t *testing.T) {
				t.Parallel()
				got := all(t, tr.open(g, id, speed, 0, 0))
				kept, text, notices := split(got)
				if !slices.Equal(kept, stored) {
					t.Errorf("replayed\n%s\nstored\n%s", strings.Join(kept, "\n"), strings.Join(stored, "\n"))
				}
				want := []sentPiece{
					{"replay_started", fmt.Sprintf(`{"from":1,"to":%d,"tip":%d,"speed":%q}`, len(stored), len(stored), speed)},
					{"replay_ended", fmt.Sprintf(`{"seq":%d}`, len(stored))},
				}
				if !slices.Equal(notices, want) {
					t.Errorf("notices %v, want %v", notices, want)
				}
				one, pieces := newWatcher(), 0
				for _, s := range got[1 : len(got)-1] {
					var e events.WireEvent
					must(t, json.Unmarshal([]byte(s.data), &e))
					must(t, one.take(e))
				}
				for _, p := range list {
					if p.events == nil {
						pieces++
					}
				}
				if len(text) != pieces {
					t.Fatalf("%d pieces of text, want %d", len(text), pieces)
				}
				if first := recordedAt.Add(4 * 30 * time.Millisecond); !text[0].Time.Equal(first) {
					t.Errorf("the first text has the time %v, want %v", text[0].Time, first)
				}
				live := newWatcher()
				s := g.sse(id, 0)
				defer s.close()
				live.until(t, s, func() bool { return live.seq == w.tip(id) })
				requireSameState(t, w, id, g, live, one)
			})
		}
	}
}

// TestReplay_SendsManyPagesInOrder tests that more events and text than one read returns arrive in order, without the text of
// another session.
func TestReplay_SendsManyPagesInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, other := w.session("default"), w.session("default")
	exe, block := newID(t, events.KindExecution), newID(t, events.KindBlock)
	ev := func(p events.Payload) turn {
		return turn{events: []events.Event{{ExecutionID: exe, ConversationID: events.MainConversation, Source: events.FromRunner, Data: p}}}
	}
	list, whole := []turn{ev(events.BlockStart{Block: events.Block{ID: block, Kind: events.KindAssistantText}})}, ""
	for i := range 700 {
		piece := fmt.Sprint(i, " ")
		whole += piece
		list = append(list, turn{block: block, text: piece})
		if i%3 == 0 {
			list = append(list, ev(events.Log{Message: piece}))
		}
	}
	list = append(list, ev(events.BlockComplete{Block: events.Block{ID: block, Kind: events.KindAssistantText, Content: whole}}))
	w.record("default", other, time.Millisecond, play(t))
	w.record("default", id, time.Millisecond, list)
	for _, tr := range replays {
		kept, text, notices := split(all(t, tr.open(g, id, "max", 0, 0)))
		said := ""
		for _, d := range text {
			var data struct{ Delta string }
			must(t, json.Unmarshal(d.Data, &data))
			said += data.Delta
		}
		if !slices.Equal(kept, w.stored(id)) || len(text) != 700 || said != whole || len(notices) != 2 {
			t.Errorf("%s: %d events, %d pieces of text, notices %v", tr.name, len(kept), len(text), notices)
		}
	}
}

// TestReplay_NamesBlocksWithoutDeltas tests that a replay names the blocks whose text DELTAS no longer has,
// completely or in part.
func TestReplay_NamesBlocksWithoutDeltas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	list := play(t)
	w.record("default", id, 30*time.Millisecond, list)
	stream, err := w.js.Stream(t.Context(), topology.StreamDeltas)
	must(t, err)
	whole := func(got []sentPiece) (list []string) {
		for _, n := range got {
			if n.kind == "block_whole" {
				list = append(list, n.data)
			}
		}
		return list
	}
	said := func(block string, shownBytes int) string {
		for i, s := range w.stored(id) {
			var e events.WireEvent
			must(t, json.Unmarshal([]byte(s), &e))
			if d, ok := e.Event().Data.(events.BlockComplete); ok && d.Block.ID == block {
				return fmt.Sprintf(`{"seq":%d,"blockId":%q,"shownBytes":%d}`, i+1, block, shownBytes)
			}
		}
		t.Fatalf("block %s does not end", block)
		return ""
	}
	var blocks []string // blocks with text, in order
	for _, p := range list {
		if p.block != "" && !slices.Contains(blocks, p.block) {
			blocks = append(blocks, p.block)
		}
	}
	// The first message was the beginning of the first block, so the rest cannot be shown before the block's end.
	must(t, stream.Purge(t.Context(), jetstream.WithPurgeSequence(2)))
	for _, tr := range replays {
		if got, want := whole(all(t, tr.open(g, id, "max", 0, 0))), []string{said(blocks[0], 0)}; !slices.Equal(got, want) {
			t.Errorf("%s, after the first piece was lost: %v, want %v", tr.name, got, want)
		}
	}
	must(t, stream.Purge(t.Context()))
	for _, tr := range replays {
		got := all(t, tr.open(g, id, "max", 0, 0))
		want := []string{said(blocks[0], 0), said(blocks[1], 0), said(blocks[2], 0), said(blocks[3], 0)}
		if have := whole(got); !slices.Equal(have, want) {
			t.Errorf("%s, without any text: %v, want %v", tr.name, have, want)
		}
		if kept, text, _ := split(got); len(text) != 0 || !slices.Equal(kept, w.stored(id)) {
			t.Errorf("%s: %d pieces of text, %d events", tr.name, len(text), len(kept))
		}
	}
}

// TestReplay_PartEndsInTheSameState tests that a replay of a part, with the events before it, yields the same end as a full replay,
// also if a block is open at the beginning, whose text is then sent from its start.
func TestReplay_PartEndsInTheSameState(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.record("default", id, 30*time.Millisecond, play(t))
	stored := w.stored(id)
	tip := uint32(len(stored))
	for _, tr := range replays {
		t.Run(tr.name, func(t *testing.T) {
			t.Parallel()
			for cut := uint32(1); cut < tip; cut++ {
				one := newWatcher()
				for _, part := range [][2]uint32{{1, cut}, {cut + 1, tip}} {
					one.reconnected()
					got := all(t, tr.open(g, id, "max", part[0], part[1]))
					kept, _, notices := split(got)
					if !slices.Equal(kept, stored[part[0]-1:part[1]]) || len(notices) != 2 {
						t.Fatalf("%v: %d events, notices %v", part, len(kept), notices)
					}
					for _, s := range got[1 : len(got)-1] {
						var e events.WireEvent
						must(t, json.Unmarshal([]byte(s.data), &e))
						if done, ok := e.Event().Data.(events.BlockComplete); ok && int(one.text[done.Block.ID]) != len(done.Block.Content) {
							t.Errorf("cut after %d: %d bytes of the text %q arrived", cut, one.text[done.Block.ID], done.Block.Content)
						}
						must(t, one.take(e))
					}
				}
				if one.seq != tip {
					t.Fatalf("cut after %d: the replays end at %d", cut, one.seq)
				}
			}
		})
	}
}

// TestReplay_AnnouncesShortenedGaps tests that idle gaps are shortened, and that the client is notified before the
// wait.
func TestReplay_AnnouncesShortenedGaps(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.emit("default", id, events.Event{Time: recordedAt.Add(time.Hour), Data: events.Log{Message: "an hour later"}})
	for _, tr := range replays {
		t.Run(tr.name, func(t *testing.T) {
			t.Parallel()
			_, _, notices := split(all(t, tr.open(g, id, "1000", 0, 0)))
			// The session began one microsecond after recordedAt.
			if want := (sentPiece{"gap_shortened", `{"seq":1,"gapMs":3599999,"leftOutMs":1599999}`}); len(notices) != 3 || notices[1] != want {
				t.Errorf("got %v, want %v between start and end", notices, want)
			}
		})
	}
}

func TestReplay_BadInputNamesTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, foreign, deleted := w.session("default"), w.session("other"), w.session("default")
	w.emit("default", id, events.Event{Data: events.Log{}}, events.Event{Data: events.Log{}})
	w.emit("default", deleted, events.Event{Data: events.SessionDeleted{}})
	for _, c := range []struct {
		query, fields, code, field string
	}{
		{"&from=0", `,"from":0`, "INVALID_REQUEST", "from"},
		{"&to=0", `,"to":0`, "INVALID_REQUEST", "to"},
		{"&from=-1", `,"from":-1`, "INVALID_REQUEST", "from"},
		{"&to=-1", `,"to":-1`, "INVALID_REQUEST", "to"},
		{"&from=x", `,"from":"x"`, "INVALID_REQUEST", "from"},
		{"&from=1.5", `,"from":1.5`, "INVALID_REQUEST", "from"},
		{"&from=18446744073709551616", `,"from":18446744073709551616`, "INVALID_REQUEST", "from"},
		{"&to=18446744073709551616", `,"to":18446744073709551616`, "INVALID_REQUEST", "to"},
		{"&from=3&to=2", `,"from":3,"to":2`, "INVALID_REQUEST", "from"},
		{"&from=4", `,"from":4`, "CURSOR_AHEAD", "from"},
		{"&to=4294967295", `,"to":4294967295`, "CURSOR_AHEAD", "to"},
		{"&speed=0", `,"speed":0`, "INVALID_REQUEST", "speed"},
		{"&speed=-1", `,"speed":-1`, "INVALID_REQUEST", "speed"},
		{"&speed=NaN", `,"speed":"NaN"`, "INVALID_REQUEST", "speed"},
		{"&speed=Inf", `,"speed":"Inf"`, "INVALID_REQUEST", "speed"},
		{"&speed=", `,"speed":null`, "INVALID_REQUEST", "speed"},
		{"&speed=fast", `,"speed":[1]`, "INVALID_REQUEST", "speed"},
		{"&after=1", `,"after":1`, "INVALID_REQUEST", "after"},
	} {
		status := map[string]int{"INVALID_REQUEST": 400, "CURSOR_AHEAD": 409}[c.code]
		g.get("/api/sessions/"+id+"/events/stream?replay=1"+c.query).wantProblem(t, status, c.code, c.field)
		s := g.dial()
		s.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,"replay":true%s}`, id, c.fields))
		if r := s.wantError(c.code, c.field); c.code == "CURSOR_AHEAD" && (r.Tip == nil || *r.Tip != 3) {
			t.Errorf("%s: tip %v", c.fields, r.Tip)
		}
		s.send(fmt.Sprintf(`{"type":"session:leave","sessionId":%q}`, id))
		s.wantError("NOT_JOINED", "sessionId")
	}
	g.get("/api/sessions/"+id+"/events/stream?replay=maybe").wantProblem(t, 400, "INVALID_REQUEST", "replay")
	for _, name := range []string{"speed", "from", "to"} {
		g.get("/api/sessions/"+id+"/events/stream?"+name+"=1").wantProblem(t, 400, "INVALID_REQUEST", name)
		s := g.dial()
		s.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,%q:1}`, id, name))
		s.wantError("INVALID_REQUEST", name)
	}
	for _, none := range []string{foreign, deleted, oldID(t, events.KindSession)} {
		g.get("/api/sessions/"+none+"/events/stream?replay=1").wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
		s := g.dial()
		s.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,"replay":true}`, none))
		s.wantError("SESSION_NOT_FOUND", "sessionId")
	}
}

// TestReplay_BadInputNamesTheFieldOverGRPC tests that gRPC refuses the same requests as SSE, with the code and the field.
func TestReplay_BadInputNamesTheFieldOverGRPC(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, foreign, deleted := w.session("default"), w.session("other"), w.session("default")
	w.emit("default", id, events.Event{Data: events.Log{}}, events.Event{Data: events.Log{}})
	w.emit("default", deleted, events.Event{Data: events.SessionDeleted{}})
	type request = spoolv1.ReplayEventsRequest
	const invalid, ahead, gone = codes.InvalidArgument, codes.OutOfRange, codes.NotFound
	for _, c := range []struct {
		r           *request
		status      codes.Code
		code, field string
	}{
		{&request{From: ptr[uint32](0)}, invalid, "INVALID_REQUEST", "from"},
		{&request{To: ptr[uint32](0)}, invalid, "INVALID_REQUEST", "to"},
		{&request{From: ptr[uint32](3), To: ptr[uint32](2)}, invalid, "INVALID_REQUEST", "from"},
		{&request{From: ptr[uint32](4)}, ahead, "CURSOR_AHEAD", "from"},
		{&request{To: ptr[uint32](1<<32 - 1)}, ahead, "CURSOR_AHEAD", "to"},
		{&request{Speed: "0"}, invalid, "INVALID_REQUEST", "speed"},
		{&request{Speed: "-1"}, invalid, "INVALID_REQUEST", "speed"},
		{&request{Speed: "NaN"}, invalid, "INVALID_REQUEST", "speed"},
		{&request{Speed: "-Inf"}, invalid, "INVALID_REQUEST", "speed"},
		{&request{Speed: "1e309"}, invalid, "INVALID_REQUEST", "speed"},
		{&request{Speed: "fast"}, invalid, "INVALID_REQUEST", "speed"},
		{&request{ExecutionId: "x"}, invalid, "INVALID_REQUEST", "executionId"},
		{&request{SessionId: "ses_*"}, invalid, "INVALID_REQUEST", "sessionId"},
		{&request{SessionId: foreign}, gone, "SESSION_NOT_FOUND", "sessionId"},
		{&request{SessionId: deleted}, gone, "SESSION_NOT_FOUND", "sessionId"},
		{&request{SessionId: oldID(t, events.KindSession)}, gone, "SESSION_NOT_FOUND", "sessionId"},
	} {
		if c.r.SessionId == "" {
			c.r.SessionId = id
		}
		st, err := spoolv1.NewEventsClient(g.conn()).ReplayEvents(t.Context(), c.r)
		must(t, err)
		_, err = st.Recv()
		wantCode(t, err, c.status, c.code, c.field)
	}
}

// TestReplay_ExtremeSpeedsReachTheEnd tests that a replay at the lowest and highest possible speed reaches the end.
func TestReplay_ExtremeSpeedsReachTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.emit("default", id, events.Event{Time: recordedAt.Add(1000 * time.Hour), Data: events.Log{}})
	for _, tr := range replays {
		for _, speed := range []string{"1e308", "1.7976931348623157e308", "5e-324"} {
			t.Run(tr.name+" "+speed, func(t *testing.T) {
				t.Parallel()
				if kept, _, _ := split(all(t, tr.open(g, id, speed, 0, 0))); !slices.Equal(kept, w.stored(id)) {
					t.Errorf("%d events", len(kept))
				}
			})
		}
	}
}

// replayExecution opens a replay of one execution on each transport.
func (s *served) replayExecution(session, execution string, from uint32) map[string]func() replayed {
	return map[string]func() replayed{
		"SSE": func() replayed {
			return s.replaySSE(session, fmt.Sprintf("&speed=max&from=%d&executionId=%s", from, execution))
		},
		"WebSocket": func() replayed {
			return s.replayWS(session, fmt.Sprintf(`,"speed":"max","from":%d,"executionId":%q`, from, execution))
		},
		"gRPC": func() replayed {
			no := false
			return s.replayRPC(&spoolv1.ReplayEventsRequest{SessionId: session, Speed: "max", From: &from, ExecutionId: execution, Metadata: &no})
		},
	}
}

// TestReplay_ExecutionHasOnlyItsEvents tests that a replay of one execution has only its events and text, up to its end.
func TestReplay_ExecutionHasOnlyItsEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, other := w.session("default"), w.session("default")
	exes, blocks := []string{}, []string{}
	list := []turn{}
	for i := range 3 {
		x, block := newID(t, events.KindExecution), newID(t, events.KindBlock)
		exes, blocks = append(exes, x), append(blocks, block)
		ev := func(source events.Source, p events.Payload) {
			list = append(list, turn{events: []events.Event{{ExecutionID: x, ConversationID: events.MainConversation, Source: source, Data: p}}})
		}
		ev(events.FromServer, events.MessageAccepted{BlockID: "blk_" + x, Content: "q"})
		ev(events.FromRunner, events.BlockStart{Block: events.Block{ID: block, Kind: events.KindAssistantText}})
		list = append(list, turn{block: block, text: "one "})
		if i == 1 { // a queued message and its withdrawal arrive during the turn
			w := turn{events: []events.Event{{ExecutionID: newID(t, events.KindExecution), Source: events.FromServer, Data: events.MessageAccepted{BlockID: "waits", Content: "later"}}}}
			list = append(list, w, turn{events: []events.Event{{ExecutionID: w.events[0].ExecutionID, Source: events.FromServer, Data: events.ExecutionWithdrawn{}}}})
		}
		list = append(list, turn{block: block, text: "two"})
		ev(events.FromRunner, events.BlockComplete{Block: events.Block{ID: block, Kind: events.KindAssistantText, Content: "one two"}})
		ev(events.FromRunner, events.ExecutionCompleted{Result: "one two"})
		ev(events.FromServer, events.ModelCalled{}) // metered after the end
	}
	w.record("default", id, 30*time.Millisecond, list)
	w.turn("default", other, "one", "answer")
	var want []string
	var last uint32
	for i, s := range w.stored(id) {
		var e events.WireEvent
		must(t, json.Unmarshal([]byte(s), &e))
		if e.ExecutionID == exes[1] && last == 0 {
			want = append(want, s)
			if events.IsTerminal(e.Type) {
				last = uint32(i + 1)
			}
		}
	}
	var first events.WireEvent
	must(t, json.Unmarshal([]byte(want[0]), &first))
	for name, open := range g.replayExecution(id, exes[1], 1) {
		kept, text, notices := split(all(t, open()))
		if !slices.Equal(kept, want) {
			t.Errorf("%s: replayed\n%s\nwant\n%s", name, strings.Join(kept, "\n"), strings.Join(want, "\n"))
		}
		ends := []sentPiece{
			{"replay_started", fmt.Sprintf(`{"from":%d,"to":%d,"tip":%d,"speed":"max"}`, first.Seq, last, w.tip(id))},
			{"replay_ended", fmt.Sprintf(`{"seq":%d}`, last)},
		}
		if !slices.Equal(notices, ends) {
			t.Errorf("%s: notices %v, want %v", name, notices, ends)
		}
		if len(text) != 2 || !strings.Contains(string(text[0].Data)+string(text[1].Data), blocks[1]) || strings.Contains(string(text[0].Data)+string(text[1].Data), blocks[0]) {
			t.Errorf("%s: text %v", name, text)
		}
	}
	// A replay from within the execution's block sends the earlier text of the block, and none of another execution.
	for name, open := range g.replayExecution(id, exes[1], first.Seq+2) {
		kept, text, _ := split(all(t, open()))
		if !slices.Equal(kept, want[2:]) || len(text) != 2 {
			t.Errorf("%s, from the block's middle: %d events, %d pieces of text", name, len(kept), len(text))
		}
	}
	path := "/api/sessions/" + id + "/events/stream?replay=1&executionId="
	g.get(path+exes[1]+fmt.Sprint("&from=", last+1)).wantProblem(t, 400, "INVALID_REQUEST", "executionId")
	g.get(path+exes[1]+fmt.Sprint("&to=", first.Seq-1)).wantProblem(t, 400, "INVALID_REQUEST", "executionId")
	g.get(path+exes[1], header("Last-Event-ID", fmt.Sprint(last))).want(t, 204)
	g.get(path+"x").wantProblem(t, 400, "INVALID_REQUEST", "executionId")
	g.get(path).wantProblem(t, 400, "INVALID_REQUEST", "executionId")
	g.get("/api/sessions/"+id+"/events/stream?executionId="+exes[1]).wantProblem(t, 400, "INVALID_REQUEST", "executionId")
	// An execution of another session does not exist.
	g.get("/api/sessions/"+other+"/events/stream?replay=1&executionId="+exes[1]).wantProblem(t, 404, "EXECUTION_NOT_FOUND", "executionId")
	s := g.dial()
	s.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,"replay":true,"executionId":%q}`, other, exes[1]))
	s.wantError("EXECUTION_NOT_FOUND", "executionId")
	st, err := spoolv1.NewEventsClient(g.conn()).ReplayEvents(t.Context(), &spoolv1.ReplayEventsRequest{SessionId: other, ExecutionId: exes[1]})
	must(t, err)
	_, err = st.Recv()
	wantCode(t, err, codes.NotFound, "EXECUTION_NOT_FOUND", "executionId")
}

// TestReplay_CancelledCallReturnsItsBytes tests that a call that is cancelled or reaches its deadline returns its bytes.
func TestReplay_CancelledCallReturnsItsBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	var list []events.Event
	for i := range 5000 {
		list = append(list, events.Event{Time: recordedAt.Add(time.Duration(i) * time.Hour), Data: events.Log{}})
	}
	w.emit("default", id, list...)
	client := spoolv1.NewEventsClient(g.conn())
	for name, limit := range map[codes.Code]func() (context.Context, context.CancelFunc){
		codes.Canceled:         func() (context.Context, context.CancelFunc) { return context.WithCancel(t.Context()) },
		codes.DeadlineExceeded: func() (context.Context, context.CancelFunc) { return context.WithTimeout(t.Context(), 3*time.Second) },
	} {
		ctx, cancel := limit()
		st, err := client.ReplayEvents(ctx, &spoolv1.ReplayEventsRequest{SessionId: id, Speed: slowestSpeed})
		must(t, err)
		_, err = st.Recv()
		if err == nil {
			g.wantMetric(t, `spool_gateway_readers 1`)
		}
		if name == codes.Canceled {
			cancel()
		}
		for err == nil {
			_, err = st.Recv()
		}
		if status.Code(err) != name {
			t.Errorf("got %v, want %s", err, name)
		}
		cancel()
		g.wantMetric(t, `spool_gateway_readers 0`)
		g.wantMetric(t, `spool_gateway_held_bytes 0`)
	}
}

// TestReplay_LimitedKeyCannotReplayOtherAgents tests that a key that is limited to agents can only replay their sessions.
func TestReplay_LimitedKeyCannotReplayOtherAgents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	key := g.withKey(g.withKey(root).do("POST", "/api/keys", `{"name":"x","agents":["mine"]}`).want(t, 201).text("key"))
	mine, other := w.sessionOf("default", "mine"), w.sessionOf("default", "other")
	key.get("/api/sessions/"+other+"/events/stream?replay=1").wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	s := key.dial()
	s.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,"replay":true}`, other))
	s.wantError("SESSION_NOT_FOUND", "sessionId")
	for _, tr := range replays {
		if kept, _, _ := split(all(t, tr.open(key, mine, "max", 0, 0))); len(kept) != 1 {
			t.Errorf("%s: %d events", tr.name, len(kept))
		}
	}
}

// TestReplay_BrowserReconnectContinues tests that a browser that reconnects after the replay's end gets 204, and that
// one that was disconnected continues.
func TestReplay_BrowserReconnectContinues(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.emit("default", id, events.Event{Data: events.Log{}}, events.Event{Data: events.Log{}})
	path := "/api/sessions/" + id + "/events/stream?replay=1&speed=max"
	g.get(path, header("Last-Event-ID", "3")).want(t, 204)
	g.get(path+"&to=2", header("Last-Event-ID", "2")).want(t, 204)
	if a := g.get(path, header("Last-Event-ID", "1")).want(t, 200); !strings.Contains(string(a.body), `{"from":2,"to":3,`) {
		t.Errorf("got %s", a)
	}
	g.get(path, header("Last-Event-ID", "9")).wantProblem(t, 409, "CURSOR_AHEAD", "from")
}

// slowestSpeed is a speed at which each event waits for the longest possible time.
const slowestSpeed = "0.000000001"

// TestReplay_EndsWithAReason tests that a replay ends with a reason when its client leaves, its key is revoked, its session is
// deleted or its gateway stops, and that it returns its bytes. A replay counts as a stream and takes bytes of its
// tenant.
func TestReplay_EndsWithAReason(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantStreams: 3})
	made := g.withKey(root).do("POST", "/api/keys", `{"name":"x"}`).want(t, 201)
	mine := g.withKey(made.text("key"))
	other := g.withKey(g.withKey(root).do("POST", "/api/keys", `{"name":"y"}`).want(t, 201).text("key"))
	begin := func(s *served, id string) []replayed {
		var list []replayed
		for _, tr := range replays {
			c := tr.open(s, id, slowestSpeed, 0, 0)
			for range 2 { // the start and the first event
				_, err := c.next()
				must(t, err)
			}
			list = append(list, c)
		}
		return list
	}
	long := func() string {
		id := w.session("default")
		var list []events.Event
		for i := range 5000 {
			list = append(list, events.Event{Time: recordedAt.Add(time.Duration(i) * time.Hour), Data: events.Log{}})
		}
		w.emit("default", id, list...)
		return id
	}
	ends := func(c replayed, code string) {
		t.Helper()
		for {
			one, err := c.next()
			var p errProblem
			switch {
			case err == nil && one.kind != "replay_ended":
				continue
			case !errors.As(err, &p) || p.code != code:
				t.Errorf("got %v, %v; want %s", one, err, code)
			}
			c.close()
			return
		}
	}
	id := long()
	list := begin(mine, id)
	g.wantStreams(root, 3)
	g.wantHeld(root, func(n float64) bool { return n >= 3*768<<10 })
	other.get("/api/sessions/"+id+"/events/stream?replay=1").wantProblem(t, 429, "TOO_MANY_STREAMS", "")

	// After a session was left, it can be joined again.
	c := list[1].(wsReplay)
	c.send(fmt.Sprintf(`{"type":"session:leave","requestId":"l","sessionId":%q}`, id))
	for {
		if one, err := c.next(); errors.Is(err, io.EOF) {
			break
		} else if err != nil || one.kind == "replay_ended" {
			t.Fatalf("got %v, %v", one, err)
		}
	}
	c.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,"replay":true,"speed":%s}`, id, slowestSpeed))
	c.want("session:joined")

	w.emit("default", id, events.Event{Data: events.SessionDeleted{}})
	for _, c := range list {
		ends(c, "SESSION_NOT_FOUND")
	}
	g.wantStreams(root, 0)
	g.wantHeld(root, func(n float64) bool { return n < 768<<10 })

	id = long()
	list = begin(mine, id)
	mine.do("DELETE", "/api/keys/"+made.text("keyId"), "").want(t, 200)
	for _, c := range list {
		ends(c, "UNAUTHENTICATED")
	}
	list = begin(other, id)
	g.stop()
	list[1].close() // a WebSocket is closed with a code
	for _, c := range []replayed{list[0], list[2]} {
		ends(c, "UNAVAILABLE")
	}
}

// TestReplay_WithoutDELTASIsUnavailable tests that a replay without DELTAS ends with a temporary error after the first block with
// text began, because the gateway cannot know which text is no longer stored.
func TestReplay_WithoutDELTASIsUnavailable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.record("default", id, time.Millisecond, play(t)[:5])
	must(t, w.js.DeleteStream(t.Context(), topology.StreamDeltas))
	for _, tr := range replays {
		c := tr.open(g, id, "max", 0, 0)
		defer c.close()
		for _, want := range []string{"replay_started", "session_created", "message_accepted", "execution_dispatched", "execution_claimed", "execution_started", "block_start"} {
			if one, err := c.next(); err != nil || one.kind != want {
				t.Errorf("%s: got %v, %v, want %s", tr.name, one, err, want)
			}
		}
		var p errProblem
		if one, err := c.next(); !errors.As(err, &p) || p.code != "UNAVAILABLE" {
			t.Errorf("%s: got %v, %v", tr.name, one, err)
		}
	}
}

// TestReplay_StalledClientIsDisconnected tests that a client that does not read is disconnected without an effect on another
// replay, and that the bytes of a replay are bounded.
func TestReplay_StalledClientIsDisconnected(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{WriteTimeout: time.Second})
	id := w.session("default")
	for range 40 {
		var list []events.Event
		for range 10 {
			list = append(list, events.Event{Data: events.Log{Message: strings.Repeat("x", 60_000)}})
		}
		w.emit("default", id, list...)
	}
	stalled := g.replayWS(id, `,"speed":"max"`)
	defer stalled.close()
	raw := rawSSE(t, g, id, "?replay=1&speed=max")
	defer func() { _ = raw.Close() }()
	call := g.replayRPC(&spoolv1.ReplayEventsRequest{SessionId: id, Speed: "max"})
	defer call.close()
	kept, _, _ := split(all(t, g.replaySSE(id, "&speed=max")))
	if len(kept) != int(w.tip(id)) {
		t.Errorf("another client received %d events", len(kept))
	}
	g.wantMetric(t, `spool_gateway_clients_cut_total{code="SLOW_CLIENT",kind="ws"} 1`)
	g.wantMetric(t, `spool_gateway_clients_cut_total{code="SLOW_CLIENT",kind="sse"} 1`)
	g.wantMetric(t, `spool_gateway_clients_cut_total{code="SLOW_CLIENT",kind="grpc"} 1`)
	g.wantMetric(t, `spool_gateway_held_bytes 0`)
	g.wantMetric(t, `spool_gateway_readers 0`)
}

// TestReplay_CountsAsBytesInFlight tests that replays take bytes of their tenant, and are refused if these do not
// suffice.
func TestReplay_CountsAsBytesInFlight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxRequest: 8 << 20, MaxTenantBytes: 10 << 20})
	one := g.withNewKey(root, "one")
	id := w.session("one")
	w.emit("one", id, events.Event{Time: recordedAt.Add(time.Hour), Data: events.Log{}}, events.Event{Time: recordedAt.Add(2 * time.Hour), Data: events.Log{}})
	var open []replayed
	for range 13 {
		c := one.replaySSE(id, "&speed="+slowestSpeed)
		defer c.close()
		open = append(open, c)
	}
	one.get("/api/sessions/"+id+"/events/stream?replay=1").wantProblem(t, 429, "TOO_MUCH_IN_FLIGHT", "")
	s := one.dial()
	s.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,"replay":true}`, id))
	s.wantError("TOO_MUCH_IN_FLIGHT", "")
	for _, c := range open { // each ends on its own and returns its bytes
		all(t, c)
	}
	g.wantHeld(root, func(n float64) bool { return n == 0 })
	all(t, one.replaySSE(id, "&speed=max"))
}
