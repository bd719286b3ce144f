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
	// maxPendingFrames and maxPendingFrameBytes limit the frames of a partition that have arrived and not been handled. NATS drops
	// further frames; handleFrame finds the gap in their numbers.
	maxPendingFrames     = 4096
	maxPendingFrameBytes = 16 << 20
	// maxSeenExecutors is the number of executors whose frame numbers a partition remembers.
	maxSeenExecutors = 1000
)

// partition receives the frames of one partition of the log, with the text in flight of its sessions, while clients
// of the gateway follow any of these sessions. The hub's mu guards it.
type partition struct {
	n        int
	feeds    int // feeds of the partition
	sub      *nats.Subscription
	began    time.Time         // when the subscription began
	seen     map[string]uint64 // number of the last frame, by executor
	requests map[*feed]bool    // feeds that need a read of DELTAS
	reading  bool              // whether a goroutine reads DELTAS
}

// acquirePartition counts one more feed of the session's partition, and for the first one subscribes to the
// partition's frames. releasePartition must be called when the feed ends. mu must be held.
func (h *Hub) acquirePartition(session string) error {
	n := h.cfg.Partitions.PartitionOf(session)
	p := h.partitions[n]
	if p == nil {
		p = &partition{n: n, began: time.Now(), seen: map[string]uint64{}, requests: map[*feed]bool{}}
		sub, err := h.cfg.NATS.Subscribe(events.FrameSubject(n, "*"), func(m *nats.Msg) { h.handleFrame(p, m) })
		if err != nil {
			return err
		}
		if err := sub.SetPendingLimits(maxPendingFrames, maxPendingFrameBytes); err != nil {
			h.unsubscribe(sub)
			return err
		}
		p.sub = sub
		h.partitions[n] = p
	}
	p.feeds++
	return nil
}

// releasePartition counts one feed less of the feed's partition. After the last one it ends the subscription to the
// partition's frames. mu must be held.
func (h *Hub) releasePartition(f *feed) {
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
	if last == 0 && len(p.seen) >= maxSeenExecutors {
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
		h.rereadPartitionText(p, "frame")
	}
}

// liveSubject appends to b the subject of LIVE for a session; session has the form of events.FrameSession.
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

// rereadPartitionText makes the feeds of a partition read DELTAS, because frames were lost.
func (h *Hub) rereadPartitionText(p *partition, reason string) {
	h.cfg.Metrics.Reread("text-" + reason)
	for _, f := range h.partitionFeeds(p) {
		f.rereadText()
	}
}

// partitionFeeds returns the feeds of a partition.
func (h *Hub) partitionFeeds(p *partition) (list []*feed) {
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
func (h *Hub) rereadAllText(reason string) {
	for _, p := range h.activePartitions() {
		h.rereadPartitionText(p, reason)
	}
}

// activePartitions returns the partitions of which the Hub has feeds.
func (h *Hub) activePartitions() []*partition {
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
	for _, p := range h.activePartitions() {
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
		case <-time.After(tipCheckGrace): // frames may still be on the way
		}
		if h.recordMissedFrames(p, last) {
			h.rereadPartitionText(p, "behind")
		}
	}
}

// recordMissedFrames reports whether a partition has not received a frame that is in last, the last frame of each
// executor in DELTAS. It records these frames as seen, because the caller then reads the text from DELTAS.
func (h *Hub) recordMissedFrames(p *partition, last []deltas.Frame) bool {
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
	for _, f := range h.partitionFeeds(p) {
		f.mu.Lock()
		open := len(f.open) > 0
		f.mu.Unlock()
		if open {
			return true
		}
	}
	return false
}

// requestTextRead makes the goroutine of the feed's partition read DELTAS for the feed. The feed's mu is held.
func (h *Hub) requestTextRead(f *feed) {
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
		h.work.Go(func() { h.readRequestedText(ctx, p) })
	}
}

// readRequestedText reads DELTAS for all feeds of a partition that have requested it, until no feed requests it. One read serves
// all of them.
func (h *Hub) readRequestedText(ctx context.Context, p *partition) {
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
		h.readTextOnce(ctx, p, requests)
	}
}

// readTextOnce reads DELTAS once for the feeds of a partition that are in requests.
func (h *Hub) readTextOnce(ctx context.Context, p *partition, requests map[*feed]bool) {
	var from deltas.StartPosition
	feeds := map[string]*feed{}
	for f := range requests {
		start, ok := f.beginTextRead()
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
		f.endTextRead(stream.LastSequence(), err)
	}
}

// readTextPage reads one page of DELTAS and adds the deltas to their feeds.
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

// acquireTextRead blocks until fewer than maxConcurrentReads reads of DELTAS are in progress. The caller must call
// release after its read.
func (h *Hub) acquireTextRead(ctx context.Context) (release func(), err error) {
	select {
	case h.textSlots <- struct{}{}:
		return func() { <-h.textSlots }, nil
	case <-ctx.Done():
		return nil, errHubStopping()
	}
}
