package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestApprovals_AreDecidedOnATerminal tests the prompt of spool run on a terminal: yes, a rejection with a comment, changed arguments
// in an editor, a decision that somebody else makes, and Ctrl-C. Without a terminal the same call is denied, because nobody is there.
func TestApprovals_AreDecidedOnATerminal(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "approvals.yaml"), Executor: executor.Config{AnthropicModel: "known-model", Slots: 2}})
	k := asker{architecture: "spool"}.begin(t, c, "asks", map[string]any{"preset": "ask"})
	dir, data := t.TempDir(), t.TempDir()
	editor := filepath.Join(dir, "editor")
	if err := os.WriteFile(editor, []byte("#!/bin/sh\nsed -i s/asked.txt/edited.txt/ \"$1\"\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	const prompt = "[?] whole request:"
	run := func(query string, steps func(x *harness.Terminal)) (code int, screen string) {
		t.Helper()
		x := c.StartTerminal(t, dir, data, []string{"EDITOR=" + editor}, "run", "--session", k.session, query)
		x.AwaitText(prompt)
		if x.EchoesInput() {
			t.Error("the terminal echoes while the prompt is shown")
		}
		steps(x)
		code, screen = x.AwaitExit()
		if !strings.Contains(screen, "run_code asks for approval") {
			t.Errorf("%s: the screen lacks the request:\n%s", query, screen)
		}
		return code, screen
	}
	if code, screen := run("run touch yes.txt", func(x *harness.Terminal) { x.Type("y\r") }); code != 0 || !k.created("yes.txt") {
		t.Errorf("yes: ended with %d:\n%s", code, screen)
	}
	code, screen := run("run touch no.txt", func(x *harness.Terminal) {
		x.Type("n\r")
		x.AwaitText("what to tell the agent")
		x.Type("use another name\r")
	})
	if code != 0 || k.created("no.txt") || !strings.Contains(screen, "use another name") {
		t.Errorf("no: ended with %d:\n%s", code, screen)
	}
	code, screen = run("run touch asked.txt", func(x *harness.Terminal) {
		x.Type("e\r")
		x.AwaitText("approve with these arguments? [y/n]:")
		x.Type("y\r")
	})
	if code != 0 || k.created("asked.txt") || !k.created("edited.txt") {
		t.Errorf("edit: ended with %d:\n%s", code, screen)
	}
	code, screen = run("run touch elsewhere.txt", func(x *harness.Terminal) {
		x.Type("y") // not a line
		var open struct{ Approvals []struct{ ApprovalID string } }
		c.Call(0, "GET", "/api/approvals?status=open&sessionId="+k.session, nil, &open)
		if len(open.Approvals) != 1 {
			t.Fatalf("open are %+v", open)
		}
		c.Call(0, "POST", "/api/approvals/"+open.Approvals[0].ApprovalID+"/decide", map[string]any{"decision": "skip"}, nil)
	})
	if code != 0 || k.created("elsewhere.txt") || !strings.Contains(screen, "skipped") {
		t.Errorf("elsewhere: ended with %d:\n%s", code, screen)
	}
	if code, screen := run("run touch interrupted.txt", func(x *harness.Terminal) { x.Type("y" + harness.CtrlC) }); code != 130 || k.created("interrupted.txt") || !strings.Contains(screen, "request ended without a decision") {
		t.Errorf("Ctrl-C: ended with %d:\n%s", code, screen)
	}
	if code, out, says := c.RunCLI(t, dir, data, "run", "--session", k.session, "run touch unattended.txt"); code != 0 || k.created("unattended.txt") || !strings.Contains(out, "(rule unattended)") {
		t.Errorf("unattended: ended with %d:\n%s%s", code, out, says)
	}
}

// TestApprovals_ShowTheWholeCommandOnATerminal tests on a terminal of 80 columns that the command of a call comes before
// the agent's words, that neither spaces nor invisible characters hide its end, and that all choices are visible.
func TestApprovals_ShowTheWholeCommandOnATerminal(t *testing.T) {
	t.Parallel()
	for name, query := range map[string]string{"spool": "run ", "claude-code": "forge "} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := askers()[name]
			a.need(t)
			c := harness.New(t, harness.Options{Script: script(t, "approvals.yaml"), Executor: executor.Config{AnthropicModel: "known-model", Slots: 2}})
			k := a.begin(t, c, "asks", map[string]any{"preset": "ask"})
			command := "touch shown.txt;" + strings.Repeat(" ", 2000) + "touch hidden.txt # \u3164\u202e\u034f"
			x := c.StartTerminalWithColumns(t, 80, t.TempDir(), t.TempDir(), nil, "run", "--session", k.session, query+command)
			x.AwaitText(" more rows\n")
			const more, last = "[m]ore, [?] whole request:", "[e]dit, [?] whole request:"
			x.AwaitText(more)
			shows := func(choices string) []string {
				t.Helper()
				rows := x.ScreenRows(80)
				if got := strings.TrimSpace(rows[len(rows)-1]); !strings.HasPrefix(got, "[y]es, [n]o, [a]ll, [s]kip, ") || !strings.HasSuffix(got, choices) {
					t.Errorf("the prompt is %q", got)
				}
				return rows
			}
			rows := shows(more)
			at := slices.Index(rows, "  command:")
			if at < 0 || !strings.HasSuffix(rows[at-1], " asks for approval") || rows[at+1] != "    │ touch shown.txt;" {
				t.Fatalf("the command is not first in %q", rows)
			}
			for i := 0; !strings.Contains(x.Output(), last) && i < 10; i++ {
				x.Type("m\r")
				harness.Eventually(t, "the next page", func() bool {
					rows := x.ScreenRows(80)
					return strings.Contains(x.Output(), last) || strings.HasSuffix(rows[len(rows)-1], more) && strings.Count(x.Output(), " more rows\n") > i+1
				})
			}
			rows = shows(last)
			end := slices.IndexFunc(rows, func(row string) bool {
				return strings.HasPrefix(row, "    ┆ ") && strings.Contains(row, "touch hidden.txt")
			})
			says := slices.IndexFunc(rows, func(row string) bool { return strings.HasPrefix(row, "  the agent says:") })
			if end < at || !strings.Contains(strings.ReplaceAll(strings.Join(rows[end:], ""), "    ┆ ", ""), `touch hidden.txt # \u{3164}\u{202e}\u{34f}`) || name == "claude-code" && says < end || slices.Contains(rows, "  command: ls") || slices.Contains(rows, "  host: localhost") {
				t.Errorf("the end of the command is row %d, the agent's words row %d: %q", end, says, rows)
			}
			x.Type("n\r")
			x.AwaitText("what to tell the agent")
			x.Type("\r")
			if code, screen := x.AwaitExit(); code != 0 || k.created("shown.txt") || k.created("hidden.txt") {
				t.Errorf("ended with %d:\n%s", code, screen)
			}
		})
	}
}
