package fold

import (
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

// foldDelta folds text in flight. Text that is known already is removed. Text after a gap, or of a block that has not
// begun, is stored and not announced. Text of a completed block or ended execution is dropped.
func (f *folding) foldDelta(d Delta) {
	k := Key{d.Tenant, d.Session}
	a := f.useSession(k)
	id := rowKey(d.BlockID)
	if a.deleted || id == "" || d.Text == "" {
		return
	}
	b := a.blocks[id]
	if b != nil && b.row.final() {
		return
	}
	if x := a.executions[rowKey(d.ExecutionID)]; b == nil && x != nil && x.row.ended() {
		return
	}
	text := a.texts[id]
	if text == nil {
		text = &blockText{execution: rowKey(d.ExecutionID)}
		a.texts[id] = text
	}
	known := uint32(len(text.Known))
	d.Text, d.Time = cleanSameLength(d.Text), clampTime(d.Time)
	fresh := text.Add(d.Delta)
	switch {
	case fresh != "":
		f.writeText(k, id, known, fresh, d.Delta)
		if b != nil {
			l := f.announce(k)
			l.Deltas = append(l.Deltas, piece(d.Delta, known, fresh))
		}
	case int(d.Offset) > len(text.Known):
		f.writeText(k, id, d.Offset, d.Text, d.Delta)
	}
}

func (f *folding) writeText(k Key, block string, offset uint32, text string, d events.Delta) {
	f.out.Texts = append(f.out.Texts, &Text{
		Tenant: k.Tenant, Session: k.ID, Block: block, Offset: int64(offset), Group: f.model.group,
		Execution: rowKey(d.ExecutionID), Conversation: rowKey(d.ConversationID), At: pgTime(d.Time), Text: text,
	})
}

func piece(d events.Delta, offset uint32, text string) events.Delta {
	d.Offset, d.Text = offset, text
	return d
}

// announceText announces the text that arrived before its block began.
func (f *folding) announceText(a *aggregate, b *Block) {
	text := a.texts[b.ID]
	if text == nil || text.Known == "" {
		return
	}
	l := f.announce(a.key)
	l.Deltas = append(l.Deltas, events.Delta{
		BlockID: b.block.ID, ExecutionID: b.block.ExecutionID, ConversationID: b.block.ConversationID, Text: text.Known, Time: b.block.Time,
	})
}

// blockText is the text in flight of a block, which may not have begun yet.
type blockText struct {
	blocks.Text
	execution string
}

// cleanSameLength is like clean, but keeps the length in bytes, because offsets count bytes.
func cleanSameLength(s string) string { return clean(strings.ReplaceAll(s, "\x00", "\x1a")) }

// deleteTextWithoutBlock deletes the text in flight of an execution's blocks that never began. Changes.Ended handles
// blocks that are not in memory.
func (f *folding) deleteTextWithoutBlock(a *aggregate, execution string) {
	for id, t := range a.texts {
		if t.execution != execution {
			continue
		}
		b, present := a.blocks[id]
		switch {
		case b != nil: // its block_complete drops the text
		case present || a.complete:
			f.deleteText(a, id)
		default:
			delete(a.texts, id)
			f.discardText(a, id)
		}
	}
}

// deleteText deletes the text in flight of a block that is complete or will never begin.
func (f *folding) deleteText(a *aggregate, id string) {
	if _, ok := a.texts[id]; !ok && a.complete {
		return
	}
	delete(a.texts, id)
	f.out.TextGone = append(f.out.TextGone, Child{a.key, id})
	f.discardText(a, id)
	if l := f.live[a.key]; l != nil {
		l.Deltas = remove(l.Deltas, func(d events.Delta) bool { return rowKey(d.BlockID) == id })
	}
}

// discardText removes a block's text from the changes of this fold.
func (f *folding) discardText(a *aggregate, id string) {
	f.out.Texts = remove(f.out.Texts, func(t *Text) bool { return t.Block == id && t.Session == a.key.ID && t.Tenant == a.key.Tenant })
}
