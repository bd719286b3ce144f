package system

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// StampBytes is the length in bytes of the text that Stamp returns.
const StampBytes = 24

// Stamp returns a piece of text that holds a time: 19 digits of nanoseconds, padded with spaces.
func Stamp(at time.Time) string {
	return fmt.Sprintf("%019d%5s", at.UnixNano(), " ")
}

// Stamps checks the events of a session as its client receives them, and computes their age from the stamps in their
// text. Seqs must have no gap, pieces of a text must follow each other, and a complete text must begin with the pieces
// that were received before it.
type Stamps struct {
	Pieces int // pieces of text, each counted once
	Kept   int // events of the log

	seq    uint32
	block  string
	shown  string // text of the block
	joined int    // bytes of shown that were received since the client joined
}

// Seq returns the seq of the last event, which is the cursor of the client.
func (s *Stamps) Seq() uint32 { return s.seq }

// Joined is called when the client has joined again, after the event Seq. The gateway then sends the text of the open
// block from its beginning.
func (s *Stamps) Joined() { s.joined = 0 }

// Add checks the next event, and returns the age at its receipt of each piece of text that it brings for the first
// time. A block's end may repeat text that deltas brought; any other duplicate, a gap or a wrong order is an error.
func (s *Stamps) Add(w events.Wire, received time.Time) (ages []time.Duration, err error) {
	if w.Type != events.TextDelta {
		switch {
		case w.Seq <= s.seq:
			return nil, fmt.Errorf("seq %d came after %d: duplicated or out of order", w.Seq, s.seq)
		case w.Seq > s.seq+1:
			return nil, fmt.Errorf("seq %d came after %d: event %d is lost", w.Seq, s.seq, s.seq+1)
		}
		s.seq = w.Seq
		s.Kept++
	} else if w.Seq != s.seq {
		return nil, fmt.Errorf("text with seq %d came after event %d", w.Seq, s.seq)
	}
	t, ok, err := TextOf(w)
	if err != nil || !ok {
		return nil, err
	}
	if t.Block != s.block {
		s.block, s.shown, s.joined = t.Block, "", 0
	}
	offset := t.Offset
	switch {
	case t.Complete && !strings.HasPrefix(t.Piece, s.shown):
		return nil, fmt.Errorf("block %s is complete with another text than was shown", t.Block)
	case t.Complete:
		offset = 0
	case offset < s.joined:
		return nil, fmt.Errorf("block %s: text from %d came after %d bytes: duplicated or out of order", t.Block, offset, s.joined)
	case offset > s.joined:
		return nil, fmt.Errorf("block %s: text from %d came after %d bytes: %d bytes are lost", t.Block, offset, s.joined, offset-s.joined)
	}
	s.joined = offset + len(t.Piece)
	known := min(len(s.shown)-offset, len(t.Piece))
	if t.Piece[:known] != s.shown[offset:offset+known] {
		return nil, fmt.Errorf("block %s: text from %d differs from the text that was shown before", t.Block, offset)
	}
	piece := t.Piece[known:]
	s.shown += piece
	if len(piece)%StampBytes != 0 {
		return nil, fmt.Errorf("block %s: %d bytes are no whole pieces", t.Block, len(piece))
	}
	for ; len(piece) > 0; piece = piece[StampBytes:] {
		ns, err := strconv.ParseInt(piece[:19], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("block %s: %w", t.Block, err)
		}
		s.Pieces++
		ages = append(ages, received.Sub(time.Unix(0, ns)))
	}
	return ages, nil
}
