package live

import (
	"math"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxText is the largest text of one frame, in bytes.
const maxText = 64 << 10

// frameOverhead is about the size in bytes of a frame's JSON without its text.
const frameOverhead = 384

// openText is the text of one open block, as far as it is known without a gap.
type openText struct {
	block, execution, conversation string
	text                           []byte // append-only, so that Readers may hold slices of it
	at                             time.Time

	// The last frame that was built. Readers at the same offset share it.
	lastFrame Frame
	from, to  int
}

// add appends the new part of a delta. ok is false if text before the delta is missing.
func (b *openText) add(d events.Delta) (fresh, ok bool) {
	skip := len(b.text) - int(d.Offset)
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
	return true, true
}

// addStored adds the pieces of text that Postgres has.
func (b *openText) addStored(t reads.Text) {
	for _, piece := range t.Pieces {
		piece.Time = t.At
		b.add(piece)
	}
}

// known returns the number of known bytes.
func (b *openText) known() uint32 { return uint32(min(len(b.text), math.MaxUint32)) }

// frame returns the text from an offset on, or a first part of it that ends with a complete character.
func (b *openText) frame(from int, session string, seq uint32, position string) (Frame, int, error) {
	to := len(b.text)
	if to-from > maxText {
		to = from + maxText
		for to > from && !utf8.RuneStart(b.text[to]) {
			to--
		}
	}
	if b.lastFrame.JSON != nil && b.from == from && b.to == to && b.lastFrame.Seq == seq {
		return b.lastFrame, to, nil
	}
	d := events.Delta{
		BlockID: b.block, ExecutionID: b.execution, ConversationID: b.conversation,
		Offset: uint32(from), Text: string(b.text[from:to]), Time: b.at,
	}
	raw, err := d.AppendWire(make([]byte, 0, len(d.Text)+frameOverhead), session, seq, position)
	if err != nil {
		return Frame{}, from, err
	}
	b.lastFrame, b.from, b.to = Frame{Seq: seq, Type: events.TextDelta, JSON: raw}, from, to
	return b.lastFrame, to, nil
}
