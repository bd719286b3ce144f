package system

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// StampBytes is the length of a piece of text that says when it was written.
const StampBytes = 24

// Stamp is such a piece: 19 digits of nanoseconds and a filling, as long as the scripted model's own pieces.
func Stamp(at time.Time) string {
	return fmt.Sprintf("%019d%5s", at.UnixNano(), " ")
}

// Stamps reads a session's events as a client does, and holds them to what they
// promise: each seq follows the last, text follows text, a whole text begins with
// what was shown of it.
type Stamps struct {
	Pieces int // that were shown, each once
	Kept   int // events of the log

	seq   uint32
	block string
	shown string
}

// Add takes the next event that came at a time. It gives how old every piece of
// text was when it was first shown. What is doubled, lost or out of order is an error.
func (s *Stamps) Add(w events.Wire, at time.Time) (late []time.Duration, err error) {
	if w.Type != events.TextDelta {
		if w.Seq != s.seq+1 {
			return nil, fmt.Errorf("seq %d came after %d", w.Seq, s.seq)
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
		s.block, s.shown = t.Block, ""
	}
	piece := t.Piece
	switch {
	case t.Complete && !strings.HasPrefix(t.Piece, s.shown):
		return nil, fmt.Errorf("block %s is complete with another text than was shown", t.Block)
	case t.Complete:
		piece = t.Piece[len(s.shown):]
	case t.Offset != len(s.shown):
		return nil, fmt.Errorf("block %s: text from %d came after %d bytes", t.Block, t.Offset, len(s.shown))
	}
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
		late = append(late, at.Sub(time.Unix(0, ns)))
	}
	return late, nil
}
