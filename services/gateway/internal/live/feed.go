package live

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// feed follows one session for all clients of the gateway that follow it. It holds the last events of the session in
// a ring, up to the event tip, and the text of the blocks that are open after tip.
type feed struct {
	hub             *Hub
	tenant, session string
	sub             *nats.Subscription
	users           int // number of users of the feed; guarded by the hub's mu

	ready    chan struct{} // closed when the start has succeeded or failed
	startErr error         // set before ready is closed

	mu       sync.Mutex
	tip      uint32
	position string                  // position of the event at tip
	ring     []Frame                 // stored events without a gap; the last one is at tip
	bytes    int                     // bytes in the ring
	metadata feedMetadata            // the metadata of events at tip
	open     []*openText             // blocks that are open at tip, in the order of their start
	early    map[string]*waitingText // text of blocks whose block_start the feed does not have yet, by block
	waiting  int                     // bytes of early, and of text after a gap in the text of open blocks
	released bool                    // the feed has ended and keeps no text
	// complete is a sequence of DELTAS: all frames after it were received. The text of a block that begins after it needs no
	// read of DELTAS.
	complete     uint64
	losses       uint64 // how often the feed did not receive or keep a delta
	lossesAtRead uint64 // losses when the last read of DELTAS began
	readers      map[*Reader]struct{}
	ended        error // why no more events will come; Readers still get the events in the feed
	lagging      Lag

	reading   bool // whether a goroutine is reading Postgres
	readAgain bool // whether it must read once more
}

// load sets the feed to the session's last event and its open blocks, as Postgres has them, and then closes f.ready.
// Messages of LIVE that arrive in the meantime cause another read of Postgres. After a failure load sets f.startErr.
func (f *feed) load(ctx context.Context) {
	defer close(f.ready)
	// Once the server has the subscription, no event is lost between the read and LIVE. Without NATS the comparisons
	// with Postgres still move the feed, only later.
	if f.hub.cfg.NATS.IsConnected() {
		flush, cancel := context.WithTimeout(ctx, time.Second)
		if err := f.hub.cfg.NATS.FlushWithContext(flush); err != nil {
			f.hub.cfg.Logger.Info("feed starts before NATS confirmed its subscription", "session", f.session, "error", err)
		}
		cancel()
	}
	tip, err := f.readTip(ctx)
	if err != nil {
		f.startErr = err
		// The next Join creates a new feed.
		f.hub.mu.Lock()
		f.hub.removeFeed(f)
		f.hub.mu.Unlock()
		return
	}
	f.hub.cfg.Metrics.Reread("start")
	f.mu.Lock()
	defer f.mu.Unlock()
	f.readers = map[*Reader]struct{}{}
	f.tip, f.position, f.metadata.session = tip.Seq, tip.Position, tip.Metadata
	for _, t := range tip.Open {
		f.openBlock(&openText{block: t.ID, execution: t.ExecutionID, conversation: t.ConversationID, from: t.From})
	}
	if f.readAgain {
		f.readAgain = false
		f.startReread("start")
	}
}

// readTip reads the session's last event and its open blocks from Postgres.
func (f *feed) readTip(ctx context.Context) (reads.SessionTip, error) {
	release, err := f.hub.acquireRead(ctx)
	if err != nil {
		return reads.SessionTip{}, err
	}
	defer release()
	return f.hub.cfg.ReadModels.Tip(ctx, f.tenant, f.session)
}

// acquireRead blocks until fewer than maxConcurrentReads reads of Postgres are in progress. The caller must call
// release after its read. The error is that of a Hub that stops.
func (h *Hub) acquireRead(ctx context.Context) (release func(), err error) {
	select {
	case h.slots <- struct{}{}:
		return func() { <-h.slots }, nil
	case <-ctx.Done():
		return nil, errHubStopping()
	}
}

// handleLiveMessage appends the events of one message of LIVE to the feed, and makes the feed read Postgres if the
// message shows that an event is missing.
func (f *feed) handleLiveMessage(data []byte) {
	m, err := decodeLiveMessage(data)
	if err != nil {
		f.hub.cfg.Logger.Error("decode message of LIVE: reading the session from Postgres", "session", f.session, "error", err)
		m = liveMessage{}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.readers == nil { // the start is not complete yet
		f.readAgain = true
		return
	}
	changed, why := f.applyMessage(m)
	if m.Tip == 0 {
		why = "hole"
	}
	if why != "" {
		f.startReread(why)
	}
	if changed {
		f.wakeReaders()
	}
}

// applyMessage appends the events of a message of LIVE to the feed. changed reports whether Readers have something
// new. reason is why the feed must read Postgres, or "" if nothing is missing. mu must be held.
func (f *feed) applyMessage(m liveMessage) (changed bool, reason string) {
	for _, raw := range m.Events {
		switch took, err := f.appendEvent(raw, nil); {
		case err != nil:
			f.hub.cfg.Logger.Error("decode event of LIVE: reading the session from Postgres", "session", f.session, "error", err)
			return changed, "hole"
		case took == eventsMissing:
			return changed, "hole"
		case took == metadataMissing:
			return changed, "metadata"
		case took == eventAppended:
			changed = true
		}
	}
	if m.Tip > f.tip {
		return changed, "hole"
	}
	return changed, ""
}

// appendResult is the result of appending an event to a feed.
type appendResult int

const (
	eventKnown      appendResult = iota // the feed has the event already
	eventAppended                       // the event is the new tip
	eventsMissing                       // an event before this one is missing
	metadataMissing                     // the metadata of the event's execution is not known
)

// appendEvent appends the event raw to the ring if it is the next one, and updates the open blocks. stored is the
// same event with its metadata, if it comes from Postgres. For an event of LIVE stored is nil, and the feed derives
// the metadata from the events that set it. mu must be held.
func (f *feed) appendEvent(raw []byte, stored *reads.StoredEvent) (appendResult, error) {
	w, err := events.DecodeWireEvent(raw)
	if err != nil {
		return eventKnown, err
	}
	switch {
	case w.Seq <= f.tip:
		return eventKnown, nil
	case w.Seq != f.tip+1:
		return eventsMissing, nil
	}
	e := decodeIfUsed(w)
	if stored != nil {
		f.metadata.setFromStored(w.ExecutionID, stored.Metadata)
	} else {
		f.metadata.observeEvent(e)
	}
	shown, ok := f.metadata.metadataOf(w.ExecutionID)
	if !ok {
		return metadataMissing, nil
	}
	f.tip, f.position = w.Seq, w.Position
	frame := Frame{Seq: w.Seq, Type: w.Type, JSON: bytes.Clone(raw), Metadata: shown}
	f.bytes += len(frame.JSON)
	if n := len(f.ring); n == 0 || f.ring[n-1].Metadata != shown {
		f.bytes += shown.Len() // counted once for consecutive events that share it
	}
	f.ring = append(f.ring, frame)
	for len(f.ring) > f.hub.cfg.RingEvents || f.bytes > f.hub.cfg.RingBytes && len(f.ring) > 1 {
		f.evictOldest(1)
	}
	f.trackBlocks(e)
	return eventAppended, nil
}

// decodeIfUsed returns an event with its data decoded if observeEvent or trackBlocks may use the data, and otherwise
// without, because decoding is most of the cost of an event.
func decodeIfUsed(w events.WireEvent) events.Event {
	for _, used := range [...]events.Payload{
		events.SessionCreated{}, events.SessionOptionsUpdated{}, events.MessageAccepted{}, events.BlockStart{}, events.BlockComplete{}, events.SessionDeleted{},
	} {
		if w.Type == used.EventType() {
			return w.Event()
		}
	}
	return events.Event{ExecutionID: w.ExecutionID, ConversationID: w.ConversationID}
}

// evictOldest removes the n oldest events from the ring. mu must be held.
func (f *feed) evictOldest(n int) {
	for i, frame := range f.ring[:n] {
		f.bytes -= len(frame.JSON)
		if i+1 == len(f.ring) || f.ring[i+1].Metadata != frame.Metadata {
			f.bytes -= frame.Metadata.Len()
		}
	}
	f.ring = slices.Delete(f.ring, 0, n)
}

// trackBlocks updates the list of open blocks for an event that was appended, and ends the feed if the session was deleted. mu must be held.
func (f *feed) trackBlocks(e events.Event) {
	switch d := e.Data.(type) {
	case events.BlockStart:
		open := slices.ContainsFunc(f.open, func(b *openText) bool { return b.block == d.Block.ID })
		if !open && (d.Block.Status == "" || d.Block.Status == events.StatusPending) {
			f.openBlock(&openText{block: d.Block.ID, execution: e.ExecutionID, conversation: e.ConversationID, from: deltas.BlockStartPosition(d)})
		}
	case events.BlockComplete:
		f.closeBlock(d.Block.ID)
	case events.SessionDeleted:
		f.ended = errSessionDeleted()
	}
}

// errSessionDeleted returns the problem with which the Readers of a deleted session end.
func errSessionDeleted() error {
	return problem.New(problem.SessionNotFound, "", "the session was deleted")
}

// startReread makes a goroutine read the feed's missing events from Postgres; if one is running, it reads once more.
// reason is counted in the metric Reread. mu must be held.
func (f *feed) startReread(reason string) {
	if f.ended != nil {
		return
	}
	if f.reading {
		f.readAgain = true
		return
	}
	f.hub.mu.Lock()
	defer f.hub.mu.Unlock()
	if f.hub.closed {
		return
	}
	f.hub.cfg.Metrics.Reread(reason)
	f.reading = true
	ctx := f.hub.run
	f.hub.work.Go(func() { f.readMissing(ctx) })
}

// readMissing reads events from Postgres until the feed has all of them. After a failure it stops; the next
// comparison with Postgres starts another read.
func (f *feed) readMissing(ctx context.Context) {
	for {
		more, err := f.readPage(ctx)
		f.mu.Lock()
		var p *problem.Error
		if errors.As(err, &p) && p.Code == problem.SessionNotFound {
			f.ended = errSessionDeleted()
			err = nil
		}
		if err != nil && ctx.Err() == nil {
			f.hub.cfg.Logger.Warn("read session from Postgres: will retry", "session", f.session, "error", err)
		}
		if err != nil || f.ended != nil || !more && !f.readAgain {
			f.reading, f.readAgain = false, false
			f.wakeReaders()
			f.mu.Unlock()
			return
		}
		f.readAgain = false
		f.wakeReaders()
		f.mu.Unlock()
	}
}

// readPage reads the page of events after the feed's tip from Postgres and appends them. more reports whether there
// are more pages.
func (f *feed) readPage(ctx context.Context) (more bool, err error) {
	release, err := f.hub.acquireRead(ctx)
	if err != nil {
		return false, err
	}
	defer release()
	f.mu.Lock()
	after := f.tip
	f.mu.Unlock()
	page, err := f.hub.cfg.ReadModels.Events(ctx, f.tenant, f.session, reads.EventQuery{After: after, Limit: f.hub.cfg.PageEvents, Metadata: true})
	if err != nil {
		return false, err
	}
	if err := f.appendAll(page.Events); err != nil {
		return false, err
	}
	return page.Next < page.Tip, nil
}

// appendAll appends events that were read from Postgres to the feed.
func (f *feed) appendAll(list []reads.StoredEvent) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, kept := range list {
		if _, err := f.appendEvent(kept.JSON, &kept); err != nil {
			return problem.New(problem.Internal, "", "an event in the read models is not valid").WithCause(err)
		}
	}
	return nil
}

// endReaders makes all Readers of the feed return err, after they have returned the events that the feed has. Only
// the first call has an effect.
func (f *feed) endReaders(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended == nil {
		f.ended = err
	}
	f.wakeReaders()
}

// wakeReaders wakes every Reader of the feed. mu must be held.
func (f *feed) wakeReaders() {
	for r := range f.readers {
		r.wakeUp()
	}
}
