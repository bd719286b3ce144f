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
	session   string // the session's events.FrameSessionKey
	stream    *PartitionReader
	fetched   []events.Delta
}

// NewReader returns a Reader of the deltas of a session after a position in the stream DELTAS. It sends nothing to
// NATS.
func NewReader(nc *nats.Conn, partitions events.Partitioning, tenant, session string, from StartPosition) *Reader {
	p := partitions.PartitionOf(session)
	return &Reader{nc: nc, partition: p, session: events.FrameSessionKey(tenant, session), stream: NewPartitionReader(nc, p, from)}
}

// Buffered reports whether the next Peek returns without a request to NATS.
func (r *Reader) Buffered() bool { return len(r.fetched) > 0 || r.stream.AtEnd() }

// Peek returns the session's next delta without removing it; ok is false at the end of the stream.
func (r *Reader) Peek(ctx context.Context) (d events.Delta, ok bool, err error) {
	for len(r.fetched) == 0 && !r.stream.AtEnd() {
		if err := r.Fetch(ctx); err != nil {
			return d, false, err
		}
	}
	if len(r.fetched) == 0 {
		return d, false, nil
	}
	return r.fetched[0], true, nil
}

// Fetch reads the next messages of the stream DELTAS into the Reader. They may contain no delta of the session.
func (r *Reader) Fetch(ctx context.Context) error {
	return r.stream.Read(ctx, func(e SessionDelta) {
		if string(e.Session) != r.session {
			return
		}
		if d, err := events.DecodeDelta(e.JSON); err == nil { // an invalid delta is skipped: the completed block shows that text is missing
			r.fetched = append(r.fetched, d)
		}
	})
}

// DropPeeked removes the delta that the last Peek returned.
func (r *Reader) DropPeeked() { r.fetched = r.fetched[1:] }

// TakeFetched removes and returns the session's deltas that were fetched and not removed yet.
func (r *Reader) TakeFetched() []events.Delta {
	list := r.fetched
	r.fetched = nil
	return list
}

// AtEnd reports whether the last read reached the end of the stream DELTAS.
func (r *Reader) AtEnd() bool { return r.stream.AtEnd() }

// FetchedBytes returns the size in bytes of all messages that were fetched. They contain deltas of other sessions too.
func (r *Reader) FetchedBytes() int { return r.stream.ReadBytes() }

// SkipTo makes the Reader continue at a later position, without the deltas before it. If the position is earlier, SkipTo
// has no effect.
func (r *Reader) SkipTo(to StartPosition) {
	if to.After == 0 || to.After < r.stream.next { // the order of a time and of what was read is not known
		return
	}
	read := r.stream.bytes
	r.fetched, r.stream = nil, NewPartitionReader(r.nc, r.partition, to)
	r.stream.bytes = read
}
