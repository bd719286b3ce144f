package e2e

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// shown returns the view of a client that has received the events.
func shown(t *testing.T, list []events.WireEvent) *blocks.BlockView {
	t.Helper()
	v := blocks.NewBlockView()
	for _, w := range list {
		v.Apply(w.Event())
	}
	return v
}

// TestState_AtEveryEvent tests that the state at each event of two turns, the second of which was queued, is the fold
// of the log up to that event. It also equals the view that a client, by WebSocket and by SSE, had at that moment.
func TestState_AtEveryEvent(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateways: 2, Projectors: 2, Script: script(t, "stream.yaml")})
	session := c.CreateSession("spool", nil)
	get := func(path string, out any) error {
		var raw json.RawMessage
		if code := c.Call(1, "GET", path, nil, &raw); code != 200 {
			return fmt.Errorf("GET %s answered %d: %s", path, code, raw)
		}
		return json.Unmarshal(raw, out)
	}
	socket, err := c.JoinSocket(0, session, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	stream, err := c.JoinSSE(1, session, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	c.PostMessage(session, "list the folder, turn 0")
	last := c.PostMessage(session, "list the folder, turn 1")
	for _, s := range []*harness.Stream{socket, stream} {
		for {
			w, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			if w.Type == events.TextDelta {
				continue
			}
			// The session continues meanwhile.
			live := shown(t, s.Events)
			if err := sameButText(s.View, live); err != nil {
				t.Fatalf("at %d the client shows more than the events say: %v", w.Seq, err)
			}
			state, err := harness.ReadState(get, session, w.Seq, 3)
			if err == nil {
				err = harness.CompareState(state, s.Events, live.Blocks())
			}
			if err != nil {
				t.Fatal(err)
			}
			if w.ExecutionID == last && events.IsTerminal(w.Type) {
				break
			}
		}
	}
	// The states are the same after everything has ended. Without at, the state is that of the last event.
	for n := range socket.Events {
		state, err := harness.ReadState(get, session, uint32(n+1), 200)
		if err == nil {
			err = harness.CompareState(state, socket.Events[:n+1], shown(t, socket.Events[:n+1]).Blocks())
		}
		if err != nil {
			t.Error(err)
		}
	}
	if state, err := harness.ReadState(get, session, 0, 200); err != nil || state.Seq < socket.Cursor {
		t.Errorf("without at the state is that of event %d, %v; the last was %d or later", state.Seq, err, socket.Cursor)
	}
}

// sameButText compares two views, except for the text of open blocks.
func sameButText(a, b *blocks.BlockView) error {
	list := [2][]events.Block{a.Blocks(), b.Blocks()}
	for _, blocks := range list {
		for i := range blocks {
			if blocks[i].Status == events.StatusPending {
				blocks[i].Content = ""
			}
		}
	}
	if x, y := fmt.Sprintf("%+v", list[0]), fmt.Sprintf("%+v", list[1]); x != y {
		return fmt.Errorf("%s\nand\n%s", x, y)
	}
	return nil
}

// TestCompare_TwoRuns tests that two sessions with the same query and the same answers of the model do not differ,
// and that another query after that makes them differ from there on.
func TestCompare_TwoRuns(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateways: 1, Projectors: 1, Script: script(t, "stream.yaml")})
	one, two := c.CreateSession("spool", nil), c.CreateSession("spool", nil)
	var streams [2]*harness.Stream
	for i, session := range []string{one, two} {
		streams[i], _ = c.RunQuery(session, "list the folder, turn 0", nil)
	}
	compare := func() (d struct {
		Equal            bool
		EqualEvents      int
		Summary, Field   string
		Event, WithEvent struct{ Seq uint32 }
	}) {
		if code := c.Call(0, "GET", "/api/sessions/"+one+"/compare?with="+two, nil, &d); code != 200 {
			t.Fatalf("compare answered %d, %+v", code, d)
		}
		return d
	}
	if d := compare(); !d.Equal || d.EqualEvents < 5 {
		t.Errorf("two runs of one query: %+v", d)
	}
	alike := compare().EqualEvents
	before := streams[1].Cursor
	c.RunQuery(one, "list the folder, turn 1", streams[0])
	c.RunQuery(two, "list the folder, turn 2", streams[1])
	if d := compare(); d.Equal || d.Field != "data.content" || d.EqualEvents != alike || d.WithEvent.Seq <= before {
		t.Errorf("another query after that: %+v, %d events were alike before", d, alike)
	}
}
