package system

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// TimestampTextBytes is the length, in bytes, of the text that TimestampText returns.
const TimestampTextBytes = 24

// TimestampText returns a piece of text that contains the time at: 19 digits of nanoseconds, padded with spaces to
// TimestampTextBytes. A client that receives the text can compute its age.
func TimestampText(at time.Time) string {
	return fmt.Sprintf("%019d%5s", at.UnixNano(), " ")
}

// TimestampChecker checks the events of one session as its client receives them, and computes the age of the agent's
// text from the times that TimestampText wrote into the text. There must be no gap in the seqs or in the text of a
// block, and a complete text must begin with the pieces that were received before it.
type TimestampChecker struct {
	Pieces int // pieces of text, each counted once
	Kept   int // events of the log

	seq    uint32
	block  string
	shown  string // text of the block
	joined int    // bytes of shown that were received since the client joined
}

// Seq returns the seq of the last event that the client has received. It is the cursor from which the client can join
// again.
func (s *TimestampChecker) Seq() uint32 { return s.seq }

// HandleRejoin must be called when the client has joined the session again, after the event Seq. The gateway then sends
// the text of the open block from its beginning.
func (s *TimestampChecker) HandleRejoin() { s.joined = 0 }

// CheckEvent checks the next event that the client has received, at the time received. It returns the ages of the pieces of
// text that the event contains and that were not received before. The end of a block may repeat text of deltas; any
// other duplicate, a gap or a wrong order is an error.
func (s *TimestampChecker) CheckEvent(w events.WireEvent, received time.Time) (ages []time.Duration, err error) {
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
	t, ok, err := AgentTextOf(w)
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
	if len(piece)%TimestampTextBytes != 0 {
		return nil, fmt.Errorf("block %s: %d bytes are no whole pieces", t.Block, len(piece))
	}
	for ; len(piece) > 0; piece = piece[TimestampTextBytes:] {
		ns, err := strconv.ParseInt(piece[:19], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("block %s: %w", t.Block, err)
		}
		s.Pieces++
		ages = append(ages, received.Sub(time.Unix(0, ns)))
	}
	return ages, nil
}
