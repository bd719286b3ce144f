package system

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
)

// Client speaks to a gateway.
type Client struct {
	URL  string
	HTTP *http.Client
}

// NewClient makes one that keeps as many connections as there are callers.
func NewClient(url string) *Client {
	return &Client{URL: url, HTTP: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
}

// call makes a request, with a body unless it is nil, and decodes the answer,
// unless out is nil. The answer must be a success.
func (c *Client) call(ctx context.Context, method, path string, body, out any) error {
	var in io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		in = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.URL+path, in)
	if err != nil {
		return err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return c.do(req, out)
}

func (c *Client) do(req *http.Request, out any) error {
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // it was read
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s answered %d: %.200s", req.Method, req.URL.Path, resp.StatusCode, raw)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(raw, out)
}

// Create makes a session of an architecture.
func (c *Client) Create(ctx context.Context, architecture string) (session string, err error) {
	return c.CreateWith(ctx, architecture, "")
}

// CreateWith makes a session of an architecture and a model, "" for the default one.
func (c *Client) CreateWith(ctx context.Context, architecture, model string) (session string, err error) {
	body := map[string]any{"architecture": architecture}
	if model != "" {
		body["model"] = model
	}
	return c.create(ctx, body)
}

func (c *Client) create(ctx context.Context, body map[string]any) (session string, err error) {
	var out struct {
		SessionID string `json:"sessionId"`
	}
	err = c.call(ctx, http.MethodPost, "/api/sessions", body, &out)
	return out.SessionID, err
}

// Apply applies a definition of a kind of the catalogue, agents or environments.
func (c *Client) Apply(ctx context.Context, kind, slug string, spec any) error {
	return c.call(ctx, http.MethodPost, "/api/"+kind, map[string]any{"ref": map[string]any{"slug": slug}, "spec": spec}, nil)
}

// PushSkill pushes a ZIP as the latest version of a skill.
func (c *Client) PushSkill(ctx context.Context, slug string, zip []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+"/api/skills?slug="+slug, bytes.NewReader(zip))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/zip")
	return c.do(req, nil)
}

// CreateOf makes a session of an agent of the catalogue.
func (c *Client) CreateOf(ctx context.Context, agent string) (session string, err error) {
	return c.create(ctx, map[string]any{"agent": agent})
}

// Delete deletes a session; its sandbox ends soon after. See System.End.
func (c *Client) Delete(ctx context.Context, session string) error {
	return c.call(ctx, http.MethodDelete, "/api/sessions/"+session, nil, nil)
}

// Sync asks for a snapshot of a session's workspace, which comes in its own time.
func (c *Client) Sync(ctx context.Context, session string) error {
	return c.call(ctx, http.MethodPost, "/api/sessions/"+session+"/sync", struct{}{}, nil)
}

// Post posts a message.
func (c *Client) Post(ctx context.Context, session, text string) (execution string, err error) {
	var out struct {
		ExecutionID string `json:"executionId"`
	}
	err = c.call(ctx, http.MethodPost, "/api/sessions/"+session+"/messages", map[string]any{"content": text}, &out)
	return out.ExecutionID, err
}

// Socket is a WebSocket that has joined one session.
type Socket struct {
	Tip  uint32 // when it joined
	conn *websocket.Conn
}

// Message is what a Socket is sent.
type Message struct {
	Type    string      `json:"type"`
	Seq     uint32      `json:"seq"`
	Event   events.Wire `json:"event"`
	Code    string      `json:"code"`
	Message string      `json:"message"`
}

// Join opens a WebSocket, joins the session from its first event, and returns when the gateway says so.
func (c *Client) Join(ctx context.Context, session string) (*Socket, error) {
	conn, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(c.URL, "http")+"/api/ws", nil) //nolint:bodyclose // an upgraded connection has none
	if err != nil {
		return nil, err
	}
	conn.SetReadLimit(16 << 20)
	s := &Socket{conn: conn}
	join, err := json.Marshal(map[string]any{"type": "session:join", "requestId": "r1", "sessionId": session, "after": 0})
	if err == nil {
		err = conn.Write(ctx, websocket.MessageText, join)
	}
	for err == nil {
		var m Message
		if m, _, err = s.next(ctx); err == nil && m.Type == "session:joined" {
			s.Tip = m.Seq
			return s, nil
		}
	}
	s.Close()
	return nil, err
}

// Next gives the next event or text, and when it was there.
func (s *Socket) Next(ctx context.Context) (events.Wire, time.Time, error) {
	for {
		m, at, err := s.next(ctx)
		if err != nil || m.Type == "session:event" {
			return m.Event, at, err
		}
	}
}

func (s *Socket) next(ctx context.Context) (Message, time.Time, error) {
	var m Message
	_, raw, err := s.conn.Read(ctx)
	at := time.Now()
	if err != nil {
		return m, at, err
	}
	if err := json.Unmarshal(raw, &m); err != nil {
		return m, at, err
	}
	if m.Type == "error" {
		return m, at, fmt.Errorf("the gateway says %s: %s", m.Code, m.Message)
	}
	return m, at, nil
}

// Close ends the connection.
func (s *Socket) Close() { _ = s.conn.CloseNow() }

// Text is what of a block's text an event of type text_delta or block_complete brings.
type Text struct {
	Block    string
	Offset   int // in bytes
	Piece    string
	Complete bool // it is the whole text
}

// TextOf reads it; false when the event brings none of the agent's text.
func TextOf(w events.Wire) (Text, bool, error) {
	switch w.Type {
	case events.TextDelta:
		var d struct {
			BlockID string `json:"blockId"`
			Offset  int    `json:"offset"`
			Delta   string `json:"delta"`
		}
		err := json.Unmarshal(w.Data, &d)
		return Text{Block: d.BlockID, Offset: d.Offset, Piece: d.Delta}, err == nil, err
	case events.BlockComplete{}.EventType():
		var d events.BlockComplete
		err := json.Unmarshal(w.Data, &d)
		return Text{Block: d.Block.ID, Piece: d.Block.Content, Complete: true}, err == nil && d.Block.Kind == events.KindAssistantText, err
	}
	return Text{}, false, nil
}
