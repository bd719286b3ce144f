package terminal

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

const (
	// maxResultLines is the maximum number of lines of a tool's result that are shown.
	maxResultLines = 12
	// maxResultColumns is the maximum number of columns of a line of a tool's result that are shown.
	maxResultColumns = 400
	// maxInputColumns is the maximum number of columns of a tool's input or description that are shown.
	maxInputColumns = 120
)

// writeBlock writes the part of a queued block that is known. It reports whether the block is now written completely.
func (r *Renderer) writeBlock(it *queuedItem) (done bool) {
	b := it.block
	switch {
	case it.note != nil:
		if !it.below {
			r.separateBlock()
		}
		r.writeLine(it.note)
		return true
	case it.isStreamed():
		return r.writeNewText(it)
	}
	defer r.setConversationPrefix(b.ConversationID)()
	switch b.Kind {
	case events.KindUserMessage:
		r.separateBlock()
		r.screen.appendText(stylePrompt, "> ")
		r.screen.appendText(styleBold, strings.TrimRight(SafeText(messageText(b)), "\n"))
		r.screen.endNonEmptyLine()
	case events.KindToolUse:
		r.writeToolUse(b)
	case events.KindToolResult:
		r.writeToolResult(b)
	case events.KindSubagent:
		r.writeSubagent(b)
	case events.KindTodo, events.KindPlan:
		r.writePlan(b)
	case events.KindStep:
		r.writeStep(b)
	case events.KindSkillLoad:
		r.writeSkillLoad(b)
	case events.KindSystem:
		if b.Message != "" {
			r.writeNote(styleDim, b.Message)
		}
	case events.KindError:
		r.writeNote(styleRed, "✗ "+joinCodeAndMessage(b.Code, b.Message))
	default:
		r.writeNote(styleDim, string(b.Kind)+" "+b.Content+b.Message)
	}
	return true
}

// writeNewText writes the text of a streamed block that was not written before. It reports whether the block is now
// written completely.
func (r *Renderer) writeNewText(it *queuedItem) (done bool) {
	text := it.text.Known
	if it.isComplete() {
		text = it.block.Content
	}
	if strings.TrimSpace(text) == "" {
		return it.isComplete()
	}
	defer r.setConversationPrefix(it.block.ConversationID)()
	st := styleNormal
	if it.block.Kind == events.KindThinking {
		st = styleDim
	}
	if !it.begun {
		it.begun = true
		r.separateBlock()
	}
	rest, ok := strings.CutPrefix(text, it.shown)
	if !ok { // the complete text differs from its deltas: the complete text is right
		r.screen.endNonEmptyLine()
		rest = text
	}
	it.shown = text
	if it.isComplete() {
		rest = strings.TrimRight(rest, "\n")
	}
	r.screen.appendText(st, SafeText(rest))
	if it.isComplete() {
		r.screen.endNonEmptyLine()
		if it.block.Status == events.StatusError {
			r.screen.appendText(styleDim, "(broken off)")
			r.screen.endNonEmptyLine()
		}
	}
	return it.isComplete()
}

// setConversationPrefix marks the lines that follow as lines of a sub-agent's conversation, until restore is called.
func (r *Renderer) setConversationPrefix(conversation string) (restore func()) {
	was := r.screen.prefix
	if conversation != "" && conversation != events.MainConversation {
		r.screen.prefix = toStyledRunes(styleDim, "│ ")
	}
	return func() {
		r.screen.prefix = was
	}
}

// separateBlock ends the current line, and writes an empty line if a block is above.
func (r *Renderer) separateBlock() {
	r.screen.endNonEmptyLine()
	if r.gap {
		prefix := r.screen.prefix
		r.screen.prefix = nil
		r.screen.endLine()
		r.screen.prefix = prefix
	}
	r.gap, r.last = true, ""
}

// writeNote writes a line between blocks, after the current block is complete.
func (r *Renderer) writeNote(st textStyle, text string) {
	cells := toStyledRunes(st, SafeLine(text))
	if r.partlyWrittenBlock() != nil {
		r.queue = append(r.queue, &queuedItem{block: &events.Block{Status: events.StatusComplete}, note: cells})
		return
	}
	r.separateBlock()
	r.writeLine(cells)
}

// writeLine writes styled runes as a line.
func (r *Renderer) writeLine(cells []styledRune) {
	for _, c := range cells {
		r.screen.putRune(c)
	}
	r.screen.endNonEmptyLine()
}

// partlyWrittenBlock returns the block that has been written partly, or nil.
func (r *Renderer) partlyWrittenBlock() *queuedItem {
	for _, it := range r.queue {
		if it.begun && !it.isComplete() {
			return it
		}
	}
	return nil
}

// writeToolUse writes a line for a tool call: the tool, its input and its description.
func (r *Renderer) writeToolUse(b *events.Block) {
	r.separateBlock()
	name := b.DisplayName
	if name == "" {
		name = b.ToolName
	}
	r.screen.appendText(styleTool, "● "+SafeLine(name))
	if in := summarizeInput(b); in != "" {
		r.screen.appendText(styleNormal, " "+in)
	}
	if b.Description != "" {
		r.screen.appendText(styleDim, "  "+FitLine(SafeLine(b.Description), maxInputColumns))
	}
	if b.Status == events.StatusError {
		r.screen.appendText(styleRed, " (aborted)")
	}
	r.screen.endNonEmptyLine()
	r.last = b.ToolUseID
}

// writeToolResult writes the result of a tool call.
func (r *Renderer) writeToolResult(b *events.Block) {
	if b.ToolUseID == "" || r.last != b.ToolUseID {
		r.separateBlock()
		r.screen.appendText(styleTool, "● "+SafeLine(r.tools[b.ToolUseID]))
		r.screen.appendText(styleDim, " returned")
		r.screen.endNonEmptyLine()
	}
	st := styleDim
	if b.IsError || b.Status == events.StatusError {
		st = styleRed
	}
	r.writeClipped(st, b.Output)
	delete(r.tools, b.ToolUseID)
	r.last = ""
}

// writeClipped writes the first lines of a tool's output, indented, and the number of lines that it omits.
func (r *Renderer) writeClipped(st textStyle, output string) {
	output = strings.Trim(SafeText(output), "\n")
	if output == "" {
		output = "(no output)"
	}
	lines := strings.Split(output, "\n")
	left := 0
	if len(lines) > maxResultLines+1 { // omitting a single line would save nothing
		left = len(lines) - maxResultLines
		lines = lines[:maxResultLines]
	}
	was := r.screen.prefix
	r.screen.prefix = append(append([]styledRune(nil), was...), toStyledRunes(styleNormal, "  ")...)
	for _, l := range lines {
		r.screen.appendText(st, FitLine(l, maxResultColumns))
		r.screen.endLine()
	}
	if left > 0 {
		r.screen.appendText(styleDim, fmt.Sprintf("… %d more lines (clipped here; --json has them all)", left))
		r.screen.endLine()
	}
	r.screen.prefix = was
}

// writeSubagent writes that a sub-agent has ended, and its output.
func (r *Renderer) writeSubagent(b *events.Block) {
	r.separateBlock()
	r.screen.appendText(styleTool, "● sub-agent "+SafeLine(b.Name))
	if b.DurationMs > 0 {
		r.screen.appendText(styleDim, " ended after "+formatMilliseconds(b.DurationMs))
	}
	r.screen.endNonEmptyLine()
	st := styleNormal
	if b.Status == events.StatusError {
		st = styleRed
	}
	r.writeClipped(st, b.Output)
}

// writePlan writes the agent's plan, or its list of tasks.
func (r *Renderer) writePlan(b *events.Block) {
	list := b.TodoList()
	if len(list) == 0 {
		return
	}
	r.separateBlock()
	if p := b.Plan; p != nil && p.Title+p.Explanation != "" {
		r.screen.appendText(styleTool, "● plan "+SafeLine(p.Title))
		r.screen.appendText(styleDim, " "+FitLine(SafeLine(p.Explanation), maxInputColumns))
		r.screen.endNonEmptyLine()
	}
	for _, t := range list {
		mark, st := "[ ] ", styleNormal
		switch events.PlanStatus(t.Status) {
		case events.PlanCompleted:
			mark, st = "[x] ", styleDim
		case events.PlanInProgress:
			mark, st = "[>] ", styleBold
		case events.PlanCancelled:
			mark, st = "[-] ", styleDim
		}
		r.screen.appendText(st, mark+SafeLine(t.Content))
		r.screen.endNonEmptyLine()
	}
}

// writeStep writes a line for a step of a plan, and its result.
func (r *Renderer) writeStep(b *events.Block) {
	s := b.Step
	if s == nil {
		return
	}
	r.separateBlock()
	r.screen.appendText(styleTool, "● step "+SafeLine(s.Title))
	r.screen.appendText(styleDim, " "+SafeLine(string(s.Status)))
	if reason := joinCodeAndMessage(s.ErrorCode, s.ErrorMessage); reason != "" {
		r.screen.appendText(styleRed, " "+SafeLine(reason))
	}
	r.screen.endNonEmptyLine()
	if s.Result != "" {
		r.writeClipped(styleDim, s.Result)
	}
}

// writeSkillLoad writes a line for a skill that the agent has read.
func (r *Renderer) writeSkillLoad(b *events.Block) {
	if b.Skill == nil {
		return
	}
	r.separateBlock()
	r.screen.appendText(styleTool, "● skill "+SafeLine(b.Skill.Name))
	if b.Skill.Path != "" {
		r.screen.appendText(styleDim, "  "+SafeLine(b.Skill.Path))
	}
	r.screen.endNonEmptyLine()
}

// writeNotice writes a line for an event that belongs to no block.
func (r *Renderer) writeNotice(e events.Event) {
	switch d := e.Data.(type) {
	case events.SessionCreated:
		r.writeNote(styleDim, fmt.Sprintf("%s on %s", d.Architecture, d.Provider))
	case events.SandboxReplaced:
		r.writeNote(styleYellow, "the sandbox was lost and replaced; lost with it: "+d.Lost)
	case events.AttemptFailed:
		r.writeNote(styleYellow, fmt.Sprintf("attempt %d of %d died: %s", d.Attempt, d.Attempts, joinCodeAndMessage(d.Code, d.Message)))
	case events.SandboxFailed:
		r.writeNote(styleRed, "✗ no sandbox: "+joinCodeAndMessage(d.Code, d.Message))
	case events.SandboxReady, events.SandboxTerminated, events.SandboxPaused, events.SandboxResumed, events.SandboxHealth,
		events.ExecutionPaused, events.ExecutionResumed, events.FilesApplied, events.WorkspaceSyncStarted, events.WorkspaceSynced, events.WorkspaceRestored, events.EgressDenied:
		r.writeSandboxNotice(e)
	case events.SubagentSpawned:
		r.writeNote(styleTool, "● sub-agent "+SafeLine(d.Name)+" started")
	case events.PermissionDecided:
		if d.Decision == "deny" {
			r.writeNote(styleYellow, "denied: "+SafeLine(d.ToolName)+" "+d.Reason+" (rule "+d.Rule+")")
		}
	case events.Log:
		if d.Level == "warn" || d.Level == "error" {
			r.writeNote(styleDim, d.Stream+": "+FitLine(SafeLine(d.Message), maxResultColumns))
		}
	case events.Error:
		r.writeNote(styleRed, "✗ "+joinCodeAndMessage(d.Code, d.Message))
	case events.WatchdogWarned:
		r.writeNote(styleYellow, fmt.Sprintf("the agent was silent for %s (watchdog %s, action %s)", formatMilliseconds(d.AfterMs), d.Watchdog, d.Action))
	case events.LoopDetected:
		who := "the agent"
		if e.ConversationID != events.MainConversation {
			who = "a sub-agent"
		}
		r.writeNote(styleYellow, fmt.Sprintf("%s called %s %d times in a row with the same arguments and the same result", who, d.ToolName, d.Calls))
	case events.SessionIdle:
		r.writeNote(styleDim, "the session is idle; its next message continues it")
	case events.SessionClosed:
		r.writeNote(styleYellow, "the session is closed: "+d.Reason)
	case events.SessionDeleted:
		r.writeNote(styleYellow, "the session was deleted")
	default:
		r.writeExecutionEnd(e)
	}
}

// writeExecutionEnd writes a line that states how an execution ended. It ignores other events.
func (r *Renderer) writeExecutionEnd(e events.Event) {
	if !events.IsTerminal(e.Type()) {
		return
	}
	r.endBlocks(e.ExecutionID)
	switch d := e.Data.(type) {
	case events.ExecutionCompleted:
		r.writeNote(styleGreen, formatExecutionEnd("✓ completed", d.DurationMs, d.Usage, d.CostUSD))
	case events.ExecutionFailed:
		r.writeNote(styleRed, "✗ failed: "+joinCodeAndMessage(d.Code, d.Message))
	case events.ExecutionCancelled:
		r.writeNote(styleYellow, formatExecutionEnd("■ cancelled ("+d.Reason+")", d.DurationMs, d.Usage, 0))
	case events.ExecutionWithdrawn:
		r.writeNote(styleYellow, "■ withdrawn before it ran ("+d.Reason+")")
	}
}

// formatExecutionEnd returns a line about the end of an execution: how it ended, its duration, tokens and cost.
func formatExecutionEnd(how string, duration uint32, u events.Usage, cost float64) string {
	s := how + " after " + formatMilliseconds(duration)
	if u != (events.Usage{}) {
		s += " · " + formatTokens(u)
	}
	if cost > 0 {
		s += fmt.Sprintf(" · $%.4f", cost)
	}
	return s
}

// joinCodeAndMessage returns a message followed by a code in parentheses. Either may be empty.
func joinCodeAndMessage(code, message string) string {
	if code == "" || message == "" {
		return code + message
	}
	return message + " (" + code + ")"
}

// formatMilliseconds formats a number of milliseconds as a duration.
func formatMilliseconds(n uint32) string { return (time.Duration(n) * time.Millisecond).String() }

// messageText returns the text of a message, with a placeholder for each image.
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

// summarizeInput returns a tool call's input on one line: its main argument, or else its JSON. It returns "" if there
// is no input, or if only JSON could be shown and the call has a description.
func summarizeInput(b *events.Block) string {
	if len(b.Input) == 0 {
		return ""
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(b.Input, &fields) == nil {
		for _, name := range []string{"file_path", "filePath", "path", "command", "code", "pattern", "query", "url", "prompt", "description"} {
			var s string
			if json.Unmarshal(fields[name], &s) == nil && s != "" {
				first, more, _ := strings.Cut(strings.TrimSpace(s), "\n")
				first = FitLine(SafeLine(first), maxInputColumns)
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
	return FitLine(SafeLine(string(b.Input)), maxInputColumns)
}
