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

// Replay reads events in batches, each of which it holds in memory. A batch ends after this number of events or bytes.
const (
	maxBatchEvents = 200
	maxBatchBytes  = 4 << 20
)

// Server-sent events are not part of spool.proto, although their data is the JSON of its messages.

// ReplayItem is one item that Replay yields. Exactly one of Event, Started and Whole is set.
type ReplayItem struct {
	Event   *events.WireEvent   // a stored event, in order and once; or a delta with new text only
	Raw     json.RawMessage     // the event as JSON
	Started *pace.StartedNotice // yielded once, first
	Whole   *pace.BlockWholeNotice
}

// Replay yields the events of a session from the seq from to the seq to, and the stored deltas of these events, as fast
// as they are consumed. A nil to means the session's last event when Replay begins. Replay requests one batch of events
// at a time, so the consumer may be slow, and it continues after a lost connection. It ends after the last event, or
// with an error: that of ctx, an *Error or an *UnreachableError.
func (c *Client) Replay(ctx context.Context, session string, from uint32, to *uint32) iter.Seq2[ReplayItem, error] {
	return func(yield func(ReplayItem, error) bool) {
		r := &replayIteration{client: c, session: session, from: from, to: to, known: map[string]int{}}
		for !r.ended {
			batch, err := r.nextBatch(ctx)
			for _, item := range batch {
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

// replayIteration is the state of one call of Replay: its position, over any number of connections.
type replayIteration struct {
	client  *Client
	session string
	from    uint32 // seq of the next event
	to      *uint32
	begun   bool           // Started was yielded
	known   map[string]int // number of bytes that were yielded of the texts of open blocks
	ended   bool
}

// nextBatch returns the next items of the replay, and retries after a lost connection. If a connection is lost after an
// event was received, nextBatch returns the items up to that point.
func (r *replayIteration) nextBatch(ctx context.Context) ([]ReplayItem, error) {
	again := newRetryState()
	for {
		before := r.from
		list, err := r.readBatch(ctx)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err == nil || r.from > before {
			return list, nil
		}
		if err := again.waitForRetry(ctx, err); err != nil {
			return nil, err
		}
	}
}

// connectionLostError is returned if a connection ended before the last event of the replay.
type connectionLostError struct{ err error }

func (e *connectionLostError) Error() string {
	return "the connection ended before the end of the replay: " + shortCause(e.err)
}

func (e *connectionLostError) Unwrap() error { return e.err }

// readBatch opens a connection and reads items until the batch is full or the replay has ended.
func (r *replayIteration) readBatch(ctx context.Context) (list []ReplayItem, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.client.cfg.Timeout)
	defer cancel() // ends the connection, on which further events may follow
	q := url.Values{"replay": {"1"}, "speed": {"max"}, "from": {strconv.FormatUint(uint64(r.from), 10)}}
	if r.to != nil {
		q.Set("to", strconv.FormatUint(uint64(*r.to), 10))
	}
	body, err := r.client.openEventStream(ctx, apiCall{method: http.MethodGet, path: []string{"api", "sessions", r.session, "events", "stream"}, query: q})
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	lines := bufio.NewReader(io.LimitReader(body, maxResponseBytes))
	for size, count := 0, 0; count < maxBatchEvents && size < maxBatchBytes && !r.ended; {
		kind, data, err := readServerSentEvent(lines)
		if err != nil {
			return list, &connectionLostError{err}
		}
		item, err := r.decodeItem(kind, data)
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

// openEventStream requests server-sent events and returns the body of the response.
func (c *Client) openEventStream(ctx context.Context, r apiCall) (io.ReadCloser, error) {
	req, err := c.newRequest(ctx, r, http.NoBody)
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
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponseBytes))
	return nil, errors.Join(c.responseError(resp, body), err, resp.Body.Close())
}

// readServerSentEvent reads one server-sent event that has data, and returns its type and data.
func readServerSentEvent(r *bufio.Reader) (kind string, data []byte, err error) {
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

// decodeItem decodes a server-sent event of a replay. It returns nil if the event contains nothing new.
func (r *replayIteration) decodeItem(kind string, data []byte) (*ReplayItem, error) {
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
	return r.newEventItem(w, data)
}

// newEventItem returns the item for an event of the log. It returns a *skippedEventsError if the server skipped an
// event.
func (r *replayIteration) newEventItem(w events.WireEvent, raw json.RawMessage) (*ReplayItem, error) {
	if w.Type == events.TextDelta {
		return r.newDeltaItem(w, raw)
	}
	if w.Seq != r.from {
		return nil, &skippedEventsError{r.from - 1, w.Seq}
	}
	r.from++
	if d, ok := w.Event().Data.(events.BlockComplete); ok {
		delete(r.known, d.Block.ID)
	}
	return &ReplayItem{Event: &w, Raw: raw}, nil
}

// newDeltaItem returns the item for a delta, or nil if its text was already received. On each connection the server
// sends the text of open blocks from its start.
func (r *replayIteration) newDeltaItem(w events.WireEvent, raw json.RawMessage) (*ReplayItem, error) {
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
