package harness

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

// WaitTimeout is the time limit of each wait in end-to-end tests. It is long, because the machine may be busy.
const WaitTimeout = 60 * time.Second

// Call sends a REST request to gateway i, with body as JSON unless body is nil. It decodes the response into out unless
// out is nil, and returns the status.
func (c *Cluster) Call(i int, method, path string, body, out any) int {
	c.T.Helper()
	var in io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		requireNoError(c.T, err)
		in = bytes.NewReader(b)
	}
	ctx, cancel := context.WithTimeout(context.Background(), WaitTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.URL(i)+path, in)
	requireNoError(c.T, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	requireNoError(c.T, err)
	raw, err := io.ReadAll(resp.Body)
	requireNoError(c.T, err)
	requireNoError(c.T, resp.Body.Close())
	if out != nil {
		if err := json.Unmarshal(raw, out); err != nil {
			c.T.Fatalf("%s %s answered %d %s: %v", method, path, resp.StatusCode, raw, err)
		}
	}
	if resp.StatusCode >= 300 && out == nil {
		c.T.Fatalf("%s %s answered %d %s", method, path, resp.StatusCode, raw)
	}
	return resp.StatusCode
}

// CreateSession creates a session of an architecture through gateway 0 and returns its id. more holds further fields of the
// request. The session is deleted when the test ends.
func (c *Cluster) CreateSession(architecture string, more map[string]any) string {
	c.T.Helper()
	body := map[string]any{"architecture": architecture}
	for k, v := range more {
		body[k] = v
	}
	var s struct {
		SessionID string `json:"sessionId"`
	}
	if code := c.Call(0, "POST", "/api/sessions", body, &s); code != http.StatusCreated || s.SessionID == "" {
		c.T.Fatalf("create answered %d, %+v", code, s)
	}
	c.T.Cleanup(func() { c.DeleteSession(s.SessionID) })
	return s.SessionID
}

// PostMessage posts text as a message to a session through gateway 0, and returns the id of its execution.
func (c *Cluster) PostMessage(session, text string) string {
	c.T.Helper()
	var a struct {
		ExecutionID string `json:"executionId"`
	}
	if code := c.Call(0, "POST", "/api/sessions/"+session+"/messages", map[string]any{"content": text}, &a); code != http.StatusAccepted {
		c.T.Fatalf("post answered %d, %+v", code, a)
	}
	return a.ExecutionID
}

// Stream is a client that follows the events of one session over a WebSocket or SSE.
type Stream struct {
	View   *blocks.BlockView
	Cursor uint32 // seq of the last stored event
	Events []events.WireEvent
	Seen   func(events.WireEvent) // called by Next after a stored event was applied to View; may be nil
	next   func() (events.WireEvent, error)
	close  func()
}

// Close closes the stream's connection.
func (s *Stream) Close() { s.close() }

// Next returns the next event or delta of the session, and applies it to View. It returns an error if an event's seq
// does not follow the last one.
func (s *Stream) Next() (events.WireEvent, error) {
	w, err := s.next()
	if err != nil {
		return w, err
	}
	if w.Type == events.TextDelta {
		if w.Seq != s.Cursor {
			return w, fmt.Errorf("text in flight with seq %d after event %d", w.Seq, s.Cursor)
		}
		d := events.Delta{ExecutionID: w.ExecutionID, ConversationID: w.ConversationID}
		if err := json.Unmarshal(w.Data, &d); err != nil {
			return w, err
		}
		s.View.ApplyDelta(d)
		return w, nil
	}
	if w.Seq != s.Cursor+1 {
		return w, fmt.Errorf("seq %d came after %d", w.Seq, s.Cursor)
	}
	s.Cursor = w.Seq
	s.Events = append(s.Events, w)
	s.View.Apply(w.Event())
	if s.Seen != nil {
		s.Seen(w)
	}
	return w, nil
}

// ReadUntilEnd reads events until an execution has ended, and returns its terminal event.
func (s *Stream) ReadUntilEnd(execution string) (events.WireEvent, error) {
	for {
		w, err := s.Next()
		if err != nil || w.ExecutionID == execution && events.IsTerminal(w.Type) {
			return w, err
		}
	}
}

// JoinSocket opens a WebSocket to gateway i and joins a session after the last event that the stream from has received. The
// new stream continues from's View. from may be nil; the stream then begins with the first event.
func (c *Cluster) JoinSocket(i int, session string, from *Stream) (*Stream, error) {
	ctx, cancel := context.WithTimeout(context.Background(), WaitTimeout)
	// the body of a WebSocket handshake does not need to be closed
	//nolint:bodyclose // after Dial the body never needs to be closed
	conn, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(c.URL(i), "http")+"/api/ws", nil)
	if err != nil {
		cancel()
		return nil, err
	}
	conn.SetReadLimit(16 << 20)
	s := continueStream(from)
	join, err := json.Marshal(map[string]any{"type": "session:join", "requestId": "r1", "sessionId": session, "after": s.Cursor})
	if err == nil {
		err = conn.Write(ctx, websocket.MessageText, join)
	}
	s.close = func() { _ = conn.CloseNow(); cancel() }
	s.next = func() (events.WireEvent, error) {
		for {
			_, raw, err := conn.Read(ctx)
			if err != nil {
				return events.WireEvent{}, err
			}
			var m struct {
				Type    string           `json:"type"`
				Event   events.WireEvent `json:"event"`
				Code    string           `json:"code"`
				Message string           `json:"message"`
			}
			if err := json.Unmarshal(raw, &m); err != nil {
				return events.WireEvent{}, err
			}
			switch m.Type {
			case "session:event":
				return m.Event, nil
			case "error":
				return events.WireEvent{}, fmt.Errorf("%s: %s", m.Code, m.Message)
			}
		}
	}
	return s, err
}

// JoinSSE is like JoinSocket, but over SSE.
func (c *Cluster) JoinSSE(i int, session string, from *Stream) (*Stream, error) {
	ctx, cancel := context.WithTimeout(context.Background(), WaitTimeout)
	s := continueStream(from)
	req, err := http.NewRequestWithContext(ctx, "GET", c.URL(i)+"/api/sessions/"+session+"/events/stream", nil)
	if err != nil {
		cancel()
		return nil, err
	}
	req.Header.Set("Last-Event-ID", fmt.Sprint(s.Cursor))
	resp, err := http.DefaultClient.Do(req) //nolint:bodyclose // closed with the stream
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("stream answered %s", resp.Status)
	}
	if err != nil {
		cancel()
		return nil, err
	}
	lines := bufio.NewReader(resp.Body)
	s.close = func() { cancel(); _ = resp.Body.Close() }
	s.next = func() (events.WireEvent, error) {
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return events.WireEvent{}, err
			}
			data, ok := strings.CutPrefix(line, "data:")
			if !ok {
				continue
			}
			var w events.WireEvent
			return w, json.Unmarshal([]byte(data), &w)
		}
	}
	return s, nil
}

// continueStream returns a stream without a connection that has the events and the View of the stream from, or an empty
// one if from is nil.
func continueStream(from *Stream) *Stream {
	if from == nil {
		return &Stream{View: blocks.NewBlockView()}
	}
	return &Stream{View: from.View, Cursor: from.Cursor, Events: from.Events, Seen: from.Seen}
}

// RunQuery posts text as a message to a session, reads a stream to the end of its execution, and returns the stream and
// the terminal event. The stream continues from, which may be nil.
func (c *Cluster) RunQuery(session, text string, from *Stream) (*Stream, events.WireEvent) {
	c.T.Helper()
	s, err := c.JoinSocket(0, session, from)
	requireNoError(c.T, err)
	defer s.Close()
	execution := c.PostMessage(session, text)
	end, err := s.ReadUntilEnd(execution)
	if err != nil {
		c.T.Fatalf("stream of %s: %v; %s", session, err, c.DescribeStoppedStream(session, s))
	}
	return s, end
}

// Eventually calls ok again and again until it returns true. After the time WaitTimeout, it fails the test with a message
// that contains what, a description of the condition.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(WaitTimeout); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting until %s", what)
		}
	}
}
