package terminal

import (
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// ApprovalLines returns the lines in which an approval request is shown to people: what the agent would do, and the
// questions that it asks. The lines contain no terminal commands.
func ApprovalLines(a events.ApprovalRequested) []string {
	lines := []string{approvalTitle(a)}
	add := func(name, text string) {
		if text == "" {
			return
		}
		text = strings.TrimRight(SafeText(text), "\n")
		if !strings.Contains(text, "\n") {
			lines = append(lines, name+": "+text)
			return
		}
		lines = append(lines, name+":")
		for l := range strings.SplitSeq(text, "\n") {
			lines = append(lines, "  "+l)
		}
	}
	p := a.Preview
	add("reason", a.Reason)
	add("command", p.Command)
	add("folder", p.Cwd)
	for _, path := range p.Paths {
		add("path", SafeLine(path))
	}
	add("url", p.URL)
	add("text", p.Text)
	add("changes", p.Diff)
	if p.Command+p.URL+p.Text+p.Diff == "" && len(p.Paths) == 0 {
		add("arguments", string(a.Input))
	}
	if p.Truncated {
		lines = append(lines, "(cut: the request is longer than what is shown)")
	}
	for i, q := range a.Questions {
		lines = append(lines, questionLines(i, q)...)
	}
	add("schema of the answer", string(a.Schema))
	add("rule", a.Rule)
	add("class", a.Class)
	return lines
}

// questionLines returns the lines in which the question with index i is shown, with its numbered options.
func questionLines(i int, q events.Question) []string {
	text := SafeLine(q.Question)
	if q.Header != "" {
		text = SafeLine(q.Header) + ": " + text
	}
	switch {
	case q.Secret:
		text += " (the answer is not stored)"
	case q.Multiple:
		text += " (several answers are possible)"
	}
	lines := []string{fmt.Sprintf("question %d: %s", i+1, text)}
	for n, o := range q.Options {
		line := fmt.Sprintf("  %d. %s", n+1, SafeLine(o.Label))
		if o.Description != "" {
			line += ": " + SafeLine(o.Description)
		}
		lines = append(lines, line)
	}
	if q.Other && len(q.Options) > 0 {
		lines = append(lines, "  or any other text")
	}
	return lines
}

// approvalTitle returns one line that states what an approval request asks for.
func approvalTitle(a events.ApprovalRequested) string {
	what := map[events.ApprovalKind]string{
		events.ApprovalTool: SafeLine(a.ToolName) + " asks for approval", events.ApprovalPlan: "the agent asks for approval of its plan",
		events.ApprovalQuestion: "the agent asks", events.ApprovalElicitation: "an MCP server asks",
	}[a.Kind]
	if what == "" {
		what = SafeLine(string(a.Kind)) + " asks for approval"
	}
	if title := SafeLine(a.Title); title != "" {
		what += ": " + title
	}
	return what
}

// writeApproval writes lines for an event of an approval request. It returns false if e is another event.
func (r *Renderer) writeApproval(e events.Event) bool {
	switch d := e.Data.(type) {
	case events.ApprovalRequested:
		r.approvals[d.ApprovalID] = approvalTitle(d)
		r.writeApprovalRequest(e.ConversationID, d)
	case events.ApprovalDecided:
		line := "decision of a person: " + d.Decision
		if d.Comment != "" {
			line += ", " + d.Comment
		}
		r.writeNote(styleDim, line)
	case events.ApprovalResolved:
		st, line := styleYellow, "■ "+d.Outcome
		switch d.Outcome {
		case events.OutcomeApproved, events.OutcomeAnswered:
			st, line = styleGreen, "✓ "+d.Outcome
		}
		switch d.Cause {
		case events.ResolvedByClass:
			line += " with its class"
		case events.ResolvedByTimeout:
			line += ": nobody decided in time"
		}
		r.writeApprovalEnd(st, line, d.ApprovalID)
	case events.ApprovalRetracted:
		r.writeApprovalEnd(styleDim, "request ended without a decision ("+d.Reason+")", d.ApprovalID)
	case events.AgentDenied:
		r.writeNote(styleYellow, "denied by the agent's own program: "+d.ToolName+" "+joinCodeAndMessage(d.Code, d.Reason))
	default:
		return false
	}
	return true
}

// writeApprovalRequest writes an approval request, after the current block is complete. It omits lines of a long
// request.
func (r *Renderer) writeApprovalRequest(conversation string, d events.ApprovalRequested) {
	lines, mark := ApprovalLines(d), "? "
	if conversation != "" && conversation != events.MainConversation {
		mark = "? a sub-agent: "
	}
	r.writeNote(styleYellow, mark+lines[0])
	lines = lines[1:]
	if len(lines) > maxResultLines+1 {
		left := len(lines) - maxResultLines
		lines = append(lines[:maxResultLines:maxResultLines], fmt.Sprintf("… %d more lines (spool approvals show %s)", left, SafeLine(d.ApprovalID)))
	}
	for _, l := range lines {
		r.writeIndentedNote(FitLine(l, maxResultColumns))
	}
	r.writeIndentedNote(SafeLine(d.ApprovalID))
}

// writeIndentedNote writes an indented line below a note.
func (r *Renderer) writeIndentedNote(text string) {
	cells := toStyledRunes(styleDim, "  "+strings.ReplaceAll(text, "\t", "    "))
	if r.partlyWrittenBlock() != nil {
		r.queue = append(r.queue, &queuedItem{block: &events.Block{Status: events.StatusComplete}, note: cells, below: true})
		return
	}
	r.writeLine(cells)
}

// writeApprovalEnd writes a line that states how an approval request ended.
func (r *Renderer) writeApprovalEnd(st textStyle, line, id string) {
	if title := r.approvals[id]; title != "" {
		line += " · " + title
	}
	delete(r.approvals, id)
	r.writeNote(st, line)
}

// WriteApproval writes all lines of an approval request.
func (r *Renderer) WriteApproval(a events.ApprovalRequested) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.endNonEmptyLine()
	for _, l := range ApprovalLines(a) {
		r.writeLine(toStyledRunes(styleNormal, strings.ReplaceAll(l, "\t", "    ")))
	}
	r.redraw()
}

// WriteSection writes a heading, and a text below it.
func (r *Renderer) WriteSection(heading string, text []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.endNonEmptyLine()
	r.writeLine(toStyledRunes(styleYellow, heading))
	for l := range strings.SplitSeq(strings.TrimRight(SafeText(string(text)), "\n"), "\n") {
		r.writeLine(toStyledRunes(styleNormal, "  "+strings.ReplaceAll(l, "\t", "    ")))
	}
	r.redraw()
}

// ShowPrompt shows a prompt, and what the user has typed at it, in place of the status line. An empty label removes the
// prompt.
func (r *Renderer) ShowPrompt(label, typed string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.label, r.typed = label, strings.NewReplacer("\n", " ", "\t", " ").Replace(SafeText(typed))
	r.redraw()
}

// promptLine returns the prompt and the typed text on one line. If the line is too short, it leaves out the beginning
// of the typed text.
func (r *Renderer) promptLine() string {
	room := r.screen.wrapColumn() - 1
	label := FitLine(SafeLine(r.label), max(room*2/3, 1)) + " "
	typed := []rune(r.typed)
	for len(typed) > 0 && textColumns(label)+textColumns(string(typed)) > room {
		typed = typed[1:]
	}
	return label + string(typed)
}

// Suspend holds all output back until Resume is called, while another program uses the terminal.
func (r *Renderer) Suspend() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.suspend()
}

// Resume writes the output that was held back since Suspend.
func (r *Renderer) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.suspended = false
	r.redraw()
}
