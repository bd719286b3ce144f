package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"mime"
	"net/http"
	"net/url"
	"strconv"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
)

// A replay is read in parts, which are held in memory. A part ends after this number of events or bytes.
const (
	partEvents = 200
	partBytes  = 4 << 20
)

// Server-sent events are not part of spool.proto, although their data is the JSON of its messages.

// ReplayItem is one item of a replay. Exactly one of Event, Started and Whole is set.
type ReplayItem struct {
	Event   *events.WireEvent   // a stored event, in order and once; or a delta with new text only
	Raw     json.RawMessage     // the event as JSON
	Started *pace.StartedNotice // yielded once, first
	Whole   *pace.BlockWholeNotice
}

// Replay yields the events of a session from the seq from up to the seq to, and the deltas of these events that are
// still stored, as fast as they are consumed. A nil to means the session's last event when Replay begins. It reads one
// part at a time, so that a consumer may take any time, and continues after a lost connection. It ends with the last
// event, or with an error: that of ctx, an *Error or an *UnreachableError.
func (c *Client) Replay(ctx context.Context, session string, from uint32, to *uint32) iter.Seq2[ReplayItem, error] {
	return func(yield func(ReplayItem, error) bool) {
		r := &replayer{client: c, session: session, from: from, to: to, known: map[string]int{}}
		for !r.ended {
			part, err := r.part(ctx)
			for _, item := range part {
				if !yield(item, nil) {
					return
				}
			}
			if err != nil {
				yield(ReplayItem{}, err)
				return
			}
		}
	}
}

// replayer is one call of Replay. It holds the position, over any number of connections.
type replayer struct {
	client  *Client
	session string
	from    uint32 // seq of the next event
	to      *uint32
	begun   bool           // Started was yielded
	known   map[string]int // number of bytes that were yielded of the texts of open blocks
	ended   bool
}

// part returns the next part. A part that a lost connection ended early is returned if it has an event.
func (r *replayer) part(ctx context.Context) ([]ReplayItem, error) {
	again := newAttempts()
	for {
		before := r.from
		list, err := r.read(ctx)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err == nil || r.from > before {
			return list, nil
		}
		if err := again.wait(ctx, err); err != nil {
			return nil, err
		}
	}
}

// brokenError is returned if a connection ended before the last event of the replay.
type brokenError struct{ err error }

func (e *brokenError) Error() string {
	return "the connection ended before the end of the replay: " + reason(e.err)
}

func (e *brokenError) Unwrap() error { return e.err }

// read opens one connection and reads until the part or the replay is complete.
func (r *replayer) read(ctx context.Context) (list []ReplayItem, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.client.cfg.Timeout)
	defer cancel() // ends the connection, on which further events may follow
	q := url.Values{"replay": {"1"}, "speed": {"max"}, "from": {strconv.FormatUint(uint64(r.from), 10)}}
	if r.to != nil {
		q.Set("to", strconv.FormatUint(uint64(*r.to), 10))
	}
	body, err := r.client.openStream(ctx, call{method: http.MethodGet, path: []string{"api", "sessions", r.session, "events", "stream"}, query: q})
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	lines := bufio.NewReader(io.LimitReader(body, maxResponse))
	for size, count := 0, 0; count < partEvents && size < partBytes && !r.ended; {
		kind, data, err := serverSent(lines)
		if err != nil {
			return list, &brokenError{err}
		}
		item, err := r.take(kind, data)
		if err != nil {
			return list, err
		}
		if item != nil {
			list = append(list, *item)
			if size += len(data); item.Event != nil && item.Event.Type != events.TextDelta {
				count++
			}
		}
	}
	return list, nil
}

// openStream requests server-sent events.
func (c *Client) openStream(ctx context.Context, r call) (io.ReadCloser, error) {
	req, err := c.request(ctx, r, http.NoBody)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "text/event-stream")
	resp, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return nil, c.unreachableError(ctx, err)
	}
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); resp.StatusCode == http.StatusOK && err == nil && media == "text/event-stream" {
		return resp.Body, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	return nil, errors.Join(c.responseError(resp, body), err, resp.Body.Close())
}

// serverSent reads one server-sent event that has data.
func serverSent(r *bufio.Reader) (kind string, data []byte, err error) {
	for {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return "", nil, err
		}
		line = bytes.TrimSuffix(line, []byte("\n"))
		if len(line) == 0 {
			if data != nil {
				return kind, data, nil
			}
			kind = ""
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "event":
			kind = string(value)
		case "data":
			if data != nil {
				data = append(data, '\n')
			}
			data = append(data, value...)
		}
	}
}

// take decodes a server-sent event. It returns nil for an event without anything new.
func (r *replayer) take(kind string, data []byte) (*ReplayItem, error) {
	read := func(into any) error {
		if err := json.Unmarshal(data, into); err != nil {
			return fmt.Errorf("decode a server-sent event of type %s: %w", kind, err)
		}
		return nil
	}
	switch pace.NoticeKind(kind) {
	case pace.ReplayStarted:
		var s pace.StartedNotice
		if err := read(&s); err != nil || r.begun {
			return nil, err
		}
		r.begun, r.to = true, &s.To
		return &ReplayItem{Started: &s}, nil
	case pace.BlockWhole:
		var w pace.BlockWholeNotice
		return &ReplayItem{Whole: &w}, read(&w)
	case pace.ReplayEnded:
		r.ended = true
		return nil, nil
	case "problem":
		e := &Error{}
		if err := read(e); err != nil {
			return nil, err
		}
		return nil, e
	}
	var w events.WireEvent
	if err := read(&w); err != nil {
		return nil, err
	}
	return r.event(w, data)
}

// event checks that no event was skipped.
func (r *replayer) event(w events.WireEvent, raw json.RawMessage) (*ReplayItem, error) {
	if w.Type == events.TextDelta {
		return r.text(w, raw)
	}
	if w.Seq != r.from {
		return nil, &holeError{r.from - 1, w.Seq}
	}
	r.from++
	if d, ok := w.Event().Data.(events.BlockComplete); ok {
		delete(r.known, d.Block.ID)
	}
	return &ReplayItem{Event: &w, Raw: raw}, nil
}

// text returns a delta with new text, or nil: on each connection the server sends the text of open blocks from its start.
func (r *replayer) text(w events.WireEvent, raw json.RawMessage) (*ReplayItem, error) {
	var d events.Delta
	if err := json.Unmarshal(w.Data, &d); err != nil {
		return nil, fmt.Errorf("decode a delta: %w", err)
	}
	if int(d.Offset)+len(d.Text) <= r.known[d.BlockID] {
		return nil, nil
	}
	r.known[d.BlockID] = int(d.Offset) + len(d.Text)
	return &ReplayItem{Event: &w, Raw: raw}, nil
}
