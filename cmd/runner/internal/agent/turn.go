package agent

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
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
	// DefaultCoalesce is the minimum time between two text deltas of a block. Text that arrives earlier is joined to
	// one delta.
	DefaultCoalesce = 20 * time.Millisecond
	// maxTextField is the maximum size in bytes of a text field of a journal line. A text of this size fits into a line
	// even if every byte is escaped.
	maxTextField = 1 << 20
	// maxDeltaText is the maximum size in bytes of the text of a text_delta, so that the event fits into a NATS message.
	maxDeltaText = 64 << 10
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

// TurnConfig configures a turn. A turn with a nil Journal is used while no turn runs: its lines go to Idle, it does not end,
// and it denies requests for permission.
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
	Workspace   string             // absolute path of the agent's folder; "" if requests name no files in it
	BeforeEnd   func()             // called once, before the line that ends the turn is journaled; nil for nothing

	// AnswerTimeout is the time limit for a request that the agent answers without its model; 0 for no limit.
	AnswerTimeout time.Duration
	// Idle keeps what is written after the end of the turn, or without a Journal; nil for nothing.
	Idle *IdleOutput
}

// Turn writes one turn to the journal: blocks, text, events, and the end. It guarantees valid ids and UTF-8 offsets,
// whole runes, text before any line that follows it, that every block is finished before the end, and exactly one end.
// Its methods block while the journal is full. They are safe for concurrent use.
type Turn struct {
	ctx  context.Context // ends when the turn is killed, which also ends waiting for the journal
	cfg  TurnConfig
	idle bool // no turn runs

	mu    sync.Mutex
	open  []*openBlock // in the order they were opened
	timer *time.Timer  // armed while text waits
	sent  time.Time    // when text was last journaled
	end   *runner.TurnEnd
	held  []runner.JournalLine // lines from before Start
	agent string               // the agent's own session id, as last reported
	alarm alarm

	approvals approvals
}

// openBlock is a block of a turn that was started and is not finished.
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
	if cfg.Idle == nil {
		cfg.Idle = &IdleOutput{}
	}
	idle := cfg.Journal == nil
	if idle {
		cfg.Journal = cfg.Idle
	}
	if cfg.Policy == nil {
		cfg.Policy = &permission.Policy{}
	}
	t := &Turn{ctx: ctx, cfg: cfg, idle: idle, approvals: approvals{approved: map[string]bool{}}}
	for _, class := range cfg.Approved {
		t.approvals.approved[class] = true
	}
	return t
}

// AgentSession returns the agent's own session id, as the last event transcript_written had it, or "".
func (t *Turn) AgentSession() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.agent
}

// Ended returns the outcome of the turn, or nil while the turn goes on.
func (t *Turn) Ended() *runner.TurnEnd {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.end
}

// Start journals the line that the agent has started, and then the lines that were held until then.
func (t *Turn) Start(s runner.TurnStart) {
	t.mu.Lock()
	defer t.mu.Unlock()
	held := t.held
	t.cfg.Hold, t.held = false, nil
	t.journalLine(runner.AgentStarted, "", s)
	for _, line := range held {
		t.appendOrHold(line)
	}
}

// appendOrHold appends a line to the journal, or holds the line until Start is called.
func (t *Turn) appendOrHold(line runner.JournalLine) {
	if t.cfg.Hold {
		t.held = append(t.held, line)
		return
	}
	if t.end != nil {
		t.cfg.Idle.Append(t.ctx, line)
		return
	}
	t.cfg.Journal.Append(t.ctx, line)
}

// OpenBlock starts a block in a conversation (events.MainConversation for the main agent's) and returns the id of the
// block. OpenBlock sets the block's id, status, time and execution.
func (t *Turn) OpenBlock(conversation string, b events.Block) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.openBlock(conversation, b)
}

// openBlock is OpenBlock for a caller that holds mu.
func (t *Turn) openBlock(conversation string, b events.Block) string {
	b = t.withTurnFields(conversation, b, events.StatusPending)
	if t.end == nil {
		o := &openBlock{block: b, conversation: conversation, text: blockText{redact: t.cfg.Redact.NewStream()}}
		if b.Kind == events.KindToolUse {
			o.text.typed = new([]byte)
		}
		t.open = append(t.open, o)
	}
	t.flushAndJournalLine(events.BlockStart{}.EventType(), conversation, events.BlockStart{Block: b})
	return b.ID
}

// AddBlock journals a block that is complete from the start, and returns the id of the block. If the block has status
// error, AddBlock keeps it.
func (t *Turn) AddBlock(conversation string, b events.Block) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	status := events.StatusComplete
	if b.Status == events.StatusError {
		status = events.StatusError
	}
	b = t.withTurnFields(conversation, b, status)
	t.flushAndJournalLine(events.BlockStart{}.EventType(), conversation, events.BlockStart{Block: b})
	return b.ID
}

// AppendText appends a piece to the text of an open block: the content of assistant_text and thinking, the input of
// tool_use, the output of tool_result and subagent. A piece may end in the middle of a rune.
func (t *Turn) AppendText(id, piece string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.findOpenBlock(id)
	if b == nil {
		t.journalUnknownBlock("text", id, piece)
		return
	}
	b.text.appendPiece(piece)
	if t.timer != nil || !b.text.hasUnsentText() {
		return
	}
	// The first piece is sent at once. Text that follows soon is held, to be joined.
	if wait := t.cfg.Coalesce - t.cfg.Now().Sub(t.sent); wait > 0 {
		t.timer = time.AfterFunc(wait, t.flushCoalesced)
	} else {
		t.flushText()
	}
}

// UpdateBlock changes fields of an open block, and journals the change.
func (t *Turn) UpdateBlock(id string, u events.BlockUpdates) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.findOpenBlock(id)
	if b == nil {
		t.journalUnknownBlock("update", id, "")
		return
	}
	t.updateBlock(b, u)
}

// updateBlock is UpdateBlock for a caller that holds mu.
func (t *Turn) updateBlock(b *openBlock, u events.BlockUpdates) {
	applyBlockUpdates(&b.block, u)
	t.flushAndJournalLine(events.BlockUpdate{}.EventType(), b.conversation, events.BlockUpdate{BlockID: b.block.ID, Updates: u})
}

// CompleteBlock finishes an open block. If change is not nil, it is called with the finished block and may correct
// every field except the identity; a text that it sets replaces the text that was streamed. It may set status error.
func (t *Turn) CompleteBlock(id string, change func(*events.Block)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.findOpenBlock(id)
	if b == nil {
		t.journalUnknownBlock("completion", id, "")
		return
	}
	t.finishBlock(b, events.StatusComplete, change)
}

// SetPlan journals the whole plan of a conversation. The first plan opens a block, and a later plan replaces that of the block. The end of the
// conversation or of the turn completes the block.
func (t *Turn) SetPlan(conversation string, p events.Plan) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if b := t.findOpenPlan(conversation); b != nil {
		t.updateBlock(b, events.BlockUpdates{Plan: &p})
		return
	}
	t.openBlock(conversation, events.Block{Kind: events.KindPlan, Plan: &p})
}

// findOpenPlan returns the open block of kind plan of a conversation, or nil if there is none.
func (t *Turn) findOpenPlan(conversation string) *openBlock {
	for _, b := range t.open {
		if b.block.Kind == events.KindPlan && b.conversation == conversation {
			return b
		}
	}
	return nil
}

// Emit journals an event that is not a block. The end of a sub-agent completes the plan of its conversation.
func (t *Turn) Emit(conversation string, p events.Payload) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w, ok := p.(events.TranscriptWritten); ok && w.AgentSessionID != "" {
		t.agent = w.AgentSessionID
	}
	if ended, ok := p.(events.SubagentCompleted); ok {
		if plan := t.findOpenPlan(ended.Conversation); plan != nil {
			t.finishBlock(plan, events.StatusComplete, nil)
		}
	}
	t.flushAndJournalLine(p.EventType(), conversation, p)
}

// End ends the turn. Blocks that are still open are finished with status error and the text so far (see AbortBlocks), and open requests are
// retracted. What comes after the first call of End goes to TurnConfig.Idle.
func (t *Turn) End(e runner.TurnEnd) {
	t.mu.Lock()
	replies := t.finishTurn(e)
	t.mu.Unlock()
	for _, reply := range replies {
		reply()
	}
}

// finishTurn ends the turn for a caller that holds mu. It returns functions that call the replies to the open
// permission requests.
func (t *Turn) finishTurn(e runner.TurnEnd) (replies []func()) {
	if t.end != nil || t.idle {
		t.journalLine(events.Log{}.EventType(), events.MainConversation, events.Log{
			Level: "warn", Stream: "runner", Message: fmt.Sprintf("the agent ended a turn that did not run: %s %s %s", e.Outcome, e.Code, e.Message),
		})
		return nil
	}
	replies = t.retractRequests("turn_ended")
	t.finishOpenBlocks()
	if t.cfg.BeforeEnd != nil {
		t.cfg.BeforeEnd()
	}
	// The end of a turn does not wait for a full journal: what the turn held has been released.
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	t.ctx = ctx
	t.flushAndJournalLine(runner.TurnEnded, "", e)
	t.end = &e
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	if t.alarm.timer != nil {
		t.alarm.timer.Stop()
		t.alarm = alarm{}
	}
	return replies
}

// AbortBlocks finishes the blocks that are still open with status error and the text so far. A plan and a loaded skill are whole at any time:
// their blocks get status complete.
func (t *Turn) AbortBlocks() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.finishOpenBlocks()
}

// finishOpenBlocks is AbortBlocks for a caller that holds mu.
func (t *Turn) finishOpenBlocks() {
	for len(t.open) > 0 {
		status := events.StatusError
		if kind := t.open[0].block.Kind; kind == events.KindPlan || kind == events.KindSkillLoad {
			status = events.StatusComplete
		}
		t.finishBlock(t.open[0], status, nil)
	}
}

// withTurnFields returns b with the fields that the turn determines: conversation, execution, time and status.
func (t *Turn) withTurnFields(conversation string, b events.Block, s events.BlockStatus) events.Block {
	b.ID = t.cfg.Journal.NewBlockID()
	b.Status, b.Time, b.ExecutionID, b.ConversationID = s, t.cfg.Now().UTC(), t.cfg.ExecutionID, conversation
	return b
}

// findOpenBlock returns the open block with the given id, or nil if there is none.
func (t *Turn) findOpenBlock(id string) *openBlock {
	i := slices.IndexFunc(t.open, func(b *openBlock) bool { return b.block.ID == id })
	if i < 0 {
		return nil
	}
	return t.open[i]
}

// journalUnknownBlock journals an error event: the adapter named the block id, which is not open. what names the
// operation, and text is the text that it would have added.
func (t *Turn) journalUnknownBlock(what, id, text string) {
	t.flushAndJournalLine(events.Error{}.EventType(), events.MainConversation, events.Error{
		Code: "AGENT_PROTOCOL", Message: "the agent sent " + what + " for a block that is not open: " + strings.TrimSuffix(truncate.Prefix(id, 64)+": "+text, ": "),
	})
}

// finishBlock journals an open block as finished with status s, and removes it from the open blocks.
func (t *Turn) finishBlock(b *openBlock, s events.BlockStatus, change func(*events.Block)) {
	b.text.finish()
	t.flushText()
	t.open = slices.DeleteFunc(t.open, func(o *openBlock) bool { return o == b })
	whole := b.block
	whole.Status = s
	b.text.storeIn(&whole)
	if change != nil {
		change(&whole)
	}
	// A session may correct the content of a block, but not its identity.
	whole.ID, whole.Kind, whole.Time, whole.ExecutionID, whole.ConversationID = b.block.ID, b.block.Kind, b.block.Time, b.block.ExecutionID, b.conversation
	if whole.Status != events.StatusError {
		whole.Status = events.StatusComplete
	}
	t.flushAndJournalLine(events.BlockComplete{}.EventType(), b.conversation, events.BlockComplete{Block: whole})
}

// flushCoalesced journals the text that waits to be joined to one delta. A timer calls it, so that text does not wait
// longer than the coalescing time.
func (t *Turn) flushCoalesced() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timer = nil
	if t.end == nil {
		t.flushText()
	}
}

// flushText journals the text of all open blocks that is not in the journal yet, in the order of the blocks.
func (t *Turn) flushText() {
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	for _, b := range t.open {
		for {
			offset, piece := b.text.takePiece(maxDeltaText)
			if piece == "" {
				break
			}
			t.sent = t.cfg.Now()
			t.journalLine(events.TextDelta, b.conversation, runner.TextDelta{BlockID: b.block.ID, Offset: offset, Delta: piece})
		}
	}
}

// flushAndJournalLine journals the unsent text of all open blocks, and then a line with data.
func (t *Turn) flushAndJournalLine(typ events.Type, conversation string, data any) {
	t.flushText()
	t.journalLine(typ, conversation, data)
}

// journalLine journals a line with data, redacted and cut to the maximum size of a line. After the end of the turn it appends
// the line to TurnConfig.Idle.
func (t *Turn) journalLine(typ events.Type, conversation string, data any) {
	raw, cut, err := encodeLine(RedactPayload(t.cfg.Redact, data))
	conversation = redactConversation(t.cfg.Redact, conversation)
	line := runner.JournalLine{Type: typ, Time: t.cfg.Now().UTC(), ExecutionID: t.cfg.ExecutionID, ConversationID: conversation, Data: raw}
	// The note comes before the line, because the end of a turn is its last line.
	if err != nil {
		t.journalLineError(line, "INTERNAL", err)
		return
	}
	if cut {
		t.journalLineError(line, "OUTPUT_CUT", errLineTooLong)
	}
	t.appendOrHold(line)
}

// journalLineError journals an error event with a code: the line was changed or dropped because of err.
func (t *Turn) journalLineError(line runner.JournalLine, code string, err error) {
	raw, _, encErr := encodeLine(events.Error{Code: code, Message: string(line.Type) + ": " + err.Error()})
	if encErr != nil {
		t.cfg.Log.Error("cannot encode an error", "type", line.Type, "err", encErr)
		return
	}
	line.Type, line.Data = events.Error{}.EventType(), raw
	t.appendOrHold(line)
}
