package terminal

import (
	"fmt"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

const (
	// approvalPageRows is the number of rows of a request that are shown at once. With a prompt they fit on a terminal of
	// 24 rows.
	approvalPageRows = 16
	// minPageRows is the number of rows of a request that are shown at once if the class of its calls is long.
	minPageRows = 4
	// minTypedColumns is the number of columns that a prompt leaves for what the user types.
	minTypedColumns = 8
)

// PromptLabel is the text before what the user types. Short takes its place on a terminal that is too narrow for Full,
// so that all choices are visible. The zero value is no prompt.
type PromptLabel struct{ Full, Short string }

// BeginPrompt holds the output of the session back until ShowPrompt removes the prompt, so that no text of an agent comes
// between a request and its prompt. It writes the heading of the request and returns its rows.
func (r *Renderer) BeginPrompt(a events.ApprovalRequested) (rows []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prompting = true
	r.screen.endNonEmptyLine()
	mark := "? "
	for _, row := range splitRows([]string{ApprovalHeading(a)}, r.approvalColumns()) {
		r.writeLine(toStyledRunes(styleYellow, mark+row))
		mark = "  "
	}
	r.redraw()
	return ApprovalRows(a, r.approvalColumns())
}

// WritePage writes the first page of the rows of a request, how many rows are left, and the class of calls that the
// choice "all" covers, if it is offered. It returns the rows that are left.
func (r *Renderer) WritePage(rows []string, class string) (left []string) {
	rows = splitRows(rows, r.approvalColumns()) // the terminal may have become narrower
	var below []string
	if class != "" {
		below = FieldRows("[a]ll also approves later:", class, r.approvalColumns())
	}
	page := min(max(approvalPageRows-len(below), minPageRows), len(rows))
	if left = rows[page:]; len(left) > 0 {
		below = append([]string{fmt.Sprintf("… %d more rows", len(left))}, below...)
	}
	r.WriteRows(slices.Concat(rows[:page], below))
	return left
}

// WriteRows writes rows of a request, indented.
func (r *Renderer) WriteRows(rows []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.screen.endNonEmptyLine()
	for _, row := range splitRows(rows, r.approvalColumns()) {
		r.writeLine(toStyledRunes(styleNormal, "  "+row))
	}
	r.redraw()
}

// WriteField writes a text in the rows of a field.
func (r *Renderer) WriteField(name, text string) {
	r.WriteRows(FieldRows(name, text, r.approvalColumns()))
}

// WriteWhole writes all rows of a request, with its class and the arguments of the call.
func (r *Renderer) WriteWhole(rows []string, a events.ApprovalRequested) {
	for _, f := range [][2]string{{"class:", a.Class}, {"arguments:", string(a.Input)}} {
		if f[1] != "" {
			rows = slices.Concat(rows, FieldRows(f[0], f[1], r.approvalColumns()))
		}
	}
	r.WriteRows(rows)
}

// approvalColumns returns the number of columns of a row of a request, or 0 without a terminal.
func (r *Renderer) approvalColumns() int {
	if !r.screen.tty {
		return 0
	}
	return r.screen.wrapColumn() - 2
}

// ShowPrompt shows a prompt, and what the user has typed at it, in place of the status line. The zero label removes the
// prompt, and writes the output that was held back since BeginPrompt.
func (r *Renderer) ShowPrompt(label PromptLabel, typed string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.label, r.typed = label, SafeLine(typed)
	if label == (PromptLabel{}) {
		r.releaseOutput()
	}
	r.redraw()
}

// holdOutput runs show, or keeps it until the prompt is removed. The caller must hold mu.
func (r *Renderer) holdOutput(show func()) {
	if r.prompting {
		r.held = append(r.held, show)
		return
	}
	show()
}

// releaseOutput writes the output that was held back. The caller must hold mu.
func (r *Renderer) releaseOutput() {
	held := r.held
	r.prompting, r.held = false, nil
	for _, show := range held {
		show()
	}
}

// promptLine returns the prompt and the typed text on one line. If the line is too short, it leaves out the beginning
// of the typed text.
func (r *Renderer) promptLine() string {
	room := r.screen.wrapColumn() - 1
	label := SafeLine(r.label.Full)
	if textColumns(label)+minTypedColumns > room {
		label = SafeLine(r.label.Short)
	}
	label += " "
	typed := []rune(r.typed)
	for len(typed) > 0 && textColumns(label)+textColumns(string(typed)) > room {
		typed = typed[1:]
	}
	return label + string(typed)
}
