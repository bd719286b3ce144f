// Package deltas reads text in flight, the text of blocks that are not complete, from the stream DELTAS.
package deltas

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	pageMessages = 256       // messages in one request
	pageBytes    = 512 << 10 // bytes after which the server ends a response
	pageTimeout  = 5 * time.Second
	// maxResponses is the number of responses that wait to be handled. The server sends at most 1,024 messages to a request
	// for last messages, and one more response.
	maxResponses = 1032
)

// Start is the position in the stream DELTAS at which a read begins. The Start of a block's text is at or before the
// first delta of that text.
type Start struct {
	// After is the sequence of DELTAS after which the read begins; 0 means that Time is used.
	After uint64
	// Time is when the first delta was published at the earliest; the zero time means the beginning of the stream. The
	// clocks of executors and of NATS may differ by clockMargin.
	Time time.Time
}

// clockMargin is subtracted from Start.Time when a read begins, because the clocks of executors and of NATS may differ.
const clockMargin = time.Minute

// Before returns a start that is not later than s and o.
func (s Start) Before(o Start) Start {
	if o.Time.Before(s.Time) {
		s.Time = o.Time
	}
	s.After = min(s.After, o.After)
	return s
}

// StartOf returns the start of the text of a block.
func StartOf(b events.BlockStart) Start { return Start{After: b.TextAfter, Time: b.Block.Time} }

// Stream reads the deltas of all sessions of one partition in the order of publication, without a JetStream consumer. It
// reads both forms of message: frames, each of which holds deltas of several sessions, and the messages of earlier
// builds, each of which holds one delta. It is not safe for concurrent use.
type Stream struct {
	nc     *nats.Conn
	filter string
	since  *time.Time // start of the first read, if next is 0
	next   uint64     // sequence of the next read
	end    bool
	bytes  int
}

// NewStream returns a Stream that begins at a position in the stream DELTAS. It sends nothing to NATS.
func NewStream(nc *nats.Conn, partition int, from Start) *Stream {
	s := &Stream{nc: nc, filter: topology.DeltaFilter(partition)}
	switch {
	case from.After > 0:
		s.next = from.After + 1
	case !from.Time.IsZero():
		since := from.Time.Add(-clockMargin)
		s.since = &since
	}
	return s
}

// Entry is a delta in the stream DELTAS, and the session to which it belongs.
type Entry struct {
	Session []byte // the session's events.FrameSession
	JSON    []byte // the delta, for events.DecodeDelta
}

// AtEnd reports whether the last read reached the end of the stream.
func (s *Stream) AtEnd() bool { return s.end }

// Bytes returns the number of bytes of the messages that were read.
func (s *Stream) Bytes() int { return s.bytes }

// Last returns the sequence of the last message that was read, or 0.
func (s *Stream) Last() uint64 { return max(s.next, 1) - 1 }

// getRequest requests the first messages of a subject, starting at a sequence or a time.
type getRequest struct {
	Seq       uint64     `json:"seq,omitempty"`
	StartTime *time.Time `json:"start_time,omitempty"`
	NextFor   string     `json:"next_by_subj"`
	Batch     int        `json:"batch"`
	MaxBytes  int        `json:"max_bytes"`
}

// Read reads the next messages, at most about pageBytes, and calls add for each delta. The bytes of an Entry are valid
// during the call. A later Read continues after the last message, also after an error.
func (s *Stream) Read(ctx context.Context, add func(Entry)) error {
	request := getRequest{Seq: max(s.next, 1), NextFor: s.filter, Batch: pageMessages, MaxBytes: pageBytes}
	if s.next == 0 && s.since != nil {
		request.Seq, request.StartTime = 0, s.since
	}
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	return responses(ctx, s.nc, body, func(m *nats.Msg) (last bool, err error) {
		if last, pending, err := status(m); last || err != nil {
			s.end = err == nil && pending == 0
			return true, err
		}
		seq, err := sequence(m)
		if err != nil {
			return true, err
		}
		s.next = seq + 1
		s.bytes += len(m.Data)
		addMessage(m, add)
		return false, nil
	})
}

// addMessage calls add for each delta of a message. Damaged deltas are skipped: the complete block has the text.
func addMessage(m *nats.Msg, add func(Entry)) {
	subject := m.Header.Get(jetstream.SubjectHeader)
	if _, ok := events.FrameExecutor(subject); ok {
		for d, err := range events.FrameDeltas(m.Data) {
			if err != nil {
				return
			}
			add(Entry(d))
		}
		return
	}
	if t := strings.Split(subject, "."); len(t) == 4 {
		add(Entry{Session: []byte(events.FrameSession(t[2], t[3])), JSON: m.Data})
	}
}

// Frame is the last frame of an executor in a partition.
type Frame struct {
	Executor string
	Number   uint64
	Time     time.Time // when NATS stored it
	Seq      uint64    // its sequence in DELTAS
}

// LastFrames returns the last frame of each executor in a partition.
func LastFrames(ctx context.Context, nc *nats.Conn, partition int) ([]Frame, error) {
	body, err := json.Marshal(map[string]any{"multi_last": []string{events.FrameSubject(partition, "*")}})
	if err != nil {
		return nil, err
	}
	var list []Frame
	err = responses(ctx, nc, body, func(m *nats.Msg) (bool, error) {
		if last, _, err := status(m); last || err != nil {
			return true, err
		}
		f := Frame{}
		if f.Seq, err = sequence(m); err != nil {
			return true, err
		}
		if f.Time, err = time.Parse(time.RFC3339Nano, m.Header.Get(jetstream.TimeStampHeaer)); err != nil {
			return true, fmt.Errorf("message %d has no time: %w", f.Seq, err)
		}
		f.Executor, _ = events.FrameExecutor(m.Header.Get(jetstream.SubjectHeader))
		if f.Number, err = events.FrameNumber(m.Data); err == nil {
			list = append(list, f)
		}
		return false, nil
	})
	return list, err
}

// responses sends a request to the API of JetStream for direct reads of the stream DELTAS. It calls each with every
// response, until each returns true or an error.
func responses(ctx context.Context, nc *nats.Conn, body []byte, each func(*nats.Msg) (last bool, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, pageTimeout)
	defer cancel()
	inbox := nc.NewRespInbox()
	received := make(chan *nats.Msg, maxResponses) // a subscription of its own would have a channel of 512 KB
	sub, err := nc.ChanSubscribe(inbox, received)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only if the connection is closed, and then the read fails too
	if err := nc.PublishRequest("$JS.API.DIRECT.GET."+topology.StreamDeltas, inbox, body); err != nil {
		return err
	}
	for {
		var last bool
		var err error
		select {
		case m := <-received:
			last, err = each(m)
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", topology.StreamDeltas, err)
		}
		if last {
			return nil
		}
	}
}

// Status values of responses that are not messages.
const (
	statusEnd  = "204" // end of the batch
	statusNone = "404" // no messages
)

// status returns whether a response is the last one, and how many messages follow it in the stream. A response that is
// an error of the server is returned as an error.
func status(m *nats.Msg) (last bool, pending uint64, err error) {
	switch code := m.Header.Get("Status"); code {
	case "":
		return false, 0, nil
	case statusNone:
		return true, 0, nil
	case statusEnd:
		pending, err = strconv.ParseUint(m.Header.Get("Nats-Num-Pending"), 10, 64)
		return true, pending, err
	default:
		return true, 0, fmt.Errorf("the server returned %s %s", code, m.Header.Get("Description"))
	}
}

// sequence returns the stream sequence of a message.
func sequence(m *nats.Msg) (uint64, error) {
	seq, err := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the response has no sequence: %w", err)
	}
	return seq, nil
}
