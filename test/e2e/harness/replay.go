package harness

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
)

// ReplayResult holds what a client received when it replayed a session: the stored events, and the text that was sent
// before its block was complete.
type ReplayResult struct {
	Events []string          // JSON of each stored event, in the order of arrival
	Text   map[string]string // text in flight, by block
	Whole  map[string]bool   // blocks that appeared complete: not all of their text was sent in flight
}

// addMessage stores one message of a replay. kind is the name of the SSE event, or the type of the WebSocket message without
// "session:".
func (r *ReplayResult) addMessage(kind string, raw []byte) error {
	switch pace.NoticeKind(kind) {
	case pace.ReplayStarted, pace.GapShortened, pace.ReplayEnded:
		return nil
	case pace.BlockWhole:
		var whole pace.BlockWholeNotice
		err := json.Unmarshal(raw, &whole)
		r.Whole[whole.BlockID] = true
		return err
	}
	var w events.WireEvent
	if err := json.Unmarshal(raw, &w); err != nil {
		return fmt.Errorf("%s %s: %w", kind, raw, err)
	}
	if w.Type != events.TextDelta {
		r.Events = append(r.Events, string(raw))
		return nil
	}
	var d events.Delta
	if err := json.Unmarshal(w.Data, &d); err != nil {
		return err
	}
	r.Text[d.BlockID] += d.Text
	return nil
}

// newReplayResult returns an empty ReplayResult.
func newReplayResult() *ReplayResult {
	return &ReplayResult{Text: map[string]string{}, Whole: map[string]bool{}}
}

// ReplaySSE reads a whole replay of a session over SSE, at the highest speed. base is the URL of a gateway; key is the
// API key, "" for none.
func ReplaySSE(ctx context.Context, base, key, session string) (*ReplayResult, error) {
	ctx, cancel := context.WithTimeout(ctx, WaitTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/api/sessions/"+url.PathEscape(session)+"/events/stream?replay=1&speed=max", nil)
	if err != nil {
		return nil, err
	}
	req.Header = authorizationHeader(key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // the body is read to its end
	r, kind, lines := newReplayResult(), "", bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadString('\n')
		if errors.Is(err, io.EOF) && kind == string(pace.ReplayEnded) {
			return r, nil
		}
		if err != nil {
			return r, fmt.Errorf("replay of %s answered %s and broke off after %q: %w", session, resp.Status, kind, err)
		}
		switch name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": "); name {
		case "event":
			kind = value
		case "data":
			if err := r.addMessage(kind, []byte(value)); err != nil {
				return r, err
			}
		}
	}
}

// ReplaySocket is like ReplaySSE, but over a WebSocket.
func ReplaySocket(ctx context.Context, base, key, session string) (*ReplayResult, error) {
	ctx, cancel := context.WithTimeout(ctx, WaitTimeout)
	defer cancel()
	// the body of a WebSocket handshake does not need to be closed
	//nolint:bodyclose // after Dial the body never needs to be closed
	conn, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(base, "http")+"/api/ws", &websocket.DialOptions{HTTPHeader: authorizationHeader(key)})
	if err != nil {
		return nil, err
	}
	defer conn.CloseNow() //nolint:errcheck // the connection is cut off
	conn.SetReadLimit(16 << 20)
	if err := conn.Write(ctx, websocket.MessageText, fmt.Appendf(nil, `{"type":"session:join","requestId":"r1","sessionId":%q,"replay":true,"speed":"max"}`, session)); err != nil {
		return nil, err
	}
	r := newReplayResult()
	for {
		_, raw, err := conn.Read(ctx)
		if err != nil {
			return r, err
		}
		var m struct {
			Type  string
			Event json.RawMessage
		}
		if err := json.Unmarshal(raw, &m); err != nil {
			return r, err
		}
		switch kind := strings.TrimPrefix(m.Type, "session:"); kind {
		case "joined":
		case "left":
			return r, nil
		case "error":
			return r, fmt.Errorf("replay of %s: %s", session, raw)
		case "event":
			err = r.addMessage(kind, m.Event)
		default:
			err = r.addMessage(kind, raw)
		}
		if err != nil {
			return r, err
		}
	}
}

// ParseReplayOutput parses out, the output of "spool replay --json".
func ParseReplayOutput(out string) (*ReplayResult, error) {
	r := newReplayResult()
	for line := range strings.Lines(out) {
		if err := r.addMessage("", []byte(strings.TrimSuffix(line, "\n"))); err != nil {
			return r, err
		}
	}
	return r, nil
}

// authorizationHeader returns the HTTP header that contains an API key; without headers if key is "".
func authorizationHeader(key string) http.Header {
	if key == "" {
		return http.Header{}
	}
	return http.Header{"Authorization": {"Bearer " + key}}
}
