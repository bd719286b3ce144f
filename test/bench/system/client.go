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

// Client sends requests to a gateway of Spool. It is safe for concurrent use.
type Client struct {
	URL  string
	HTTP *http.Client
}

// NewClient returns a client of the gateway at url. The client keeps up to 64 idle connections.
func NewClient(url string) *Client {
	return &Client{URL: url, HTTP: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
}

// callGateway sends a request to the gateway, with body as JSON unless body is nil, and decodes the response into out unless
// out is nil. A status other than 2xx is an error.
func (c *Client) callGateway(ctx context.Context, method, path string, body, out any) error {
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
	return c.sendRequest(req, out)
}

// sendRequest sends req to the gateway and decodes the response into out, unless out is nil. A status other than 2xx is an
// error.
func (c *Client) sendRequest(req *http.Request, out any) error {
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: status %d: %.200s", req.Method, req.URL.Path, resp.StatusCode, raw)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(raw, out)
}

// SessionSpec is the body of the request to a gateway that creates a session. Either Agent or Architecture must be set.
type SessionSpec struct {
	Agent        string `json:"agent,omitempty"` // the slug of an applied agent
	Architecture string `json:"architecture,omitempty"`
	Model        string `json:"model,omitempty"` // "" for the default
}

// CreateSession creates a session and returns its id.
func (c *Client) CreateSession(ctx context.Context, spec SessionSpec) (session string, err error) {
	var out struct {
		SessionID string `json:"sessionId"`
	}
	err = c.callGateway(ctx, http.MethodPost, "/api/sessions", spec, &out)
	return out.SessionID, err
}

// ApplyDefinition creates or updates an entry of the catalogue. kind is "agents" or "environments"; spec is the entry's
// definition.
func (c *Client) ApplyDefinition(ctx context.Context, kind, slug string, spec any) error {
	return c.callGateway(ctx, http.MethodPost, "/api/"+kind, map[string]any{"ref": map[string]any{"slug": slug}, "spec": spec}, nil)
}

// PushSkill pushes the ZIP of a skill through the gateway, as the latest version of the skill with the given slug.
func (c *Client) PushSkill(ctx context.Context, slug string, zip []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+"/api/skills?slug="+slug, bytes.NewReader(zip))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/zip")
	return c.sendRequest(req, nil)
}

// DeleteSession deletes a session. The session's sandbox ends soon afterwards; System.DeleteAndAwaitEnd also waits for
// that.
func (c *Client) DeleteSession(ctx context.Context, session string) error {
	return c.callGateway(ctx, http.MethodDelete, "/api/sessions/"+session, nil, nil)
}

// RequestSnapshot requests a snapshot of a session's workspace and does not wait for it.
func (c *Client) RequestSnapshot(ctx context.Context, session string) error {
	return c.callGateway(ctx, http.MethodPost, "/api/sessions/"+session+"/sync", struct{}{}, nil)
}

// PostMessage posts text as a message to a session and returns the id of its execution.
func (c *Client) PostMessage(ctx context.Context, session, text string) (execution string, err error) {
	var out struct {
		ExecutionID string `json:"executionId"`
	}
	err = c.callGateway(ctx, http.MethodPost, "/api/sessions/"+session+"/messages", map[string]any{"content": text}, &out)
	return out.ExecutionID, err
}

// DecideApproval sends a person's decision about an approval request, by the request's id.
func (c *Client) DecideApproval(ctx context.Context, approval, decision string) error {
	return c.callGateway(ctx, http.MethodPost, "/api/approvals/"+approval+"/decide", map[string]any{"decision": decision}, nil)
}

// SessionSocket is a client's WebSocket that has joined one session.
type SessionSocket struct {
	Tip  uint32 // the seq of the session's last event when the socket joined
	conn *websocket.Conn
}

// gatewayMessage is a message that the gateway sends on a WebSocket.
type gatewayMessage struct {
	Type    string           `json:"type"`
	Seq     uint32           `json:"seq"`
	Event   events.WireEvent `json:"event"`
	Code    string           `json:"code"`
	Message string           `json:"message"`
}

// JoinSession opens a WebSocket to the gateway and joins the session. The socket receives all events, from the first one. JoinSession
// returns when the gateway has confirmed the join.
func (c *Client) JoinSession(ctx context.Context, session string) (*SessionSocket, error) {
	return c.JoinSessionAfter(ctx, session, 0)
}

// JoinSessionAfter is like JoinSession, but the socket receives only the events after the one with the given seq.
func (c *Client) JoinSessionAfter(ctx context.Context, session string, seq uint32) (*SessionSocket, error) {
	conn, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(c.URL, "http")+"/api/ws", nil) //nolint:bodyclose // an upgraded connection has none
	if err != nil {
		return nil, err
	}
	conn.SetReadLimit(16 << 20)
	s := &SessionSocket{conn: conn}
	join, err := json.Marshal(map[string]any{"type": "session:join", "requestId": "r1", "sessionId": session, "after": seq})
	if err == nil {
		err = conn.Write(ctx, websocket.MessageText, join)
	}
	for err == nil {
		var m gatewayMessage
		if m, _, err = s.next(ctx); err == nil && m.Type == "session:joined" {
			s.Tip = m.Seq
			return s, nil
		}
	}
	s.Close()
	return nil, err
}

// Next returns the next event or text delta of the session, and the time at which it was received.
func (s *SessionSocket) Next(ctx context.Context) (events.WireEvent, time.Time, error) {
	for {
		m, at, err := s.next(ctx)
		if err != nil || m.Type == "session:event" {
			return m.Event, at, err
		}
	}
}

// next returns the next message of the gateway, and the time at which it was received. A message about an error is
// returned as an error.
func (s *SessionSocket) next(ctx context.Context) (gatewayMessage, time.Time, error) {
	var m gatewayMessage
	_, raw, err := s.conn.Read(ctx)
	received := time.Now()
	if err != nil {
		return m, received, err
	}
	if err := json.Unmarshal(raw, &m); err != nil {
		return m, received, err
	}
	if m.Type == "error" {
		return m, received, fmt.Errorf("error from the gateway: %s: %s", m.Code, m.Message)
	}
	return m, received, nil
}

// Close closes the WebSocket.
func (s *SessionSocket) Close() { _ = s.conn.CloseNow() }

// BlockText is the piece of a block's text that an event of type text_delta or block_complete contains.
type BlockText struct {
	Block    string
	Offset   int // in bytes
	Piece    string
	Complete bool // Piece is the whole text
}

// AgentTextOf returns the piece of the agent's text that an event contains. ok is false if the event contains no text of the
// agent.
func AgentTextOf(w events.WireEvent) (text BlockText, ok bool, err error) {
	switch w.Type {
	case events.TextDelta:
		var d struct {
			BlockID string `json:"blockId"`
			Offset  int    `json:"offset"`
			Delta   string `json:"delta"`
		}
		err := json.Unmarshal(w.Data, &d)
		return BlockText{Block: d.BlockID, Offset: d.Offset, Piece: d.Delta}, err == nil, err
	case events.BlockComplete{}.EventType():
		var d events.BlockComplete
		err := json.Unmarshal(w.Data, &d)
		return BlockText{Block: d.Block.ID, Piece: d.Block.Content, Complete: true}, err == nil && d.Block.Kind == events.KindAssistantText, err
	}
	return BlockText{}, false, nil
}
