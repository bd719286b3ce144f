// Package blocks folds events and deltas into blocks. It is the only such reducer: live clients, reloads and the
// server use it, and the test vectors in testdata define it for other languages. It is pure.
package blocks

import (
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// ChangedBlockID returns the id of the block that an event changes, or "" if the event changes no block.
func ChangedBlockID(e events.Event) string {
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

// Reduce returns the state of a block after an event. prev is the block before the event, or nil if the block is not
// known yet. Reduce returns nil if the event changes no block, or if the block cannot be shown yet. A block that is
// complete or in status error no longer changes.
func Reduce(prev *events.Block, e events.Event) *events.Block {
	if prev != nil && prev.Status != events.StatusPending {
		return prev
	}
	switch d := e.Data.(type) {
	case events.MessageAccepted:
		return withEventFields(events.Block{
			ID: d.BlockID, Kind: events.KindUserMessage, Status: events.StatusComplete, Time: e.Time,
			Content: d.Content, Parts: d.Parts, ConversationID: events.MainConversation,
		}, e)
	case events.BlockStart:
		b := withEventFields(d.Block, e)
		if prev != nil {
			b.Content = prev.Content
		}
		return b
	case events.BlockUpdate:
		if prev == nil {
			return nil
		}
		b := *prev
		applyUpdates(&b, d.Updates)
		return &b
	case events.BlockComplete:
		b := withEventFields(d.Block, e)
		if prev != nil && !prev.Time.IsZero() {
			b.Time = prev.Time
		}
		return b
	}
	return prev
}

// withEventFields returns a copy of b with the execution, conversation, time and status of the event e.
func withEventFields(b events.Block, e events.Event) *events.Block {
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
	setPlanTodos(&b)
	return &b
}

// setPlanTodos sets the todos of a block of kind plan to the items of its plan, for clients that show the list of both kinds.
func setPlanTodos(b *events.Block) {
	if b.Kind == events.KindPlan {
		b.Todos = b.TodoList()
	}
}

// applyUpdates sets the fields of a block that a block_update event changes.
func applyUpdates(b *events.Block, u events.BlockUpdates) {
	if u.Input != nil {
		b.Input = u.Input
	}
	if u.Todos != nil {
		b.Todos = u.Todos
	}
	if u.Plan != nil {
		b.Plan = u.Plan
	}
	if u.Step != nil {
		b.Step = u.Step
	}
	for _, f := range []struct {
		to   *string
		from *string
	}{{&b.DisplayName, u.DisplayName}, {&b.Description, u.Description}, {&b.Summary, u.Summary}, {&b.Output, u.Output}} {
		if f.from != nil {
			*f.to = *f.from
		}
	}
	setPlanTodos(b)
}

// StreamedText is the streamed text of one open block: the contiguous text from its start, and deltas that arrived ahead of
// a gap. The zero StreamedText is empty.
type StreamedText struct {
	Known   string         // may be set, to continue from a text that is known from elsewhere
	Waiting []events.Delta // deltas after a gap, sorted by offset

	buffer *strings.Builder // its content is Known, unless Known was set or another copy of the StreamedText has grown; nil until text is appended
}

// Add adds a delta. Deltas may arrive in any order and several times. Add returns the text that was appended to
// Known. A text that grows by small deltas costs time and memory in proportion to its length.
func (t *StreamedText) Add(d events.Delta) (fresh string) {
	if len(t.Waiting) == 0 && int(d.Offset) <= len(t.Known) {
		return t.appendNew(d)
	}
	start := len(t.Known)
	i, _ := slices.BinarySearchFunc(t.Waiting, d, func(a, b events.Delta) int { return int(int64(a.Offset) - int64(b.Offset)) })
	t.Waiting = slices.Insert(t.Waiting, i, d)
	for len(t.Waiting) > 0 && int(t.Waiting[0].Offset) <= len(t.Known) {
		w := t.Waiting[0]
		t.Waiting = t.Waiting[1:]
		t.appendNew(w)
	}
	return t.Known[start:]
}

// appendNew appends the part of a delta that is not in Known yet, and returns this part. The delta must not begin after
// the end of Known.
func (t *StreamedText) appendNew(d events.Delta) (fresh string) {
	skip := len(t.Known) - int(d.Offset)
	if skip >= len(d.Text) {
		return ""
	}
	fresh = d.Text[skip:]
	// The comparison reads no text in the usual case, in which both strings are the same memory.
	if t.buffer == nil || t.buffer.String() != t.Known {
		t.buffer = &strings.Builder{}
		t.buffer.WriteString(t.Known)
	}
	t.buffer.WriteString(fresh)
	t.Known = t.buffer.String()
	return fresh
}

// BlockView holds the blocks of one session as one client shows them. It is updated by the events and deltas of a
// stream.
type BlockView struct {
	blocks map[string]*events.Block
	texts  map[string]*StreamedText
	order  []string       // block ids in the order of their first appearance
	runs   map[string]int // execution id to its index in the session
}

// NewBlockView returns an empty BlockView.
func NewBlockView() *BlockView {
	return &BlockView{blocks: map[string]*events.Block{}, texts: map[string]*StreamedText{}, runs: map[string]int{}}
}

// Apply applies one event. Events must come in order of seq, each once.
func (v *BlockView) Apply(e events.Event) {
	if _, seen := v.runs[e.ExecutionID]; !seen && e.ExecutionID != "" {
		v.runs[e.ExecutionID] = len(v.runs)
	}
	id := ChangedBlockID(e)
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

// ApplyDelta applies a delta. Deltas may come in any order, before or after the start of their block.
func (v *BlockView) ApplyDelta(d events.Delta) {
	b := v.blocks[d.BlockID]
	if b != nil && b.Status != events.StatusPending {
		return
	}
	t := v.texts[d.BlockID]
	if t == nil {
		t = &StreamedText{}
		v.texts[d.BlockID] = t
	}
	t.Add(d)
	if b != nil {
		b.Content = t.Known
	}
}

// Blocks returns the blocks in display order: by execution, then by seq.
func (v *BlockView) Blocks() []events.Block {
	out := make([]events.Block, 0, len(v.order))
	for _, id := range v.order {
		out = append(out, *v.blocks[id])
	}
	slices.SortStableFunc(out, func(a, b events.Block) int { return v.runs[a.ExecutionID] - v.runs[b.ExecutionID] })
	return out
}

// String returns one line per block, for the messages of failed comparisons.
func (v *BlockView) String() string {
	var s strings.Builder
	for _, b := range v.Blocks() {
		s.WriteString(string(b.Kind) + " " + string(b.Status) + " " + b.ID + " " + b.Content + string(b.Input) + b.Output + b.Message + "\n")
	}
	return s.String()
}
