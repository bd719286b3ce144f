package compose

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

// patience is the time limit for the end of a turn, on a busy machine.
const patience = 3 * time.Minute

// server is a gateway as a client sees it.
type server struct{ url, key string }

// call sends a request and decodes the answer, which must have the given status.
func (s server) call(ctx context.Context, method, path string, body any, status int, out any) error {
	var in io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		in = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, in)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+s.key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != status {
		return fmt.Errorf("%s %s answered %s: %s", method, path, resp.Status, raw)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(raw, out)
}

// events returns the whole history of a session.
func (s server) events(ctx context.Context, session string) ([]events.WireEvent, error) {
	var all []events.WireEvent
	for after := uint32(0); ; {
		var page struct {
			Events    []events.WireEvent
			Tip, Next uint32
		}
		if err := s.call(ctx, "GET", fmt.Sprintf("/api/sessions/%s/events?after=%d&limit=200", session, after), nil, http.StatusOK, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Events...)
		if page.Next >= page.Tip || page.Next == after {
			return all, nil
		}
		after = page.Next
	}
}

// stream is a client's WebSocket, with all events that it has received over all its connections.
type stream struct {
	session string
	conn    *websocket.Conn
	seen    []events.WireEvent
	view    *blocks.BlockView
	deltas  int
}

func newStream(session string) *stream { return &stream{session: session, view: blocks.NewBlockView()} }

// join connects and requests the events after the last one received.
func (s *stream) join(ctx context.Context, at server) error {
	conn, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(at.url, "http")+"/api/ws", &websocket.DialOptions{
		HTTPHeader: http.Header{"Authorization": {"Bearer " + at.key}},
	})
	if err != nil {
		return err
	}
	conn.SetReadLimit(16 << 20)
	s.conn = conn
	raw, err := json.Marshal(map[string]any{"type": "session:join", "requestId": "r", "sessionId": s.session, "after": s.cursor()})
	if err != nil {
		return err
	}
	return conn.Write(ctx, websocket.MessageText, raw)
}

func (s *stream) leave() { _ = s.conn.CloseNow() } // the server may have closed the connection already

func (s *stream) cursor() uint32 { return uint32(len(s.seen)) } //nolint:gosec // a session has fewer events

// next reads one event or delta. A gap, a repetition and an event out of order are errors.
func (s *stream) next(ctx context.Context) (events.WireEvent, error) {
	for {
		_, raw, err := s.conn.Read(ctx)
		if err != nil {
			return events.WireEvent{}, err
		}
		var m struct {
			Type, Code, Message string
			Event               events.WireEvent
		}
		if err := json.Unmarshal(raw, &m); err != nil {
			return events.WireEvent{}, err
		}
		switch {
		case m.Type == "error":
			return events.WireEvent{}, fmt.Errorf("%s: %s", m.Code, m.Message)
		case m.Type != "session:event":
			continue
		case m.Event.Type == events.TextDelta:
			if m.Event.Seq != s.cursor() {
				return m.Event, fmt.Errorf("text in flight with seq %d after event %d", m.Event.Seq, s.cursor())
			}
			d := events.Delta{ExecutionID: m.Event.ExecutionID, ConversationID: m.Event.ConversationID}
			if err := json.Unmarshal(m.Event.Data, &d); err != nil {
				return m.Event, err
			}
			s.deltas++
			s.view.ApplyDelta(d)
		default:
			if m.Event.Seq != s.cursor()+1 {
				return m.Event, fmt.Errorf("event %d came after %d", m.Event.Seq, s.cursor())
			}
			s.seen = append(s.seen, m.Event)
			s.view.Apply(m.Event.Event())
		}
		return m.Event, nil
	}
}

// until reads events up to the end of an execution.
func (s *stream) until(ctx context.Context, execution string) (events.WireEvent, error) {
	for {
		w, err := s.next(ctx)
		if err != nil || w.ExecutionID == execution && events.IsTerminal(w.Type) {
			return w, err
		}
	}
}

// catchUp reads until n events were received.
func (s *stream) catchUp(ctx context.Context, n int) error {
	for len(s.seen) < n {
		if _, err := s.next(ctx); err != nil {
			return fmt.Errorf("after %d of %d events: %w", len(s.seen), n, err)
		}
	}
	return nil
}

// compareWithLog compares the events that the client received with the log.
func (s *stream) compareWithLog(log []events.WireEvent) error {
	if len(s.seen) != len(log) {
		return fmt.Errorf("the client saw %d events, the log has %d", len(s.seen), len(log))
	}
	fold := blocks.NewBlockView()
	for i, w := range log {
		fold.Apply(w.Event())
		got, err := json.Marshal(s.seen[i])
		if err != nil {
			return err
		}
		want, err := json.Marshal(w)
		if err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("event %d is %s to the client, %s in the log", i+1, got, want)
		}
	}
	if got, want := s.view.String(), fold.String(); got != want {
		return fmt.Errorf("the client shows\n%s\nthe log folds to\n%s", got, want)
	}
	return nil
}
