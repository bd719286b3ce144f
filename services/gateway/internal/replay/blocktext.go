package replay

import (
	"context"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxTextRead is the number of bytes of DELTAS after which TextsBefore stops.
const maxTextRead = 32 << 20

// Text is the text in flight of a block at an event.
type Text struct {
	reads.OpenText
	Prefix   []byte // the text from the block's beginning up to the first gap
	Complete bool   // whether Prefix is the whole text in flight at the event

	reachedEvent bool // whether text from after the event was read
	hasGap       bool // whether text after a gap was read
}

// TextsBefore returns the text in flight that blocks of a session had before a time, which is the text that a replay
// would send; a nil time means all text so far. It reads DELTAS from the start of the oldest block on. take is called with the number of
// bytes before they are held; its error ends the read.
func (p *Player) TextsBefore(ctx context.Context, tenant, session string, open []reads.OpenText, before *time.Time, take func(bytes int64) error) ([]*Text, error) {
	if len(open) == 0 {
		return nil, nil
	}
	since := open[0].Start
	var list []*Text
	for _, o := range open {
		if list = append(list, &Text{OpenText: o}); o.Start.Before(since) {
			since = o.Start
		}
	}
	from := deltaReader{nc: p.cfg.NATS, subject: p.cfg.Partitions.DeltaSubject(tenant, session), remedy: "try again", since: since.Add(-clockMargin)}
	var at time.Time // time of the piece that was read last
	waits := func(t *Text) bool { return t.needsMore(at) }
	for from.bytes < maxTextRead && slices.ContainsFunc(list, waits) {
		d, ok, err := p.peek(ctx, tenant, &from)
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		at = d.Time
		from.drop()
		if i := slices.IndexFunc(list, func(t *Text) bool { return t.ID == d.BlockID }); i >= 0 {
			if err := list[i].add(d, before, take); err != nil {
				return nil, err
			}
		}
	}
	for _, t := range list {
		t.Complete = !t.hasGap && (t.reachedEvent || len(t.Prefix) >= t.Bytes)
	}
	return list, nil
}

// needsMore reports whether text after the time at may belong to the block and come before the event. The text in flight
// of a complete block may be longer than its final text.
func (t *Text) needsMore(at time.Time) bool {
	if t.End.IsZero() {
		return !t.reachedEvent && !t.hasGap && len(t.Prefix) < t.Bytes
	}
	return !t.reachedEvent && !t.hasGap && !at.After(t.End)
}

// add adds a piece of the block's text, unless it comes after a gap or after the event.
func (t *Text) add(d events.Delta, before *time.Time, take func(bytes int64) error) error {
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
	if err := take(int64(len(d.Text) - skip)); err != nil {
		return err
	}
	t.Prefix = append(t.Prefix, d.Text[skip:]...)
	return nil
}
