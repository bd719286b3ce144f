package replay

import (
	"context"
	"slices"
	"strings"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxDeltasRead is the number of bytes of DELTAS after which BlockTextsBefore stops.
const maxDeltasRead = 32 << 20

// BlockText is the text in flight that a block had before an event of its session.
type BlockText struct {
	reads.OpenText
	Prefix   []byte // the text from the block's beginning up to the first gap
	Complete bool   // whether Prefix is the whole text in flight at the event

	reachedEvent bool // whether text from after the event was read
	hasGap       bool // whether text after a gap was read
}

// BlockTextsBefore returns the text in flight that blocks of a session had before a time, which is the text that a replay
// would send; a nil time means all text so far. It reads DELTAS from the start of the oldest block on. take is called with the number of
// bytes before they are held; its error ends the read. take may be nil.
func (p *Player) BlockTextsBefore(ctx context.Context, tenant, session string, open []reads.OpenText, before *time.Time, take func(bytes int64) error) ([]*BlockText, error) {
	if len(open) == 0 {
		return nil, nil
	}
	var list []*BlockText
	for _, o := range open {
		list = append(list, &BlockText{OpenText: o})
	}
	from := deltas.NewReader(p.cfg.NATS, p.cfg.Partitions, tenant, session, earliestStart(open))
	var at time.Time // time of the piece that was read last
	waits := func(t *BlockText) bool { return t.mayHaveMoreAfter(at) }
	atEnd := false
	for from.FetchedBytes() < maxDeltasRead && slices.ContainsFunc(list, waits) {
		d, ok, err := p.peekDelta(ctx, tenant, "try again", from)
		if err != nil {
			return nil, err
		}
		if !ok {
			atEnd = true
			break
		}
		at = d.Time
		from.DropPeeked()
		if i := slices.IndexFunc(list, func(t *BlockText) bool { return t.ID == d.BlockID }); i >= 0 {
			if err := list[i].addDelta(d, before, take); err != nil {
				return nil, err
			}
		}
	}
	for _, t := range list {
		whole := len(t.Prefix) >= t.Bytes
		if t.End.IsZero() {
			whole = atEnd
		}
		t.Complete = !t.hasGap && (t.reachedEvent || whole)
	}
	return list, nil
}

// mayHaveMoreAfter reports whether text that was sent after the time at may belong to the block and come before the
// event. The text in flight of a complete block may be longer than its final text.
func (t *BlockText) mayHaveMoreAfter(at time.Time) bool {
	return !t.reachedEvent && !t.hasGap && (t.End.IsZero() || !at.After(t.End))
}

// earliestStart returns the earliest position in DELTAS at which the text of any of the blocks can begin.
func earliestStart(open []reads.OpenText) deltas.StartPosition {
	from := open[0].From
	for _, o := range open[1:] {
		from = from.Earlier(o.From)
	}
	return from
}

// hasTextInFlight reports whether blocks of a kind have text that a replay and a state show while it is in flight.
func hasTextInFlight(k events.BlockKind) bool {
	return k == events.KindAssistantText || k == events.KindThinking
}

// Blocks returns a session's blocks, with the text in flight of open ones, as reads.Store.Blocks does.
func (p *Player) Blocks(ctx context.Context, tenant, session, conversation string, take func(bytes int64) error) ([]*spoolv1.Block, uint32, error) {
	list, open, tip, err := p.cfg.Reads.Blocks(ctx, tenant, session, conversation, take)
	if err != nil {
		return nil, 0, err
	}
	return list, tip, p.fillText(ctx, tenant, session, open, list, take)
}

// NewestBlocks returns a page of a session's blocks, with the text in flight of open ones, as reads.Store.NewestBlocks
// does. take is called with the number of bytes of text in flight before they are held; its error ends the read.
func (p *Player) NewestBlocks(ctx context.Context, tenant, session, conversation string, before reads.BlockToken, limit uint32, take func(bytes int64) error) (reads.BlockPage, error) {
	page, err := p.cfg.Reads.NewestBlocks(ctx, tenant, session, conversation, before, limit)
	if err != nil {
		return page, err
	}
	return page, p.fillText(ctx, tenant, session, page.Open, page.Blocks, take)
}

// Block returns one block of a session, with its text in flight if it is open, and the seq up to which it is folded.
// take is used as in NewestBlocks.
func (p *Player) Block(ctx context.Context, tenant, session, id string, take func(bytes int64) error) (*spoolv1.Block, uint32, error) {
	page, err := p.cfg.Reads.Block(ctx, tenant, session, id)
	if err != nil {
		return nil, 0, err
	}
	return page.Blocks[0], page.Tip, p.fillText(ctx, tenant, session, page.Open, page.Blocks, take)
}

// fillText sets the content of the open blocks in list to their text in flight.
func (p *Player) fillText(ctx context.Context, tenant, session string, open []reads.OpenText, list []*spoolv1.Block, take func(bytes int64) error) error {
	// A tool may run for long. Its block must not make the read of all other texts begin long ago.
	var texts, others []reads.OpenText
	for _, o := range open {
		i := slices.IndexFunc(list, func(b *spoolv1.Block) bool { return b.GetId() == o.ID })
		if hasTextInFlight(events.BlockKind(list[i].GetKind())) {
			texts = append(texts, o)
		} else {
			others = append(others, o)
		}
	}
	for _, group := range [][]reads.OpenText{texts, others} {
		if _, err := p.FillOpenBlocks(ctx, tenant, session, group, nil, list, take); err != nil {
			return err
		}
	}
	return nil
}

// FillOpenBlocks sets the content of those of blocks that are in open to the text in flight that BlockTextsBefore
// returns, and returns these texts.
func (p *Player) FillOpenBlocks(ctx context.Context, tenant, session string, open []reads.OpenText, before *time.Time, blocks []*spoolv1.Block, take func(bytes int64) error) ([]*BlockText, error) {
	list, err := p.BlockTextsBefore(ctx, tenant, session, open, before, take)
	byID := map[string]*BlockText{}
	for _, t := range list {
		byID[t.ID] = t
	}
	for _, b := range blocks {
		if t := byID[b.GetId()]; t != nil && len(t.Prefix) > 0 {
			text := strings.ToValidUTF8(string(t.Prefix), "\ufffd") // pieces may overlap in the middle of a character
			b.Content = &text
		}
	}
	return list, err
}

// addDelta appends a delta to the block's text, unless the delta comes after a gap or after the event. before is the
// time of the event, nil for none.
func (t *BlockText) addDelta(d events.Delta, before *time.Time, take func(bytes int64) error) error {
	skip := len(t.Prefix) - int(d.Offset)
	switch {
	case skip < 0:
		t.hasGap = true // pieces are in order, so the missing text will not come later
		return nil
	case t.hasGap || t.reachedEvent:
		return nil
	case before != nil && d.Time.After(*before):
		t.reachedEvent = true
		return nil
	case skip >= len(d.Text):
		return nil
	}
	if take != nil {
		if err := take(int64(len(d.Text) - skip)); err != nil {
			return err
		}
	}
	t.Prefix = append(t.Prefix, d.Text[skip:]...)
	return nil
}
