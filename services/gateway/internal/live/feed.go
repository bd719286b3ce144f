package live

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// feed follows one session. It knows the session up to tip: the last events, in
// the ring, and the text of the blocks that are open there.
type feed struct {
	hub             *Hub
	tenant, session string
	sub             *nats.Subscription
	holders         int // who uses the feed; guarded by the hub's mu

	ready    chan struct{} // closed when the start is over
	startErr error         // set before ready is closed

	mu       sync.Mutex
	tip      uint32
	position string      // of the event at tip
	ring     []Frame     // kept events without a gap, the last one is at tip
	bytes    int         // in the ring
	metadata metadata    // that the events at tip show
	open     []*inFlight // blocks that are open at tip, in the order of their start
	readers  map[*Reader]struct{}
	ended    error // why nothing more will come; Readers still get what the feed holds
	lagging  Lag

	reading bool // a goroutine reads Postgres
	again   bool // and is to read once more
}

// announced is readmodel.Live with each event's bytes as they are stored.
type announced struct {
	Tip    uint32            `json:"tip"`
	Events []json.RawMessage `json:"events"`
	Deltas []events.Delta    `json:"deltas"`
}

// start reads where the session stands. What LIVE brings meanwhile is read again after.
func (f *feed) start(ctx context.Context) {
	defer close(f.ready)
	// Once the server has the subscription nothing is missed between the read and LIVE. Without
	// NATS the looks at Postgres still move the feed, only later.
	if f.hub.cfg.NATS.IsConnected() {
		flush, cancel := context.WithTimeout(ctx, time.Second)
		if err := f.hub.cfg.NATS.FlushWithContext(flush); err != nil {
			f.hub.cfg.Logger.Info("a feed starts before NATS has confirmed its subscription", "session", f.session, "error", err)
		}
		cancel()
	}
	tip, err := f.readTip(ctx)
	if err != nil {
		f.startErr = err
		// Whoever comes next starts anew.
		f.hub.mu.Lock()
		f.hub.forget(f)
		f.hub.mu.Unlock()
		return
	}
	f.hub.cfg.Metrics.Reread("start")
	f.mu.Lock()
	defer f.mu.Unlock()
	f.readers = map[*Reader]struct{}{}
	f.tip, f.position, f.metadata.session = tip.Seq, tip.Position, tip.Metadata
	for _, t := range tip.Open {
		b := &inFlight{block: t.BlockID, execution: t.ExecutionID, conversation: t.ConversationID}
		b.fill(t)
		f.open = append(f.open, b)
	}
	if f.again {
		f.again = false
		f.reread("start")
	}
}

func (f *feed) readTip(ctx context.Context) (reads.Tip, error) {
	release, err := f.hub.slot(ctx)
	if err != nil {
		return reads.Tip{}, err
	}
	defer release()
	return f.hub.cfg.Source.Tip(ctx, f.tenant, f.session)
}

// slot waits for its turn to read Postgres.
func (h *Hub) slot(ctx context.Context) (release func(), err error) {
	select {
	case h.slots <- struct{}{}:
		return func() { <-h.slots }, nil
	case <-ctx.Done():
		return nil, errStopping()
	}
}

// live takes one message of LIVE.
func (f *feed) live(data []byte) {
	var m announced
	if err := json.Unmarshal(data, &m); err != nil {
		f.hub.cfg.Logger.Error("a message on LIVE cannot be read; the session is read from Postgres", "session", f.session, "error", err)
		m = announced{}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.readers == nil { // not started yet
		f.again = true
		return
	}
	changed, why := f.take(m)
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

// take applies a message; why says what is missing, "" for nothing. mu is held.
func (f *feed) take(m announced) (changed bool, why string) {
	for _, raw := range m.Events {
		switch took, err := f.append(raw, nil); {
		case err != nil:
			f.hub.cfg.Logger.Error("an event on LIVE cannot be read; the session is read from Postgres", "session", f.session, "error", err)
			return changed, "hole"
		case took == gap:
			return changed, "hole"
		case took == undressed:
			return changed, "metadata"
		case took == taken:
			changed = true
		}
	}
	if m.Tip > f.tip {
		return changed, "hole"
	}
	for _, d := range m.Deltas {
		i := slices.IndexFunc(f.open, func(b *inFlight) bool { return b.block == d.BlockID })
		if i < 0 {
			continue // completed
		}
		fresh, ok := f.open[i].add(d)
		changed = changed || fresh
		if !ok {
			why = "text"
		}
	}
	return changed, why
}

// What append did with an event.
type appended int

const (
	known appended = iota // it was there already
	taken
	gap       // there is one missing before it
	undressed // its execution's metadata is not known here
)

// append adds the next event. LIVE brings it without metadata: stored is nil, and
// the feed knows the metadata from the events that set it. mu is held.
func (f *feed) append(raw []byte, stored *reads.Kept) (appended, error) {
	var w events.Wire
	if err := json.Unmarshal(raw, &w); err != nil {
		return known, err
	}
	switch {
	case w.Seq <= f.tip:
		return known, nil
	case w.Seq != f.tip+1:
		return gap, nil
	}
	e := w.Event()
	if stored != nil {
		f.metadata.stored(w.ExecutionID, stored.Metadata)
	} else {
		f.metadata.learn(e)
	}
	shown, ok := f.metadata.of(w.ExecutionID)
	if !ok {
		return undressed, nil
	}
	f.tip, f.position = w.Seq, w.Position
	frame := Frame{Seq: w.Seq, Type: w.Type, JSON: bytes.Clone(raw), Metadata: shown}
	f.bytes += len(frame.JSON)
	if n := len(f.ring); n == 0 || f.ring[n-1].Metadata != shown {
		f.bytes += shown.Len() // once for events in a row that share it
	}
	f.ring = append(f.ring, frame)
	for len(f.ring) > f.hub.cfg.RingEvents || f.bytes > f.hub.cfg.RingBytes && len(f.ring) > 1 {
		f.drop(1)
	}
	f.track(e)
	return taken, nil
}

// drop takes the oldest events out of the ring. mu is held.
func (f *feed) drop(n int) {
	for i, frame := range f.ring[:n] {
		f.bytes -= len(frame.JSON)
		if i+1 == len(f.ring) || f.ring[i+1].Metadata != frame.Metadata {
			f.bytes -= frame.Metadata.Len()
		}
	}
	f.ring = slices.Delete(f.ring, 0, n)
}

// track keeps the list of open blocks, and learns of the session's end. mu is held.
func (f *feed) track(e events.Event) {
	switch d := e.Data.(type) {
	case events.BlockStart:
		open := slices.ContainsFunc(f.open, func(b *inFlight) bool { return b.block == d.Block.ID })
		if !open && (d.Block.Status == "" || d.Block.Status == events.StatusPending) {
			f.open = append(f.open, &inFlight{block: d.Block.ID, execution: e.ExecutionID, conversation: e.ConversationID})
		}
	case events.BlockComplete:
		f.open = slices.DeleteFunc(f.open, func(b *inFlight) bool { return b.block == d.Block.ID })
	case events.SessionDeleted:
		f.ended = errDeleted()
	}
}

func errDeleted() error {
	return problem.New(problem.SessionNotFound, "", "the session was deleted")
}

// reread makes a goroutine read Postgres, or the one that does read once more. mu is held.
func (f *feed) reread(why string) {
	if f.ended != nil {
		return
	}
	if f.reading {
		f.again = true
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

// read brings the feed to where Postgres is, until there is nothing more to read.
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
			f.hub.cfg.Logger.Warn("a session could not be read from Postgres; the next look tries again", "session", f.session, "error", err)
		}
		if err != nil || f.ended != nil || !more && !f.again {
			f.reading, f.again = false, false
			f.wakeAll()
			f.mu.Unlock()
			return
		}
		f.again = false
		f.wakeAll()
		f.mu.Unlock()
	}
}

// readOnce reads a page of events, and at the end the text in flight; more says that it was not the end.
func (f *feed) readOnce(ctx context.Context) (more bool, err error) {
	release, err := f.hub.slot(ctx)
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
	if page.Next < page.Tip {
		return true, nil
	}
	tip, err := f.hub.cfg.Source.Tip(ctx, f.tenant, f.session)
	if err != nil {
		return false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range tip.Open {
		for _, b := range f.open {
			if b.block == t.BlockID {
				b.fill(t)
			}
		}
	}
	return tip.Seq > f.tip, nil
}

func (f *feed) appendAll(list []reads.Kept) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, kept := range list {
		if _, err := f.append(kept.JSON, &kept); err != nil {
			return problem.New(problem.Internal, "", "an event in the read models cannot be read").Because(err)
		}
	}
	return nil
}

// fail ends the feed for all its Readers.
func (f *feed) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended == nil {
		f.ended = err
	}
	f.wakeAll()
}

// wakeAll tells every Reader that there may be something. mu is held.
func (f *feed) wakeAll() {
	for r := range f.readers {
		r.nudge()
	}
}
