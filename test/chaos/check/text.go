package check

import "fmt"

// TextPiece is a piece of a block's text that a client received while the block was still being written.
type TextPiece struct {
	Block  string
	Offset uint32 // in bytes from the beginning of the block
	Text   string
	Seq    uint32 // seq of the last stored event, as stated by the delta
	After  uint32 // seq of the last stored event that the client had received before the delta
}

// checkTextPieces describes the first invalid piece of text that a client received, or returns nil. A piece must state the
// seq of the last event that the client received before it, belong to a block that is complete in the log, leave no gap
// after the pieces before it, and be equal to the block's text at its offset. log holds the complete texts by block.
func checkTextPieces(pieces []TextPiece, log map[string]string) []string {
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
			why = fmt.Sprintf("begins at byte %d instead of %d", p.Offset, received[p.Block])
		case end > uint64(len(text)) || text[p.Offset:end] != p.Text:
			why = fmt.Sprintf("is %q at byte %d, in the log %q", p.Text, p.Offset, text)
		}
		if why != "" {
			return []string{fmt.Sprintf("piece %d of text in flight, of block %s: %s", i+1, p.Block, why)}
		}
		received[p.Block] = max(received[p.Block], uint32(end)) //nolint:gosec // the offset is within the text
	}
	return nil
}
