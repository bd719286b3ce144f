// Package frames publishes the text of unfinished blocks to the stream DELTAS, in frames of many sessions, and reads it
// again.
package frames

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
	// maxFrameBytes is the size in bytes above which a frame is published at once, without waiting for the minimum time
	// between two frames.
	maxFrameBytes = 256 << 10
	// positionInterval is the interval at which a published frame requests an acknowledgement, which contains the present
	// sequence of the stream DELTAS. Position returns a sequence that is at most maxPositionAge old: a reader that starts at
	// an older one would read too many deltas of other executors.
	positionInterval = 100 * time.Millisecond
	maxPositionAge   = time.Minute
	// frameOverheadBytes is about the size in bytes of a frame with one delta without the delta's JSON.
	frameOverheadBytes = 128
	// textsTimeout is the time limit of one call of ReadTexts.
	textsTimeout = 10 * time.Second
)

// Config configures a Publisher. Every field is required; New does not check that.
type Config struct {
	NATS       *nats.Conn // the connection of the commits, so that text arrives before the commit that follows it
	Executor   string
	Partitions events.Partitioning
	Interval   time.Duration // the minimum time between two frames of a partition
	Logger     *slog.Logger
}

// Publisher publishes the deltas of an executor's sessions in frames. A frame contains the deltas of all sessions of a
// partition, and the time between two frames of a partition is at least Config.Interval. Deltas may be lost, because the
// event that completes a block has the block's whole text. It is safe for concurrent use.
type Publisher struct {
	cfg    Config
	next   []pendingFrame              // by partition
	stored atomic.Pointer[storedFrame] // the last acknowledgement; nil before the first
	asked  atomic.Int64                // when an acknowledgement was last requested, in Unix nanoseconds
	acks   atomic.Pointer[string]      // subject of acknowledgements; nil before Open
}

// storedFrame has the sequence in the stream DELTAS of the last frame that NATS has acknowledged.
type storedFrame struct {
	seq uint64
	at  time.Time // when it was acknowledged
}

// pendingFrame is the next frame of a partition. Deltas are added to it until it is published.
type pendingFrame struct {
	mu      sync.Mutex
	frame   []byte    // nil: no delta is waiting
	number  uint64    // of the last frame
	sent    time.Time // when the last frame was published
	pending bool      // a timer will publish the frame
}

// New returns a Publisher. New itself sends nothing to NATS.
func New(cfg Config) *Publisher {
	return &Publisher{cfg: cfg, next: make([]pendingFrame, cfg.Partitions.PartitionCount())}
}

// Open subscribes to the acknowledgements of frames, from which the Publisher learns the sequence of the stream DELTAS.
// Before Open was called, Position returns 0. The returned function stop publishes the remaining deltas and ends the
// subscription.
func (p *Publisher) Open() (stop func() error, err error) {
	inbox := p.cfg.NATS.NewInbox()
	sub, err := p.cfg.NATS.Subscribe(inbox, p.handleAck)
	if err != nil {
		return nil, fmt.Errorf("subscribe to acknowledgements of deltas: %w", err)
	}
	p.acks.Store(&inbox)
	return func() error {
		p.publishAllFrames()
		if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			return fmt.Errorf("end the subscription to acknowledgements of deltas: %w", err)
		}
		return nil
	}, nil
}

// Publish adds a delta of a session to the next frame of its partition.
func (p *Publisher) Publish(tenant, session string, d events.Delta) error {
	raw, err := d.Encode()
	if err != nil {
		return err
	}
	partition := p.cfg.Partitions.PartitionOf(session)
	f := &p.next[partition]
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frame != nil && len(f.frame)+len(raw) > maxFrameBytes { // a large delta must not make the frame of others too large for NATS
		p.publishFrame(partition)
	}
	if f.frame == nil {
		f.number++
		f.frame = events.AppendFrameHeader(make([]byte, 0, len(raw)+frameOverheadBytes), f.number)
	}
	f.frame = events.AppendFrameDelta(f.frame, events.FrameSessionKey(tenant, session), raw)
	wait := p.cfg.Interval - time.Since(f.sent)
	switch {
	case wait <= 0 && !f.pending, len(f.frame) > maxFrameBytes:
		p.publishFrame(partition)
	case !f.pending:
		f.pending = true
		time.AfterFunc(wait, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.pending = false
			p.publishFrame(partition)
		})
	}
	return nil
}

// publishFrame publishes the pending frame of a partition, if it has deltas. The caller holds the lock of the pendingFrame.
func (p *Publisher) publishFrame(partition int) {
	f := &p.next[partition]
	if f.frame == nil {
		return
	}
	now := time.Now()
	m := &nats.Msg{Subject: events.FrameSubject(partition, p.cfg.Executor), Data: f.frame}
	asked := p.asked.Load()
	if acks := p.acks.Load(); acks != nil && now.UnixNano()-asked >= int64(positionInterval) && p.asked.CompareAndSwap(asked, now.UnixNano()) {
		m.Reply = *acks
	}
	if err := p.cfg.NATS.PublishMsg(m); err != nil {
		p.cfg.Logger.Debug("text in flight was lost", "partition", partition, "error", err)
	}
	f.frame, f.sent = nil, now
}

// publishAllFrames publishes the pending frames of all partitions.
func (p *Publisher) publishAllFrames() {
	for i := range p.next {
		p.next[i].mu.Lock()
		p.publishFrame(i)
		p.next[i].mu.Unlock()
	}
}

// handleAck handles the acknowledgement of a frame, and stores the frame's sequence in the stream DELTAS. It stores the
// last acknowledgement and not the highest sequence, because sequences begin at 1 again if the stream was created again.
func (p *Publisher) handleAck(m *nats.Msg) {
	var ack struct {
		Seq uint64 `json:"seq"`
	}
	if err := json.Unmarshal(m.Data, &ack); err != nil || ack.Seq == 0 {
		p.cfg.Logger.Debug("text in flight was not stored", "answer", string(m.Data))
		return
	}
	p.stored.Store(&storedFrame{ack.Seq, time.Now()})
}

// Position returns a sequence in the stream DELTAS that precedes all deltas that are published from now on, or 0 if no
// recent sequence is known.
func (p *Publisher) Position() uint64 {
	last := p.stored.Load()
	if last == nil || time.Since(last.at) > maxPositionAge {
		return 0
	}
	return last.seq
}

// ReadTexts returns the text in flight of a session's blocks, by block id, from the deltas in the stream DELTAS that follow
// a position.
func (p *Publisher) ReadTexts(ctx context.Context, tenant, session string, from deltas.StartPosition) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, textsTimeout)
	defer cancel()
	known := map[string]*blocks.StreamedText{}
	reader := deltas.NewReader(p.cfg.NATS, p.cfg.Partitions, tenant, session, from)
	var err error
	for err == nil && !reader.AtEnd() {
		err = reader.Fetch(ctx)
		for _, d := range reader.TakeFetched() {
			if known[d.BlockID] == nil {
				known[d.BlockID] = &blocks.StreamedText{}
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
