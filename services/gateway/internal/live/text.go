package live

import (
	"slices"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
)

const (
	// maxText is the largest number of bytes of text in one frame for clients.
	maxText = 64 << 10
	// frameOverhead is about the size in bytes of a frame's JSON without its text.
	frameOverhead = 384
	// keptText is the number of bytes at the end of an open block's text that a feed keeps. Readers read text before
	// that from DELTAS.
	keptText = 1 << 20
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

// known returns the offset up to which the text is known.
func (b *openText) known() int { return b.base + len(b.text) }

// add appends the part of a delta that b does not have yet. fresh reports whether there was such a part. If text before the delta is missing,
// ok is false and b is unchanged.
func (b *openText) add(d events.Delta) (fresh, ok bool) {
	skip := b.known() - int(d.Offset)
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
	if len(b.text) > 2*keptText {
		b.trim()
	}
	return true, true
}

// trim drops the beginning of the text, so that about keptText bytes are left. The rest begins with a complete character.
func (b *openText) trim() {
	cut := len(b.text) - keptText
	for cut < len(b.text) && !utf8.RuneStart(b.text[cut]) {
		cut++
	}
	b.text, b.base = slices.Clone(b.text[cut:]), b.base+cut
	b.lastFrame = Frame{}
}

// addLater appends the deltas of b.later that no gap precedes any more, and returns the number of bytes for which they were counted as waiting.
func (b *openText) addLater() (released int) {
	for i := 0; i < len(b.later.list); {
		d := b.later.list[i]
		if int(d.Offset) > b.known() {
			i++
			continue
		}
		b.add(d)
		released += b.later.remove(i)
		i = 0
	}
	return released
}

// frame returns a frame with the text from the offset from on, and the offset after it. The frame has at most maxText bytes of text and ends with
// a complete character. from must be at least b.base.
func (b *openText) frame(from int, session string, seq uint32, position string) (Frame, int, error) {
	to := from + textEnd(b.text[from-b.base:])
	if b.lastFrame.JSON != nil && b.frameFrom == from && b.to == to && b.lastFrame.Seq == seq {
		return b.lastFrame, to, nil
	}
	f, err := b.frameOf(string(b.text[from-b.base:to-b.base]), from, session, seq, position)
	if err != nil {
		return Frame{}, from, err
	}
	b.lastFrame, b.frameFrom, b.to = f, from, to
	return f, to, nil
}

// textEnd returns the length of the first part of a text that is sent in one frame.
func textEnd[T string | []byte](text T) int {
	to := len(text)
	if to > maxText {
		to = maxText
		for to > 0 && !utf8.RuneStart(text[to]) {
			to--
		}
	}
	return to
}

// frameOf returns the frame of a part of the text.
func (b *openText) frameOf(text string, offset int, session string, seq uint32, position string) (Frame, error) {
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

func deltaSize(d events.Delta) int { return len(d.Text) + deltaOverhead }

func (w *waitingText) add(d events.Delta, now time.Time) {
	w.list, w.bytes, w.at = append(w.list, d), w.bytes+deltaSize(d), now
}

// remove removes the delta at an index and returns its size.
func (w *waitingText) remove(i int) int {
	n := deltaSize(w.list[i])
	w.list = slices.Delete(w.list, i, i+1)
	w.bytes -= n
	return n
}
