package terminal

import (
	"bytes"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
)

// TestRenderer_HoldsOutputWhileAPromptIsShown tests that no text of an agent comes between a request and its prompt, and
// that the text is shown when the prompt is removed.
func TestRenderer_HoldsOutputWhileAPromptIsShown(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	r := New(Config{Out: &out, TTY: true, Prompts: true})
	asked := events.ApprovalRequested{ApprovalID: "apr_1", Kind: events.ApprovalTool, ToolName: "Bash", Title: "ls", Preview: events.ApprovalPreview{Command: "rm -rf ~"}}
	show := func(p events.Payload) {
		r.ShowEvent(events.Event{Time: start, ExecutionID: exe, ConversationID: events.MainConversation, Data: p})
	}
	show(asked)
	if strings.Contains(out.String(), "command:") {
		t.Errorf("the request is shown before its prompt: %q", out.String())
	}
	r.WritePage(r.BeginPrompt(asked), "")
	r.ShowPrompt(PromptLabel{"[y]es:", "[y]:"}, "")
	show(events.BlockStart{Block: events.Block{ID: "blk_1", Kind: events.KindAssistantText, Status: events.StatusPending}})
	r.ShowDelta(events.Delta{BlockID: "blk_1", ExecutionID: exe, ConversationID: events.MainConversation, Text: "command: forged"})
	r.ShowSnapshot([]events.Block{{ID: "blk_2", Kind: events.KindError, Status: events.StatusComplete, Message: "command: forged"}})
	if got := out.String(); strings.Contains(got, "forged") || !strings.Contains(got, "  command: rm -rf ~\n") {
		t.Errorf("while the prompt is shown: %q", got)
	}
	r.ShowPrompt(PromptLabel{}, "")
	if n := strings.Count(out.String(), "command: forged"); n == 0 {
		t.Errorf("after the prompt: %q", out.String())
	}
	r.BeginPrompt(asked)
	show(events.SessionClosed{Reason: "at the end"})
	if err := r.Close(); err != nil || !strings.Contains(out.String(), "at the end") {
		t.Errorf("after Close: %v, %q", err, out.String())
	}
}

// TestWritePage_MarksRowsOnATerminalThatBecameNarrower tests that no part of a row looks like another field on a terminal
// that became narrower after the rows were made.
func TestWritePage_MarksRowsOnATerminalThatBecameNarrower(t *testing.T) {
	t.Parallel()
	for _, columns := range []int{20, 30, 79} {
		var out bytes.Buffer
		width := 80
		r := New(Config{Out: &out, TTY: true, Prompts: true, Width: func() int { return width }})
		command := "rm -rf ~ #" + strings.Repeat(" ", columns) + "host: localhost" + strings.Repeat(" ", 200) + "file: a"
		rows := r.BeginPrompt(events.ApprovalRequested{Kind: events.ApprovalTool, ToolName: "Bash", Preview: events.ApprovalPreview{Command: command}})
		width = columns
		out.Reset()
		for len(rows) > 0 {
			rows = r.WritePage(rows, "commands that begin with `rm`"+strings.Repeat(" ", 100)+"command: ls")
		}
		for row := range strings.Lines(out.String()) {
			row = strings.TrimSuffix(row, "\n")
			isRow := strings.HasPrefix(row, "    │ ") || strings.HasPrefix(row, "    ┆ ") || strings.HasPrefix(row, "  …") || row == "  command:" || row == "  [a]ll also approves later:"
			if !isRow && !strings.HasPrefix(row, "  [a]ll also") || textColumns(row) >= columns {
				t.Errorf("%d columns: row %q", columns, row)
			}
		}
	}
}

// TestBeginPrompt_ShowsTheWholeTool tests that the name of a tool is not cut on a narrow terminal.
func TestBeginPrompt_ShowsTheWholeTool(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	r := New(Config{Out: &out, TTY: true, Prompts: true, Width: func() int { return 20 }})
	r.BeginPrompt(events.ApprovalRequested{Kind: events.ApprovalTool, ToolName: "mcp__repositories__delete_repository"})
	if got := strings.ReplaceAll(out.String(), "\n    ┆ ", ""); got != "? mcp__repositories__delete_repository asks for approval\n" {
		t.Errorf("got %q", out.String())
	}
}

// TestPromptLine_ShowsAllChoices tests that no choice of a prompt is cut on a narrow terminal.
func TestPromptLine_ShowsAllChoices(t *testing.T) {
	t.Parallel()
	label := PromptLabel{"[y]es, [n]o, [a]ll, [s]kip, [e]dit, [m]ore, [?] whole request:", "[y/n/a/s/e/m/?]:"}
	for columns := 1; columns <= 120; columns++ {
		var out bytes.Buffer
		r := New(Config{Out: &out, TTY: true, Width: func() int { return columns }})
		r.ShowPrompt(label, strings.Repeat("typed ", 50))
		want := label.Short
		if columns >= 80 {
			want = label.Full
		}
		if got := out.String(); !strings.HasPrefix(got, want+" ") && !strings.HasPrefix(got, label.Full+" ") || textColumns(got) >= max(columns, minWidth) {
			t.Errorf("%d columns: %q", columns, got)
		}
	}
}

// TestFieldRows_FitOnTheTerminal tests that a terminal shows each row of a text in one row, also if the text has
// characters that are as wide as two, or that stand above another one.
func TestFieldRows_FitOnTheTerminal(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text string
		wide int
	}{
		"ideographs": {"四", 2}, "emoji": {"😀", 2}, "small squares": {"◽", 2}, "small squares, black": {"◾", 2}, "watches": {"⌚", 2}, "stars": {"⭐", 2},
		"letters of Hangul": {"ᄀ", 2}, "marks above a letter": {"\u0301", 1},
	} {
		rows := FieldRows("command:", "a"+strings.Repeat(c.text, 300)+"host: localhost", 80)
		for _, row := range rows {
			if n := len([]rune(row)) + (c.wide-1)*strings.Count(row, c.text); n > 80 {
				t.Errorf("%s: a row needs %d columns: %q", name, n, row)
			}
		}
	}
}

// TestApprovalRows_ShowEachFieldWhole tests for any texts and widths that the rows have all characters of each field,
// that they fit, and that a row which begins as a field is one.
func TestApprovalRows_ShowEachFieldWhole(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := func(name string) string {
			return rapid.StringOfN(rapid.RuneFrom([]rune("ab  \n\t四😀é\u3164\u202e:│┆")), 0, 200, -1).Draw(t, name)
		}
		columns := rapid.IntRange(minWidth-3, 120).Draw(t, "columns")
		a := events.ApprovalRequested{Reason: text("reason"), Preview: events.ApprovalPreview{Command: text("command") + "x", Cwd: text("folder"), Text: text("text")}}
		fields := map[string]string{"command:": a.Preview.Command, "folder:": a.Preview.Cwd, "text:": a.Preview.Text, "the agent says:": a.Reason}
		got := map[string]string{}
		name := ""
		for _, row := range ApprovalRows(a, columns) {
			if n := textColumns(row); n > columns && n > textColumns(fieldMark)+2 {
				t.Fatalf("row of %d columns, the limit is %d: %q", n, columns, row)
			}
			part, isLine := strings.CutPrefix(row, fieldMark)
			rest, isRest := strings.CutPrefix(row, continuedMark)
			switch {
			case isRest:
				got[name] += rest
			case isLine && got[name] == "":
				got[name] = "\n" + part
			case isLine:
				got[name] += "\n" + part
			default:
				found := false
				for f := range fields {
					if value, ok := strings.CutPrefix(row, f); ok {
						name, got[f], found = f, strings.TrimPrefix(value, " "), true
					}
				}
				if !found {
					t.Fatalf("row %q is no field", row)
				}
			}
		}
		for f, value := range fields {
			want := strings.TrimSuffix(strings.ReplaceAll(SafeText(value), "\t", "    "), "\n")
			if shown := strings.TrimPrefix(got[f], "\n"); value != "" && shown != want && got[f] != want {
				t.Fatalf("%s %q is shown as %q", f, want, got[f])
			}
		}
	})
}
