// Package blocks is the one reducer that folds events and text in flight into
// blocks: the same for live clients, reloads, the server and, through the
// vectors in testdata, other languages. It is pure.
package blocks

import (
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// Target is the id of the block that an event is about; "" for none.
func Target(e events.Event) string {
	switch d := e.Data.(type) {
	case events.MessageAccepted:
		return d.BlockID
	case events.BlockStart:
		return d.Block.ID
	case events.BlockUpdate:
		return d.BlockID
	case events.BlockComplete:
		return d.Block.ID
	}
	return ""
}

// Reduce gives the block after an event; prev is nil when it is not known yet.
// It returns nil when the event is about no block, or about one that cannot be
// shown yet. A block that is complete or in error no longer changes.
func Reduce(prev *events.Block, e events.Event) *events.Block {
	if prev != nil && prev.Status != events.StatusPending {
		return prev
	}
	switch d := e.Data.(type) {
	case events.MessageAccepted:
		return dress(events.Block{
			ID: d.BlockID, Kind: events.KindUserMessage, Status: events.StatusComplete, Time: e.Time,
			Content: d.Content, Parts: d.Parts, ConversationID: events.MainConversation,
		}, e)
	case events.BlockStart:
		b := dress(d.Block, e)
		if prev != nil {
			b.Content = prev.Content
		}
		return b
	case events.BlockUpdate:
		if prev == nil {
			return nil
		}
		b := *prev
		update(&b, d.Updates)
		return &b
	case events.BlockComplete:
		b := dress(d.Block, e)
		if prev != nil && !prev.Time.IsZero() {
			b.Time = prev.Time
		}
		return b
	}
	return prev
}

// dress fills in what the event says of its block.
func dress(b events.Block, e events.Event) *events.Block {
	b.ExecutionID = e.ExecutionID
	if e.ConversationID != "" {
		b.ConversationID = e.ConversationID
	}
	if b.Time.IsZero() {
		b.Time = e.Time
	}
	if b.Status == "" {
		b.Status = events.StatusPending
		if _, done := e.Data.(events.BlockComplete); done {
			b.Status = events.StatusComplete
		}
	}
	return &b
}

func update(b *events.Block, u events.BlockUpdates) {
	if u.Input != nil {
		b.Input = u.Input
	}
	if u.Todos != nil {
		b.Todos = u.Todos
	}
	for _, f := range []struct {
		to   *string
		from *string
	}{{&b.DisplayName, u.DisplayName}, {&b.Description, u.Description}, {&b.Summary, u.Summary}, {&b.Output, u.Output}} {
		if f.from != nil {
			*f.to = *f.from
		}
	}
}

// Text is the text in flight of one open block: what is known without a hole,
// and what waits behind one. The zero Text knows nothing.
type Text struct {
	Known   string
	Waiting []events.Delta // sorted by offset, each beyond a hole
}

// Add takes a delta in any order and as often as it comes, and gives what is
// newly known: the text to append, which begins at the former length of Known.
func (t *Text) Add(d events.Delta) (fresh string) {
	start := len(t.Known)
	i, _ := slices.BinarySearchFunc(t.Waiting, d, func(a, b events.Delta) int { return int(int64(a.Offset) - int64(b.Offset)) })
	t.Waiting = slices.Insert(t.Waiting, i, d)
	for len(t.Waiting) > 0 && int(t.Waiting[0].Offset) <= len(t.Known) {
		w := t.Waiting[0]
		t.Waiting = t.Waiting[1:]
		if skip := len(t.Known) - int(w.Offset); skip < len(w.Text) {
			t.Known += w.Text[skip:]
		}
	}
	return t.Known[start:]
}

// View is the blocks of one session, fed by one client's stream.
type View struct {
	blocks map[string]*events.Block
	texts  map[string]*Text
	order  []string       // block ids as they were first shown
	runs   map[string]int // execution to its place
}

// NewView starts with no blocks.
func NewView() *View {
	return &View{blocks: map[string]*events.Block{}, texts: map[string]*Text{}, runs: map[string]int{}}
}

// Apply folds one event; events come in order of seq, each once.
func (v *View) Apply(e events.Event) {
	if _, seen := v.runs[e.ExecutionID]; !seen && e.ExecutionID != "" {
		v.runs[e.ExecutionID] = len(v.runs)
	}
	id := Target(e)
	if id == "" {
		return
	}
	prev := v.blocks[id]
	next := Reduce(prev, e)
	if next == nil {
		return
	}
	if prev == nil {
		v.order = append(v.order, id)
	}
	v.blocks[id] = next
	if next.Status != events.StatusPending {
		delete(v.texts, id)
		return
	}
	if t := v.texts[id]; t != nil {
		next.Content = t.Known
	}
}

// ApplyDelta folds text in flight, in any order, before or after its block is known.
func (v *View) ApplyDelta(d events.Delta) {
	b := v.blocks[d.BlockID]
	if b != nil && b.Status != events.StatusPending {
		return
	}
	t := v.texts[d.BlockID]
	if t == nil {
		t = &Text{}
		v.texts[d.BlockID] = t
	}
	t.Add(d)
	if b != nil {
		b.Content = t.Known
	}
}

// Blocks gives the blocks in the order they are shown: by execution, then by seq.
func (v *View) Blocks() []events.Block {
	out := make([]events.Block, 0, len(v.order))
	for _, id := range v.order {
		out = append(out, *v.blocks[id])
	}
	slices.SortStableFunc(out, func(a, b events.Block) int { return v.runs[a.ExecutionID] - v.runs[b.ExecutionID] })
	return out
}

// String shows the blocks for a failed comparison: a line each.
func (v *View) String() string {
	var s strings.Builder
	for _, b := range v.Blocks() {
		s.WriteString(string(b.Kind) + " " + string(b.Status) + " " + b.ID + " " + b.Content + string(b.Input) + b.Output + b.Message + "\n")
	}
	return s.String()
}
