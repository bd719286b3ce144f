package gateway_test

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// shown returns the member metadata of an event, or "" for none.
func shown(t testing.TB, event []byte) string {
	t.Helper()
	var e struct {
		Type     string          `json:"type"`
		Metadata json.RawMessage `json:"metadata"`
	}
	must(t, json.Unmarshal(event, &e))
	if e.Type == string(events.TextDelta) && e.Metadata != nil {
		t.Errorf("text in flight carries metadata: %s", event)
	}
	return string(e.Metadata)
}

// raw reads the raw events of a stream, including text in flight.
type raw interface {
	raw() (seq uint32, kind string, event []byte)
	close()
}

func (c *ws) raw() (uint32, string, []byte) {
	r := c.want("session:event")
	var w events.WireEvent
	must(c.t, json.Unmarshal(r.Event, &w))
	return w.Seq, string(w.Type), r.Event
}

type sseBytes struct {
	*sse
	t testing.TB
}

func (s sseBytes) raw() (seq uint32, kind string, event []byte) {
	for {
		line, err := s.lines.ReadString('\n')
		must(s.t, err)
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch name {
		case "event":
			kind = value
		case "data":
			var w events.WireEvent
			must(s.t, json.Unmarshal([]byte(value), &w))
			return w.Seq, kind, []byte(value)
		}
	}
}

type rpcBytes struct {
	*rpc
	t testing.TB
}

func (r rpcBytes) raw() (uint32, string, []byte) {
	m, err := r.stream.Recv()
	must(r.t, err)
	e := m.GetEvent()
	var list []string
	if s := e.GetMetadata().GetSession(); s != nil {
		list = append(list, `"session":`+s.Text)
	}
	if s := e.GetMetadata().GetMessage(); s != nil {
		list = append(list, `"message":`+s.Text)
	}
	text := fmt.Sprintf(`{"type":%q}`, e.Type)
	if list != nil {
		text = fmt.Sprintf(`{"type":%q,"metadata":{%s}}`, e.Type, strings.Join(list, ","))
	}
	return e.Seq, e.Type, []byte(text)
}

// metadataStreams joins a session on every kind of stream.
func (s *served) metadataStreams(session string, after uint32, with bool) map[string]raw {
	s.t.Helper()
	c := s.dial()
	member, query := "", ""
	if !with {
		member, query = `,"metadata":false`, "?metadata=0"
	}
	c.send(fmt.Sprintf(`{"type":"session:join","requestId":"r","sessionId":%q,"after":%d%s}`, session, after, member))
	c.want("session:joined")
	conn := s.conn()
	no := false
	r := &spoolv1.StreamEventsRequest{SessionId: session, After: after}
	if !with {
		r.Metadata = &no
	}
	st, err := spoolv1.NewEventsClient(conn).StreamEvents(s.context(s.t.Context()), r)
	must(s.t, err)
	return map[string]raw{
		"WebSocket": c, "SSE": sseBytes{s.sse(session, after, query), s.t}, "gRPC": rpcBytes{&rpc{st, func() {}, conn}, s.t},
	}
}

// wantMetadata reads the events after a cursor and compares their metadata.
func wantMetadata(t testing.TB, name string, s raw, after uint32, want []string) {
	t.Helper()
	for seq := after + 1; int(seq) <= len(want); {
		got, kind, event := s.raw()
		meta := shown(t, event)
		if kind == string(events.TextDelta) {
			continue
		}
		if got != seq || meta != want[seq-1] {
			t.Errorf("%s: event %d (%s) shows %q, want event %d with %q", name, got, kind, meta, seq, want[seq-1])
		}
		seq++
	}
}

// TestEvents_HaveTheMetadataOfTheirTime tests that an event has the session's metadata at the time when it was
// appended, and that of its message, on all ways to read it: from Postgres, live, on a feed that began during an
// execution, and after the session's metadata changed.
func TestEvents_HaveTheMetadataOfTheirTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	const first, second, ofMessage = `{"run":1152921504606846976,"a":"<é>"}`, `["later",{"metadata":null}]`, `{"ticket":"T-1"}`
	session := newID(t, events.KindSession)
	one, two := newID(t, events.KindExecution), newID(t, events.KindExecution)
	block := events.DeriveID(events.KindBlock, one, "answer")
	var want []string
	emit := func(show string, list ...events.Event) {
		w.emit("default", session, list...)
		for range list {
			want = append(want, show)
		}
	}
	of := func(exe string, d events.Payload) events.Event {
		return events.Event{ExecutionID: exe, ConversationID: events.MainConversation, Data: d}
	}
	message := func(exe, metadata string) events.Event {
		return of(exe, events.MessageAccepted{BlockID: events.DeriveID(events.KindBlock, exe, "message"), Content: "q", Metadata: json.RawMessage(metadata)})
	}
	const firstAlone, firstBoth = `{"session":` + first + `}`, `{"session":` + first + `,"message":` + ofMessage + `}`
	const secondAlone, secondBoth = `{"session":` + second + `}`, `{"session":` + second + `,"message":` + ofMessage + `}`

	emit(firstAlone, events.Event{Data: events.SessionCreated{Agent: "default", AgentVersion: "1", Architecture: "spool", Provider: "local", Metadata: json.RawMessage(first)}})
	early := g.metadataStreams(session, 0, true)
	bare := g.metadataStreams(session, 0, false)
	emit(firstBoth, message(one, ofMessage), of(one, events.ExecutionDispatched{}))
	emit(firstBoth, of(one, events.ExecutionStarted{Attempt: 1}), of(one, events.BlockStart{Block: events.Block{ID: block, Kind: events.KindAssistantText}}))
	w.emitText("default", session, block, "text in flight")

	other := w.gateway(gateway.Config{}) // its feed starts after the message was accepted
	middle, from := other.metadataStreams(session, uint32(len(want)), true), uint32(len(want))
	emit(firstBoth, of(one, events.BlockComplete{Block: events.Block{ID: block, Kind: events.KindAssistantText, Content: "text in flight"}}))
	emit(firstAlone, events.Event{Data: events.SessionOptionsUpdated{Options: events.Options{Model: "m"}}}) // without metadata the former one stays
	emit(secondAlone, events.Event{Data: events.SessionOptionsUpdated{Metadata: json.RawMessage(second)}})
	emit(secondBoth, of(one, events.ExecutionCompleted{Result: "done"}))
	emit(secondAlone, of(two, events.MessageAccepted{BlockID: events.DeriveID(events.KindBlock, two, "message"), Content: "no metadata"}))
	emit(secondAlone, of(two, events.ExecutionCompleted{Result: "done"}))

	none := make([]string, len(want))
	for name, s := range early {
		wantMetadata(t, "live "+name, s, 0, want)
	}
	for name, s := range middle {
		wantMetadata(t, "from the middle, "+name, s, from, want)
	}
	for name, s := range bare {
		wantMetadata(t, "live without metadata "+name, s, 0, none)
	}
	for name, s := range g.metadataStreams(session, 2, true) {
		wantMetadata(t, "from Postgres, "+name, s, 2, want)
	}
	rest := func(query string, want []string) {
		t.Helper()
		a := g.get("/api/sessions/"+session+"/events?limit=100"+query).want(t, 200)
		var page struct {
			Events []json.RawMessage `json:"events"`
		}
		must(t, json.Unmarshal(a.body, &page))
		if len(page.Events) != len(want) {
			t.Errorf("%s: %d events, want %d", query, len(page.Events), len(want))
		}
		for i := range min(len(page.Events), len(want)) {
			if got := shown(t, page.Events[i]); got != want[i] {
				t.Errorf("REST %s: event %s shows %s, want %s", query, page.Events[i], got, want[i])
			}
		}
	}
	rest("", want)
	rest("&metadata=true", want)
	rest("&after=4", want[4:])
	rest("&metadata=0", none)
	rest("&types=execution_completed", []string{secondBoth, secondAlone})

	g.get("/api/sessions/"+session+"/events?metadata=maybe").wantProblem(t, 400, "INVALID_REQUEST", "metadata")
	g.get("/api/sessions/"+session+"/events/stream?metadata=no").wantProblem(t, 400, "INVALID_REQUEST", "metadata")
	c := g.dial()
	c.send(fmt.Sprintf(`{"type":"session:join","requestId":"r","sessionId":%q,"metadata":"no"}`, session))
	c.wantError("INVALID_REQUEST", "metadata")
}

// TestEvents_MetadataCountsInThePage tests that metadata, which each event repeats, counts towards the 2 MiB of a
// page.
func TestEvents_MetadataCountsInThePage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	session := newID(t, events.KindSession)
	large := json.RawMessage(`"` + strings.Repeat("m", 16<<10-2) + `"`)
	w.emit("default", session, events.Event{Data: events.SessionCreated{Agent: "default", AgentVersion: "1", Architecture: "spool", Provider: "local", Metadata: large}})
	list := make([]events.Event, 300)
	for i := range list {
		list[i] = events.Event{Data: events.SessionIdle{IdleMs: 1}}
	}
	w.emit("default", session, list...)
	next, seen := 0.0, 0
	for pages := 0; seen < 301; pages++ {
		a := g.get("/api/sessions/"+session+"/events?limit=1000&after="+strconv.Itoa(int(next))).want(t, 200)
		n := len(a.field("events").([]any))
		if n == 0 || len(a.body) > 3<<20 || pages > 10 {
			t.Fatalf("page %d has %d events in %d bytes", pages, n, len(a.body))
		}
		seen, next = seen+n, a.number("next")
		if int(next) != seen {
			t.Fatalf("next is %v after %d events", next, seen)
		}
	}
	if a := g.get("/api/sessions/"+session+"/events?limit=1000&metadata=0").want(t, 200); len(a.field("events").([]any)) != 301 {
		t.Errorf("without metadata %d events fit a page", len(a.field("events").([]any)))
	}
}
