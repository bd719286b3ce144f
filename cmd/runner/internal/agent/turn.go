package agent

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Limits of what one block carries; see encodeLine for lines.
const (
	// DefaultCoalesce is the least time between two text deltas of a block. Text that arrives earlier is joined.
	DefaultCoalesce = 20 * time.Millisecond
	// maxText is the largest size of a text field in bytes. With every byte escaped it still fits into a line.
	maxText = 1 << 20
	// maxDelta is the largest size of the text of a text_delta in bytes, so that it fits into a message of the bus.
	maxDelta = 64 << 10
)

// Journal stores the lines of a turn in order and numbers them.
type Journal interface {
	// Append blocks while the journal is full, until ctx ends. Then the line is stored all the same, so that a turn
	// can always be ended.
	Append(ctx context.Context, l runner.JournalLine)
	// NewBlockID returns an id that is unique within the journal.
	NewBlockID() string
	// Name returns the name of the journal.
	Name() string
}

// TurnConfig configures a turn. A turn with a nil Journal drops everything and logs it at debug level; it is used
// between turns.
type TurnConfig struct {
	Journal     Journal
	ExecutionID string
	Now         func() time.Time   // nil for time.Now
	Coalesce    time.Duration      // 0 for DefaultCoalesce
	Log         *slog.Logger       // nil for none
	Hold        bool               // hold all lines until Start, whose line comes first
	Redact      *redact.Set        // values that no line may contain; nil for none
	Policy      *permission.Policy // decides requests of the agent; nil for the policy of an agent without permissions
	Approved    []string           // classes of requests that a person approved in an earlier attempt
	BeforeEnd   func()             // called once, before the line that ends the turn is journaled; nil for nothing
}

// Turn writes one turn to the journal: blocks, text, events, and the end. It guarantees valid ids and UTF-8 offsets,
// whole runes, text before any line that follows it, that every block is finished before the end, and exactly one end.
// Its methods block while the journal is full. They are safe for concurrent use.
type Turn struct {
	ctx context.Context // ends when the turn is killed, which also ends waiting for the journal
	cfg TurnConfig

	mu    sync.Mutex
	open  []*openBlock // in the order they were opened
	timer *time.Timer  // armed while text waits
	sent  time.Time    // when text was last journaled
	end   *runner.TurnEnd
	held  []runner.JournalLine // lines from before Start
	agent string               // the agent's own session id, as last reported

	approvals approvals
}

// openBlock is a block that has been started and not finished.
type openBlock struct {
	block        events.Block
	conversation string
	text         blockText
}

// NewTurn returns a new turn. When ctx ends, the turn no longer waits for a full journal; the turn itself does not end.
func NewTurn(ctx context.Context, cfg TurnConfig) *Turn {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Coalesce == 0 {
		cfg.Coalesce = DefaultCoalesce
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Policy == nil {
		cfg.Policy = &permission.Policy{}
	}
	t := &Turn{ctx: ctx, cfg: cfg, approvals: approvals{approved: map[string]bool{}}}
	for _, class := range cfg.Approved {
		t.approvals.approved[class] = true
	}
	return t
}

// AgentSession returns the agent's own session id from the last TranscriptWritten, or "".
func (t *Turn) AgentSession() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.agent
}

// Ended returns the end of the turn, or nil while the turn goes on.
func (t *Turn) Ended() *runner.TurnEnd {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.end
}

// Start journals the line AgentStarted, and then the lines that were held for it.
func (t *Turn) Start(s runner.TurnStart) {
	t.mu.Lock()
	defer t.mu.Unlock()
	held := t.held
	t.cfg.Hold, t.held = false, nil
	t.put(runner.AgentStarted, "", s)
	for _, line := range held {
		t.append(line)
	}
}

// append appends a line to the journal, or holds the line until Start is called.
func (t *Turn) append(line runner.JournalLine) {
	if t.cfg.Hold {
		t.held = append(t.held, line)
		return
	}
	t.cfg.Journal.Append(t.ctx, line)
}

// Open starts a block in a conversation (events.MainConversation for the main agent's) and returns its id. The turn
// sets id, status, time and execution.
func (t *Turn) Open(conversation string, b events.Block) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b = t.setFields(conversation, b, events.StatusPending)
	if t.end == nil && t.cfg.Journal != nil {
		o := &openBlock{block: b, conversation: conversation, text: blockText{redact: t.cfg.Redact.Stream()}}
		if b.Kind == events.KindToolUse {
			o.text.typed = new([]byte)
		}
		t.open = append(t.open, o)
	}
	t.write(events.BlockStart{}.EventType(), conversation, events.BlockStart{Block: b})
	return b.ID
}

// Whole journals a block that is complete at once and returns its id. A status of error is kept.
func (t *Turn) Whole(conversation string, b events.Block) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	status := events.StatusComplete
	if b.Status == events.StatusError {
		status = events.StatusError
	}
	b = t.setFields(conversation, b, status)
	t.write(events.BlockStart{}.EventType(), conversation, events.BlockStart{Block: b})
	return b.ID
}

// Text appends to the text of an open block: the content of assistant_text and thinking, the input of tool_use, the
// output of tool_result and subagent. A piece may end in the middle of a rune.
func (t *Turn) Text(id, piece string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.find(id)
	if b == nil {
		t.journalUnknownBlock("text", id)
		return
	}
	b.text.add(piece)
	if t.timer != nil || !b.text.waiting() {
		return
	}
	// The first piece is sent at once. Text that follows soon is held, to be joined.
	if wait := t.cfg.Coalesce - t.cfg.Now().Sub(t.sent); wait > 0 {
		t.timer = time.AfterFunc(wait, t.flushCoalesced)
	} else {
		t.flush()
	}
}

// Update changes fields of an open block.
func (t *Turn) Update(id string, u events.BlockUpdates) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.find(id)
	if b == nil {
		t.journalUnknownBlock("update", id)
		return
	}
	applyUpdates(&b.block, u)
	t.write(events.BlockUpdate{}.EventType(), b.conversation, events.BlockUpdate{BlockID: id, Updates: u})
}

// Complete finishes a block. If change is not nil, it is called with the finished block and may correct every field
// but the identity, text included: what the agent states at the end replaces what it streamed. It may set status
// error.
func (t *Turn) Complete(id string, change func(*events.Block)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.find(id)
	if b == nil {
		t.journalUnknownBlock("completion", id)
		return
	}
	t.finish(b, events.StatusComplete, change)
}

// Emit journals an event that is not a block.
func (t *Turn) Emit(conversation string, p events.Payload) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w, ok := p.(events.TranscriptWritten); ok && w.AgentSessionID != "" {
		t.agent = w.AgentSessionID
	}
	t.write(p.EventType(), conversation, p)
}

// End ends the turn. Blocks that are still open are finished with status error and the text so far, and open requests are
// retracted. Further calls of End and of all other methods have no effect.
func (t *Turn) End(e runner.TurnEnd) {
	t.mu.Lock()
	replies := t.finishTurn(e)
	t.mu.Unlock()
	for _, reply := range replies {
		reply()
	}
}

// finishTurn ends the turn and returns the calls of the replies to its open requests.
func (t *Turn) finishTurn(e runner.TurnEnd) (replies []func()) {
	if t.cfg.Journal == nil {
		t.cfg.Log.Debug("an end outside a turn", "outcome", e.Outcome, "code", e.Code)
		return nil
	}
	if t.end != nil {
		t.cfg.Log.Warn("agent ended its turn twice", "outcome", e.Outcome, "code", e.Code)
		return nil
	}
	replies = t.retractAll("turn_ended")
	for len(t.open) > 0 {
		t.finish(t.open[0], events.StatusError, nil)
	}
	if t.cfg.BeforeEnd != nil {
		t.cfg.BeforeEnd()
	}
	// The end of a turn does not wait for a full journal: what the turn held has been released.
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	t.ctx = ctx
	t.write(runner.TurnEnded, "", e)
	t.end = &e
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	return replies
}

// setFields returns b with the fields that the turn determines: conversation, execution, time and status.
func (t *Turn) setFields(conversation string, b events.Block, s events.BlockStatus) events.Block {
	if t.cfg.Journal != nil {
		b.ID = t.cfg.Journal.NewBlockID()
	}
	b.Status, b.Time, b.ExecutionID, b.ConversationID = s, t.cfg.Now().UTC(), t.cfg.ExecutionID, conversation
	return b
}

// find returns the open block with an id, or nil if there is none.
func (t *Turn) find(id string) *openBlock {
	i := slices.IndexFunc(t.open, func(b *openBlock) bool { return b.block.ID == id })
	if i < 0 {
		return nil
	}
	return t.open[i]
}

// journalUnknownBlock journals that the agent named a block that is not open.
func (t *Turn) journalUnknownBlock(what, id string) {
	if t.cfg.Journal == nil || t.end != nil {
		return
	}
	t.write(events.Error{}.EventType(), events.MainConversation, events.Error{
		Code: "AGENT_PROTOCOL", Message: "the agent sent " + what + " for a block that is not open: " + truncate.Prefix(id, 64),
	})
}

// finish writes the finished block and removes it from the open ones.
func (t *Turn) finish(b *openBlock, s events.BlockStatus, change func(*events.Block)) {
	b.text.finish()
	t.flush()
	t.open = slices.DeleteFunc(t.open, func(o *openBlock) bool { return o == b })
	whole := b.block
	whole.Status = s
	b.text.put(&whole)
	if change != nil {
		change(&whole)
	}
	// A session may correct the content of a block, but not its identity.
	whole.ID, whole.Kind, whole.Time, whole.ExecutionID, whole.ConversationID = b.block.ID, b.block.Kind, b.block.Time, b.block.ExecutionID, b.conversation
	if whole.Status != events.StatusError {
		whole.Status = events.StatusComplete
	}
	t.write(events.BlockComplete{}.EventType(), b.conversation, events.BlockComplete{Block: whole})
}

// flushCoalesced journals the text that waits. It is called by the timer that bounds how long text is coalesced.
func (t *Turn) flushCoalesced() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timer = nil
	if t.end == nil {
		t.flush()
	}
}

// flush journals the waiting text of all open blocks, in the order of the blocks.
func (t *Turn) flush() {
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	for _, b := range t.open {
		for {
			offset, piece := b.text.takePiece(maxDelta)
			if piece == "" {
				break
			}
			t.sent = t.cfg.Now()
			t.put(events.TextDelta, b.conversation, runner.TextDelta{BlockID: b.block.ID, Offset: offset, Delta: piece})
		}
	}
}

// write journals the waiting text of all open blocks, and then a line.
func (t *Turn) write(typ events.Type, conversation string, data any) {
	t.flush()
	t.put(typ, conversation, data)
}

// put journals a line, redacted and cut to the size of a line. After the end of the turn it drops the line.
func (t *Turn) put(typ events.Type, conversation string, data any) {
	if t.end != nil || t.cfg.Journal == nil {
		t.cfg.Log.Debug("dropped outside a turn", "type", typ)
		return
	}
	raw, cut, err := encodeLine(Redacted(t.cfg.Redact, data))
	conversation = redactConversation(t.cfg.Redact, conversation)
	line := runner.JournalLine{Type: typ, Time: t.cfg.Now().UTC(), ExecutionID: t.cfg.ExecutionID, ConversationID: conversation, Data: raw}
	// The note comes before the line, because the end of a turn is its last line.
	if err != nil {
		t.note(line, "INTERNAL", err)
		return
	}
	if cut {
		t.note(line, "OUTPUT_CUT", errCut)
	}
	t.append(line)
}

// note journals an event with a code about a line that was changed or dropped because of err.
func (t *Turn) note(line runner.JournalLine, code string, err error) {
	raw, _, encErr := encodeLine(events.Error{Code: code, Message: string(line.Type) + ": " + err.Error()})
	if encErr != nil {
		t.cfg.Log.Error("cannot encode an error", "type", line.Type, "err", encErr)
		return
	}
	line.Type, line.Data = events.Error{}.EventType(), raw
	t.append(line)
}
