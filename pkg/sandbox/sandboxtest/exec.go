package sandboxtest

import (
	"context"
	"io"
	"os"
	"strings"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// testExecStreams checks that stdin, stdout and stderr carry all bytes, large ones and interactive ones, each on its own stream.
func testExecStreams(f *fixture) {
	box := f.createSandbox(f.newSpec())
	out, errs, code := f.runCommand(box, sandbox.Command{Args: []string{"sh", "-c", `read line; echo "got $line"; echo bad >&2; exit 3`}}, "hello\n")
	if out != "got hello\n" || errs != "bad\n" || code != 3 {
		f.Errorf("stdout %q, stderr %q, code %d", out, errs, code)
	}
	big := strings.Repeat("0123456789abcdef", 64<<10)
	p, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"cat"}})
	f.failOnError(err)
	go func() {
		if _, err := io.WriteString(p.Stdin(), big); err != nil {
			f.Error(err)
		}
		if err := p.Stdin().Close(); err != nil {
			f.Error(err)
		}
	}()
	raw, err := io.ReadAll(p.Stdout())
	f.failOnError(err)
	if string(raw) != big {
		f.Errorf("received %d bytes of %d", len(raw), len(big))
	}
	_, err = p.Wait()
	f.failOnError(err)
	// Input and output are passed on while the command runs.
	p, err = box.Exec(f.ctx, sandbox.Command{Args: []string{"cat"}})
	f.failOnError(err)
	for _, word := range []string{"one", "two"} {
		_, err := io.WriteString(p.Stdin(), word)
		f.failOnError(err)
		buf := make([]byte, len(word))
		_, err = io.ReadFull(p.Stdout(), buf)
		f.failOnError(err)
		if string(buf) != word {
			f.Errorf("echo of %q is %q", word, buf)
		}
	}
	f.failOnError(p.Stdin().Close())
	_, err = p.Wait()
	f.failOnError(err)
}

// testExecExitCodes checks the result of Wait for commands that exit or are ended by a signal.
func testExecExitCodes(f *fixture) {
	box := f.createSandbox(f.newSpec())
	for line, want := range map[string]int{"true": 0, "exit 1": 1, "exit 255": 255, "kill -9 $$": -1} {
		if _, _, code := f.runShell(box, line); code != want {
			f.Errorf("%s: code %d, want %d", line, code, want)
		}
	}
	p, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"no-such-program-of-spool"}})
	if err == nil {
		code, werr := p.Wait()
		if werr == nil && code == 0 {
			f.Error("a program that does not exist was started")
		}
	}
	if _, err := box.Exec(f.ctx, sandbox.Command{}); err == nil {
		f.Error("a command without args was accepted")
	}
}

// testExecOutlivesContext checks that a command continues after the context of Exec has ended.
func testExecOutlivesContext(f *fixture) {
	box := f.createSandbox(f.newSpec())
	ctx, cancel := context.WithCancel(f.ctx)
	p, err := box.Exec(ctx, sandbox.Command{Args: []string{"cat"}})
	f.failOnError(err)
	cancel()
	_, err = io.WriteString(p.Stdin(), "still here")
	f.failOnError(err)
	f.failOnError(p.Stdin().Close())
	raw, err := io.ReadAll(p.Stdout())
	f.failOnError(err)
	if code, err := p.Wait(); string(raw) != "still here" || code != 0 || err != nil {
		f.Errorf("after its context ended: %q, code %d, %v", raw, code, err)
	}
}

// testExecKill checks that Kill ends a command and its streams, and not the sandbox.
func testExecKill(f *fixture) {
	box := f.createSandbox(f.newSpec())
	p, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"sh", "-c", `echo up; sleep 1000 & wait`}})
	f.failOnError(err)
	buf := make([]byte, 3)
	_, err = io.ReadFull(p.Stdout(), buf)
	f.failOnError(err)
	f.failOnError(p.Kill())
	code, err := p.Wait()
	f.failOnError(err)
	if code != -1 {
		f.Errorf("code %d after Kill, want -1", code)
	}
	if n, err := p.Stdout().Read(buf); n != 0 || err == nil {
		f.Errorf("stdout returned %d bytes and %v after Kill", n, err)
	}
	f.failOnError(p.Kill())
	if alive, err := box.Running(f.ctx); !alive || err != nil {
		f.Errorf("the sandbox runs: %v, %v", alive, err)
	}
}

// testExecRunner checks that a command whose first argument is "runner" runs the sandbox's own runner binary.
func testExecRunner(f *fixture) {
	box := f.createSandbox(f.newSpec())
	out, errs, code := f.runCommand(box, sandbox.Command{Args: []string{"runner", "--help"}}, "")
	if code != 0 || !strings.Contains(out, "serve") {
		f.Errorf("runner --help: code %d, %s%s", code, out, errs)
	}
}

// testExecEnvironment checks that a command has the variables of the sandbox and of the command, and none of the
// executor's.
func testExecEnvironment(f *fixture) {
	box := f.createSandbox(f.newSpec())
	out, _, _ := f.runCommand(box, sandbox.Command{Args: []string{"env"}, Env: map[string]string{"GIVEN": "a b"}}, "")
	if strings.Contains(out, secretVariable) || strings.Contains(out, "must-not-be-seen") {
		f.Errorf("the environment is inherited:\n%s", out)
	}
	vars := map[string]string{}
	for line := range strings.Lines(out) {
		k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		vars[k] = v
	}
	if vars["GIVEN"] != "a b" || vars["PATH"] == "" || vars["LANG"] == "" {
		f.Errorf("the environment lacks something:\n%s", out)
	}
	if home, _ := os.UserHomeDir(); vars["HOME"] == "" || vars["HOME"] == home {
		f.Errorf("HOME is %q", vars["HOME"])
	}
	if _, _, code := f.runShell(box, `touch "$HOME/mine" && test -w "$HOME/mine"`); code != 0 {
		f.Error("HOME cannot be written")
	}
}

// testExecDir checks the working directory of a command: Command.Dir, or else the workspace.
func testExecDir(f *fixture) {
	box := f.createSandbox(f.newSpec())
	f.failOnError(box.Files().Put(f.ctx, "sub/deep/file", strings.NewReader("x")))
	if out, _, code := f.runCommand(box, sandbox.Command{Args: []string{"cat", "file"}, Dir: "sub/deep"}, ""); out != "x" || code != 0 {
		f.Errorf("in a folder: %q, code %d", out, code)
	}
	if out, _, code := f.runShell(box, "cat sub/deep/file"); out != "x" || code != 0 {
		f.Errorf("in the workspace: %q, code %d", out, code)
	}
	_, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"pwd"}, Dir: "../.."})
	f.checkError(err, sandbox.ErrOutsideWorkspace)
	_, err = box.Exec(f.ctx, sandbox.Command{Args: []string{"pwd"}, Dir: "nowhere"})
	f.checkError(err, sandbox.ErrNotFound)
}
