package check

import "fmt"

// Piece is a piece of text in flight, as a client received it.
type Piece struct {
	Block  string
	Offset uint32 // in bytes from the block's beginning
	Text   string
	Seq    uint32 // what the piece says is the last kept event
	After  uint32 // the last kept event that the client had when the piece came
}

// texts returns the first piece of a client that is wrong, or nothing: a piece comes with the seq of the client's last event, belongs to a
// block that the log completes, leaves no gap to the pieces before it, and is what the log's text has at its offset.
func texts(pieces []Piece, log map[string]string) []string {
	received := map[string]uint32{}
	for i, p := range pieces {
		text, ok := log[p.Block]
		end := uint64(p.Offset) + uint64(len(p.Text))
		why := ""
		switch {
		case p.Seq != p.After:
			why = fmt.Sprintf("came with seq %d after event %d", p.Seq, p.After)
		case !ok:
			why = "belongs to a block that the log does not complete"
		case p.Offset > received[p.Block]:
			why = fmt.Sprintf("begins at byte %d, and byte %d is due", p.Offset, received[p.Block])
		case end > uint64(len(text)) || text[p.Offset:end] != p.Text:
			why = fmt.Sprintf("is %q at byte %d, in the log %q", p.Text, p.Offset, text)
		}
		if why != "" {
			return []string{fmt.Sprintf("piece %d of text in flight, of block %s: %s", i+1, p.Block, why)}
		}
		received[p.Block] = max(received[p.Block], uint32(end)) //nolint:gosec // it is within the text
	}
	return nil
}
