package live

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
)

const (
	// maxFrames and maxFrameBytes limit the frames of a partition that have arrived and not been handled. NATS drops
	// further frames; handleFrame finds the gap in their numbers.
	maxFrames     = 4096
	maxFrameBytes = 16 << 20
	// maxSeen is the number of executors whose frame numbers a partition remembers.
	maxSeen = 1000
)

// partition receives the text in flight of the sessions of one partition, while clients of the gateway follow any of
// them. The hub's mu guards it.
type partition struct {
	n        int
	feeds    int // feeds of the partition
	sub      *nats.Subscription
	began    time.Time         // when the subscription began
	seen     map[string]uint64 // number of the last frame, by executor
	requests map[*feed]bool    // feeds that need a read of DELTAS
	reading  bool              // whether a goroutine reads DELTAS
}

// usePartition counts a feed of the session's partition, and for the first one subscribes to the partition's frames. leavePartition must be called
// when the feed ends. mu must be held.
func (h *Hub) usePartition(session string) error {
	n := h.cfg.Partitions.PartitionOf(session)
	p := h.partitions[n]
	if p == nil {
		p = &partition{n: n, began: time.Now(), seen: map[string]uint64{}, requests: map[*feed]bool{}}
		sub, err := h.cfg.NATS.Subscribe(events.FrameSubject(n, "*"), func(m *nats.Msg) { h.handleFrame(p, m) })
		if err != nil {
			return err
		}
		if err := sub.SetPendingLimits(maxFrames, maxFrameBytes); err != nil {
			h.unsubscribe(sub)
			return err
		}
		p.sub = sub
		h.partitions[n] = p
	}
	p.feeds++
	return nil
}

// leavePartition ends the use of a partition by a feed. After the last one, the subscription ends. mu must be held.
func (h *Hub) leavePartition(f *feed) {
	n := h.cfg.Partitions.PartitionOf(f.session)
	p := h.partitions[n]
	delete(p.requests, f)
	if p.feeds--; p.feeds > 0 {
		return
	}
	delete(h.partitions, n)
	h.unsubscribe(p.sub)
}

// handleFrame passes the deltas of a frame to the feeds of their sessions. If the frame's number shows that frames of the executor were lost, the
// feeds of the partition read DELTAS.
func (h *Hub) handleFrame(p *partition, m *nats.Msg) {
	executor, ok := events.FrameExecutor(m.Subject)
	number, err := events.FrameNumber(m.Data)
	if !ok || err != nil {
		h.cfg.Logger.Warn("read frame of text in flight: its text is shown when the blocks are complete", "subject", m.Subject, "error", err)
		return
	}
	type delta struct {
		feed *feed
		json []byte
	}
	var list []delta
	subject := make([]byte, 0, 128)
	h.mu.Lock()
	last := p.seen[executor]
	if last == 0 && len(p.seen) >= maxSeen {
		clear(p.seen)
	}
	p.seen[executor] = max(last, number)
	for d, frameErr := range events.FrameDeltas(m.Data) {
		if err = frameErr; err != nil {
			break
		}
		subject = liveSubject(subject[:0], d.Session)
		if f := h.feeds[string(subject)]; f != nil {
			list = append(list, delta{f, d.JSON})
		}
	}
	h.mu.Unlock()
	if err != nil {
		h.cfg.Logger.Warn("read frame of text in flight: its text is shown when the blocks are complete", "subject", m.Subject, "error", err)
	}
	for _, d := range list {
		d.feed.handleDelta(d.json, false)
	}
	if last > 0 && number > last+1 {
		h.rereadText(p, "frame")
	}
}

// liveSubject appends the LIVE subject of an events.FrameSessionKey to b.
func liveSubject(b, session []byte) []byte {
	b = append(b, "live."...)
	for _, c := range session {
		if c == ' ' {
			c = '.'
		}
		b = append(b, c)
	}
	return b
}

// rereadText makes the feeds of a partition read DELTAS, because frames were lost.
func (h *Hub) rereadText(p *partition, why string) {
	h.cfg.Metrics.Reread("text-" + why)
	for _, f := range h.feedsOf(p) {
		f.rereadText()
	}
}

// feedsOf returns the feeds of a partition.
func (h *Hub) feedsOf(p *partition) (list []*feed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.feeds {
		if h.cfg.Partitions.PartitionOf(f.session) == p.n {
			list = append(list, f)
		}
	}
	return list
}

// rereadAllText makes all feeds read DELTAS.
func (h *Hub) rereadAllText(why string) {
	for _, p := range h.textPartitions() {
		h.rereadText(p, why)
	}
}

// textPartitions returns the partitions that have feeds.
func (h *Hub) textPartitions() []*partition {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []*partition
	for _, p := range h.partitions {
		list = append(list, p)
	}
	return list
}

// checkFrames finds lost frames after which no other frame came: for each partition with open blocks it compares the number of the last frame
// that was received from each executor with the last one in DELTAS. The feeds of a partition that misses one read DELTAS.
func (h *Hub) checkFrames(ctx context.Context) {
	for _, p := range h.textPartitions() {
		if !h.hasOpenBlocks(p) {
			continue
		}
		release, err := h.acquireTextRead(ctx)
		if err != nil {
			return
		}
		last, err := deltas.LastFrames(ctx, h.cfg.NATS, p.n)
		release()
		if err != nil {
			if ctx.Err() == nil {
				h.cfg.Logger.Warn("compare text in flight with DELTAS: will retry", "partition", p.n, "error", err)
			}
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(checkGrace): // frames may still be on the way
		}
		if h.missesFrames(p, last) {
			h.rereadText(p, "behind")
		}
	}
}

// missesFrames reports whether a partition has not received the last frame of an executor.
func (h *Hub) missesFrames(p *partition, last []deltas.Frame) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	misses := false
	for _, f := range last {
		seen, known := p.seen[f.Executor]
		if seen < f.Number && (known || f.Time.After(p.began)) {
			p.seen[f.Executor], misses = f.Number, true
		}
	}
	return misses
}

// hasOpenBlocks reports whether any feed of a partition has an open block.
func (h *Hub) hasOpenBlocks(p *partition) bool {
	for _, f := range h.feedsOf(p) {
		f.mu.Lock()
		open := len(f.open) > 0
		f.mu.Unlock()
		if open {
			return true
		}
	}
	return false
}

// requestText makes the goroutine of the feed's partition read DELTAS for the feed. The feed's mu is held.
func (h *Hub) requestText(f *feed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.partitions[h.cfg.Partitions.PartitionOf(f.session)]
	if h.closed || p == nil {
		return
	}
	p.requests[f] = true
	if !p.reading {
		p.reading = true
		ctx := h.run
		h.work.Go(func() { h.readText(ctx, p) })
	}
}

// readText reads DELTAS for all feeds of a partition that have requested it, until no feed requests it. One read serves
// all of them.
func (h *Hub) readText(ctx context.Context, p *partition) {
	for {
		h.mu.Lock()
		if len(p.requests) == 0 || h.closed {
			p.reading = false
			h.mu.Unlock()
			return
		}
		requests := p.requests
		p.requests = map[*feed]bool{}
		h.mu.Unlock()
		h.readTextOf(ctx, p, requests)
	}
}

// readTextOf reads DELTAS once for some feeds of a partition.
func (h *Hub) readTextOf(ctx context.Context, p *partition, requests map[*feed]bool) {
	var from deltas.StartPosition
	feeds := map[string]*feed{}
	for f := range requests {
		start, ok := f.beginText()
		if !ok {
			continue
		}
		if len(feeds) == 0 {
			from = start
		}
		from = from.Earlier(start)
		feeds[events.FrameSessionKey(f.tenant, f.session)] = f
	}
	if len(feeds) == 0 {
		return
	}
	h.cfg.Metrics.Reread("text")
	stream := deltas.NewPartitionReader(h.cfg.NATS, p.n, from)
	var err error
	for err == nil && !stream.AtEnd() {
		err = h.readTextPage(ctx, stream, feeds)
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, nats.ErrConnectionClosed) {
		h.cfg.Logger.Warn("read text in flight from DELTAS: will retry", "partition", p.n, "error", err)
	}
	for _, f := range feeds {
		f.endText(stream.LastSequence(), err)
	}
}

// readTextPage reads one page of DELTAS and adds the deltas of some feeds.
func (h *Hub) readTextPage(ctx context.Context, stream *deltas.PartitionReader, feeds map[string]*feed) error {
	release, err := h.acquireTextRead(ctx)
	if err != nil {
		return err
	}
	defer release()
	return stream.Read(ctx, func(e deltas.SessionDelta) {
		if f := feeds[string(e.Session)]; f != nil {
			f.handleDelta(e.JSON, true)
		}
	})
}

// acquireTextRead blocks until fewer than maxReads reads of DELTAS are in progress. The caller must call release after its read.
func (h *Hub) acquireTextRead(ctx context.Context) (release func(), err error) {
	select {
	case h.textSlots <- struct{}{}:
		return func() { <-h.textSlots }, nil
	case <-ctx.Done():
		return nil, errStopping()
	}
}
