package terminal

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// ApprovalHeading returns one line that states who asks. Which call a tool makes is in the rows of the request.
func ApprovalHeading(a events.ApprovalRequested) string {
	what := map[events.ApprovalKind]string{
		events.ApprovalTool: SafeLine(a.ToolName) + " asks for approval", events.ApprovalPlan: "the agent asks for approval of its plan",
		events.ApprovalQuestion: "the agent asks", events.ApprovalElicitation: "an MCP server asks",
	}[a.Kind]
	if what == "" {
		what = SafeLine(string(a.Kind)) + " asks for approval"
	}
	return what
}

// approvalTitle returns one line that names an approval request among others.
func approvalTitle(a events.ApprovalRequested) string {
	if title := SafeLine(a.Title); title != "" {
		return ApprovalHeading(a) + ": " + title
	}
	return ApprovalHeading(a)
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

// writeApprovalRequest writes an approval request, after the current block is complete. It writes only the title of a
// request about which a prompt asks, because the prompt comes with the request. Otherwise a terminal shows the first
// page.
func (r *Renderer) writeApprovalRequest(conversation string, d events.ApprovalRequested) {
	mark := "? "
	if conversation != "" && conversation != events.MainConversation {
		mark = "? a sub-agent: "
	}
	r.writeNote(styleYellow, mark+approvalTitle(d))
	if !r.prompts {
		rows := ApprovalRows(d, r.approvalColumns())
		more := 0
		if r.screen.tty && len(rows) > approvalPageRows {
			more, rows = len(rows)-approvalPageRows, rows[:approvalPageRows]
		}
		for _, row := range rows {
			r.writeIndentedNote(row)
		}
		if more > 0 {
			r.writeIndentedNote(fmt.Sprintf("… %d more rows are not shown here: spool approvals show %s", more, SafeLine(d.ApprovalID)))
		}
	}
	r.writeIndentedNote(SafeLine(d.ApprovalID))
}

// writeIndentedNote writes an indented line below a note.
func (r *Renderer) writeIndentedNote(text string) {
	cells := toStyledRunes(styleDim, "  "+text)
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
