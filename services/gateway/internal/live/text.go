package live

import (
	"slices"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
)

const (
	// maxFrameText is the largest number of bytes of text in one frame for clients.
	maxFrameText = 64 << 10
	// frameOverhead is about the size in bytes of a frame's JSON without its text.
	frameOverhead = 384
	// keptTextBytes is the number of bytes at the end of an open block's text that a feed keeps. Readers read text before
	// that from DELTAS.
	keptTextBytes = 1 << 20
)

// openText is the text of one open block that a feed holds: from the offset base up to the first gap, and the deltas
// that have arrived after the gap.
type openText struct {
	block, execution, conversation string
	from                           deltas.StartPosition
	base                           int // offset of the first byte of text
	text                           []byte
	at                             time.Time
	later                          waitingText // text after a gap

	// whole means that the text is known as far as DELTAS had it when that was last certain. Otherwise it has to be read
	// from DELTAS.
	whole   bool
	reading bool      // a read of DELTAS is in progress that includes the block
	readAt  time.Time // when DELTAS was last read for the block
	// checkAt is when DELTAS is read once more, because the stream may store a delta after the core subscription
	// would have received it. Zero means that this is not necessary.
	checkAt time.Time

	// The last frame that was built. Readers at the same offset share it.
	lastFrame     Frame
	frameFrom, to int
}

// knownEnd returns the offset up to which the text of the block is known.
func (b *openText) knownEnd() int { return b.base + len(b.text) }

// addDelta appends the part of a delta that the text b does not have yet. fresh reports whether there was such a
// part. If text before the delta is missing, ok is false and b is unchanged.
func (b *openText) addDelta(d events.Delta) (fresh, ok bool) {
	skip := b.knownEnd() - int(d.Offset)
	if skip < 0 {
		return false, false
	}
	if skip >= len(d.Text) {
		return false, true
	}
	b.text = append(b.text, d.Text[skip:]...)
	if d.Time.After(b.at) {
		b.at = d.Time
	}
	if len(b.text) > 2*keptTextBytes {
		b.trimBeginning()
	}
	return true, true
}

// trimBeginning drops the beginning of the text, so that about keptTextBytes bytes are left. The rest begins with a complete character.
func (b *openText) trimBeginning() {
	cut := len(b.text) - keptTextBytes
	for cut < len(b.text) && !utf8.RuneStart(b.text[cut]) {
		cut++
	}
	b.text, b.base = slices.Clone(b.text[cut:]), b.base+cut
	b.lastFrame = Frame{}
}

// addLaterDeltas appends the deltas that waited for text before them and can be appended now. It returns the number
// of bytes for which they were counted as waiting.
func (b *openText) addLaterDeltas() (released int) {
	for i := 0; i < len(b.later.list); {
		d := b.later.list[i]
		if int(d.Offset) > b.knownEnd() {
			i++
			continue
		}
		b.addDelta(d)
		released += b.later.removeDelta(i)
		i = 0
	}
	return released
}

// nextFrame returns a frame with the text of the block from the offset from on, and the offset after the frame. The
// frame has at most maxFrameText bytes of text and ends with a complete character. from must be at least b.base.
func (b *openText) nextFrame(from int, session string, seq uint32, position string) (Frame, int, error) {
	to := from + frameTextLen(b.text[from-b.base:])
	if b.lastFrame.JSON != nil && b.frameFrom == from && b.to == to && b.lastFrame.Seq == seq {
		return b.lastFrame, to, nil
	}
	f, err := b.newFrame(string(b.text[from-b.base:to-b.base]), from, session, seq, position)
	if err != nil {
		return Frame{}, from, err
	}
	b.lastFrame, b.frameFrom, b.to = f, from, to
	return f, to, nil
}

// frameTextLen returns how many of the first bytes of a text are sent in one frame: at most maxFrameText, up to the
// end of a character.
func frameTextLen[T string | []byte](text T) int {
	to := len(text)
	if to > maxFrameText {
		to = maxFrameText
		for to > 0 && !utf8.RuneStart(text[to]) {
			to--
		}
	}
	return to
}

// newFrame returns a frame with a part of the block's text, which begins at the given offset.
func (b *openText) newFrame(text string, offset int, session string, seq uint32, position string) (Frame, error) {
	d := events.Delta{
		BlockID: b.block, ExecutionID: b.execution, ConversationID: b.conversation,
		Offset: uint32(offset), Text: text, Time: b.at,
	}
	raw, err := d.AppendWire(make([]byte, 0, len(d.Text)+frameOverhead), session, seq, position)
	if err != nil {
		return Frame{}, err
	}
	return Frame{Seq: seq, Type: events.TextDelta, JSON: raw}, nil
}

// waitingText holds deltas of a block that clients cannot get yet, because text before them, or the block_start, has
// not arrived.
type waitingText struct {
	list  []events.Delta
	bytes int
	at    time.Time // when the last one arrived
}

// deltaOverhead is about the size in bytes of a delta in memory without its text.
const deltaOverhead = 256

// deltaSize returns the number of bytes that a delta takes in memory.
func deltaSize(d events.Delta) int { return len(d.Text) + deltaOverhead }

// addDelta appends a delta that arrived at the time now.
func (w *waitingText) addDelta(d events.Delta, now time.Time) {
	w.list, w.bytes, w.at = append(w.list, d), w.bytes+deltaSize(d), now
}

// removeDelta removes the delta at index i and returns its size in memory.
func (w *waitingText) removeDelta(i int) int {
	n := deltaSize(w.list[i])
	w.list = slices.Delete(w.list, i, i+1)
	w.bytes -= n
	return n
}
