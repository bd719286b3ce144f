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
	maxReadMessages = 256       // messages in one request
	maxReadBytes    = 512 << 10 // bytes after which the server ends a response
	readTimeout     = 5 * time.Second
	// responseBuffer is the capacity of the channel of responses that wait to be handled. The server sends at most
	// 1,024 messages to a request for last messages, and one more response.
	responseBuffer = 1032
)

// StartPosition is the position in the stream DELTAS at which a read begins. The position for a block's text is at or
// before the first delta of that text.
type StartPosition struct {
	// After is the sequence of DELTAS after which the read begins; 0 means that Time is used.
	After uint64
	// Time is when the first delta was published at the earliest; the zero time means the beginning of the stream. The
	// clocks of executors and of NATS may differ by clockMargin.
	Time time.Time
}

// clockMargin is subtracted from StartPosition.Time when a read begins, because the clocks of executors and of NATS may
// differ.
const clockMargin = time.Minute

// Earlier returns a position that is not later than s and o.
func (s StartPosition) Earlier(o StartPosition) StartPosition {
	if o.Time.Before(s.Time) {
		s.Time = o.Time
	}
	s.After = min(s.After, o.After)
	return s
}

// BlockStartPosition returns the position at which a read of a block's text begins.
func BlockStartPosition(b events.BlockStart) StartPosition {
	return StartPosition{After: b.TextAfter, Time: b.Block.Time}
}

// PartitionReader reads the deltas of all sessions of one partition in the order of publication, without a JetStream
// consumer. It reads both forms of message: frames, each of which holds deltas of several sessions, and the messages of
// earlier builds, each of which holds one delta. It is not safe for concurrent use.
type PartitionReader struct {
	nc     *nats.Conn
	filter string
	since  *time.Time // start of the first read, if next is 0
	next   uint64     // sequence of the next read
	end    bool
	bytes  int
}

// NewPartitionReader returns a PartitionReader that begins at a position in the stream DELTAS. It sends nothing to
// NATS.
func NewPartitionReader(nc *nats.Conn, partition int, from StartPosition) *PartitionReader {
	s := &PartitionReader{nc: nc, filter: topology.DeltaFilter(partition)}
	switch {
	case from.After > 0:
		s.next = from.After + 1
	case !from.Time.IsZero():
		since := from.Time.Add(-clockMargin)
		s.since = &since
	}
	return s
}

// SessionDelta is a delta in the stream DELTAS, and the session to which it belongs.
type SessionDelta struct {
	Session []byte // the session's events.FrameSessionKey
	JSON    []byte // the delta, for events.DecodeDelta
}

// AtEnd reports whether the last Read reached the end of the stream DELTAS.
func (s *PartitionReader) AtEnd() bool { return s.end }

// ReadBytes returns the total size in bytes of the messages that were read.
func (s *PartitionReader) ReadBytes() int { return s.bytes }

// LastSequence returns the stream sequence of the last message that was read, or 0.
func (s *PartitionReader) LastSequence() uint64 { return max(s.next, 1) - 1 }

// getRequest requests the first messages of a subject, starting at a sequence or a time.
type getRequest struct {
	Seq       uint64     `json:"seq,omitempty"`
	StartTime *time.Time `json:"start_time,omitempty"`
	NextFor   string     `json:"next_by_subj"`
	Batch     int        `json:"batch"`
	MaxBytes  int        `json:"max_bytes"`
}

// Read reads the next messages, about maxReadBytes at most, and calls add for each delta. The bytes of a SessionDelta
// are valid during the call. A later Read continues after the last message, also after an error.
func (s *PartitionReader) Read(ctx context.Context, add func(SessionDelta)) error {
	request := getRequest{Seq: max(s.next, 1), NextFor: s.filter, Batch: maxReadMessages, MaxBytes: maxReadBytes}
	if s.next == 0 && s.since != nil {
		request.Seq, request.StartTime = 0, s.since
	}
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	return getDirect(ctx, s.nc, body, func(m *nats.Msg) (last bool, err error) {
		if last, pending, err := parseStatus(m); last || err != nil {
			s.end = err == nil && pending == 0
			return true, err
		}
		seq, err := streamSequence(m)
		if err != nil {
			return true, err
		}
		s.next = seq + 1
		s.bytes += len(m.Data)
		decodeDeltas(m, add)
		return false, nil
	})
}

// decodeDeltas calls add for each delta of a message. Damaged deltas are skipped: the complete block has the text.
func decodeDeltas(m *nats.Msg, add func(SessionDelta)) {
	subject := m.Header.Get(jetstream.SubjectHeader)
	if _, ok := events.FrameExecutor(subject); ok {
		for d, err := range events.FrameDeltas(m.Data) {
			if err != nil {
				return
			}
			add(SessionDelta(d))
		}
		return
	}
	if t := strings.Split(subject, "."); len(t) == 4 {
		add(SessionDelta{Session: []byte(events.FrameSessionKey(t[2], t[3])), JSON: m.Data})
	}
}

// Frame is the last frame that an executor published in a partition.
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
	err = getDirect(ctx, nc, body, func(m *nats.Msg) (bool, error) {
		if last, _, err := parseStatus(m); last || err != nil {
			return true, err
		}
		f := Frame{}
		if f.Seq, err = streamSequence(m); err != nil {
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

// getDirect sends a direct get request of JetStream to the stream DELTAS. It calls each with every response, until each
// returns true or an error.
func getDirect(ctx context.Context, nc *nats.Conn, body []byte, each func(*nats.Msg) (last bool, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	inbox := nc.NewRespInbox()
	received := make(chan *nats.Msg, responseBuffer) // a subscription of its own would have a channel of 512 KB
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
	statusEndOfBatch = "204" // end of the batch
	statusNoMessages = "404" // no messages
)

// parseStatus reports whether a response is the last one, and returns how many messages follow it in the stream. A
// response that is an error of the server is returned as an error.
func parseStatus(m *nats.Msg) (last bool, pending uint64, err error) {
	switch code := m.Header.Get("Status"); code {
	case "":
		return false, 0, nil
	case statusNoMessages:
		return true, 0, nil
	case statusEndOfBatch:
		pending, err = strconv.ParseUint(m.Header.Get("Nats-Num-Pending"), 10, 64)
		return true, pending, err
	default:
		return true, 0, fmt.Errorf("the server returned %s %s", code, m.Header.Get("Description"))
	}
}

// streamSequence returns the stream sequence of a message.
func streamSequence(m *nats.Msg) (uint64, error) {
	seq, err := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the response has no sequence: %w", err)
	}
	return seq, nil
}
