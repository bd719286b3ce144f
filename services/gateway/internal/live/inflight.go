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
	// maxWaiting is the number of bytes of a feed's text that waits for its block_start or for text before it.
	maxWaiting = 256 << 10
	// maxAllWaiting is the sum of that for a gateway.
	maxAllWaiting = 64 << 20
	// earlyAge is how long text waits for its block_start.
	earlyAge = 30 * time.Second
	// textPause is the minimum time between two reads of DELTAS because of the same block.
	textPause = 2 * time.Second
)

// never is larger than every sequence of DELTAS.
const never = math.MaxUint64

// handleDelta adds a delta that was published or that DELTAS has, as JSON.
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

// addDelta adds a delta to its block. stored means that it was read from DELTAS, which also has the text of blocks that
// ended. changed reports whether Readers have something new. mu must be held.
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
		if f.hold(d) {
			b.later.add(d, time.Now())
		}
		b.whole = false
		if time.Since(b.readAt) > textPause {
			f.requestText()
		}
	case fresh && len(b.later.list) > 0:
		f.release(b.addLater())
	}
	return fresh
}

// addEarly keeps a delta of a block that has not begun. mu must be held.
func (f *feed) addEarly(d events.Delta) {
	if !f.hold(d) {
		f.loseText()
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

// openBlock begins the text of a block. mu must be held.
func (f *feed) openBlock(b *openText) {
	f.open = append(f.open, b)
	b.whole = b.from.After > 0 && b.from.After >= f.complete
	if w := f.early[b.block]; w != nil {
		delete(f.early, b.block)
		f.release(w.bytes)
		for _, d := range w.list {
			f.addDelta(d, false)
		}
	}
	if !b.whole {
		f.requestText()
	}
}

// closeBlock drops the text of a block. mu must be held.
func (f *feed) closeBlock(id string) {
	f.open = slices.DeleteFunc(f.open, func(b *openText) bool {
		if b.block == id {
			f.release(b.later.bytes)
		}
		return b.block == id
	})
}

// hold counts a delta that waits. It returns false if there is no room for it. mu must be held.
func (f *feed) hold(d events.Delta) bool {
	n := deltaSize(d)
	if f.released || f.waiting+n > maxWaiting {
		return false
	}
	f.waiting += n
	if f.hub.waiting.Add(int64(n)) > maxAllWaiting {
		f.release(n)
		return false
	}
	return true
}

// release ends the wait of deltas. mu must be held.
func (f *feed) release(bytes int) {
	f.waiting -= bytes
	f.hub.waiting.Add(int64(-bytes))
}

// releaseText drops all text of a feed that has ended. The hub's mu must not be held.
func (f *feed) releaseText() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.release(f.waiting)
	f.released, f.early = true, nil
}

// dropEarly drops text whose block did not begin in time. mu must be held.
func (f *feed) dropEarly(now time.Time) {
	for id, w := range f.early {
		if now.Sub(w.at) > earlyAge {
			delete(f.early, id)
			f.release(w.bytes)
			f.loseText()
		}
	}
}

// loseText records that the feed did not receive or keep a delta. mu must be held.
func (f *feed) loseText() {
	f.complete = never
	f.losses++
}

// rereadText makes the feed read DELTAS for its open blocks, because frames of the session's partition may have been lost.
func (f *feed) rereadText() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.loseText()
	for _, b := range f.open {
		b.whole = false
	}
	if len(f.open) > 0 {
		f.requestText()
	}
}

// checkText requests a read of DELTAS for blocks whose text is not certain. mu must be held.
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

// beginText returns where the read of DELTAS for the feed begins; ok is false if it needs none.
func (f *feed) beginText() (from deltas.Start, ok bool) {
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
		from = from.Before(b.from)
	}
	return from, ok
}

// endText records that DELTAS was read up to a sequence.
func (f *feed) endText(last uint64, err error) {
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	certain := err == nil && f.losses == f.lossesAtRead // otherwise what was lost meanwhile may come after last
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
