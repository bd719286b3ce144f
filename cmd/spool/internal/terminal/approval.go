package terminal

import (
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// ApprovalLines returns an approval request for people, in lines that are safe to show: what it would do, and the questions that it asks.
func ApprovalLines(a events.ApprovalRequested) []string {
	lines := []string{approvalTitle(a)}
	add := func(name, text string) {
		if text == "" {
			return
		}
		text = strings.TrimRight(Safe(text), "\n")
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
		add("path", Line(path))
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

// questionLines returns a question with its numbered options.
func questionLines(i int, q events.Question) []string {
	text := Line(q.Question)
	if q.Header != "" {
		text = Line(q.Header) + ": " + text
	}
	switch {
	case q.Secret:
		text += " (the answer is not stored)"
	case q.Multiple:
		text += " (several answers are possible)"
	}
	lines := []string{fmt.Sprintf("question %d: %s", i+1, text)}
	for n, o := range q.Options {
		line := fmt.Sprintf("  %d. %s", n+1, Line(o.Label))
		if o.Description != "" {
			line += ": " + Line(o.Description)
		}
		lines = append(lines, line)
	}
	if q.Other && len(q.Options) > 0 {
		lines = append(lines, "  or any other text")
	}
	return lines
}

// approvalTitle returns one line that says what a request asks for.
func approvalTitle(a events.ApprovalRequested) string {
	what := map[events.ApprovalKind]string{
		events.ApprovalTool: Line(a.ToolName) + " asks for approval", events.ApprovalPlan: "the agent asks for approval of its plan",
		events.ApprovalQuestion: "the agent asks", events.ApprovalElicitation: "an MCP server asks",
	}[a.Kind]
	if what == "" {
		what = Line(string(a.Kind)) + " asks for approval"
	}
	if title := Line(a.Title); title != "" {
		what += ": " + title
	}
	return what
}

// writeApproval writes lines for the events of approval requests. It reports whether e is one.
func (r *Renderer) writeApproval(e events.Event) bool {
	switch d := e.Data.(type) {
	case events.ApprovalRequested:
		r.approvals[d.ApprovalID] = approvalTitle(d)
		r.noteApproval(e.ConversationID, d)
	case events.ApprovalDecided:
		line := "decision of a person: " + d.Decision
		if d.Comment != "" {
			line += ", " + d.Comment
		}
		r.note(dim, line)
	case events.ApprovalResolved:
		st, line := yellow, "■ "+d.Outcome
		switch d.Outcome {
		case events.OutcomeApproved, events.OutcomeAnswered:
			st, line = green, "✓ "+d.Outcome
		}
		switch d.Cause {
		case events.ResolvedByClass:
			line += " with its class"
		case events.ResolvedByTimeout:
			line += ": nobody decided in time"
		}
		r.endApproval(st, line, d.ApprovalID)
	case events.ApprovalRetracted:
		r.endApproval(dim, "request ended without a decision ("+d.Reason+")", d.ApprovalID)
	case events.AgentDenied:
		r.note(yellow, "denied by the agent's own program: "+d.ToolName+" "+problem(d.Code, d.Reason))
	default:
		return false
	}
	return true
}

// noteApproval writes a request, after the current block is complete.
func (r *Renderer) noteApproval(conversation string, d events.ApprovalRequested) {
	lines, mark := ApprovalLines(d), "? "
	if conversation != "" && conversation != events.MainConversation {
		mark = "? a sub-agent: "
	}
	r.note(yellow, mark+lines[0])
	lines = lines[1:]
	if len(lines) > shownLines+1 {
		left := len(lines) - shownLines
		lines = append(lines[:shownLines:shownLines], fmt.Sprintf("… %d more lines (spool approvals show %s)", left, Line(d.ApprovalID)))
	}
	for _, l := range lines {
		r.noteIndented(Fit(l, shownColumns))
	}
	r.noteIndented(Line(d.ApprovalID))
}

// noteIndented writes a line below a note.
func (r *Renderer) noteIndented(text string) {
	cells := styledCells(dim, "  "+strings.ReplaceAll(text, "\t", "    "))
	if r.writing() != nil {
		r.queue = append(r.queue, &item{block: &events.Block{Status: events.StatusComplete}, note: cells, below: true})
		return
	}
	r.writeLine(cells)
}

// endApproval writes how a request ended.
func (r *Renderer) endApproval(st style, line, id string) {
	if title := r.approvals[id]; title != "" {
		line += " · " + title
	}
	delete(r.approvals, id)
	r.note(st, line)
}

// Approval writes a request completely.
func (r *Renderer) Approval(a events.ApprovalRequested) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.freshLine()
	for _, l := range ApprovalLines(a) {
		r.writeLine(styledCells(normal, strings.ReplaceAll(l, "\t", "    ")))
	}
	r.draw()
}

// Lines writes a text below a heading.
func (r *Renderer) Lines(heading string, text []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.freshLine()
	r.writeLine(styledCells(yellow, heading))
	for l := range strings.SplitSeq(strings.TrimRight(Safe(string(text)), "\n"), "\n") {
		r.writeLine(styledCells(normal, "  "+strings.ReplaceAll(l, "\t", "    ")))
	}
	r.draw()
}

// Prompt shows a prompt and what was typed in place of the status line; an empty label removes it.
func (r *Renderer) Prompt(label, typed string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.label, r.typed = label, strings.NewReplacer("\n", " ", "\t", " ").Replace(Safe(typed))
	r.draw()
}

// promptLine returns the prompt on one line, with the end of what was typed if the line is too short for all.
func (r *Renderer) promptLine() string {
	room := r.screen.columns() - 1
	label := Fit(Line(r.label), max(room*2/3, 1)) + " "
	typed := []rune(r.typed)
	for len(typed) > 0 && width(label)+width(string(typed)) > room {
		typed = typed[1:]
	}
	return label + string(typed)
}

// Suspend stops all output to the terminal until Resume is called, for a program that uses the terminal meanwhile.
func (r *Renderer) Suspend() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.suspend()
}

// Resume writes what was held back since Suspend.
func (r *Renderer) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.suspended = false
	r.draw()
}
