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
	// requestTimeout is the time limit of one HTTP request, because a service that is frozen by a fault does not answer.
	requestTimeout = 15 * time.Second
	// streamIdleTimeout is the time without data after which a client closes its stream and connects again. A gateway
	// sends a comment every 15 s.
	streamIdleTimeout = 20 * time.Second
	// retryPause is the pause between two attempts of a request, of a connection, or of another check.
	retryPause = 250 * time.Millisecond
)

// clientDriver runs all clients of a run of the chaos test, and stores what they have received.
type clientDriver struct {
	c         *cluster
	mu        sync.Mutex
	accepted  map[string]string // session by execution
	open      map[string]bool   // executions whose end no client has received
	ended     map[string]bool   // ended executions; a client may receive the end before the answer to its message
	clients   []*followingClient
	retries   int
	refused   []string // valid cursors that were refused, and answers that no client should receive
	received  time.Time
	stall     time.Duration // longest time in which no client received an event while a query was open
	posts     sync.WaitGroup
	followers sync.WaitGroup // end with the context of startClients
	deleted   int            // sessions that were deleted during the faults
}

// followingClient receives the events of one session over SSE or a WebSocket, and stores them.
type followingClient struct {
	kind, session string
	mu            sync.Mutex
	events        []check.Event
	pieces        []check.TextPiece
	connections   int
}

// cursor returns the seq of the last event that the client has received.
func (c *followingClient) cursor() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return uint32(len(c.events))
}

// sendRequest sends an HTTP request to the gateway with the given number, with body as JSON and key as the idempotency
// key. It returns the status and the body of the response. If the status is 2xx, it decodes the body into out.
func (d *clientDriver) sendRequest(ctx context.Context, gateway int, method, path, key string, body, out any) (int, string, error) {
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

// sendUntilAnswered repeats a request with the same idempotency key until a gateway has answered with a status below
// 500. After another status, such as 503, or a lost connection, the outcome of the request is not known.
func (d *clientDriver) sendUntilAnswered(ctx context.Context, method, path, key string, body, out any) (status int, answer string, err error) {
	for gateway := 0; ; gateway++ {
		status, answer, err = d.sendRequest(ctx, gateway, method, path, key, body, out)
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

// recordViolation stores a message about a response that no client should receive, for the end of the run.
func (d *clientDriver) recordViolation(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refused = append(d.refused, fmt.Sprintf(format, args...))
}

// createSession creates a session with a budget, which may be empty, with key as the idempotency key, and returns the
// session's id.
func (d *clientDriver) createSession(ctx context.Context, key string, budget events.Budget) (string, error) {
	var s struct{ SessionID string }
	body := map[string]any{"architecture": "spool", "sessionOptions": map[string]any{"budget": budget}}
	status, answer, err := d.sendUntilAnswered(ctx, http.MethodPost, "/api/sessions", key, body, &s)
	if err == nil && status != http.StatusCreated {
		err = fmt.Errorf("create answered %d %s", status, answer)
	}
	return s.SessionID, err
}

// messageTexts are the first words of the messages that clients post. The rules of the model's script, script.yaml,
// match them.
var messageTexts = []string{"text", "text", "silent", "files", "error", "hello"}

// postMessages posts messages to a session, at random intervals, until the channel until is closed. It posts only while
// the session has fewer than three queries that have not ended.
func (d *clientDriver) postMessages(ctx context.Context, until <-chan struct{}, session string, r *rand.Rand) {
	defer d.posts.Done()
	for n := 0; ; n++ {
		select {
		case <-until:
			return
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(r.IntN(1500)) * time.Millisecond):
		}
		if d.countOpenQueries(session) >= 3 {
			continue
		}
		var a struct{ ExecutionID string }
		text := fmt.Sprintf("%s %d", messageTexts[r.IntN(len(messageTexts))], n)
		status, answer, err := d.sendUntilAnswered(ctx, http.MethodPost, "/api/sessions/"+session+"/messages", fmt.Sprintf("%s-%d", session, n), map[string]any{"content": text}, &a)
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
		d.sendRandomControl(ctx, a.ExecutionID, r)
	}
}

// sendRandomControl cancels an execution, pauses and resumes it, or, most often, does nothing. r decides.
func (d *clientDriver) sendRandomControl(ctx context.Context, execution string, r *rand.Rand) {
	steps := [][]string{{}, {}, {}, {}, {}, {"cancel"}, {"pause", "resume"}}[r.IntN(7)]
	for _, step := range steps {
		time.Sleep(time.Duration(r.IntN(3000)) * time.Millisecond)
		// 409 means that the execution has ended, or is not paused.
		status, answer, err := d.sendUntilAnswered(ctx, http.MethodPost, "/api/executions/"+execution+"/"+step, "", map[string]any{}, nil)
		if err != nil || status/100 != 2 && status != http.StatusConflict {
			d.recordViolation("%s of %s: %d %s %v", step, execution, status, answer, err)
		}
	}
}

// countOpenQueries returns the number of queries of a session whose end no client has received.
func (d *clientDriver) countOpenQueries(session string) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for x := range d.open {
		if d.accepted[x] == session {
			n++
		}
	}
	return n
}

// storeEvent stores an event or a delta that a client received. It also stores an event whose seq does not follow the
// last one, so that the check at the end of the run finds it.
func (d *clientDriver) storeEvent(c *followingClient, w events.WireEvent) {
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
	if events.IsTerminal(w.Type) {
		delete(d.open, w.ExecutionID)
		d.ended[w.ExecutionID] = true
	}
}

// storePiece stores a piece of a block's text that a client received while the block was being written.
func (d *clientDriver) storePiece(c *followingClient, w events.WireEvent) {
	var delta events.Delta
	if err := json.Unmarshal(w.Data, &delta); err != nil {
		d.recordViolation("text in flight of %s: %v: %s", c.session, err, w.Data)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	after := uint32(len(c.events)) //nolint:gosec // a small number
	c.pieces = append(c.pieces, check.TextPiece{Block: delta.BlockID, Offset: delta.Offset, Text: delta.Text, Seq: w.Seq, After: after})
}

// canonicalJSON returns a JSON text in a form in which equal values are equal strings. If raw is not JSON, it returns
// raw.
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

// followSession connects a client to the gateways, one after the other, and stores what the client receives. It connects again
// whenever a connection ends, until ctx ends. first is the number of the first gateway.
func (d *clientDriver) followSession(ctx context.Context, c *followingClient, first int) {
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

// followSSE follows the client's session over SSE, after the last event that the client has received, until the stream
// ends. If the gateway refuses the stream, the error contains the code.
func (d *clientDriver) followSSE(ctx context.Context, c *followingClient, gateway int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	idle := time.AfterFunc(streamIdleTimeout, cancel)
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
		idle.Reset(streamIdleTimeout)
		data, ok := strings.CutPrefix(lines.Text(), "data:")
		if !ok {
			continue
		}
		var w events.WireEvent
		if err := json.Unmarshal([]byte(data), &w); err != nil {
			return err
		}
		if w.ID == "" && w.Type != events.TextDelta {
			return errors.New(data) // an error ends the stream
		}
		d.storeEvent(c, w)
	}
	return lines.Err()
}

// followSocket is like followSSE, but over a WebSocket.
func (d *clientDriver) followSocket(ctx context.Context, c *followingClient, gateway int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	idle := time.AfterFunc(streamIdleTimeout, cancel)
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
		idle.Reset(streamIdleTimeout)
		var m struct {
			Type, Code, Message string
			Event               events.WireEvent
		}
		if err := json.Unmarshal(raw, &m); err != nil {
			return err
		}
		switch m.Type {
		case "session:event":
			d.storeEvent(c, m.Event)
		case "error":
			return fmt.Errorf("%s: %s", m.Code, m.Message)
		}
	}
}
