package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/retry"
)

const (
	// firstRetryWait is the wait before the first retry. It doubles with each further retry.
	firstRetryWait = 100 * time.Millisecond
	pingInterval   = 15 * time.Second
	pingTimeout    = 10 * time.Second
	// webSocketDialTimeout is the time limit for opening the WebSocket.
	webSocketDialTimeout = 10 * time.Second
	// joinTimeout is the time limit for the server's response to a join.
	joinTimeout = 30 * time.Second
	// maxSkippingConnections is the number of successive connections that may skip the same event before Follow returns
	// an error.
	maxSkippingConnections = 5
)

// The messages of the WebSocket are not part of spool.proto; services/gateway/internal/socket defines them.

// FollowItem is one item that Follow yields. Exactly one of Event, Lag, Snapshot, Joined and Lost is set.
type FollowItem struct {
	Event    *events.WireEvent // a stored event, in order and once; or a delta with new text only
	Raw      json.RawMessage   // the event as JSON
	Lag      *ReadModelLag
	Snapshot *FollowSnapshot
	Joined   bool  // the stream is joined, for the first time or again
	Lost     error // the connection was lost, and Follow reconnects
}

// ReadModelLag states whether the server's read models are behind the log. Events are then late, but none are lost.
type ReadModelLag struct {
	Lagging bool   `json:"lagging"`
	LagMs   uint32 `json:"lagMs"`
}

// FollowSnapshot holds the blocks of a session that replace events which the server cannot send from the client's
// cursor on.
type FollowSnapshot struct {
	Cause  *Error // CURSOR_EXPIRED or CURSOR_AHEAD; nil if the server sent none
	Seq    uint32 // seq of the last event that is folded into the blocks
	Blocks []events.Block
}

// Follow yields the events of a session whose seq is greater than after, and then further events until ctx ends. It
// reconnects after a lost connection, and yields each event and each piece of text in flight exactly once. It ends with
// an error: that of ctx, an *Error, or an *UnreachableError if the server did not respond within Config.GiveUp.
func (c *Client) Follow(ctx context.Context, session string, after uint32) iter.Seq2[FollowItem, error] {
	return func(yield func(FollowItem, error) bool) {
		f := &followIteration{client: c, session: session, cursor: after, texts: map[string]*blocks.StreamedText{}, done: map[string]bool{}}
		f.yield = func(m FollowItem) bool { f.stopped = f.stopped || !yield(m, nil); return !f.stopped }
		if err := f.reconnectLoop(ctx); err != nil && !f.stopped {
			yield(FollowItem{}, err)
		}
	}
}

// followIteration is the state of one call of Follow: what it has yielded, over any number of connections.
type followIteration struct {
	client  *Client
	session string
	cursor  uint32                          // seq of the last event that was yielded
	texts   map[string]*blocks.StreamedText // texts of open blocks
	done    map[string]bool                 // ids of complete blocks
	yield   func(FollowItem) bool
	stopped bool // the consumer stopped the iteration
	yielded int  // number of events and deltas
	holes   int  // number of connections in a row that skipped an event, or sent a snapshot instead of it
}

// errIterationStopped is returned when the consumer of Follow has stopped the iteration.
var errIterationStopped = errors.New("stopped")

// skippedEventsError is returned when the server has sent an event whose seq does not follow that of the event before.
type skippedEventsError struct{ cursor, got uint32 }

func (e *skippedEventsError) Error() string {
	return fmt.Sprintf("the server left out events %d to %d of the session", e.cursor+1, e.got-1)
}

// reconnectLoop connects and reads until the iteration ends, and reconnects after a lost connection. It returns the
// error with which Follow ends.
func (f *followIteration) reconnectLoop(ctx context.Context) error {
	since, pauses := time.Now(), retry.NewDoubling(firstRetryWait, maxRetryWait)
	for {
		before := f.yielded
		joined, err := f.readConnection(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if f.stopped || err != nil && f.isFinal(err) {
			return err
		}
		if joined {
			since = time.Now()
			pauses.Reset()
		}
		if time.Since(since) > f.client.cfg.GiveUp {
			var problem *Error
			if errors.As(err, &problem) {
				return err
			}
			return f.client.unreachableError(ctx, err)
		}
		if err != nil && !f.yield(FollowItem{Lost: err}) {
			return nil
		}
		wait := firstRetryWait / 10 // after a connection that yielded something, reconnect almost at once
		if f.yielded > before {
			pauses.Reset()
		} else {
			wait = pauses.NextBackOff()
		}
		if retry.Pause(ctx, wait) != nil {
			return ctx.Err()
		}
	}
}

// isFinal reports whether Follow must return err, because another connection would end with the same error.
func (f *followIteration) isFinal(err error) bool {
	var problem *Error
	if errors.As(err, &problem) {
		return !problem.isTemporary()
	}
	var hole *skippedEventsError
	if errors.As(err, &hole) {
		f.holes++
		return f.holes >= maxSkippingConnections
	}
	return false
}

// readConnection opens a connection, joins the session and yields items until the connection ends. joined reports
// whether the server accepted the join. The error is nil only after a snapshot; the next connection then continues from
// the end of the snapshot.
func (f *followIteration) readConnection(ctx context.Context) (joined bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := f.client.dialWebSocket(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.CloseNow() }() // the connection is no longer used
	conn.SetReadLimit(maxResponseBytes)
	join, err := encodeJSON(map[string]any{"type": "session:join", "requestId": "1", "sessionId": f.session, "after": f.cursor})
	if err != nil {
		return false, err
	}
	if err := conn.Write(ctx, websocket.MessageText, join); err != nil {
		return false, err
	}
	var pinging sync.WaitGroup
	defer pinging.Wait()
	defer cancel()
	pinging.Go(func() { keepAlive(ctx, conn) })

	timeout := time.AfterFunc(joinTimeout, cancel)
	defer timeout.Stop()
	var refused *Error
	for {
		_, data, err := conn.Read(ctx)
		if err != nil {
			if refused != nil {
				return joined, refused
			}
			return joined, closeReason(err)
		}
		var m serverMessage
		if err := json.Unmarshal(data, &m); err != nil {
			return joined, fmt.Errorf("decode a message: %w", err)
		}
		switch m.Type {
		case "session:joined":
			joined = true
			timeout.Stop()
			if !f.yield(FollowItem{Joined: true}) {
				return joined, errIterationStopped
			}
		case "error":
			e := &Error{Code: m.Code, Field: m.Field, Detail: m.Message, Tip: m.Tip}
			if !IsCode(e, CodeCursorAhead, CodeCursorExpired) {
				return joined, e
			}
			refused = e // the server sends a snapshot next
		case "session:snapshot":
			return true, f.yieldSnapshot(refused, m)
		default:
			if err := f.handleMessage(m); err != nil {
				return joined, err
			}
		}
	}
}

// closeReason returns a short text for the error with which a WebSocket ended.
func closeReason(err error) error {
	var closed websocket.CloseError
	switch {
	case errors.As(err, &closed) && closed.Reason != "":
		return errors.New(closed.Reason)
	case errors.Is(err, io.EOF), errors.As(err, &closed):
		return errors.New("the server closed the connection")
	}
	return errors.New(shortCause(err))
}

// serverMessage holds the fields of all kinds of messages that the gateway sends over the WebSocket.
type serverMessage struct {
	Type    string          `json:"type"`
	Event   json.RawMessage `json:"event"`
	Seq     uint32          `json:"seq"`
	Blocks  []events.Block  `json:"blocks"`
	Lagging bool            `json:"lagging"`
	LagMs   uint32          `json:"lagMs"`
	Code    string          `json:"code"`
	Message string          `json:"message"`
	Field   string          `json:"field"`
	Tip     *uint32         `json:"tip"`
}

// handleMessage handles a message that the server sends after it has accepted the join.
func (f *followIteration) handleMessage(m serverMessage) error {
	switch m.Type {
	case "session:event":
		return f.yieldEvent(m.Event)
	case "session:lag":
		if !f.yield(FollowItem{Lag: &ReadModelLag{m.Lagging, m.LagMs}}) {
			return errIterationStopped
		}
	case "session:left":
		return errors.New("the server ended the stream")
	}
	return nil
}

// yieldEvent yields an event of the log, unless it was yielded before. A delta is passed to yieldDelta.
func (f *followIteration) yieldEvent(raw json.RawMessage) error {
	var w events.WireEvent
	if err := json.Unmarshal(raw, &w); err != nil {
		return fmt.Errorf("decode an event: %w", err)
	}
	if w.Type == events.TextDelta {
		return f.yieldDelta(w, raw)
	}
	if w.Seq <= f.cursor {
		return nil
	}
	if w.Seq != f.cursor+1 {
		return &skippedEventsError{f.cursor, w.Seq}
	}
	f.cursor, f.holes, f.yielded = w.Seq, 0, f.yielded+1
	if d, ok := w.Event().Data.(events.BlockComplete); ok {
		f.done[d.Block.ID] = true
		delete(f.texts, d.Block.ID)
	}
	if !f.yield(FollowItem{Event: &w, Raw: raw}) {
		return errIterationStopped
	}
	return nil
}

// yieldDelta yields the part of a delta's text that was not yielded before. After a reconnect the server sends the text
// of open blocks from its start.
func (f *followIteration) yieldDelta(w events.WireEvent, raw json.RawMessage) error {
	var d events.Delta
	if err := json.Unmarshal(w.Data, &d); err != nil {
		return fmt.Errorf("decode a delta: %w", err)
	}
	if f.done[d.BlockID] {
		return nil
	}
	t := f.texts[d.BlockID]
	if t == nil {
		t = &blocks.StreamedText{}
		f.texts[d.BlockID] = t
	}
	from := len(t.Known)
	fresh := t.Add(d)
	if fresh == "" {
		return nil
	}
	f.yielded++
	if int(d.Offset) != from || fresh != d.Text {
		d.Offset, d.Text = uint32(from), fresh
		again, err := d.ToWire(w.SessionID, w.Seq, w.Position)
		if err != nil {
			return err
		}
		w.Data = again.Data
		if raw, err = encodeJSON(w); err != nil {
			return err
		}
	}
	if !f.yield(FollowItem{Event: &w, Raw: raw}) {
		return errIterationStopped
	}
	return nil
}

// yieldSnapshot sets the cursor to the end of a snapshot that the server sent, and yields the snapshot.
func (f *followIteration) yieldSnapshot(cause *Error, m serverMessage) error {
	if f.holes++; f.holes >= maxSkippingConnections && cause != nil {
		return cause
	}
	f.cursor = m.Seq
	clear(f.texts)
	for _, b := range m.Blocks {
		if b.Status == events.StatusPending {
			f.texts[b.ID] = &blocks.StreamedText{Known: b.Content}
		} else {
			f.done[b.ID] = true
		}
	}
	if !f.yield(FollowItem{Snapshot: &FollowSnapshot{cause, m.Seq, m.Blocks}}) {
		return errIterationStopped
	}
	return nil
}

// dialWebSocket opens the WebSocket to the gateway. The error is an *Error if the gateway refused the connection.
func (c *Client) dialWebSocket(ctx context.Context) (*websocket.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, webSocketDialTimeout)
	defer cancel()
	u := *c.base.JoinPath("api", "ws")
	u.Scheme = strings.Replace(u.Scheme, "http", "ws", 1)
	//nolint:bodyclose // after Dial the body never needs to be closed
	conn, resp, err := websocket.Dial(ctx, u.String(), &websocket.DialOptions{HTTPClient: c.cfg.HTTP, HTTPHeader: c.requestHeader()})
	if err == nil {
		return conn, nil
	}
	if resp == nil || resp.StatusCode == http.StatusSwitchingProtocols {
		return nil, err
	}
	body, readErr := io.ReadAll(resp.Body)
	if readErr != nil {
		return nil, errors.Join(err, readErr)
	}
	return nil, c.responseError(resp, bytes.TrimSpace(body))
}

// keepAlive sends pings until ctx ends, and closes the connection when the server does not respond to one.
func keepAlive(ctx context.Context, conn *websocket.Conn) {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		limited, cancel := context.WithTimeout(ctx, pingTimeout)
		err := conn.Ping(limited)
		cancel()
		if err != nil {
			_ = conn.CloseNow() // the reader returns the error
			return
		}
	}
}
