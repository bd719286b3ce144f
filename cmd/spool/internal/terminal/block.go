package terminal

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

const (
	// shownLines is the number of lines of a result that are shown.
	shownLines = 12
	// shownColumns is the number of columns of a result's line, and of a tool's input, that are shown.
	shownColumns = 400
	inputColumns = 120
)

// write shows the known part of a block and reports whether that was the complete block.
func (r *Renderer) write(it *item) (done bool) {
	b := it.block
	switch {
	case it.note != nil:
		if !it.below {
			r.begin()
		}
		r.writeLine(it.note)
		return true
	case it.streamed():
		return r.stream(it)
	}
	defer r.setConversation(b.ConversationID)()
	switch b.Kind {
	case events.KindUserMessage:
		r.begin()
		r.screen.appendText(prompt, "> ")
		r.screen.appendText(bold, strings.TrimRight(Safe(messageText(b)), "\n"))
		r.screen.freshLine()
	case events.KindToolUse:
		r.toolUse(b)
	case events.KindToolResult:
		r.toolResult(b)
	case events.KindSubagent:
		r.writeSubagent(b)
	case events.KindTodo:
		r.writeTodos(b)
	case events.KindSystem:
		if b.Message != "" {
			r.note(dim, b.Message)
		}
	case events.KindError:
		r.note(red, "✗ "+problem(b.Code, b.Message))
	default:
		r.note(dim, string(b.Kind)+" "+b.Content+b.Message)
	}
	return true
}

// stream writes the new text of a growing block.
func (r *Renderer) stream(it *item) (done bool) {
	text := it.text.Known
	if it.whole() {
		text = it.block.Content
	} else if tail := unfinished.FindStringIndex(text); tail != nil {
		text = text[:max(tail[0], len(it.shown))]
	}
	if strings.TrimSpace(text) == "" {
		return it.whole()
	}
	defer r.setConversation(it.block.ConversationID)()
	st := normal
	if it.block.Kind == events.KindThinking {
		st = dim
	}
	if !it.begun {
		it.begun = true
		r.begin()
	}
	rest, ok := strings.CutPrefix(text, it.shown)
	if !ok { // the complete text differs from its deltas: the complete text is right
		r.screen.freshLine()
		rest = text
	}
	it.shown = text
	if it.whole() {
		rest = strings.TrimRight(rest, "\n")
	}
	r.screen.appendText(st, Safe(rest))
	if it.whole() {
		r.screen.freshLine()
		if it.block.Status == events.StatusError {
			r.screen.appendText(dim, "(broken off)")
			r.screen.freshLine()
		}
	}
	return it.whole()
}

// setConversation marks the following lines as those of a sub-agent's conversation until restore is called.
func (r *Renderer) setConversation(conversation string) (restore func()) {
	was := r.screen.prefix
	if conversation != "" && conversation != events.MainConversation {
		r.screen.prefix = styledCells(dim, "│ ")
	}
	return func() {
		r.screen.prefix = was
	}
}

// begin separates a block from the text above it.
func (r *Renderer) begin() {
	r.screen.freshLine()
	if r.gap {
		prefix := r.screen.prefix
		r.screen.prefix = nil
		r.screen.end()
		r.screen.prefix = prefix
	}
	r.gap, r.last = true, ""
}

// note writes a separate line, after the current block is complete.
func (r *Renderer) note(st style, text string) {
	cells := styledCells(st, Line(text))
	if r.writing() != nil {
		r.queue = append(r.queue, &item{block: &events.Block{Status: events.StatusComplete}, note: cells})
		return
	}
	r.begin()
	r.writeLine(cells)
}

// writeLine writes a line.
func (r *Renderer) writeLine(cells []cell) {
	for _, c := range cells {
		r.screen.put(c)
	}
	r.screen.freshLine()
}

// writing returns the block that is partly written.
func (r *Renderer) writing() *item {
	for _, it := range r.queue {
		if it.begun && !it.whole() {
			return it
		}
	}
	return nil
}

func (r *Renderer) toolUse(b *events.Block) {
	r.begin()
	name := b.DisplayName
	if name == "" {
		name = b.ToolName
	}
	r.screen.appendText(tool, "● "+Line(name))
	if in := shortInput(b); in != "" {
		r.screen.appendText(normal, " "+in)
	}
	if b.Description != "" {
		r.screen.appendText(dim, "  "+Fit(Line(b.Description), inputColumns))
	}
	if b.Status == events.StatusError {
		r.screen.appendText(red, " (aborted)")
	}
	r.screen.freshLine()
	r.last = b.ToolUseID
}

func (r *Renderer) toolResult(b *events.Block) {
	if b.ToolUseID == "" || r.last != b.ToolUseID {
		r.begin()
		r.screen.appendText(tool, "● "+Line(r.tools[b.ToolUseID]))
		r.screen.appendText(dim, " returned")
		r.screen.freshLine()
	}
	st := dim
	if b.IsError || b.Status == events.StatusError {
		st = red
	}
	r.writeClipped(st, b.Output)
	delete(r.tools, b.ToolUseID)
	r.last = ""
}

// writeClipped writes the first lines of an output, indented, and states how many it omitted.
func (r *Renderer) writeClipped(st style, output string) {
	output = strings.Trim(Safe(applyOverwrites(output)), "\n")
	if output == "" {
		output = "(no output)"
	}
	lines := strings.Split(output, "\n")
	left := 0
	if len(lines) > shownLines+1 { // omitting a single line would save nothing
		left = len(lines) - shownLines
		lines = lines[:shownLines]
	}
	was := r.screen.prefix
	r.screen.prefix = append(append([]cell(nil), was...), styledCells(normal, "  ")...)
	for _, l := range lines {
		r.screen.appendText(st, Fit(l, shownColumns))
		r.screen.end()
	}
	if left > 0 {
		r.screen.appendText(dim, fmt.Sprintf("… %d more lines (clipped here; --json has them all)", left))
		r.screen.end()
	}
	r.screen.prefix = was
}

func (r *Renderer) writeSubagent(b *events.Block) {
	r.begin()
	r.screen.appendText(tool, "● sub-agent "+Line(b.Name))
	if b.DurationMs > 0 {
		r.screen.appendText(dim, " ended after "+ms(b.DurationMs))
	}
	r.screen.freshLine()
	st := normal
	if b.Status == events.StatusError {
		st = red
	}
	r.writeClipped(st, b.Output)
}

func (r *Renderer) writeTodos(b *events.Block) {
	if len(b.Todos) == 0 {
		return
	}
	r.begin()
	for _, t := range b.Todos {
		mark, st := "[ ] ", normal
		switch t.Status {
		case "completed":
			mark, st = "[x] ", dim
		case "in_progress":
			mark, st = "[>] ", bold
		}
		r.screen.appendText(st, mark+Line(t.Content))
		r.screen.freshLine()
	}
}

// writeNotice writes a line for events that belong to no block.
func (r *Renderer) writeNotice(e events.Event) {
	switch d := e.Data.(type) {
	case events.SessionCreated:
		r.note(dim, fmt.Sprintf("%s on %s", d.Architecture, d.Provider))
	case events.SandboxReplaced:
		r.note(yellow, "the sandbox was lost and replaced; lost with it: "+d.Lost)
	case events.AttemptFailed:
		r.note(yellow, fmt.Sprintf("attempt %d of %d died: %s", d.Attempt, d.Attempts, problem(d.Code, d.Message)))
	case events.SandboxFailed:
		r.note(red, "✗ no sandbox: "+problem(d.Code, d.Message))
	case events.SandboxReady, events.SandboxTerminated, events.SandboxPaused, events.SandboxResumed, events.SandboxHealth,
		events.ExecutionPaused, events.ExecutionResumed, events.FilesApplied, events.WorkspaceSyncStarted, events.WorkspaceSynced, events.WorkspaceRestored, events.EgressDenied:
		r.writeEnvironment(e)
	case events.SubagentSpawned:
		r.note(tool, "● sub-agent "+Line(d.Name)+" started")
	case events.PermissionDecided:
		if d.Decision == "deny" {
			r.note(yellow, "denied: "+Line(d.ToolName)+" "+d.Reason+" (rule "+d.Rule+")")
		}
	case events.Log:
		if d.Level == "warn" || d.Level == "error" {
			r.note(dim, d.Stream+": "+Fit(Line(d.Message), shownColumns))
		}
	case events.Error:
		r.note(red, "✗ "+problem(d.Code, d.Message))
	case events.WatchdogWarned:
		r.note(yellow, fmt.Sprintf("the agent was silent for %s (watchdog %s, action %s)", ms(d.AfterMs), d.Watchdog, d.Action))
	case events.LoopDetected:
		who := "the agent"
		if e.ConversationID != events.MainConversation {
			who = "a sub-agent"
		}
		r.note(yellow, fmt.Sprintf("%s called %s %d times in a row with the same arguments and the same result", who, d.ToolName, d.Calls))
	case events.SessionIdle:
		r.note(dim, "the session is idle; its next message continues it")
	case events.SessionClosed:
		r.note(yellow, "the session is closed: "+d.Reason)
	case events.SessionDeleted:
		r.note(yellow, "the session was deleted")
	default:
		r.writeEnd(e)
	}
}

// writeEnd writes a line that states how an execution ended.
func (r *Renderer) writeEnd(e events.Event) {
	if !events.IsTerminal(e.Type()) {
		return
	}
	r.endBlocks(e.ExecutionID)
	switch d := e.Data.(type) {
	case events.ExecutionCompleted:
		r.note(green, endText("✓ completed", d.DurationMs, d.Usage, d.CostUSD))
	case events.ExecutionFailed:
		r.note(red, "✗ failed: "+problem(d.Code, d.Message))
	case events.ExecutionCancelled:
		r.note(yellow, endText("■ cancelled ("+d.Reason+")", d.DurationMs, d.Usage, 0))
	case events.ExecutionWithdrawn:
		r.note(yellow, "■ withdrawn before it ran ("+d.Reason+")")
	}
}

func endText(how string, duration uint32, u events.Usage, cost float64) string {
	s := how + " after " + ms(duration)
	if u != (events.Usage{}) {
		s += " · " + tokens(u)
	}
	if cost > 0 {
		s += fmt.Sprintf(" · $%.4f", cost)
	}
	return s
}

// problem joins a code and a message; either may be empty.
func problem(code, message string) string {
	if code == "" || message == "" {
		return code + message
	}
	return message + " (" + code + ")"
}

func ms(n uint32) string { return (time.Duration(n) * time.Millisecond).String() }

// messageText returns a message's text, with a placeholder for each image.
func messageText(b *events.Block) string {
	if len(b.Parts) == 0 {
		return b.Content
	}
	var out []string
	for _, p := range b.Parts {
		if p.Type == "text" {
			out = append(out, p.Text)
		} else {
			out = append(out, fmt.Sprintf("[%s, %d bytes]", p.MediaType, len(p.Data)/4*3))
		}
	}
	return strings.Join(out, "\n")
}

// shortInput returns a short form of a tool call's input: its main argument, or else its JSON. It returns "" if there is
// nothing to show, or if the description is more useful than the JSON.
func shortInput(b *events.Block) string {
	if len(b.Input) == 0 {
		return ""
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(b.Input, &fields) == nil {
		for _, name := range []string{"file_path", "filePath", "path", "command", "code", "pattern", "query", "url", "prompt", "description"} {
			var s string
			if json.Unmarshal(fields[name], &s) == nil && s != "" {
				first, more, _ := strings.Cut(strings.TrimSpace(s), "\n")
				first = Fit(Line(first), inputColumns)
				if more != "" && !strings.HasSuffix(first, "…") {
					first += " …"
				}
				return first
			}
		}
		if len(fields) == 0 {
			return ""
		}
	}
	if b.Description != "" {
		return ""
	}
	return Fit(Line(string(b.Input)), inputColumns)
}
