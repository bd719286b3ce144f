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
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
)

// A part of a replay that is held at once ends after as many events, or bytes.
const (
	partEvents = 200
	partBytes  = 4 << 20
)

// Replayed is one thing that a replay brings. One of the pointers is set.
type Replayed struct {
	Event   *events.Wire    // a kept event, in order and once; or text in flight, of which nothing is repeated
	Raw     json.RawMessage // the event as JSON
	Started *pace.Started   // once, before all else
	Whole   *pace.Whole
}

// Replay yields the events of a session from one to another, nil for the session's last event now, and the text in flight
// that is still kept, as fast as they are consumed. It reads a part at a time, so that a consumer may take any time. A
// lost connection is made again where it broke off. It ends with an error: ctx's, an *Error or an *UnreachableError.
func (c *Client) Replay(ctx context.Context, session string, from uint32, to *uint32) iter.Seq2[Replayed, error] {
	return func(yield func(Replayed, error) bool) {
		r := &replayer{client: c, session: session, from: from, to: to, known: map[string]int{}}
		for !r.ended {
			part, err := r.part(ctx)
			for _, one := range part {
				if !yield(one, nil) {
					return
				}
			}
			if err != nil {
				yield(Replayed{}, err)
				return
			}
		}
	}
}

// replayer is one Replay: where it is, over any number of connections.
type replayer struct {
	client  *Client
	session string
	from    uint32 // seq of the event that comes next
	to      *uint32
	begun   bool           // Started was yielded
	known   map[string]int // bytes of the text of open blocks
	ended   bool
}

// part reads the next part. A part that broke off is one if it has an event.
func (r *replayer) part(ctx context.Context) ([]Replayed, error) {
	for try := 0; ; try++ {
		before := r.from
		list, err := r.read(ctx)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err == nil || r.from > before {
			return list, nil
		}
		wait, again := retryAfter(err, try)
		var broken *brokenError
		if try == retries || !again && !errors.As(err, &broken) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(max(wait, firstWait)):
		}
	}
}

// brokenError is a replay that ended before its last event.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return "the server broke the replay off: " + reason(e.err) }

func (e *brokenError) Unwrap() error { return e.err }

// read makes one connection and reads until a part is whole or the replay ends.
func (r *replayer) read(ctx context.Context) (list []Replayed, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.client.cfg.Timeout)
	defer cancel() // ends the connection, which may have more
	q := url.Values{"replay": {"1"}, "speed": {"max"}, "from": {strconv.FormatUint(uint64(r.from), 10)}}
	if r.to != nil {
		q.Set("to", strconv.FormatUint(uint64(*r.to), 10))
	}
	body, err := r.client.openStream(ctx, q, "api", "sessions", r.session, "events", "stream")
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	lines := bufio.NewReader(io.LimitReader(body, maxAnswer))
	for size, count := 0, 0; count < partEvents && size < partBytes && !r.ended; {
		kind, data, err := serverSent(lines)
		if err != nil {
			return list, &brokenError{err}
		}
		one, err := r.take(kind, data)
		if err != nil {
			return list, err
		}
		if one != nil {
			list = append(list, *one)
			if size += len(data); one.Event != nil && one.Event.Type != events.TextDelta {
				count++
			}
		}
	}
	return list, nil
}

// openStream asks for server-sent events.
func (c *Client) openStream(ctx context.Context, q url.Values, path ...string) (io.ReadCloser, error) {
	u := c.base.JoinPath(escaped(path)...)
	u.RawQuery = q.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	req.Header = c.header()
	req.Header.Set("Accept", "text/event-stream")
	resp, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); resp.StatusCode == http.StatusOK && err == nil && media == "text/event-stream" {
		return resp.Body, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return nil, errors.Join(c.problem(resp, body), err, resp.Body.Close())
}

// serverSent reads one server-sent event.
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

// take reads what came; nil for what brings nothing new.
func (r *replayer) take(kind string, data []byte) (*Replayed, error) {
	read := func(into any) error {
		if err := json.Unmarshal(data, into); err != nil {
			return fmt.Errorf("a %s that is not understood: %w", kind, err)
		}
		return nil
	}
	switch pace.NoticeKind(kind) {
	case pace.ReplayStarted:
		var s pace.Started
		if err := read(&s); err != nil || r.begun {
			return nil, err
		}
		r.begun, r.to = true, &s.To
		return &Replayed{Started: &s}, nil
	case pace.BlockWhole:
		var w pace.Whole
		return &Replayed{Whole: &w}, read(&w)
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
	var w events.Wire
	if err := read(&w); err != nil {
		return nil, err
	}
	return r.event(w, data)
}

func (r *replayer) event(w events.Wire, raw json.RawMessage) (*Replayed, error) {
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
	return &Replayed{Event: &w, Raw: raw}, nil
}

// text drops what is known: each connection brings the text of open blocks from its start.
func (r *replayer) text(w events.Wire, raw json.RawMessage) (*Replayed, error) {
	var d events.Delta
	if err := json.Unmarshal(w.Data, &d); err != nil {
		return nil, fmt.Errorf("text that is not understood: %w", err)
	}
	if int(d.Offset)+len(d.Text) <= r.known[d.BlockID] {
		return nil, nil
	}
	r.known[d.BlockID] = int(d.Offset) + len(d.Text)
	return &Replayed{Event: &w, Raw: raw}, nil
}
