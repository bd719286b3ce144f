package live

import (
	"math"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
)

// Text in flight comes from two sources: the frames that executors publish, by a core subscription for each partition,
// and DELTAS, which stores the same frames. Offsets make the order unimportant: equal offsets of a block have equal
// bytes. A feed reads DELTAS when it may have missed a frame: for blocks that began before it did, after a gap in a
// block's text, and after a lost frame.

const (
	// maxWaiting is the largest number of bytes of text that a feed keeps although the text's block_start, or text
	// before it, has not arrived.
	maxWaiting = 256 << 10
	// maxAllWaiting is the largest total of such bytes in all feeds of a gateway.
	maxAllWaiting = 64 << 20
	// earlyAge is the time for which a feed keeps text whose block_start has not arrived.
	earlyAge = 30 * time.Second
	// textPause is the minimum time between two reads of DELTAS for the same block.
	textPause = 2 * time.Second
)

// never is greater than every sequence of the stream DELTAS. As feed.complete it means that a read of DELTAS is
// necessary for every new block.
const never = math.MaxUint64

// handleDelta adds a delta, as JSON, to its block and wakes the Readers. stored means that the delta was read from DELTAS, and not received from
// an executor.
func (f *feed) handleDelta(raw []byte, stored bool) {
	d, err := events.DecodeDelta(raw)
	if err != nil {
		f.hub.cfg.Logger.Warn("decode text in flight: it is shown when its block is complete", "session", f.session, "error", err)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended != nil || f.released {
		return
	}
	if f.addDelta(d, stored) {
		f.wakeAll()
	}
}

// addDelta adds a delta to its block. If text before the delta is missing, the delta waits, and the feed reads DELTAS. A delta of a block that is
// not open waits for its block_start, unless it is stored: then the block has ended. changed reports whether Readers have something new.
// mu must be held.
func (f *feed) addDelta(d events.Delta, stored bool) (changed bool) {
	i := slices.IndexFunc(f.open, func(b *openText) bool { return b.block == d.BlockID })
	if i < 0 {
		if !stored {
			f.addEarly(d)
		}
		return false
	}
	b := f.open[i]
	fresh, ok := b.add(d)
	switch {
	case !ok:
		if f.reserveWaiting(d) {
			b.later.add(d, time.Now())
		}
		b.whole = false
		if time.Since(b.readAt) > textPause {
			f.requestText()
		}
	case fresh && len(b.later.list) > 0:
		f.releaseWaiting(b.addLater())
	}
	return fresh
}

// addEarly keeps a delta of a block whose block_start the feed does not have yet. mu must be held.
func (f *feed) addEarly(d events.Delta) {
	if !f.reserveWaiting(d) {
		f.recordLoss()
		return
	}
	if f.early == nil {
		f.early = map[string]*waitingText{}
	}
	w := f.early[d.BlockID]
	if w == nil {
		w = &waitingText{}
		f.early[d.BlockID] = w
	}
	w.add(d, time.Now())
}

// openBlock adds a block to the open ones, with its text that has arrived before, and requests the text that may be missing. mu must be held.
func (f *feed) openBlock(b *openText) {
	f.open = append(f.open, b)
	b.whole = b.from.After > 0 && b.from.After >= f.complete
	if w := f.early[b.block]; w != nil {
		delete(f.early, b.block)
		f.releaseWaiting(w.bytes)
		for _, d := range w.list {
			f.addDelta(d, false)
		}
	}
	if !b.whole {
		f.requestText()
	}
}

// closeBlock removes a block from the open ones, with its text: the event that ended the block has the whole text. mu must be held.
func (f *feed) closeBlock(id string) {
	f.open = slices.DeleteFunc(f.open, func(b *openText) bool {
		if b.block == id {
			f.releaseWaiting(b.later.bytes)
		}
		return b.block == id
	})
}

// reserveWaiting counts a delta that waits, and returns false if the limits maxWaiting and maxAllWaiting leave no room for it. mu must be held.
func (f *feed) reserveWaiting(d events.Delta) bool {
	n := deltaSize(d)
	if f.released || f.waiting+n > maxWaiting {
		return false
	}
	f.waiting += n
	if f.hub.waiting.Add(int64(n)) > maxAllWaiting {
		f.releaseWaiting(n)
		return false
	}
	return true
}

// releaseWaiting counts that deltas of the given size no longer wait. mu must be held.
func (f *feed) releaseWaiting(bytes int) {
	f.waiting -= bytes
	f.hub.waiting.Add(int64(-bytes))
}

// releaseText drops all text of a feed that has ended. The hub's mu must not be held.
func (f *feed) releaseText() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.releaseWaiting(f.waiting)
	f.released, f.early = true, nil
}

// dropEarly drops the text that has waited for its block_start for longer than earlyAge. mu must be held.
func (f *feed) dropEarly(now time.Time) {
	for id, w := range f.early {
		if now.Sub(w.at) > earlyAge {
			delete(f.early, id)
			f.releaseWaiting(w.bytes)
			f.recordLoss()
		}
	}
}

// recordLoss records that the feed has not received or not kept a delta, so that blocks that begin later need a read of DELTAS. mu must be held.
func (f *feed) recordLoss() {
	f.complete = never
	f.losses++
}

// rereadText makes the feed read DELTAS for its open blocks, because frames of the session's partition may have been lost.
func (f *feed) rereadText() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.recordLoss()
	for _, b := range f.open {
		b.whole = false
	}
	if len(f.open) > 0 {
		f.requestText()
	}
}

// checkText drops early text that is too old, and requests a read of DELTAS for the open blocks whose text may be incomplete. mu must be held.
func (f *feed) checkText(now time.Time) {
	f.dropEarly(now)
	missing := false
	for _, b := range f.open {
		if !b.checkAt.IsZero() && !now.Before(b.checkAt) {
			b.whole, b.checkAt = false, time.Time{}
		}
		missing = missing || !b.whole && now.Sub(b.readAt) >= textPause
	}
	if missing {
		f.requestText()
	}
}

// requestText requests a read of DELTAS for the blocks that are not whole. mu must be held.
func (f *feed) requestText() {
	if f.ended == nil && !f.released {
		f.hub.requestText(f)
	}
}

// beginText is called before DELTAS is read for the feed, and returns the position from which it must be read; ok is false if no open block
// needs it.
func (f *feed) beginText() (from deltas.StartPosition, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lossesAtRead = f.losses
	for _, b := range f.open {
		if b.whole || f.released {
			continue
		}
		b.reading = true
		if !ok {
			from, ok = b.from, true
		}
		from = from.Earlier(b.from)
	}
	return from, ok
}

// endText is called after DELTAS was read for the feed up to the sequence last, or until the failure err. The text of the blocks is complete then,
// unless a delta was lost in the meantime.
func (f *feed) endText(last uint64, err error) {
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	certain := err == nil && f.losses == f.lossesAtRead // a delta that was lost since the read began may be stored after last
	for _, b := range f.open {
		if !b.reading {
			continue
		}
		b.reading = false
		if err == nil && b.readAt.IsZero() {
			b.checkAt = now.Add(textPause)
		}
		b.readAt = now
		b.whole = certain && len(b.later.list) == 0
	}
	if certain {
		f.complete = last
	}
}
