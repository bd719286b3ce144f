package gateway_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// blocksText returns the blocks of a client, one a line.
func (w *watcher) blocksText() string {
	var s strings.Builder
	for _, b := range w.view.Blocks() {
		fmt.Fprintf(&s, "%s %s %q\n", b.ID, b.Status, b.Content)
	}
	return s.String()
}

// stateAt returns the blocks of a state in the form of watcher.shows, and the blocks whose text is incomplete; at is
// 0 for the last event.
func (s *served) stateAt(session string, at uint32) (shown string, incomplete map[string]float64) {
	s.t.Helper()
	path := "/api/sessions/" + session + "/state?pageSize=200"
	if at > 0 {
		path += fmt.Sprint("&at=", at)
	}
	a := s.get(path).want(s.t, 200)
	for i := 0; a.text("blocks", fmt.Sprint(i), "id") != ""; i++ {
		shown += fmt.Sprintf("%s %s %q\n", a.text("blocks", fmt.Sprint(i), "id"), a.text("blocks", fmt.Sprint(i), "status"), a.text("blocks", fmt.Sprint(i), "content"))
	}
	incomplete = map[string]float64{}
	for i := 0; a.text("incompleteText", fmt.Sprint(i), "blockId") != ""; i++ {
		incomplete[a.text("incompleteText", fmt.Sprint(i), "blockId")] = a.number("incompleteText", fmt.Sprint(i), "shownBytes")
	}
	return shown, incomplete
}

// follow plays a run like a runner and a projector, with text on DELTAS too, for a client that follows it. It calls
// seen each time the client has received everything. It returns the client's state directly before each next event.
func (w *world) follow(g *served, session string, list []turn, seen func(c *watcher)) (had map[uint32]string) {
	w.t.Helper()
	client, s := newWatcher(), g.ws(session, 0)
	defer s.close()
	had = map[uint32]string{}
	until := func(enough func() bool) {
		for !enough() {
			e, err := s.next()
			must(w.t, err)
			must(w.t, client.take(e))
			had[client.seq] = client.blocksText()
		}
		seen(client)
	}
	at, offsets := recordedAt, map[string]int{}
	for _, p := range list {
		at = at.Add(30 * time.Millisecond)
		for i := range p.events {
			p.events[i].Time = at
		}
		if p.events != nil {
			w.emit("default", session, p.events...)
			until(func() bool { return client.seq == w.tip(session) })
			continue
		}
		d := events.Delta{BlockID: p.block, ConversationID: events.MainConversation, Epoch: 1, Offset: uint32(offsets[p.block]), Text: p.text, Time: at}
		w.emitDelta("default", session, d)
		offsets[p.block] += len(p.text)
		until(func() bool { return int(client.text[p.block]) >= offsets[p.block] })
	}
	return had
}

// TestState_HasTheTextInFlight tests that a state has the text that a client had before the next event, while the
// text is in flight and afterwards.
func TestState_HasTheTextInFlight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, list := w.session("default"), play(t)
	same := func(what, got, want string, incomplete map[string]float64) {
		t.Helper()
		if got != want || len(incomplete) > 0 {
			t.Errorf("%s:\n%s\nincomplete %v, a client had\n%s", what, got, incomplete, want)
		}
	}
	had := w.follow(g, id, list, func(c *watcher) {
		got, incomplete := g.stateAt(id, 0)
		same(fmt.Sprint("in flight, after event ", c.seq), got, c.blocksText(), incomplete)
	})
	withText := 0
	for at := uint32(1); at <= w.tip(id); at++ {
		got, incomplete := g.stateAt(id, at)
		same(fmt.Sprint("at event ", at), got, had[at], incomplete)
		if strings.Contains(had[at], `pending "`) && !strings.Contains(had[at], `pending ""`) {
			withText++
		}
		rpc, err := spoolv1.NewSessionsClient(g.conn()).GetSessionState(t.Context(), &spoolv1.GetSessionStateRequest{SessionId: id, At: &at, PageSize: 200})
		must(t, err)
		over := ""
		for _, b := range rpc.Blocks {
			over += fmt.Sprintf("%s %s %q\n", b.Id, b.Status, b.GetContent())
		}
		same(fmt.Sprint("over gRPC, at event ", at), over, had[at], nil)
	}
	if withText < 4 {
		t.Errorf("only %d states had text in flight", withText)
	}
}

// TestState_NamesBlocksWithIncompleteText tests that a state names the open blocks whose text is no longer stored, and the
// length of the stored part.
func TestState_NamesBlocksWithIncompleteText(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, list := w.session("default"), play(t)
	w.record("default", id, 30*time.Millisecond, list)
	stream, err := w.js.Stream(t.Context(), topology.StreamDeltas)
	must(t, err)
	var blocks []string
	for _, p := range list {
		if p.block != "" && !slices.Contains(blocks, p.block) {
			blocks = append(blocks, p.block)
		}
	}
	// The event after event 7 completes the second block; "well" and " and <more>" were published before it.
	const opened, answers = 6, 7
	if shown, incomplete := g.stateAt(id, answers); len(incomplete) > 0 || !strings.Contains(shown, `pending "hm, well"`) || !strings.Contains(shown, `pending "é and <more>"`) {
		t.Errorf("before the purge: %s, incomplete %v", shown, incomplete)
	}
	if shown, incomplete := g.stateAt(id, opened); len(incomplete) > 0 || !strings.Contains(shown, `pending "hm, "`) {
		t.Errorf("before the purge: %s, incomplete %v", shown, incomplete)
	}
	must(t, stream.Purge(t.Context(), jetstream.WithPurgeSequence(2))) // removes the first piece of the first block
	if shown, incomplete := g.stateAt(id, answers); fmt.Sprint(incomplete) != fmt.Sprint(map[string]float64{blocks[0]: 0}) || !strings.Contains(shown, `pending "é and <more>"`) {
		t.Errorf("after the first piece was lost: %s, incomplete %v", shown, incomplete)
	}
	must(t, stream.Purge(t.Context()))
	if shown, incomplete := g.stateAt(id, answers); fmt.Sprint(incomplete) != fmt.Sprint(map[string]float64{blocks[0]: 0, blocks[1]: 0}) || !strings.Contains(shown, blocks[0]+` pending ""`) {
		t.Errorf("without any text: %s, incomplete %v", shown, incomplete)
	}
	// A block that is still open: a later piece shows that text before it is missing.
	open := newID(t, events.KindBlock)
	w.emit("default", id, events.Event{ExecutionID: newID(t, events.KindExecution), ConversationID: events.MainConversation, Source: events.FromRunner,
		Data: events.BlockStart{Block: events.Block{ID: open, Kind: events.KindAssistantText}}})
	if _, incomplete := g.stateAt(id, 0); len(incomplete) > 0 {
		t.Errorf("block without text: %v is incomplete", incomplete)
	}
	w.emitText("default", id, open, "text")
	if shown, incomplete := g.stateAt(id, 0); len(incomplete) > 0 || !strings.Contains(shown, open+` pending "text"`) {
		t.Errorf("open block: %s, incomplete %v", shown, incomplete)
	}
	must(t, stream.Purge(t.Context()))
	w.emitText("default", id, open, " after a gap")
	if shown, incomplete := g.stateAt(id, 0); fmt.Sprint(incomplete) != fmt.Sprint(map[string]float64{open: 0}) {
		t.Errorf("open block whose beginning is lost: %s, incomplete %v", shown, incomplete)
	}
}

// TestState_ShowsTextThatABlockLost tests that a block that was completed with less text than was in flight shows the
// text in flight before its end.
func TestState_ShowsTextThatABlockLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, x, block := w.session("default"), newID(t, events.KindExecution), newID(t, events.KindBlock)
	ev := func(p events.Payload) turn {
		return turn{events: []events.Event{{ExecutionID: x, ConversationID: events.MainConversation, Source: events.FromRunner, Data: p}}}
	}
	w.record("default", id, 30*time.Millisecond, []turn{
		ev(events.BlockStart{Block: events.Block{ID: block, Kind: events.KindThinking}}),
		{block: block, text: "secret "}, {block: block, text: "thought"},
		ev(events.Log{Message: "amid the text"}),
		ev(events.BlockComplete{Block: events.Block{ID: block, Kind: events.KindThinking, Content: "-"}}),
	})
	if shown, incomplete := g.stateAt(id, 2); !strings.Contains(shown, `pending "secret thought"`) || len(incomplete) > 0 {
		t.Errorf("got %s, incomplete %v", shown, incomplete)
	}
}

// TestState_WithoutDELTASIsUnavailable tests that a state with open blocks is refused with a temporary error without DELTAS,
// because the gateway cannot know which text is no longer stored.
func TestState_WithoutDELTASIsUnavailable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.record("default", id, 30*time.Millisecond, play(t))
	must(t, w.js.DeleteStream(t.Context(), topology.StreamDeltas))
	if a := g.get("/api/sessions/"+id+"/state?at=7").wantProblem(t, 503, "UNAVAILABLE", ""); !strings.HasSuffix(a.text("detail"), "; try again") {
		t.Errorf("got %s", a)
	}
	g.get("/api/sessions/"+id+"/state?at=3").want(t, 200) // no block is open
}

// TestBlocks_TextIsValidIfDeltasSplitACharacter tests that text deltas that overlap in the middle of a character yield
// valid text.
func TestBlocks_TextIsValidIfDeltasSplitACharacter(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, block := w.session("default"), newID(t, events.KindBlock)
	w.emit("default", id, events.Event{ExecutionID: newID(t, events.KindExecution), ConversationID: events.MainConversation, Source: events.FromRunner, Time: recordedAt,
		Data: events.BlockStart{Block: events.Block{ID: block, Kind: events.KindAssistantText}}})
	for i, text := range []string{"ab", "éz"} {
		d := events.Delta{BlockID: block, ConversationID: events.MainConversation, Epoch: 1, Offset: uint32(i), Text: text, Time: recordedAt}
		w.emitDelta("default", id, d)
	}
	const want = "ab\ufffdz"
	conn := g.conn()
	list, err := spoolv1.NewEventsClient(conn).ListBlocks(t.Context(), &spoolv1.ListBlocksRequest{SessionId: id})
	must(t, err)
	state, err := spoolv1.NewSessionsClient(conn).GetSessionState(t.Context(), &spoolv1.GetSessionStateRequest{SessionId: id})
	must(t, err)
	if list.Blocks[0].GetContent() != want || state.Blocks[0].GetContent() != want {
		t.Errorf("blocks have %q, the state %q", list.Blocks[0].GetContent(), state.Blocks[0].GetContent())
	}
	if a := g.get("/api/sessions/"+id+"/blocks").want(t, 200); a.text("blocks", "0", "content") != want {
		t.Errorf("got %s", a)
	}
}
