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
	// maxWaitingText is the largest number of bytes of text that a feed keeps although the text's block_start, or text
	// before it, has not arrived.
	maxWaitingText = 256 << 10
	// maxTotalWaitingText is the largest number of bytes of text that all feeds of a gateway together keep although
	// the text's block_start, or text before it, has not arrived.
	maxTotalWaitingText = 64 << 20
	// maxEarlyTextAge is the time for which a feed keeps text whose block_start has not arrived.
	maxEarlyTextAge = 30 * time.Second
	// textReadInterval is the minimum time between two reads of DELTAS for the same block.
	textReadInterval = 2 * time.Second
)

// neverComplete is greater than every sequence of the stream DELTAS. As feed.complete it means that every new block
// makes a read of DELTAS necessary.
const neverComplete = math.MaxUint64

// handleDelta adds a delta, as JSON, to the text of its block and wakes the Readers. stored means that the delta was
// read from DELTAS, and not received from an executor.
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
		f.wakeReaders()
	}
}

// addDelta adds a delta to the text of its block. If text before the delta is missing, the delta waits, and the feed
// reads DELTAS. A delta of a block that is not open waits for its block_start, unless it was read from DELTAS (stored
// is true): then the block has ended. changed reports whether Readers have something new. mu must be held.
func (f *feed) addDelta(d events.Delta, stored bool) (changed bool) {
	i := slices.IndexFunc(f.open, func(b *openText) bool { return b.block == d.BlockID })
	if i < 0 {
		if !stored {
			f.keepEarlyDelta(d)
		}
		return false
	}
	b := f.open[i]
	fresh, ok := b.addDelta(d)
	switch {
	case !ok:
		if f.countWaiting(d) {
			b.later.addDelta(d, time.Now())
		}
		b.whole = false
		if time.Since(b.readAt) > textReadInterval {
			f.requestTextRead()
		}
	case fresh && len(b.later.list) > 0:
		f.uncountWaiting(b.addLaterDeltas())
	}
	return fresh
}

// keepEarlyDelta keeps a delta of a block whose block_start the feed does not have yet. mu must be held.
func (f *feed) keepEarlyDelta(d events.Delta) {
	if !f.countWaiting(d) {
		f.recordDeltaLoss()
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
	w.addDelta(d, time.Now())
}

// openBlock adds a block to the open ones, together with deltas of the block that have arrived before, and requests a
// read of DELTAS if text may be missing. mu must be held.
func (f *feed) openBlock(b *openText) {
	f.open = append(f.open, b)
	b.whole = b.from.After > 0 && b.from.After >= f.complete
	if w := f.early[b.block]; w != nil {
		delete(f.early, b.block)
		f.uncountWaiting(w.bytes)
		for _, d := range w.list {
			f.addDelta(d, false)
		}
	}
	if !b.whole {
		f.requestTextRead()
	}
}

// closeBlock removes a block and its text from the open ones, because the event that ended the block has the whole
// text. mu must be held.
func (f *feed) closeBlock(id string) {
	f.open = slices.DeleteFunc(f.open, func(b *openText) bool {
		if b.block == id {
			f.uncountWaiting(b.later.bytes)
		}
		return b.block == id
	})
}

// countWaiting counts the bytes of a delta that waits for earlier text. It returns false if the delta exceeds
// maxWaitingText or maxTotalWaitingText. mu must be held.
func (f *feed) countWaiting(d events.Delta) bool {
	n := deltaSize(d)
	if f.released || f.waiting+n > maxWaitingText {
		return false
	}
	f.waiting += n
	if f.hub.waiting.Add(int64(n)) > maxTotalWaitingText {
		f.uncountWaiting(n)
		return false
	}
	return true
}

// uncountWaiting subtracts the bytes of deltas that no longer wait from the counts of waiting text. mu must be held.
func (f *feed) uncountWaiting(bytes int) {
	f.waiting -= bytes
	f.hub.waiting.Add(int64(-bytes))
}

// releaseText drops all text of a feed that has ended. The hub's mu must not be held.
func (f *feed) releaseText() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.uncountWaiting(f.waiting)
	f.released, f.early = true, nil
}

// dropOldEarlyText drops the text that has waited for its block_start for longer than maxEarlyTextAge. mu must be held.
func (f *feed) dropOldEarlyText(now time.Time) {
	for id, w := range f.early {
		if now.Sub(w.at) > maxEarlyTextAge {
			delete(f.early, id)
			f.uncountWaiting(w.bytes)
			f.recordDeltaLoss()
		}
	}
}

// recordDeltaLoss records that the feed has not received or not kept a delta, so that blocks that begin later need a read of DELTAS. mu must be held.
func (f *feed) recordDeltaLoss() {
	f.complete = neverComplete
	f.losses++
}

// rereadText makes the feed read DELTAS for its open blocks, because frames of the session's partition may have been lost.
func (f *feed) rereadText() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.recordDeltaLoss()
	for _, b := range f.open {
		b.whole = false
	}
	if len(f.open) > 0 {
		f.requestTextRead()
	}
}

// checkOpenText drops deltas that have waited too long for their block_start, and requests a read of DELTAS for the
// open blocks whose text may be incomplete. mu must be held.
func (f *feed) checkOpenText(now time.Time) {
	f.dropOldEarlyText(now)
	missing := false
	for _, b := range f.open {
		if !b.checkAt.IsZero() && !now.Before(b.checkAt) {
			b.whole, b.checkAt = false, time.Time{}
		}
		missing = missing || !b.whole && now.Sub(b.readAt) >= textReadInterval
	}
	if missing {
		f.requestTextRead()
	}
}

// requestTextRead requests a read of DELTAS for the open blocks whose text may be incomplete. mu must be held.
func (f *feed) requestTextRead() {
	if f.ended == nil && !f.released {
		f.hub.requestTextRead(f)
	}
}

// beginTextRead is called before DELTAS is read for the feed, and returns the position from which it must be read; ok is false if no open block
// needs it.
func (f *feed) beginTextRead() (from deltas.StartPosition, ok bool) {
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

// endTextRead is called after DELTAS was read for the feed up to the sequence last, or until the failure err. The
// feed then has the whole text of its open blocks, unless a delta was lost during the read.
func (f *feed) endTextRead(last uint64, err error) {
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
			b.checkAt = now.Add(textReadInterval)
		}
		b.readAt = now
		b.whole = certain && len(b.later.list) == 0
	}
	if certain {
		f.complete = last
	}
}
