package e2e

import (
	"os"
	"path/filepath"
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
