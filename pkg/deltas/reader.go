package deltas

import (
	"context"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
)

// Reader reads the deltas of one session in the order of publication. It is not safe for concurrent use.
type Reader struct {
	nc        *nats.Conn
	partition int
	session   string // the session's events.FrameSession
	stream    *Stream
	page      []events.Delta
}

// NewReader returns a Reader of the deltas of a session after a position in the stream DELTAS. It sends nothing to
// NATS.
func NewReader(nc *nats.Conn, partitions events.Partitioning, tenant, session string, from Start) *Reader {
	p := partitions.Of(session)
	return &Reader{nc: nc, partition: p, session: events.FrameSession(tenant, session), stream: NewStream(nc, p, from)}
}

// Buffered reports whether the next Peek returns without a request to NATS.
func (r *Reader) Buffered() bool { return len(r.page) > 0 || r.stream.AtEnd() }

// Peek returns the next delta without removing it; ok is false at the end of the stream.
func (r *Reader) Peek(ctx context.Context) (d events.Delta, ok bool, err error) {
	for len(r.page) == 0 && !r.stream.AtEnd() {
		if err := r.Fetch(ctx); err != nil {
			return d, false, err
		}
	}
	if len(r.page) == 0 {
		return d, false, nil
	}
	return r.page[0], true, nil
}

// Fetch reads the next messages of the stream. They may have no delta of the session.
func (r *Reader) Fetch(ctx context.Context) error {
	return r.stream.Read(ctx, func(e Entry) {
		if string(e.Session) != r.session {
			return
		}
		if d, err := events.DecodeDelta(e.JSON); err == nil { // an invalid delta is skipped: the completed block shows that text is missing
			r.page = append(r.page, d)
		}
	})
}

// Drop removes the delta that the last Peek returned.
func (r *Reader) Drop() { r.page = r.page[1:] }

// Take removes and returns the session's deltas that were fetched and not removed yet.
func (r *Reader) Take() []events.Delta {
	list := r.page
	r.page = nil
	return list
}

// AtEnd reports whether the last read reached the end of the stream DELTAS.
func (r *Reader) AtEnd() bool { return r.stream.AtEnd() }

// Bytes returns the size in bytes of all messages that were fetched. They contain deltas of other sessions too.
func (r *Reader) Bytes() int { return r.stream.Bytes() }

// Skip makes the Reader continue at a later position, without the deltas before it. If the position is earlier, Skip
// has no effect.
func (r *Reader) Skip(to Start) {
	if to.After == 0 || to.After < r.stream.next { // the order of a time and of what was read is not known
		return
	}
	read := r.stream.bytes
	r.page, r.stream = nil, NewStream(r.nc, r.partition, to)
	r.stream.bytes = read
}
