package command

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// pendingApprovals is an API in which every approval request is open. It records decisions.
type pendingApprovals struct {
	spoolv1.ApprovalsClient
	decisions []string
}

func (p *pendingApprovals) GetApproval(context.Context, *spoolv1.GetApprovalRequest, ...grpc.CallOption) (*spoolv1.Approval, error) {
	return &spoolv1.Approval{Status: "pending"}, nil
}

func (p *pendingApprovals) DecideApproval(_ context.Context, r *spoolv1.DecideApprovalRequest, _ ...grpc.CallOption) (*spoolv1.DecideApprovalResponse, error) {
	p.decisions = append(p.decisions, r.ApprovalId+" "+r.Decision)
	return &spoolv1.DecideApprovalResponse{}, nil
}

// TestPrompt_KeysTypedBetweenPromptsDecideNothing tests that a line which was typed while no prompt was shown does not
// decide the next request, although the read of a prompt that went away has received it.
func TestPrompt_KeysTypedBetweenPromptsDecideNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys, api := make(keyboard), &pendingApprovals{}
		a := &app{IO: IO{In: keys, Raw: func() (func() error, error) { return func() error { return nil }, nil }}}
		r := terminal.New(terminal.Config{Out: io.Discard, TTY: true, Prompts: true})
		p := newApprovalPrompter(a, r, func() *client.Client { return &client.Client{Approvals: api} }, func() {})
		ctx, cancel := context.WithCancel(t.Context())
		defer close(keys)
		defer cancel()
		go p.run(ctx)
		update := func(d events.Payload) {
			p.updateQueue(events.Event{ExecutionID: exe, Data: d})
			synctest.Wait()
		}
		update(bash(apr1))
		update(events.ApprovalDecided{ApprovalID: apr1, Decision: events.DecisionSkip})
		time.Sleep(time.Minute)
		keys <- "y\r"
		time.Sleep(time.Minute)
		update(bash(apr2))
		if len(api.decisions) != 0 {
			t.Fatalf("decided %q by what was typed before", api.decisions)
		}
		keys <- "s\r"
		synctest.Wait()
		if !slices.Equal(api.decisions, []string{apr2 + " skip"}) {
			t.Errorf("decided %q by what was typed at the prompt", api.decisions)
		}
	})
}

// TestAskUser_IgnoresWhatWasTypedBefore tests that a line which was typed before a question was printed does not answer it.
func TestAskUser_IgnoresWhatWasTypedBefore(t *testing.T) {
	t.Parallel()
	typed := strings.NewReader("y\n")
	var asked strings.Builder
	a := &app{IO: IO{In: typed, InTTY: true, Err: &asked, DropInput: func() error {
		if asked.Len() > 0 {
			t.Error("what was typed is dropped after the question")
		}
		_, err := io.Copy(io.Discard, typed)
		return err
	}}}
	if answer, err := a.askUser(t.Context(), "Continue?"); isYes(answer) || err != nil {
		t.Errorf("answer %q, error %v", answer, err)
	}
}

// TestPrompt_ShowsTheWholeCallAndAllChoices tests on terminals of several widths that the command comes first, that it
// cannot be hidden by the agent's words, by spaces or by its length, that no text looks like another field, and that all
// choices are visible.
func TestPrompt_ShowsTheWholeCallAndAllChoices(t *testing.T) {
	t.Parallel()
	asked := events.ApprovalRequested{
		ApprovalID: apr1, Kind: events.ApprovalTool, ToolName: "Bash", Title: "ls", Editable: true, Input: json.RawMessage(`{"command":"x"}`),
		Class:  "ls",
		Reason: strings.Repeat("\n", 30) + "command: ls\nhost: localhost\n[y]es\u202e",
		Preview: events.ApprovalPreview{
			Command: "first" + strings.Repeat(" ", 3000) + "host: good.example\nsecond\n" + strings.Repeat("#\n", 60) + "hidden\u3164\u034f\x1b]0;\nlast\x07", Hosts: []string{"evil.example"}, Paths: []string{"a  b", "c\nfile: d"},
		},
	}
	for _, columns := range []int{40, 80, 200} {
		t.Run(fmt.Sprint(columns), func(t *testing.T) {
			t.Parallel()
			r := newTerminalRun(t, asked)
			r.columns = columns
			r.f.approvals[apr1] = approvalJSON(t, "pending", asked)
			r.decided(apr1)
			choices, last := "[y]es, [n]o, [a]ll, [s]kip, [e]dit, [m]ore, [?] whole request: ", "[y]es, [n]o, [a]ll, [s]kip, [e]dit, [?] whole request: "
			if columns < 80 {
				choices, last = "[y/n/a/s/e/m/?]: ", "[y/n/a/s/e/?]: "
			}
			const more = " more rows\r\n"
			var pages strings.Builder
			code := r.run(func() {
				r.shows(t, "Bash asks for approval\r\n")
				for {
					page, end := r.until(t, more, last)
					if pages.WriteString(page); end != more {
						break
					}
					r.shows(t, choices)
					r.keys <- "m\r"
				}
				r.keys <- "s\r"
			}, "run", "hello")
			got := rowsOf(pages.String())
			if code != ExitDone || !r.f.wasSent(`{"decision":"skip"}`) || len(got) == 0 || got[0] != "  command:" || !strings.HasPrefix(got[1], "    │ first") {
				t.Fatalf("exit code %d, the page begins with %q", code, got[:min(3, len(got))])
			}
			field := func(name string) int {
				return slices.IndexFunc(got, func(s string) bool { return strings.HasPrefix(s, "  "+name) })
			}
			if says := field("the agent says:"); says < field("host: evil.example") || says < field("command:") || says < 0 {
				t.Errorf("the agent's words are in row %d of %q", says, got)
			}
			for _, row := range got {
				if strings.HasPrefix(row, "  host: good") || strings.HasPrefix(row, "  file: d") || strings.HasPrefix(row, "  command: ls") || len([]rune(row)) >= columns {
					t.Errorf("a text looks like a field, or the row is too long: %q", row)
				}
			}
			if whole := joined(got); !strings.Contains(whole, "first"+strings.Repeat(" ", 3000)+"host: good.example\nsecond\n") || !strings.Contains(whole, `hidden\u{3164}\u{34f}\u{1b}]0;`+"\nlast\\u{7}") {
				t.Errorf("the pages lack a part of the command: %.300q", whole)
			}
		})
	}
}

// TestPrompt_MarksChangedArguments tests that no part of the arguments that a user confirms looks like another field.
func TestPrompt_MarksChangedArguments(t *testing.T) {
	t.Parallel()
	asked := bash(apr1)
	asked.Input = json.RawMessage(`{"command":"rm -rf ~ #` + strings.Repeat(" ", 40) + `host: localhost"}`)
	r := newTerminalRun(t, asked)
	r.columns = 60
	r.decided(apr1)
	r.edit = func(context.Context, []byte) ([]byte, error) {
		return []byte(strings.Replace(string(asked.Input), "~", "/", 1)), nil
	}
	code := r.run(func() {
		r.shows(t, "[y/n/a/s/e/?]: ")
		r.keys <- "e\r"
		shown, _ := r.until(t, "[y/n]:")
		if rows := rowsOf(shown); !slices.Contains(rows, "  changed arguments:") || !strings.Contains(joined(rows), strings.Repeat(" ", 40)+"host: localhost\"}") || strings.Contains(shown, "\nhost:") {
			t.Errorf("the screen shows %q", shown)
		}
		r.keys <- "y\r"
	}, "run", "hello")
	if code != ExitDone {
		t.Errorf("exit code %d", code)
	}
}

// TestPrompt_ShowsWhichServerAsks tests that a user sees which MCP server asks for data.
func TestPrompt_ShowsWhichServerAsks(t *testing.T) {
	t.Parallel()
	asked := events.ApprovalRequested{ApprovalID: apr1, Kind: events.ApprovalElicitation, ToolName: "mcp__weather", Title: "Your password", Preview: events.ApprovalPreview{Text: "Your password"}}
	r := newTerminalRun(t, asked)
	r.f.approvals[apr1] = approvalJSON(t, "pending", asked)
	r.decided(apr1)
	if code := r.run(func() {
		r.shows(t, "  server: mcp__weather\r\n")
		r.keys <- "/skip\r"
	}, "run", "hello"); code != ExitDone {
		t.Errorf("exit code %d", code)
	}
}

// TestPrompt_WaitsForADecisionWithoutQuestions tests that a request for answers that has no questions is not answered
// before the user decides.
func TestPrompt_WaitsForADecisionWithoutQuestions(t *testing.T) {
	t.Parallel()
	asked := events.ApprovalRequested{ApprovalID: apr1, Kind: events.ApprovalQuestion}
	r := newTerminalRun(t, asked)
	r.f.approvals[apr1] = approvalJSON(t, "pending", asked)
	r.decided(apr1)
	if code := r.run(func() {
		r.shows(t, prompt)
		r.keys <- "s\r"
	}, "run", "hello"); code != ExitDone || !r.f.wasSent(`{"decision":"skip"}`) || r.f.wasSent(`{"decision":"answer","answers":{}}`) {
		t.Errorf("exit code %d, sent %q", code, r.f.bodies)
	}
}

// until waits until the screen has one of the texts, and returns what the screen shows up to it, and the text.
func (r *terminalRun) until(t *testing.T, texts ...string) (before, found string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		for _, text := range texts {
			if before, rest, ok := strings.Cut(r.text.String(), text); ok {
				r.text.Reset()
				r.text.WriteString(rest)
				return before, text
			}
		}
		if r.late {
			t.Errorf("the screen shows none of %q: %q", texts, r.text.String())
			return "", ""
		}
		r.grew.Wait()
	}
}

// rowsOf returns the rows of a request in the output of a terminal, without the status line and prompts.
func rowsOf(output string) (rows []string) {
	for row := range strings.SplitSeq(output, "\r\n") {
		if i := strings.LastIndex(row, "\x1b[J"); i >= 0 {
			row = row[i+len("\x1b[J"):]
		}
		if strings.HasPrefix(row, "  ") && !strings.HasPrefix(row, "  … ") && !strings.HasPrefix(row, "  [a]ll also approves") {
			rows = append(rows, row)
		}
	}
	return rows
}

// joined returns the text of the fields in rows: a continued row belongs to the line above.
func joined(rows []string) string {
	var b strings.Builder
	for _, row := range rows {
		if part, ok := strings.CutPrefix(row, "    ┆ "); ok {
			b.WriteString(part)
		} else {
			b.WriteString("\n" + strings.TrimPrefix(row, "    │ "))
		}
	}
	return b.String()
}
