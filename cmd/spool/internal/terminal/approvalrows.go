package terminal

import (
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

const (
	// fieldMark begins each row of a text that has rows of its own, so that no text looks like another field.
	fieldMark = "  │ "
	// continuedMark begins a row that continues the line of the row above.
	continuedMark = "  ┆ "
)

// ApprovalRows returns the rows in which people see what an approval request asks for: first what the call does, then
// the questions, then what the agent says about it. A row has at most the given number of columns; 0 means no limit. No
// text is cut, and no text can look like another field.
func ApprovalRows(a events.ApprovalRequested, columns int) []string {
	rows := []string{}
	add := func(name, text string) {
		if text != "" {
			rows = append(rows, FieldRows(name, text, columns)...)
		}
	}
	p := a.Preview
	if a.Kind == events.ApprovalElicitation {
		add("server:", SafeLine(a.ToolName))
	}
	for _, c := range p.Cut {
		add("not whole:", fmt.Sprintf("%s, of %s bytes; the call %s of the session has more", c.Field, formatThousands(c.Bytes), SafeLine(a.ToolUseID)))
	}
	if p.Truncated && len(p.Cut) == 0 {
		add("not whole:", "the request is longer than what is shown")
	}
	add("command:", p.Command)
	add("folder:", p.Cwd)
	for _, path := range p.Paths {
		add("file:", SafeLine(path))
	}
	for _, host := range p.Hosts {
		add("host:", SafeLine(host))
	}
	add("url:", SafeLine(p.URL))
	add("changes:", p.Diff)
	add("text:", p.Text)
	if p.Command+p.URL+p.Text+p.Diff == "" && len(p.Paths) == 0 {
		add("arguments:", string(a.Input))
	}
	for i, q := range a.Questions {
		rows = append(rows, questionRows(i, q, columns)...)
	}
	add("rule:", SafeLine(a.Rule))
	add("class:", SafeLine(a.Class))
	add("the agent says:", a.Reason)
	if a.Kind == events.ApprovalTool {
		add("schema of the arguments:", string(a.Schema))
	} else {
		add("schema of the answer:", string(a.Schema))
	}
	return rows
}

// FieldRows returns a field of a request in rows: one row, if the text has one line that fits, or else the name, and the
// marked lines of the text.
func FieldRows(name, text string, columns int) []string {
	text = strings.TrimSuffix(SafeText(text), "\n")
	if columns > 0 {
		text = strings.ReplaceAll(text, "\t", "    ")
	}
	if row := name + " " + text; !strings.Contains(text, "\n") && (columns == 0 || textColumns(row) <= columns) {
		return []string{row}
	}
	rows := []string{name}
	for line := range strings.SplitSeq(text, "\n") {
		rows = append(rows, fieldMark+line)
	}
	return splitRows(rows, columns)
}

// splitRows returns rows with those continued in marked rows that need more than the given number of columns. 0 means no
// limit.
func splitRows(rows []string, columns int) []string {
	if columns == 0 {
		return rows
	}
	var fit []string
	for _, row := range rows {
		for mark, room := "", columns; ; mark, room = continuedMark, columns-textColumns(continuedMark) {
			part := row[:prefixLength(row, room)]
			fit = append(fit, mark+part)
			if row = row[len(part):]; row == "" {
				break
			}
		}
	}
	return fit
}

// prefixLength returns the length in bytes of the longest prefix of s that needs at most the given number of columns, but
// at least of one character.
func prefixLength(s string, columns int) int {
	n := 0
	for i, r := range s {
		if n += runeColumns(r); n > columns && i > 0 {
			return i
		}
	}
	return len(s)
}

// questionRows returns the rows in which the question with index i is shown, with its numbered options.
func questionRows(i int, q events.Question, columns int) []string {
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
	rows := FieldRows(fmt.Sprintf("question %d:", i+1), text, columns)
	for n, o := range q.Options {
		option := SafeLine(o.Label)
		if o.Description != "" {
			option += ": " + SafeLine(o.Description)
		}
		rows = append(rows, FieldRows(fmt.Sprintf("  %d.", n+1), option, columns)...)
	}
	if q.Other && len(q.Options) > 0 {
		rows = append(rows, "  or any other text")
	}
	return rows
}
