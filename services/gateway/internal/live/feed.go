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

// feed follows one session for all its Readers. It holds the last events of the session in a ring, up to the event tip, and the text of
// the blocks that are open after tip.
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
	metadata metadata                // the metadata of events at tip
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

// start sets the feed to the session's last event and its open blocks, as Postgres has them, and then closes f.ready. Messages of LIVE that
// arrive in the meantime cause another read of Postgres. After a failure it sets f.startErr.
func (f *feed) start(ctx context.Context) {
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
		f.reread("start")
	}
}

// readTip reads the session's last event and its open blocks from Postgres.
func (f *feed) readTip(ctx context.Context) (reads.Tip, error) {
	release, err := f.hub.acquireRead(ctx)
	if err != nil {
		return reads.Tip{}, err
	}
	defer release()
	return f.hub.cfg.Source.Tip(ctx, f.tenant, f.session)
}

// acquireRead blocks until fewer than maxReads reads of Postgres are in progress. The caller must call release after its read. The error is that of
// a Hub that stops.
func (h *Hub) acquireRead(ctx context.Context) (release func(), err error) {
	select {
	case h.slots <- struct{}{}:
		return func() { <-h.slots }, nil
	case <-ctx.Done():
		return nil, errStopping()
	}
}

// handleMessage appends the events of one message of LIVE, and makes the feed read Postgres if the message shows that an event is missing.
func (f *feed) handleMessage(data []byte) {
	m, err := decodeMessage(data)
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
	changed, why := f.apply(m)
	if m.Tip == 0 {
		why = "hole"
	}
	if why != "" {
		f.reread(why)
	}
	if changed {
		f.wakeAll()
	}
}

// apply appends the events of a message of LIVE. changed reports whether Readers have something new. why is the reason to read Postgres, or
// "" if nothing is missing. mu must be held.
func (f *feed) apply(m liveMessage) (changed bool, why string) {
	for _, raw := range m.Events {
		switch took, err := f.append(raw, nil); {
		case err != nil:
			f.hub.cfg.Logger.Error("decode event of LIVE: reading the session from Postgres", "session", f.session, "error", err)
			return changed, "hole"
		case took == gap:
			return changed, "hole"
		case took == noMetadata:
			return changed, "metadata"
		case took == appended:
			changed = true
		}
	}
	if m.Tip > f.tip {
		return changed, "hole"
	}
	return changed, ""
}

// appendResult is the result of feed.append.
type appendResult int

const (
	alreadyKnown appendResult = iota // the feed has the event already
	appended                         // the event is the new tip
	gap                              // an event before this one is missing
	noMetadata                       // the metadata of the event's execution is not known
)

// append appends the event raw to the ring if it is the next one, and updates the open blocks. stored is the same event with its metadata, if
// it comes from Postgres. For an event of LIVE stored is nil, and the feed derives the metadata from the events that set it. mu must be held.
func (f *feed) append(raw []byte, stored *reads.StoredEvent) (appendResult, error) {
	w, err := events.DecodeWireEvent(raw)
	if err != nil {
		return alreadyKnown, err
	}
	switch {
	case w.Seq <= f.tip:
		return alreadyKnown, nil
	case w.Seq != f.tip+1:
		return gap, nil
	}
	e := usedEvent(w)
	if stored != nil {
		f.metadata.setStored(w.ExecutionID, stored.Metadata)
	} else {
		f.metadata.observe(e)
	}
	shown, ok := f.metadata.forExecution(w.ExecutionID)
	if !ok {
		return noMetadata, nil
	}
	f.tip, f.position = w.Seq, w.Position
	frame := Frame{Seq: w.Seq, Type: w.Type, JSON: bytes.Clone(raw), Metadata: shown}
	f.bytes += len(frame.JSON)
	if n := len(f.ring); n == 0 || f.ring[n-1].Metadata != shown {
		f.bytes += shown.Len() // counted once for consecutive events that share it
	}
	f.ring = append(f.ring, frame)
	for len(f.ring) > f.hub.cfg.RingEvents || f.bytes > f.hub.cfg.RingBytes && len(f.ring) > 1 {
		f.evict(1)
	}
	f.track(e)
	return appended, nil
}

// usedEvent returns the event with its data if observe or track may use it, and otherwise without, because decoding is
// most of the cost of an event.
func usedEvent(w events.WireEvent) events.Event {
	for _, used := range [...]events.Payload{
		events.SessionCreated{}, events.SessionOptionsUpdated{}, events.MessageAccepted{}, events.BlockStart{}, events.BlockComplete{}, events.SessionDeleted{},
	} {
		if w.Type == used.EventType() {
			return w.Event()
		}
	}
	return events.Event{ExecutionID: w.ExecutionID, ConversationID: w.ConversationID}
}

// evict removes the n oldest events from the ring. mu must be held.
func (f *feed) evict(n int) {
	for i, frame := range f.ring[:n] {
		f.bytes -= len(frame.JSON)
		if i+1 == len(f.ring) || f.ring[i+1].Metadata != frame.Metadata {
			f.bytes -= frame.Metadata.Len()
		}
	}
	f.ring = slices.Delete(f.ring, 0, n)
}

// track updates the list of open blocks for an event that was appended, and ends the feed if the session was deleted. mu must be held.
func (f *feed) track(e events.Event) {
	switch d := e.Data.(type) {
	case events.BlockStart:
		open := slices.ContainsFunc(f.open, func(b *openText) bool { return b.block == d.Block.ID })
		if !open && (d.Block.Status == "" || d.Block.Status == events.StatusPending) {
			f.openBlock(&openText{block: d.Block.ID, execution: e.ExecutionID, conversation: e.ConversationID, from: deltas.BlockStartPosition(d)})
		}
	case events.BlockComplete:
		f.closeBlock(d.Block.ID)
	case events.SessionDeleted:
		f.ended = errDeleted()
	}
}

// errDeleted returns the error with which the Readers of a deleted session end.
func errDeleted() error {
	return problem.New(problem.SessionNotFound, "", "the session was deleted")
}

// reread starts a goroutine that reads Postgres, or makes the running one read once more. mu must be held.
func (f *feed) reread(why string) {
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
	f.hub.cfg.Metrics.Reread(why)
	f.reading = true
	ctx := f.hub.run
	f.hub.work.Go(func() { f.read(ctx) })
}

// read reads events from Postgres until the feed has all of them. After a failure it stops; the next comparison with Postgres starts
// another read.
func (f *feed) read(ctx context.Context) {
	for {
		more, err := f.readOnce(ctx)
		f.mu.Lock()
		var p *problem.Error
		if errors.As(err, &p) && p.Code == problem.SessionNotFound {
			f.ended = errDeleted()
			err = nil
		}
		if err != nil && ctx.Err() == nil {
			f.hub.cfg.Logger.Warn("read session from Postgres: will retry", "session", f.session, "error", err)
		}
		if err != nil || f.ended != nil || !more && !f.readAgain {
			f.reading, f.readAgain = false, false
			f.wakeAll()
			f.mu.Unlock()
			return
		}
		f.readAgain = false
		f.wakeAll()
		f.mu.Unlock()
	}
}

// readOnce reads a page of events after tip from Postgres and appends them. more reports whether there are more pages.
func (f *feed) readOnce(ctx context.Context) (more bool, err error) {
	release, err := f.hub.acquireRead(ctx)
	if err != nil {
		return false, err
	}
	defer release()
	f.mu.Lock()
	after := f.tip
	f.mu.Unlock()
	page, err := f.hub.cfg.Source.Events(ctx, f.tenant, f.session, reads.Query{After: after, Limit: f.hub.cfg.PageEvents, Metadata: true})
	if err != nil {
		return false, err
	}
	if err := f.appendAll(page.Events); err != nil {
		return false, err
	}
	return page.Next < page.Tip, nil
}

// appendAll appends events that were read from Postgres.
func (f *feed) appendAll(list []reads.StoredEvent) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, kept := range list {
		if _, err := f.append(kept.JSON, &kept); err != nil {
			return problem.New(problem.Internal, "", "an event in the read models is not valid").WithCause(err)
		}
	}
	return nil
}

// end makes all Readers of the feed return err, after the events that the feed has. Only the first call has an effect.
func (f *feed) end(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended == nil {
		f.ended = err
	}
	f.wakeAll()
}

// wakeAll wakes every Reader. mu must be held.
func (f *feed) wakeAll() {
	for r := range f.readers {
		r.wakeUp()
	}
}
