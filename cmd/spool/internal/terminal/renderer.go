// Package terminal shows a session to people: its blocks as they arrive, and on a terminal a status line with a
// spinner below them.
package terminal

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

const (
	spinEvery    = 100 * time.Millisecond
	defaultWidth = 80
)

var frames = []string{"⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"}

// Config configures a Renderer. Out is required.
type Config struct {
	Out   io.Writer
	TTY   bool             // Out is a terminal: wrap lines and show a status line
	Color bool             // Out supports colours
	Width func() int       // current width of the terminal in columns; nil means 80
	Now   func() time.Time // nil means time.Now
}

// Renderer writes a session's blocks. It is safe for concurrent use.
type Renderer struct {
	mu        sync.Mutex
	screen    screen
	now       func() time.Time
	frame     int
	state     string // state of the program itself, such as a lost connection; shown first in the status line
	label     string // of the prompt that replaces the status line; "" for none
	typed     string // what was typed at the prompt
	hint      string // shown at the end of the status line
	runs      []*execution
	queue     []*item // blocks to be shown, in the order of their start
	items     map[string]*item
	texts     map[string]*blocks.StreamedText // text of blocks that have not started
	tools     map[string]string               // tool name by call id
	approvals map[string]string               // title of open approval requests
	gap       bool                            // text stands above: separate the next block
	last      string                          // call id of the tool_use that was shown last, for its result
}

// execution is an execution that has not ended, as the status line shows it.
type execution struct {
	id    string
	phase string
	waits int // open approval requests
	since time.Time
	usage events.Usage
	tool  string
}

// item is a block, or a line of the renderer itself, that is shown or waits to be shown.
type item struct {
	block *events.Block
	text  *blocks.StreamedText
	note  []cell // a line of the renderer itself; block is then empty
	shown string // text of a streamed block that is already shown
	below bool   // with note: the line belongs to the one before
	begun bool
	// written is set when the item leaves the queue: a tool call is written when its input is known, and may end
	// later.
	written bool
}

// New returns a Renderer.
func New(cfg Config) *Renderer {
	if cfg.Width == nil {
		cfg.Width = func() int { return defaultWidth }
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Renderer{
		screen: screen{out: cfg.Out, tty: cfg.TTY, color: cfg.Color, width: cfg.Width}, now: cfg.Now,
		items: map[string]*item{}, texts: map[string]*blocks.StreamedText{}, tools: map[string]string{}, approvals: map[string]string{},
	}
}

// Event shows a stored event. Events must come in order of seq, each once.
func (r *Renderer) Event(e events.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.track(e)
	if id := blocks.ChangedBlockID(e); id != "" {
		r.fold(id, e)
	}
	if !r.writeApproval(e) {
		r.writeNotice(e)
	}
	r.draw()
}

// Delta shows a delta.
func (r *Renderer) Delta(d events.Delta) {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := r.texts[d.BlockID]
	if it := r.items[d.BlockID]; it != nil {
		text = it.text
	} else if text == nil {
		text = &blocks.StreamedText{}
		r.texts[d.BlockID] = text
	}
	text.Add(d)
	r.showReady()
	r.draw()
}

// Snapshot shows blocks that replace skipped events.
func (r *Renderer) Snapshot(list []events.Block) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range list {
		b := list[i]
		r.show(&b)
		if it := r.items[b.ID]; it != nil && b.Status == events.StatusPending {
			it.text.Known = b.Content
		}
	}
	r.showReady()
	r.draw()
}

// Note writes a line of the program itself.
func (r *Renderer) Note(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.freshLine() // the current block continues below
	r.writeLine(styledCells(yellow, Line(text)))
	r.draw()
}

// State sets the program's own state in the status line; "" clears it.
func (r *Renderer) State(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = Line(text)
	r.draw()
}

// Hint sets the text at the end of the status line while an execution runs.
func (r *Renderer) Hint(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hint = text
	r.draw()
}

// Spin moves the spinner until ctx ends. Without a terminal it returns at once.
func (r *Renderer) Spin(ctx context.Context) {
	if !r.screen.tty {
		return
	}
	tick := time.NewTicker(spinEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.Tick()
		}
	}
}

// Tick moves the spinner by one frame.
func (r *Renderer) Tick() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.frame++
	if r.screen.status != "" || r.status() != "" {
		r.draw()
	}
}

// Close shows everything that is still queued and removes the status line. It returns the first write error.
func (r *Renderer) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endBlocks("")
	r.runs, r.state, r.label = nil, "", ""
	return r.screen.close()
}

// fold updates a block with an event.
func (r *Renderer) fold(id string, e events.Event) {
	var prev *events.Block
	if it := r.items[id]; it != nil {
		prev = it.block
	}
	if next := blocks.Reduce(prev, e); next != nil {
		r.show(next)
	}
	if u, ok := e.Data.(events.BlockUpdate); ok && u.Updates.Todos != nil && r.items[id] != nil && r.writing() == nil {
		r.writeTodos(r.items[id].block)
	}
	r.showReady()
}

// show queues a block, or updates the queued one.
func (r *Renderer) show(b *events.Block) {
	it := r.items[b.ID]
	if it == nil {
		it = &item{text: r.texts[b.ID]}
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
	if it.block = b; it.written && it.whole() {
		delete(r.items, b.ID)
	}
}

// showReady shows everything that can be shown now. It writes one block at a time: until that block is complete, all other blocks wait
// in the queue.
func (r *Renderer) showReady() {
	for {
		i := slices.IndexFunc(r.queue, func(it *item) bool { return it.begun })
		if i < 0 {
			i = slices.IndexFunc(r.queue, (*item).showable)
		}
		if i < 0 || !r.write(r.queue[i]) {
			return
		}
		it := r.queue[i]
		r.queue = slices.Delete(r.queue, i, i+1)
		if it.written = true; it.whole() {
			delete(r.items, it.block.ID)
		}
	}
}

// streamed reports whether a block is shown while it grows.
func (it *item) streamed() bool {
	return it.block.Kind == events.KindAssistantText || it.block.Kind == events.KindThinking
}

func (it *item) whole() bool { return it.block.Status != events.StatusPending }

// showable reports whether a block has something to show.
func (it *item) showable() bool {
	return it.whole() || it.streamed() && it.text.Known != "" || it.block.Kind == events.KindToolUse && len(it.block.Input) > 0
}

// endBlocks ends the open blocks of an execution, or of all executions if id is "".
func (r *Renderer) endBlocks(id string) {
	for _, it := range r.queue {
		if it.whole() || id != "" && it.block.ExecutionID != id {
			continue
		}
		b := *it.block
		b.Status = events.StatusError
		if it.streamed() {
			b.Content = it.text.Known
		}
		it.block = &b
	}
	r.showReady()
}

// track updates the executions of the status line.
func (r *Renderer) track(e events.Event) {
	if e.ExecutionID == "" {
		return
	}
	i := slices.IndexFunc(r.runs, func(x *execution) bool { return x.id == e.ExecutionID })
	if events.IsTerminal(e.Type()) {
		if i >= 0 {
			r.runs = slices.Delete(r.runs, i, i+1)
		}
		return
	}
	if _, ok := e.Data.(events.MessageAccepted); ok && i < 0 {
		r.runs = append(r.runs, &execution{id: e.ExecutionID, phase: "waiting", since: e.Time})
		return
	}
	if i >= 0 {
		r.runs[i].track(e)
	}
}

func (x *execution) track(e events.Event) {
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

// draw redraws the status line and writes the output.
func (r *Renderer) draw() {
	if r.screen.tty {
		r.screen.status = r.status()
	}
	r.screen.flush()
}

// status returns the status line, or "" if no execution runs.
func (r *Renderer) status() string {
	if r.label != "" {
		return r.promptLine()
	}
	var parts []string
	if r.state != "" {
		parts = append(parts, r.state)
	}
	if i := slices.IndexFunc(r.runs, func(x *execution) bool { return !strings.HasPrefix(x.phase, "queued") }); len(r.runs) > 0 {
		x := r.runs[max(i, 0)]
		phase := x.phase
		if x.waits > 0 && phase == "running" {
			phase = "waiting for approval"
		}
		parts = append(parts, phase)
		if x.tool != "" {
			parts = append(parts, Line(x.tool))
		}
		parts = append(parts, elapsed(max(r.now().Sub(x.since), 0)))
		if x.usage != (events.Usage{}) {
			parts = append(parts, tokens(x.usage))
		}
		if r.hint != "" {
			parts = append(parts, r.hint)
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return frames[r.frame%len(frames)] + " " + strings.Join(parts, " · ")
}

// elapsed returns a duration in whole seconds.
func elapsed(d time.Duration) string { return d.Truncate(time.Second).String() }

// tokens formats the tokens of a model. Cached tokens count as input.
func tokens(u events.Usage) string {
	return thousands(u.InputTokens+u.CacheReadTokens+u.CacheWriteTokens) + " tokens in, " + thousands(u.OutputTokens) + " out"
}

func thousands(n uint32) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
