package live

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Frame is one item of a stream: an event or text in flight, as the JSON of events.Wire; or a change of the lag, if
// Lag is set; or a notice of a replay, if Notice is set.
type Frame struct {
	Seq  uint32 // seq of the event; for a text_delta, seq of the last stored event
	Type events.Type
	JSON []byte // must not be modified; without metadata
	Lag  *Lag
	// Notice is only set in replays.
	Notice *pace.Notice

	Metadata *reads.Metadata // metadata of the event; nil for none, and for text in flight
}

// Len returns the number of bytes that Append appends.
func (f Frame) Len(metadata bool) int {
	if !metadata {
		return len(f.JSON)
	}
	return len(f.JSON) + f.Metadata.Len()
}

// Append appends the event's JSON, with or without metadata. It copies encoded bytes only.
func (f Frame) Append(b []byte, metadata bool) []byte {
	if !metadata {
		return append(b, f.JSON...)
	}
	return f.Metadata.Append(b, f.JSON)
}

// Lag reports whether the read models are behind the log.
type Lag struct {
	Lagging bool   `json:"lagging"`
	LagMs   uint32 `json:"lagMs"`
}

const (
	// maxBatch is the size in bytes after which Next returns; the event that exceeds it is included.
	maxBatch = 256 << 10
	// pageRoom is the number of bytes that a Reader reserves while it reads a page from Postgres: a batch, and one
	// event as large as a commit.
	pageRoom = maxBatch + 1<<20
)

// Reader is the position of one client in a session. Next and Close must be called by one goroutine.
type Reader struct {
	held *admission.Request // the bytes that the last Next returned
	wait time.Time          // deadline of the present wait for bytes; zero if there is none

	feed   *feed
	cursor uint32        // seq of the last event that Next returned; guarded by the feed's mu
	wake   chan struct{} // has a buffer of one signal
	sent   []sentText    // returned text of the open blocks
	lagged bool          // the last Lag that Next returned
	close  sync.Once
}

// sentText is the position in an open block's text up to which Next has returned the text.
type sentText struct {
	block  string
	offset int
}

// admit registers a Reader if events after its cursor are available.
func (f *feed) admit(ctx context.Context, r *Reader) error {
	f.mu.Lock()
	available := r.cursor <= f.tip && r.cursor >= f.oldest()
	ended := f.ended
	f.mu.Unlock()
	if ended != nil {
		return ended
	}
	if !available {
		release, err := f.hub.slot(ctx)
		if err != nil {
			return err
		}
		_, err = f.hub.cfg.Source.Events(ctx, f.tenant, f.session, reads.Query{After: r.cursor, Limit: 1})
		release()
		if err != nil {
			return err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.readers[r] = struct{}{}
	if r.cursor > f.tip {
		f.reread("behind")
	}
	return nil
}

// oldest returns the lowest cursor that the ring can serve. mu must be held.
func (f *feed) oldest() uint32 {
	if len(f.ring) == 0 {
		return f.tip
	}
	return f.ring[0].Seq - 1
}

// Tip returns the seq of the session's last event that this gateway knows.
func (r *Reader) Tip() uint32 {
	r.feed.mu.Lock()
	defer r.feed.mu.Unlock()
	return max(r.feed.tip, r.cursor)
}

// Cursor returns the seq of the last event that Next returned.
func (r *Reader) Cursor() uint32 {
	r.feed.mu.Lock()
	defer r.feed.mu.Unlock()
	return r.cursor
}

// Session returns the id of the session.
func (r *Reader) Session() string { return r.feed.session }

// Next blocks until there is something to send, and returns it: each stored event once, in ascending order and
// without a gap, then text in flight. The returned bytes count against the gateway's limit until the next call of
// Next or Close. The error is the cause of ctx, the reason why no more events will come, TOO_MUCH_IN_FLIGHT or
// OVERLOADED.
func (r *Reader) Next(ctx context.Context) ([]Frame, error) {
	r.held.Keep(0)
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		frames, err := r.batch(ctx)
		if len(frames) > 0 || err != nil {
			return frames, err
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
		}
	}
}

// Ended returns the reason why no more events will come, or nil if more may come. It allows the feed to drop all
// events that it holds for this Reader. It is for a Reader whose Next is not called.
func (r *Reader) Ended() error {
	f := r.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	r.cursor = max(r.cursor, f.tip)
	return f.ended
}

// Changed returns a channel that receives a value when Next or Ended may have something new to return.
func (r *Reader) Changed() <-chan struct{} { return r.wake }

// batch returns the next frames, or none if there are none yet. It takes their bytes from the limit first.
func (r *Reader) batch(ctx context.Context) ([]Frame, error) {
	size, behind := r.pending()
	if behind {
		size = pageRoom
	}
	if err := r.reserve(ctx, size); err != nil {
		return nil, err
	}
	if behind {
		return r.readPage(ctx)
	}
	frames, err := r.takeFrames(size)
	if len(frames) == 0 {
		r.held.Keep(0)
	}
	return frames, err
}

// reserve takes bytes from the gateway's limit, and waits until they are available.
func (r *Reader) reserve(ctx context.Context, size int) error {
	if size == 0 {
		return nil
	}
	if r.wait.IsZero() { // otherwise the last wait was interrupted by its context, and its deadline still applies
		r.wait = time.Now().Add(r.feed.hub.cfg.BytesTimeout)
	}
	if err := r.held.Wait(ctx, int64(size), r.wait); err != nil {
		return err
	}
	r.wait = time.Time{}
	return nil
}

// unsentEvents returns the events in the ring that the client does not have, up to the one that exceeds maxBatch, and
// their size in bytes. The feed's mu must be held.
func (r *Reader) unsentEvents() (list []Frame, size int) {
	f := r.feed
	first := len(f.ring) - int(min(f.tip-min(r.cursor, f.tip), uint32(len(f.ring))))
	for i, frame := range f.ring[first:] {
		if size > maxBatch {
			return f.ring[first : first+i], size
		}
		size += frame.Len(true)
	}
	return f.ring[first:], size
}

// pending returns the number of bytes that takeFrames would return. behind reports whether the next events must be read
// from Postgres.
func (r *Reader) pending() (size int, behind bool) {
	f := r.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.cursor < f.oldest() {
		return 0, f.lagging.Lagging == r.lagged
	}
	_, size = r.unsentEvents()
	for _, b := range f.open {
		size += min(len(b.text)-r.offset(b.block), max(0, maxBatch-size))
	}
	return size, false
}

// takeFrames returns the frames that the feed holds for this Reader, up to size bytes.
func (r *Reader) takeFrames(size int) (frames []Frame, err error) {
	f := r.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	if lag := f.lagging; lag.Lagging != r.lagged {
		r.lagged = lag.Lagging
		frames = append(frames, Frame{Lag: &lag})
	}
	if r.cursor < f.oldest() {
		return frames, nil // the ring has moved on in the meantime
	}
	list, _ := r.unsentEvents()
	for _, frame := range list {
		if size -= frame.Len(true); size < 0 {
			return frames, nil // the event arrived in the meantime
		}
		frames = append(frames, frame)
		r.cursor = frame.Seq
	}
	if r.cursor == f.tip {
		text, err := r.text(size)
		if err != nil {
			return nil, problem.From(err)
		}
		frames = append(frames, text...)
	}
	if len(frames) == 0 && f.ended != nil {
		return nil, f.ended
	}
	return frames, nil
}

// text returns the text of the open blocks that was not returned yet. The feed's mu must be held.
func (r *Reader) text(room int) (frames []Frame, err error) {
	f := r.feed
	r.sent = slices.DeleteFunc(r.sent, func(g sentText) bool {
		return !slices.ContainsFunc(f.open, func(b *openText) bool { return b.block == g.block })
	})
	for _, b := range f.open {
		i := slices.IndexFunc(r.sent, func(g sentText) bool { return g.block == b.block })
		if i < 0 {
			if len(b.text) == 0 {
				continue
			}
			r.sent = append(r.sent, sentText{block: b.block})
			i = len(r.sent) - 1
		}
		for g := &r.sent[i]; g.offset < len(b.text) && room > 0; {
			var frame Frame
			if frame, g.offset, err = b.frame(g.offset, f.session, f.tip, f.position); err != nil {
				return nil, problem.From(err)
			}
			room -= len(frame.JSON)
			frames = append(frames, frame)
		}
	}
	return frames, nil
}

// offset returns the number of bytes of a block's text that Next has returned.
func (r *Reader) offset(block string) int {
	for _, g := range r.sent {
		if g.block == block {
			return g.offset
		}
	}
	return 0
}

// readPage reads the next events from Postgres. The Reader holds pageRoom bytes and keeps as many as were read.
func (r *Reader) readPage(ctx context.Context) ([]Frame, error) {
	f := r.feed
	release, err := f.hub.slot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	page, err := f.hub.cfg.Source.Events(ctx, f.tenant, f.session, reads.Query{After: r.Cursor(), Limit: f.hub.cfg.PageEvents, Bytes: maxBatch, Metadata: true})
	if err != nil {
		return nil, err
	}
	var frames []Frame
	var size int64
	for _, kept := range page.Events {
		frame := Frame{Seq: kept.Seq, Type: kept.Type, JSON: kept.JSON, Metadata: kept.Metadata}
		frames = append(frames, frame)
		size += int64(frame.Len(true))
	}
	r.held.Keep(size)
	if err := r.held.Take(max(0, size-pageRoom)); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(frames) > 0 {
		r.cursor = frames[len(frames)-1].Seq
	}
	if r.cursor > f.tip {
		f.reread("behind")
	}
	return frames, nil
}

// wakeUp wakes the Reader. Signals that arrive before the Reader runs are merged.
func (r *Reader) wakeUp() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Close ends the Reader.
func (r *Reader) Close() {
	r.close.Do(func() {
		r.feed.mu.Lock()
		delete(r.feed.readers, r)
		r.feed.mu.Unlock()
		r.feed.hub.leave(r.feed)
		r.held.End()
		r.feed.hub.cfg.Metrics.Readers(-1)
	})
}
