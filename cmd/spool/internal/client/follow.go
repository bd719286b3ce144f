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
	// firstWait is the wait before the second attempt; it doubles with each further attempt.
	firstWait   = 100 * time.Millisecond
	pingEvery   = 15 * time.Second
	pingTimeout = 10 * time.Second
	dialTimeout = 10 * time.Second
	// joinTimeout is the time limit for the response to a join.
	joinTimeout = 30 * time.Second
	// maxHoles is the number of connections in a row that may skip the same event before Follow returns an error.
	maxHoles = 5
)

// The messages of the WebSocket are not part of spool.proto; services/gateway/internal/socket defines them.

// Message is one item of a followed session. Exactly one of Event, Lag, Snapshot, Joined and Lost is set.
type Message struct {
	Event    *events.Wire    // a stored event, in order and once; or a delta with new text only
	Raw      json.RawMessage // the event as JSON
	Lag      *Lag
	Snapshot *Snapshot
	Joined   bool  // the stream is joined, for the first time or again
	Lost     error // the connection was lost, and Follow reconnects
}

// Lag reports whether the server's read models are behind the log: events are late, but none are lost.
type Lag struct {
	Lagging bool   `json:"lagging"`
	LagMs   uint32 `json:"lagMs"`
}

// Snapshot replaces events that the server cannot serve from the cursor.
type Snapshot struct {
	Cause  *Error // CURSOR_EXPIRED or CURSOR_AHEAD; nil if the server sent none
	Seq    uint32 // seq of the last event that is folded into the blocks
	Blocks []events.Block
}

// Follow yields a session's events with a greater seq than after, then waits for more until ctx ends. After a lost
// connection it reconnects at the cursor: it yields each event exactly once, and the text in flight without
// repetition. It ends with an error: that of ctx, an *Error, or an *UnreachableError if the server did not respond
// within Config.GiveUp.
func (c *Client) Follow(ctx context.Context, session string, after uint32) iter.Seq2[Message, error] {
	return func(yield func(Message, error) bool) {
		f := &follower{client: c, session: session, cursor: after, texts: map[string]*blocks.Text{}, done: map[string]bool{}}
		f.yield = func(m Message) bool { f.stopped = f.stopped || !yield(m, nil); return !f.stopped }
		if err := f.run(ctx); err != nil && !f.stopped {
			yield(Message{}, err)
		}
	}
}

// follower is one call of Follow. It holds what was yielded, over any number of connections.
type follower struct {
	client  *Client
	session string
	cursor  uint32                  // seq of the last event that was yielded
	texts   map[string]*blocks.Text // texts of open blocks
	done    map[string]bool         // complete blocks
	yield   func(Message) bool
	stopped bool // the consumer stopped the iteration
	yielded int  // number of events and deltas
	holes   int  // number of connections in a row that skipped an event, or sent a snapshot instead of it
}

// errStopped ends a connection after the consumer stopped the iteration.
var errStopped = errors.New("stopped")

// holeError is returned for a stream that skipped events.
type holeError struct{ cursor, got uint32 }

func (e *holeError) Error() string {
	return fmt.Sprintf("the server left out events %d to %d of the session", e.cursor+1, e.got-1)
}

func (f *follower) run(ctx context.Context) error {
	since, pauses := time.Now(), retry.NewDoubling(firstWait, maxWait)
	for {
		before := f.yielded
		joined, err := f.connection(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if f.stopped || err != nil && f.final(err) {
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
		if err != nil && !f.yield(Message{Lost: err}) {
			return nil
		}
		wait := firstWait / 10 // after a connection that brought something: reconnect at once
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

// final reports whether another connection would end in the same way.
func (f *follower) final(err error) bool {
	var problem *Error
	if errors.As(err, &problem) {
		return !problem.temporary()
	}
	var hole *holeError
	if errors.As(err, &hole) {
		f.holes++
		return f.holes >= maxHoles
	}
	return false
}

// connection joins once and reads until the connection ends. The error is nil only after a snapshot, from whose end
// the next connection continues.
func (f *follower) connection(ctx context.Context) (joined bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := f.dial(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.CloseNow() }() // the connection is no longer used
	conn.SetReadLimit(maxResponse)
	join, err := encode(map[string]any{"type": "session:join", "requestId": "1", "sessionId": f.session, "after": f.cursor})
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
			if !f.yield(Message{Joined: true}) {
				return joined, errStopped
			}
		case "error":
			e := &Error{Code: m.Code, Field: m.Field, Detail: m.Message, Tip: m.Tip}
			if !IsCode(e, CodeCursorAhead, CodeCursorExpired) {
				return joined, e
			}
			refused = e // its snapshot follows
		case "session:snapshot":
			return true, f.yieldSnapshot(refused, m)
		default:
			if err := f.take(m); err != nil {
				return joined, err
			}
		}
	}
}

// closeReason returns a short form of the error that ended a connection.
func closeReason(err error) error {
	var closed websocket.CloseError
	switch {
	case errors.As(err, &closed) && closed.Reason != "":
		return errors.New(closed.Reason)
	case errors.Is(err, io.EOF), errors.As(err, &closed):
		return errors.New("the server closed the connection")
	}
	return errors.New(reason(err))
}

// serverMessage holds the fields of all messages that the gateway sends.
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

// take handles a message on a joined stream.
func (f *follower) take(m serverMessage) error {
	switch m.Type {
	case "session:event":
		return f.yieldEvent(m.Event)
	case "session:lag":
		if !f.yield(Message{Lag: &Lag{m.Lagging, m.LagMs}}) {
			return errStopped
		}
	case "session:left":
		return errors.New("the server ended the stream")
	}
	return nil
}

// yieldEvent yields an event that was not yielded before.
func (f *follower) yieldEvent(raw json.RawMessage) error {
	var w events.Wire
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
		return &holeError{f.cursor, w.Seq}
	}
	f.cursor, f.holes, f.yielded = w.Seq, 0, f.yielded+1
	if d, ok := w.Event().Data.(events.BlockComplete); ok {
		f.done[d.Block.ID] = true
		delete(f.texts, d.Block.ID)
	}
	if !f.yield(Message{Event: &w, Raw: raw}) {
		return errStopped
	}
	return nil
}

// yieldDelta yields the part of a delta that was not yielded before: after a reconnect the server sends the text of open
// blocks from its start.
func (f *follower) yieldDelta(w events.Wire, raw json.RawMessage) error {
	var d events.Delta
	if err := json.Unmarshal(w.Data, &d); err != nil {
		return fmt.Errorf("decode a delta: %w", err)
	}
	if f.done[d.BlockID] {
		return nil
	}
	t := f.texts[d.BlockID]
	if t == nil {
		t = &blocks.Text{}
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
		if raw, err = encode(w); err != nil {
			return err
		}
	}
	if !f.yield(Message{Event: &w, Raw: raw}) {
		return errStopped
	}
	return nil
}

// yieldSnapshot moves the cursor to a snapshot, and yields the snapshot.
func (f *follower) yieldSnapshot(cause *Error, m serverMessage) error {
	if f.holes++; f.holes >= maxHoles && cause != nil {
		return cause
	}
	f.cursor = m.Seq
	clear(f.texts)
	for _, b := range m.Blocks {
		if b.Status == events.StatusPending {
			f.texts[b.ID] = &blocks.Text{Known: b.Content}
		} else {
			f.done[b.ID] = true
		}
	}
	if !f.yield(Message{Snapshot: &Snapshot{cause, m.Seq, m.Blocks}}) {
		return errStopped
	}
	return nil
}

// dial opens a WebSocket. The error is an *Error if the gateway refused the connection.
func (f *follower) dial(ctx context.Context) (*websocket.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	u := *f.client.base.JoinPath("api", "ws")
	u.Scheme = strings.Replace(u.Scheme, "http", "ws", 1)
	//nolint:bodyclose // after Dial the body never needs to be closed
	conn, resp, err := websocket.Dial(ctx, u.String(), &websocket.DialOptions{HTTPClient: f.client.cfg.HTTP, HTTPHeader: f.client.header()})
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
	return nil, f.client.responseError(resp, bytes.TrimSpace(body))
}

// keepAlive closes the connection when the server no longer responds to pings. It returns when ctx ends.
func keepAlive(ctx context.Context, conn *websocket.Conn) {
	tick := time.NewTicker(pingEvery)
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
