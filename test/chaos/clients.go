package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/chaos/check"
)

const (
	// requestTimeout is the time limit of one request, because a frozen service does not answer.
	requestTimeout = 15 * time.Second
	// idleTimeout is the time without data after which a stream's client reconnects. A gateway sends a comment every
	// 15 s.
	idleTimeout = 20 * time.Second
	// retryPause is the pause between two attempts of a request or a connection.
	retryPause = 250 * time.Millisecond
)

// driver runs the clients of a chaos run and stores what they received.
type driver struct {
	c        *cluster
	mu       sync.Mutex
	accepted map[string]string // session by execution
	open     map[string]bool   // executions whose end no client has received
	ended    map[string]bool   // ended executions; a client may receive the end before the answer to its message
	clients  []*client
	retries  int
	refused  []string // valid cursors that were refused, and answers that no client should receive
	received time.Time
	stall    time.Duration // longest time in which no client received an event while a query was open
	posts    sync.WaitGroup
	deleted  int // sessions that were deleted during the faults
}

// client follows one session over one transport, SSE or WebSocket, and stores what it receives.
type client struct {
	kind, session string
	mu            sync.Mutex
	events        []check.Event
	pieces        []check.Piece
	connections   int
}

// cursor returns the seq of the last event that the client has received.
func (c *client) cursor() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return uint32(len(c.events))
}

// call sends a request to one gateway. If the status is 2xx, the body of the answer is decoded into out.
func (d *driver) call(ctx context.Context, gateway int, method, path, key string, body, out any) (int, string, error) {
	var raw []byte
	var err error
	if body != nil {
		if raw, err = json.Marshal(body); err != nil {
			return 0, "", err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, d.c.gateways[gateway%len(d.c.gateways)]+path, bytes.NewReader(raw))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close() //nolint:errcheck // the body was read to its end
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, "", err
	}
	if resp.StatusCode/100 == 2 && out != nil {
		err = json.Unmarshal(answer, out)
	}
	return resp.StatusCode, string(answer), err
}

// callUntilKnown repeats a request with the same key until its outcome is known. After a 503 or a lost connection it is not
// known.
func (d *driver) callUntilKnown(ctx context.Context, method, path, key string, body, out any) (status int, answer string, err error) {
	for gateway := 0; ; gateway++ {
		status, answer, err = d.call(ctx, gateway, method, path, key, body, out)
		if err == nil && status < http.StatusInternalServerError {
			return status, answer, nil
		}
		if err == nil && status != http.StatusServiceUnavailable && status != http.StatusGatewayTimeout {
			d.recordViolation("%s %s answered %d %s", method, path, status, answer)
		}
		d.mu.Lock()
		d.retries++
		d.mu.Unlock()
		select {
		case <-ctx.Done():
			return 0, "", fmt.Errorf("%s %s: %w; last: %d %s %w", method, path, ctx.Err(), status, answer, err)
		case <-time.After(retryPause):
		}
	}
}

// recordViolation records an answer that no client should receive.
func (d *driver) recordViolation(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refused = append(d.refused, fmt.Sprintf(format, args...))
}

// create creates a session.
func (d *driver) create(ctx context.Context, key string) (string, error) {
	var s struct{ SessionID string }
	status, answer, err := d.callUntilKnown(ctx, http.MethodPost, "/api/sessions", key, map[string]any{"architecture": "spool"}, &s)
	if err == nil && status != http.StatusCreated {
		err = fmt.Errorf("create answered %d %s", status, answer)
	}
	return s.SessionID, err
}

// messageTexts are the first words of the messages that clients post. The rules of the model's script (script.yaml) match them.
var messageTexts = []string{"text", "text", "silent", "files", "error", "hello"}

// post posts messages to a session until the faults end. At most three messages are queued.
func (d *driver) post(ctx context.Context, until <-chan struct{}, session string, r *rand.Rand) {
	defer d.posts.Done()
	for n := 0; ; n++ {
		select {
		case <-until:
			return
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(r.IntN(1500)) * time.Millisecond):
		}
		if d.countOpen(session) >= 3 {
			continue
		}
		var a struct{ ExecutionID string }
		text := fmt.Sprintf("%s %d", messageTexts[r.IntN(len(messageTexts))], n)
		status, answer, err := d.callUntilKnown(ctx, http.MethodPost, "/api/sessions/"+session+"/messages", fmt.Sprintf("%s-%d", session, n), map[string]any{"content": text}, &a)
		if err != nil || status != http.StatusAccepted {
			d.recordViolation("message %d of %s: %d %s %v", n, session, status, answer, err)
			return
		}
		d.mu.Lock()
		if _, twice := d.accepted[a.ExecutionID]; twice {
			d.refused = append(d.refused, "two messages were answered with execution "+a.ExecutionID)
		}
		d.accepted[a.ExecutionID] = session
		if !d.ended[a.ExecutionID] {
			d.open[a.ExecutionID] = true
		}
		d.mu.Unlock()
		d.sendControl(ctx, a.ExecutionID, r)
	}
}

// sendControl sometimes cancels an execution, or pauses and resumes it.
func (d *driver) sendControl(ctx context.Context, execution string, r *rand.Rand) {
	steps := [][]string{{}, {}, {}, {}, {}, {"cancel"}, {"pause", "resume"}}[r.IntN(7)]
	for _, step := range steps {
		time.Sleep(time.Duration(r.IntN(3000)) * time.Millisecond)
		// 409 means that the execution has ended, or is not paused.
		status, answer, err := d.callUntilKnown(ctx, http.MethodPost, "/api/executions/"+execution+"/"+step, "", map[string]any{}, nil)
		if err != nil || status/100 != 2 && status != http.StatusConflict {
			d.recordViolation("%s of %s: %d %s %v", step, execution, status, answer, err)
		}
	}
}

// countOpen returns the number of queries of a session whose end no client has received.
func (d *driver) countOpen(session string) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for x := range d.open {
		if d.accepted[x] == session {
			n++
		}
	}
	return n
}

// store stores an event that a client received. It also stores one that does not follow the event before it, so that
// the check finds that.
func (d *driver) store(c *client, w events.Wire) {
	if w.Type == events.TextDelta {
		d.storePiece(c, w)
		return
	}
	c.mu.Lock()
	c.events = append(c.events, check.Event{Seq: w.Seq, ID: w.ID, Type: w.Type, ExecutionID: w.ExecutionID, Data: canonicalJSON(w.Data)})
	c.mu.Unlock()
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.open) > 0 && !d.received.IsZero() {
		d.stall = max(d.stall, now.Sub(d.received))
	}
	d.received = now
	if events.Terminal(w.Type) {
		delete(d.open, w.ExecutionID)
		d.ended[w.ExecutionID] = true
	}
}

// storePiece stores text in flight that a client received.
func (d *driver) storePiece(c *client, w events.Wire) {
	var delta events.Delta
	if err := json.Unmarshal(w.Data, &delta); err != nil {
		d.recordViolation("text in flight of %s: %v: %s", c.session, err, w.Data)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	after := uint32(len(c.events)) //nolint:gosec // a small number
	c.pieces = append(c.pieces, check.Piece{Block: delta.BlockID, Offset: delta.Offset, Text: delta.Text, Seq: w.Seq, After: after})
}

// canonicalJSON returns the canonical form of a JSON text.
func canonicalJSON(raw []byte) string {
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return string(raw)
	}
	out, err := json.Marshal(v)
	if err != nil {
		return string(raw)
	}
	return string(out)
}

// follow keeps a client connected to one of the gateways, in turn, until ctx ends.
func (d *driver) follow(ctx context.Context, c *client, first int) {
	connect := d.followSSE
	if c.kind == "WebSocket" {
		connect = d.followSocket
	}
	for gateway := first; ctx.Err() == nil; gateway++ {
		c.mu.Lock()
		c.connections++
		c.mu.Unlock()
		if err := connect(ctx, c, gateway); err != nil && strings.Contains(err.Error(), "CURSOR_") {
			d.recordViolation("%s of %s after %d: %v", c.kind, c.session, c.cursor(), err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryPause):
		}
	}
}

// followSSE follows the session over SSE, after the client's cursor, until the stream ends. Its error contains the code of a refusal.
func (d *driver) followSSE(ctx context.Context, c *client, gateway int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	idle := time.AfterFunc(idleTimeout, cancel)
	defer idle.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.c.gateways[gateway%len(d.c.gateways)]+"/api/sessions/"+c.session+"/events/stream", nil)
	if err != nil {
		return err
	}
	req.Header.Set("Last-Event-ID", fmt.Sprint(c.cursor()))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // the connection is cut off
	if resp.StatusCode != http.StatusOK {
		answer, err := io.ReadAll(resp.Body)
		return errors.Join(fmt.Errorf("answered %d %s", resp.StatusCode, answer), err)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		idle.Reset(idleTimeout)
		data, ok := strings.CutPrefix(lines.Text(), "data:")
		if !ok {
			continue
		}
		var w events.Wire
		if err := json.Unmarshal([]byte(data), &w); err != nil {
			return err
		}
		if w.ID == "" && w.Type != events.TextDelta {
			return errors.New(data) // an error ends the stream
		}
		d.store(c, w)
	}
	return lines.Err()
}

// followSocket is like followSSE over a WebSocket.
func (d *driver) followSocket(ctx context.Context, c *client, gateway int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	idle := time.AfterFunc(idleTimeout, cancel)
	defer idle.Stop()
	// the body of a WebSocket handshake does not need to be closed
	//nolint:bodyclose // after Dial the body never needs to be closed
	conn, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(d.c.gateways[gateway%len(d.c.gateways)], "http")+"/api/ws", nil)
	if err != nil {
		return err
	}
	defer conn.CloseNow() //nolint:errcheck // the connection is cut off
	conn.SetReadLimit(16 << 20)
	join, err := json.Marshal(map[string]any{"type": "session:join", "requestId": "r", "sessionId": c.session, "after": c.cursor()})
	if err != nil {
		return err
	}
	if err := conn.Write(ctx, websocket.MessageText, join); err != nil {
		return err
	}
	for {
		_, raw, err := conn.Read(ctx)
		if err != nil {
			return err
		}
		idle.Reset(idleTimeout)
		var m struct {
			Type, Code, Message string
			Event               events.Wire
		}
		if err := json.Unmarshal(raw, &m); err != nil {
			return err
		}
		switch m.Type {
		case "session:event":
			d.store(c, m.Event)
		case "error":
			return fmt.Errorf("%s: %s", m.Code, m.Message)
		}
	}
}
