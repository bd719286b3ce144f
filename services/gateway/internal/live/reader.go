package live

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Frame is one item of a stream: an event or text in flight, as the JSON of events.WireEvent; or a change of the lag, if
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

// Len returns the number of bytes that Append adds.
func (f Frame) Len(metadata bool) int {
	if !metadata {
		return len(f.JSON)
	}
	return len(f.JSON) + f.Metadata.Len()
}

// Append appends the JSON of the frame's event to b, with or without metadata. It does not encode anything again.
func (f Frame) Append(b []byte, metadata bool) []byte {
	if !metadata {
		return append(b, f.JSON...)
	}
	return f.Metadata.Append(b, f.JSON)
}

// Lag states whether the read models are behind the log, and by how many milliseconds. Clients receive it.
type Lag struct {
	Lagging bool   `json:"lagging"`
	LagMs   uint32 `json:"lagMs"`
}

const (
	// maxBatchBytes is the number of bytes of events after which Reader.Next returns; the event that exceeds it is included.
	maxBatchBytes = 256 << 10
	// pageReserveBytes is the number of bytes that a Reader reserves while it reads a page from Postgres: a batch, and one
	// event as large as a commit.
	pageReserveBytes = maxBatchBytes + 1<<20
)

// Reader returns the events and the text of a session to one client, from the client's cursor on. Next and Close must be called by one
// goroutine.
type Reader struct {
	held *admission.Request // the bytes that the last Next returned
	wait time.Time          // deadline of the present wait for bytes; zero if there is none

	feed   *feed
	cursor uint32          // seq of the last event that Next returned; guarded by the feed's mu
	wake   chan struct{}   // has a buffer of one signal
	sent   []sentPosition  // returned text of the open blocks
	past   *pastTextReader // reads text that the feed no longer has; nil if none is needed
	lagged bool            // the last Lag that Next returned
	noText bool            // Next returns no text in flight
	close  sync.Once
}

// sentPosition is the offset in the text of an open block up to which a Reader has returned the text.
type sentPosition struct {
	block  string
	offset int
	lost   bool // DELTAS does not have the text after offset: no more text of the block is returned
}

// addReader adds a Reader to the feed. The error is that of ReadModels.Events if the events after the Reader's cursor are not available, or the
// reason why the feed has ended.
func (f *feed) addReader(ctx context.Context, r *Reader) error {
	f.mu.Lock()
	available := r.cursor <= f.tip && r.cursor >= f.oldestCursor()
	ended := f.ended
	f.mu.Unlock()
	if ended != nil {
		return ended
	}
	if !available {
		release, err := f.hub.acquireRead(ctx)
		if err != nil {
			return err
		}
		_, err = f.hub.cfg.ReadModels.Events(ctx, f.tenant, f.session, reads.EventQuery{After: r.cursor, Limit: 1})
		release()
		if err != nil {
			return err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.readers[r] = struct{}{}
	if r.cursor > f.tip {
		f.startReread("behind")
	}
	return nil
}

// oldestCursor returns the lowest cursor of which the feed still has all following events. mu must be held.
func (f *feed) oldestCursor() uint32 {
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

// SkipText makes Next return no text in flight. It must be called before the first call of Next.
func (r *Reader) SkipText() { r.noText = true }

// Next blocks until there is something to send, and returns it: each stored event once, in ascending order and
// without a gap, then text in flight. The returned bytes count against the gateway's limit until the next call of
// Next or Close. The error is the cause of ctx, the reason why no more events will come, TOO_MUCH_IN_FLIGHT or
// OVERLOADED.
func (r *Reader) Next(ctx context.Context) ([]Frame, error) {
	r.held.ReleaseBytesBeyond(0)
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		frames, err := r.nextFrames(ctx)
		if len(frames) > 0 || err != nil {
			return frames, err
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
		}
	}
}

// EndError returns the reason why no more events will come, or nil if more may come. It moves the cursor to the
// session's last event, so that the feed may drop all events. It is for a Reader whose Next is not called.
func (r *Reader) EndError() error {
	f := r.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	r.cursor = max(r.cursor, f.tip)
	return f.ended
}

// Changed returns a channel that receives a value when Next or EndError may have something new to return.
func (r *Reader) Changed() <-chan struct{} { return r.wake }

// nextFrames returns the frames that the Reader returns next, or none if nothing is new. It first takes their bytes
// from the gateway's limit.
func (r *Reader) nextFrames(ctx context.Context) ([]Frame, error) {
	size, from := r.nextSource()
	if from != sourceFeed {
		size = pageReserveBytes
	}
	if err := r.reserveBytes(ctx, size); err != nil {
		return nil, err
	}
	switch from {
	case sourcePostgres:
		return r.readPastEvents(ctx)
	case sourceDeltas:
		return r.readPastText(ctx)
	case sourceFeed:
	}
	frames, err := r.takeFrames(size)
	if len(frames) == 0 {
		r.held.ReleaseBytesBeyond(0)
	}
	return frames, err
}

// reserveBytes takes bytes from the gateway's limit of bytes in flight. It blocks until they are available, for
// Config.BytesTimeout at most.
func (r *Reader) reserveBytes(ctx context.Context, size int) error {
	if size == 0 {
		return nil
	}
	if r.wait.IsZero() { // otherwise the last wait was interrupted by its context, and its deadline still applies
		r.wait = time.Now().Add(r.feed.hub.cfg.BytesTimeout)
	}
	if err := r.held.ReserveBytesBefore(ctx, int64(size), r.wait); err != nil {
		return err
	}
	r.wait = time.Time{}
	return nil
}

// unsentEvents returns the events in the ring that the client does not have, up to the one that exceeds maxBatchBytes, and
// their size in bytes. The feed's mu must be held.
func (r *Reader) unsentEvents() (list []Frame, size int) {
	list = r.eventsAfterCursor()
	for i, frame := range list {
		if size > maxBatchBytes {
			return list[:i], size
		}
		size += frame.Len(true)
	}
	return list, size
}

// eventsAfterCursor returns the events in the ring after the Reader's cursor. The feed's mu must be held.
func (r *Reader) eventsAfterCursor() []Frame {
	f := r.feed
	return f.ring[len(f.ring)-int(min(f.tip-min(r.cursor, f.tip), uint32(len(f.ring)))):]
}

// frameSource is the place from which a Reader reads its next frames: the feed, Postgres or DELTAS.
type frameSource int

const (
	sourceFeed     frameSource = iota // events and text in the feed, or nothing yet
	sourcePostgres                    // events that the feed no longer has
	sourceDeltas                      // text of an open block that the feed no longer has
)

// nextSource returns the place of the Reader's next frames and, if that is the feed, how many bytes takeFrames would
// return.
func (r *Reader) nextSource() (size int, from frameSource) {
	f := r.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	switch lagChanged := f.lagging.Lagging != r.lagged; {
	case r.cursor < f.oldestCursor() && lagChanged:
		return 0, sourceFeed
	case r.cursor < f.oldestCursor():
		return 0, sourcePostgres
	}
	_, size = r.unsentEvents()
	if r.noText {
		return size, sourceFeed
	}
	for _, b := range f.open {
		g := r.findSent(b.block)
		switch {
		case g.lost:
		case g.offset < b.base && size == 0:
			return 0, sourceDeltas
		case g.offset >= b.base:
			size += min(b.knownEnd()-g.offset, max(0, maxBatchBytes-size))
		}
	}
	return size, sourceFeed
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
	if r.cursor < f.oldestCursor() {
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
	if r.cursor == f.tip && !r.noText {
		text, err := r.takeText(size)
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

// takeText returns frames with the text of the open blocks that the Reader has not returned yet, until they have room
// bytes. The feed's mu must be held.
func (r *Reader) takeText(room int) (frames []Frame, err error) {
	f := r.feed
	r.sent = slices.DeleteFunc(r.sent, func(g sentPosition) bool {
		return !slices.ContainsFunc(f.open, func(b *openText) bool { return b.block == g.block })
	})
	for _, b := range f.open {
		if b.knownEnd() == 0 {
			continue
		}
		g := r.findOrAddSent(b.block)
		for !g.lost && g.offset >= b.base && g.offset < b.knownEnd() && room > 0 {
			var frame Frame
			if frame, g.offset, err = b.nextFrame(g.offset, f.session, f.tip, f.position); err != nil {
				return nil, problem.From(err)
			}
			room -= len(frame.JSON)
			frames = append(frames, frame)
		}
	}
	return frames, nil
}

// findSent returns a copy of the position up to which the Reader has returned the text of a block; it is 0 if the
// Reader has returned none.
func (r *Reader) findSent(block string) sentPosition {
	for _, g := range r.sent {
		if g.block == block {
			return g
		}
	}
	return sentPosition{block: block}
}

// findOrAddSent returns the position up to which the Reader has returned the text of a block, as an entry of r.sent
// that the caller may change. It adds an entry if there is none.
func (r *Reader) findOrAddSent(block string) *sentPosition {
	i := slices.IndexFunc(r.sent, func(g sentPosition) bool { return g.block == block })
	if i < 0 {
		r.sent = append(r.sent, sentPosition{block: block})
		i = len(r.sent) - 1
	}
	return &r.sent[i]
}

// pastTextReader reads the beginning of the text of one open block from DELTAS, for a Reader that needs text which
// the feed has dropped.
type pastTextReader struct {
	block  string
	deltas *deltas.Reader
}

// readPastText returns frames with text of an open block that the feed no longer has, read from DELTAS. The caller
// must have reserved pageReserveBytes; readPastText keeps as many bytes as it returns.
func (r *Reader) readPastText(ctx context.Context) ([]Frame, error) {
	f := r.feed
	f.mu.Lock()
	i := slices.IndexFunc(f.open, func(b *openText) bool { g := r.findSent(b.block); return !g.lost && g.offset < b.base })
	if i < 0 || r.cursor != f.tip { // the block ended meanwhile, or an event came first
		f.mu.Unlock()
		r.held.ReleaseBytesBeyond(0)
		return nil, nil
	}
	b, base, seq, position := *f.open[i], f.open[i].base, f.tip, f.position
	f.mu.Unlock()
	if r.past == nil || r.past.block != b.block {
		r.past = &pastTextReader{b.block, deltas.NewReader(f.hub.cfg.NATS, f.hub.cfg.Partitions, f.tenant, f.session, b.from)}
	}
	g := r.findOrAddSent(b.block)
	var frames []Frame
	size := 0
	for size < maxBatchBytes && g.offset < base {
		text, err := r.nextPastText(ctx, g)
		if err != nil {
			return nil, err
		}
		if g.lost {
			r.wakeUp() // other text of the feed may follow
			break
		}
		for len(text) > 0 {
			n := frameTextLen(text)
			frame, err := b.newFrame(text[:n], g.offset, f.session, seq, position)
			if err != nil {
				return frames, problem.From(err)
			}
			frames = append(frames, frame)
			size, g.offset, text = size+len(frame.JSON), g.offset+n, text[n:]
		}
	}
	if g.offset >= base || g.lost {
		r.past = nil
	}
	r.held.ReleaseBytesBeyond(int64(size))
	return frames, nil
}

// nextPastText reads the next text of the block of g from DELTAS and returns it. If DELTAS does not have that text,
// nextPastText sets g.lost and returns "".
func (r *Reader) nextPastText(ctx context.Context, g *sentPosition) (string, error) {
	from := r.past.deltas
	if !from.Buffered() {
		release, err := r.feed.hub.acquireTextRead(ctx)
		if err != nil {
			return "", err
		}
		defer release()
	}
	for {
		d, ok, err := from.Peek(ctx)
		switch {
		case err != nil && ctx.Err() != nil:
			return "", context.Cause(ctx)
		case err != nil:
			return "", problem.New(problem.Unavailable, "", "the text in flight cannot be read from NATS; connect again with your cursor").WithCause(err)
		case !ok, d.BlockID == g.block && int(d.Offset) > g.offset:
			g.lost = true
			return "", nil
		}
		from.DropPeeked()
		if skip := g.offset - int(d.Offset); d.BlockID == g.block && skip < len(d.Text) {
			return d.Text[skip:], nil
		}
	}
}

// readPastEvents returns the next events, which the feed no longer has, read from Postgres. The caller must have
// reserved pageReserveBytes; readPastEvents keeps as many bytes as it returns.
func (r *Reader) readPastEvents(ctx context.Context) ([]Frame, error) {
	f := r.feed
	release, err := f.hub.acquireRead(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	page, err := f.hub.cfg.ReadModels.Events(ctx, f.tenant, f.session, reads.EventQuery{After: r.Cursor(), Limit: f.hub.cfg.PageEvents, Bytes: maxBatchBytes, Metadata: true})
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
	r.held.ReleaseBytesBeyond(size)
	if err := r.held.ReserveBytes(max(0, size-pageReserveBytes)); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(frames) > 0 {
		r.cursor = frames[len(frames)-1].Seq
	}
	if r.cursor > f.tip {
		f.startReread("behind")
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

// Close ends the Reader and returns its bytes to the gateway's limit. It may be called more than once.
func (r *Reader) Close() {
	r.close.Do(func() {
		r.feed.mu.Lock()
		delete(r.feed.readers, r)
		r.feed.mu.Unlock()
		r.feed.hub.releaseFeed(r.feed)
		r.held.End()
		r.feed.hub.cfg.Metrics.Readers(-1)
	})
}
