// Package outbox publishes the text of unfinished blocks to the stream DELTAS and reads it again.
package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

const (
	// maxFrame is the size in bytes from which a frame is published at once.
	maxFrame = 256 << 10
	// positionEvery is the interval at which a frame requests an acknowledgement, which has the present sequence of the
	// stream. After positionAge the sequence is too old to be of use: too much of other executors would come after it.
	positionEvery = 100 * time.Millisecond
	positionAge   = time.Minute
	// frameOverhead is about the size in bytes of a frame with one delta without the delta's JSON.
	frameOverhead = 128
	// textsTimeout bounds one call of Texts.
	textsTimeout = 10 * time.Second
)

// Config holds the settings of an Outbox, which publishes the deltas of open blocks. Every field is required; New does not check that.
type Config struct {
	NATS       *nats.Conn // the connection of the commits, so that text arrives before the commit that follows it
	Executor   string
	Partitions events.Partitioning
	Interval   time.Duration // the minimum time between two frames of a partition
	Logger     *slog.Logger
}

// Outbox publishes the deltas of an executor's sessions: those of all sessions of a partition together in a frame, at
// most one for each interval. A delta that comes after a pause of an interval is published at once. It is safe for
// concurrent use. A lost delta is no loss: the complete block has the text.
type Outbox struct {
	cfg    Config
	boxes  []box
	stored atomic.Pointer[stored] // the last acknowledgement; nil before the first
	asked  atomic.Int64           // when an acknowledgement was last requested, in Unix nanoseconds
	acks   atomic.Pointer[string] // subject of acknowledgements; nil before Open
}

// stored is the sequence of a frame in DELTAS.
type stored struct {
	seq uint64
	at  time.Time // when it was acknowledged
}

// box is the next frame of a partition.
type box struct {
	mu      sync.Mutex
	frame   []byte    // nil: no delta is waiting
	number  uint64    // of the last frame
	sent    time.Time // when the last frame was published
	pending bool      // a timer will publish the frame
}

// New returns an Outbox. New itself sends nothing to NATS.
func New(cfg Config) *Outbox {
	return &Outbox{cfg: cfg, boxes: make([]box, cfg.Partitions.Count())}
}

// Open subscribes to the acknowledgements of frames, from which the Outbox learns the sequence of the stream DELTAS. Without it, the
// positions of blocks are unknown. stop publishes the waiting deltas and ends the subscription.
func (o *Outbox) Open() (stop func() error, err error) {
	inbox := o.cfg.NATS.NewInbox()
	sub, err := o.cfg.NATS.Subscribe(inbox, o.acknowledged)
	if err != nil {
		return nil, fmt.Errorf("subscribe to acknowledgements of deltas: %w", err)
	}
	o.acks.Store(&inbox)
	return func() error {
		o.flushAll()
		if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			return fmt.Errorf("end the subscription to acknowledgements of deltas: %w", err)
		}
		return nil
	}, nil
}

// Publish adds a delta of a session to the next frame of its partition.
func (o *Outbox) Publish(tenant, session string, d events.Delta) error {
	raw, err := d.Encode()
	if err != nil {
		return err
	}
	partition := o.cfg.Partitions.Of(session)
	b := &o.boxes[partition]
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.frame != nil && len(b.frame)+len(raw) > maxFrame { // a large delta must not make the frame of others too large for NATS
		o.flush(partition)
	}
	if b.frame == nil {
		b.number++
		b.frame = events.AppendFrame(make([]byte, 0, len(raw)+frameOverhead), b.number)
	}
	b.frame = events.AppendFrameDelta(b.frame, events.FrameSession(tenant, session), raw)
	wait := o.cfg.Interval - time.Since(b.sent)
	switch {
	case wait <= 0 && !b.pending, len(b.frame) > maxFrame:
		o.flush(partition)
	case !b.pending:
		b.pending = true
		time.AfterFunc(wait, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.pending = false
			o.flush(partition)
		})
	}
	return nil
}

// flush publishes the frame of a partition, if there is one. The box must be locked.
func (o *Outbox) flush(partition int) {
	b := &o.boxes[partition]
	if b.frame == nil {
		return
	}
	now := time.Now()
	m := &nats.Msg{Subject: events.FrameSubject(partition, o.cfg.Executor), Data: b.frame}
	asked := o.asked.Load()
	if acks := o.acks.Load(); acks != nil && now.UnixNano()-asked >= int64(positionEvery) && o.asked.CompareAndSwap(asked, now.UnixNano()) {
		m.Reply = *acks
	}
	if err := o.cfg.NATS.PublishMsg(m); err != nil {
		o.cfg.Logger.Debug("text in flight was lost", "partition", partition, "error", err)
	}
	b.frame, b.sent = nil, now
}

// flushAll publishes the frames of all partitions.
func (o *Outbox) flushAll() {
	for i := range o.boxes {
		o.boxes[i].mu.Lock()
		o.flush(i)
		o.boxes[i].mu.Unlock()
	}
}

// acknowledged records the sequence of an acknowledgement. The last one counts, because the sequences of a stream that
// was created again begin at 1.
func (o *Outbox) acknowledged(m *nats.Msg) {
	var ack struct {
		Seq uint64 `json:"seq"`
	}
	if err := json.Unmarshal(m.Data, &ack); err != nil || ack.Seq == 0 {
		o.cfg.Logger.Debug("text in flight was not stored", "answer", string(m.Data))
		return
	}
	o.stored.Store(&stored{ack.Seq, time.Now()})
}

// Position returns a sequence of DELTAS that precedes all deltas that will be published; 0 if no recent one is known.
// All partitions share the stream.
func (o *Outbox) Position() uint64 {
	last := o.stored.Load()
	if last == nil || time.Since(last.at) > positionAge {
		return 0
	}
	return last.seq
}

// Texts returns the text of a session's blocks, by block id, from the deltas after a start.
func (o *Outbox) Texts(ctx context.Context, tenant, session string, from deltas.Start) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, textsTimeout)
	defer cancel()
	known := map[string]*blocks.Text{}
	reader := deltas.NewReader(o.cfg.NATS, o.cfg.Partitions, tenant, session, from)
	var err error
	for err == nil && !reader.AtEnd() {
		err = reader.Fetch(ctx)
		for _, d := range reader.Take() {
			if known[d.BlockID] == nil {
				known[d.BlockID] = &blocks.Text{}
			}
			known[d.BlockID].Add(d)
		}
	}
	out := map[string]string{}
	for id, t := range known {
		out[id] = t.Known
	}
	return out, err
}
