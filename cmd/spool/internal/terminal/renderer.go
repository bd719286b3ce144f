// Package terminal shows a session to people: its blocks as they arrive, and on a terminal a status line with a
// spinner below them.
package terminal

import (
	"context"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

const (
	spinnerInterval = 100 * time.Millisecond
	defaultWidth    = 80
)

var spinnerFrames = []string{"⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"}

// Config configures a Renderer. Out is required.
type Config struct {
	Out   io.Writer
	TTY   bool       // Out is a terminal: wrap lines and show a status line
	Color bool       // Out supports colours
	Width func() int // current width of the terminal in columns; nil means 80
	// Prompts is set if a prompt with the whole request follows each approval request.
	Prompts bool
	Now     func() time.Time // nil means time.Now
}

// Renderer writes the blocks of a session to a terminal or a file, and shows a status line on a terminal. It is safe
// for concurrent use.
type Renderer struct {
	mu        sync.Mutex
	screen    screen
	now       func() time.Time
	frame     int
	state     string // state of the program itself, such as a lost connection; shown first in the status line
	prompts   bool
	label     PromptLabel // of the prompt that replaces the status line
	typed     string      // the text that the user has typed at the prompt
	prompting bool        // the output of the session is held back
	held      []func()    // writes the output of the session that was held back
	hint      string      // shown at the end of the status line
	runs      []*statusExecution
	queue     []*queuedItem // blocks to be shown, in the order of their start
	items     map[string]*queuedItem
	texts     map[string]*blocks.StreamedText // text of blocks that have not started
	tools     map[string]string               // tool name by call id
	approvals map[string]string               // title of open approval requests
	gap       bool                            // text was written above, so the next block must be separated from it
	last      string                          // call id of the tool_use that was shown last, for its result
}

// statusExecution is an execution that has not ended, with what the status line shows about it.
type statusExecution struct {
	id    string
	phase string
	waits int // number of open approval requests
	since time.Time
	usage events.Usage
	tool  string
}

// queuedItem is a block of the session, or a note of the program, that is shown or waits to be shown.
type queuedItem struct {
	block *events.Block
	text  *blocks.StreamedText
	note  []styledRune // a line of the renderer itself; block is then empty
	shown string       // text of a streamed block that is already shown
	below bool         // with note: the line belongs to the note above it
	begun bool
	// written is set when the item leaves the queue: a tool call is written when its input is known, and may end
	// later.
	written bool
}

// New returns a Renderer that writes to cfg.Out.
func New(cfg Config) *Renderer {
	if cfg.Width == nil {
		cfg.Width = func() int { return defaultWidth }
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Renderer{
		screen: screen{out: cfg.Out, tty: cfg.TTY, color: cfg.Color, width: cfg.Width}, now: cfg.Now, prompts: cfg.Prompts,
		items: map[string]*queuedItem{}, texts: map[string]*blocks.StreamedText{}, tools: map[string]string{}, approvals: map[string]string{},
	}
}

// ShowEvent shows an event of the log. The caller must pass the events in the order of seq, each once.
func (r *Renderer) ShowEvent(e events.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holdOutput(func() {
		r.trackExecution(e)
		if id := blocks.ChangedBlockID(e); id != "" {
			r.updateBlock(id, e)
		}
		if !r.writeApproval(e) {
			r.writeNotice(e)
		}
	})
	r.redraw()
}

// ShowDelta shows the text of a delta.
func (r *Renderer) ShowDelta(d events.Delta) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holdOutput(func() { r.addDelta(d) })
	r.redraw()
}

// addDelta shows the text of a delta.
func (r *Renderer) addDelta(d events.Delta) {
	text := r.texts[d.BlockID]
	if it := r.items[d.BlockID]; it != nil {
		text = it.text
	} else if text == nil {
		text = &blocks.StreamedText{}
		r.texts[d.BlockID] = text
	}
	text.Add(d)
	r.writeReadyBlocks()
}

// ShowSnapshot shows blocks in place of events that were skipped.
func (r *Renderer) ShowSnapshot(list []events.Block) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holdOutput(func() {
		for i := range list {
			b := list[i]
			r.queueBlock(&b)
			if it := r.items[b.ID]; it != nil && b.Status == events.StatusPending {
				it.text.Known = b.Content
			}
		}
		r.writeReadyBlocks()
	})
	r.redraw()
}

// ShowNote writes a line of the program itself, at once.
func (r *Renderer) ShowNote(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.endNonEmptyLine() // the current block continues below
	r.writeLine(toStyledRunes(styleYellow, SafeLine(text)))
	r.redraw()
}

// SetProgramState sets the state of the program itself, which the status line shows first. An empty text clears it.
func (r *Renderer) SetProgramState(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = SafeLine(text)
	r.redraw()
}

// SetHint sets the text that the status line shows at its end while an execution runs.
func (r *Renderer) SetHint(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hint = text
	r.redraw()
}

// RunSpinner moves the spinner of the status line until ctx ends. Without a terminal it returns at once.
func (r *Renderer) RunSpinner(ctx context.Context) {
	if !r.screen.tty {
		return
	}
	tick := time.NewTicker(spinnerInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.AdvanceSpinner()
		}
	}
}

// AdvanceSpinner moves the spinner of the status line by one frame.
func (r *Renderer) AdvanceSpinner() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.frame++
	if r.screen.status != "" || r.statusLine() != "" {
		r.redraw()
	}
}

// Close shows everything that is still queued, and removes the status line. It returns the first error of writing.
func (r *Renderer) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.releaseOutput()
	r.endBlocks("")
	r.runs, r.state, r.label = nil, "", PromptLabel{}
	return r.screen.close()
}

// updateBlock updates the block with the given id by an event, and shows the change.
func (r *Renderer) updateBlock(id string, e events.Event) {
	var prev *events.Block
	if it := r.items[id]; it != nil {
		prev = it.block
	}
	if next := blocks.Reduce(prev, e); next != nil {
		if it := r.items[id]; it != nil && it.written && hasOtherPlan(prev, next) {
			it.written = false // it is written again
			r.queue = append(r.queue, it)
		}
		r.queueBlock(next)
	}
	r.writeReadyBlocks()
}

// hasOtherPlan reports whether a block has another plan, list of tasks or step than before.
func hasOtherPlan(before, now *events.Block) bool {
	return !reflect.DeepEqual(before.Plan, now.Plan) || !reflect.DeepEqual(before.Step, now.Step) || !slices.Equal(before.Todos, now.Todos)
}

// queueBlock adds a block to the queue, or replaces it there.
func (r *Renderer) queueBlock(b *events.Block) {
	it := r.items[b.ID]
	if it == nil {
		it = &queuedItem{text: r.texts[b.ID]}
		if it.text == nil {
			it.text = &blocks.StreamedText{}
		}
		delete(r.texts, b.ID)
		r.items[b.ID] = it
		r.queue = append(r.queue, it)
		if b.Kind == events.KindToolUse {
			r.tools[b.ToolUseID] = b.ToolName
		}
	}
	if it.block = b; it.written && it.isComplete() {
		delete(r.items, b.ID)
	}
}

// writeReadyBlocks writes all queued blocks that can be written now. It writes one block at a time: all other blocks
// wait until that block is complete.
func (r *Renderer) writeReadyBlocks() {
	for {
		i := slices.IndexFunc(r.queue, func(it *queuedItem) bool { return it.begun })
		if i < 0 {
			i = slices.IndexFunc(r.queue, (*queuedItem).hasOutput)
		}
		if i < 0 || !r.writeBlock(r.queue[i]) {
			return
		}
		it := r.queue[i]
		r.queue = slices.Delete(r.queue, i, i+1)
		if it.written = true; it.isComplete() {
			delete(r.items, it.block.ID)
		}
	}
}

// isStreamed reports whether the text of the block is shown while the agent writes it.
func (it *queuedItem) isStreamed() bool {
	return it.block.Kind == events.KindAssistantText || it.block.Kind == events.KindThinking
}

// isComplete reports whether the block will not change any more.
func (it *queuedItem) isComplete() bool { return it.block.Status != events.StatusPending }

// hasOutput reports whether there is a part of the block to show.
func (it *queuedItem) hasOutput() bool {
	b := it.block
	return it.isComplete() || it.isStreamed() && it.text.Known != "" || b.Kind == events.KindToolUse && len(b.Input) > 0 ||
		len(b.TodoList()) > 0 || b.Kind == events.KindStep || b.Kind == events.KindSkillLoad
}

// endBlocks ends the open blocks of an execution, or of all executions if id is "".
func (r *Renderer) endBlocks(id string) {
	for _, it := range r.queue {
		if it.isComplete() || id != "" && it.block.ExecutionID != id {
			continue
		}
		b := *it.block
		b.Status = events.StatusError
		if it.isStreamed() {
			b.Content = it.text.Known
		}
		it.block = &b
	}
	r.writeReadyBlocks()
}

// trackExecution updates the executions that the status line shows.
func (r *Renderer) trackExecution(e events.Event) {
	if e.ExecutionID == "" {
		return
	}
	i := slices.IndexFunc(r.runs, func(x *statusExecution) bool { return x.id == e.ExecutionID })
	if events.IsTerminal(e.Type()) {
		if i >= 0 {
			r.runs = slices.Delete(r.runs, i, i+1)
		}
		return
	}
	if _, ok := e.Data.(events.MessageAccepted); ok && i < 0 {
		r.runs = append(r.runs, &statusExecution{id: e.ExecutionID, phase: "waiting", since: e.Time})
		return
	}
	if i >= 0 {
		r.runs[i].applyEvent(e)
	}
}

// applyEvent updates what the status line shows about the execution.
func (x *statusExecution) applyEvent(e events.Event) {
	switch d := e.Data.(type) {
	case events.ExecutionQueued:
		x.phase = "queued"
		if d.Ahead > 0 {
			x.phase = fmt.Sprintf("queued, %d ahead", d.Ahead)
		}
	case events.ExecutionDispatched:
		x.phase = "starting"
	case events.SandboxCreating:
		x.phase = "creating a sandbox"
	case events.SandboxReady:
		x.phase = "starting"
	case events.ExecutionStarted:
		x.phase = "running"
	case events.AttemptFailed:
		x.phase = "starting again"
	case events.InterruptRequested:
		if !strings.HasPrefix(x.phase, "queued") { // an interrupt stops the running execution
			x.phase = "stopping"
		}
	case events.CancelRequested:
		x.phase = "cancelling"
	case events.TerminateRequested:
		x.phase = "terminating"
	case events.PauseRequested:
		x.phase = "pausing"
	case events.ExecutionPaused:
		x.phase = "paused"
	case events.ExecutionResumed:
		x.phase = "running"
	case events.ApprovalRequested:
		x.waits++
	case events.ApprovalResolved, events.ApprovalRetracted:
		x.waits = max(x.waits-1, 0)
	case events.MetadataUpdate:
		x.usage = d.Usage
	case events.BlockStart:
		if d.Block.Kind == events.KindToolUse {
			x.tool = d.Block.ToolName
		}
	case events.BlockComplete:
		if d.Block.Kind == events.KindToolResult {
			x.tool = ""
		}
	}
}

// redraw redraws the status line, and writes all buffered output.
func (r *Renderer) redraw() {
	if r.screen.tty {
		r.screen.status = r.statusLine()
	}
	r.screen.flush()
}

// statusLine returns the text of the status line, or "" if there is nothing to show.
func (r *Renderer) statusLine() string {
	if r.label != (PromptLabel{}) {
		return r.promptLine()
	}
	var parts []string
	if r.state != "" {
		parts = append(parts, r.state)
	}
	if i := slices.IndexFunc(r.runs, func(x *statusExecution) bool { return !strings.HasPrefix(x.phase, "queued") }); len(r.runs) > 0 {
		x := r.runs[max(i, 0)]
		phase := x.phase
		if x.waits > 0 && phase == "running" {
			phase = "waiting for approval"
		}
		parts = append(parts, phase)
		if x.tool != "" {
			parts = append(parts, SafeLine(x.tool))
		}
		parts = append(parts, formatSeconds(max(r.now().Sub(x.since), 0)))
		if x.usage != (events.Usage{}) {
			parts = append(parts, formatTokens(x.usage))
		}
		if r.hint != "" {
			parts = append(parts, r.hint)
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return spinnerFrames[r.frame%len(spinnerFrames)] + " " + strings.Join(parts, " · ")
}

// formatSeconds formats a duration in whole seconds.
func formatSeconds(d time.Duration) string { return d.Truncate(time.Second).String() }

// formatTokens formats the numbers of input and output tokens. Cached tokens count as input.
func formatTokens(u events.Usage) string {
	return formatThousands(u.InputTokens+u.CacheReadTokens+u.CacheWriteTokens) + " tokens in, " + formatThousands(u.OutputTokens) + " out"
}

// formatThousands formats a number with commas between groups of three digits.
func formatThousands(n uint32) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
