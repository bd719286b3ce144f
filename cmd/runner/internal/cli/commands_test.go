package cli_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/cli"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/runner"
)

// result is the result of a command that has ended.
type result struct {
	out, err string
	code     int
}

func runCommand(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	cmd := command(args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

func printed(t *testing.T, out string) (lines []runner.JournalLine) {
	t.Helper()
	for raw := range strings.Lines(out) {
		var l runner.JournalLine
		if err := json.Unmarshal([]byte(raw), &l); err != nil {
			t.Fatalf("%v: %s", err, raw)
		}
		lines = append(lines, l)
	}
	return lines
}

func TestExecuteQuery_ReturnsItsExitCode(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		script string
		more   []string
		code   int
		want   runner.TurnEnd
	}{
		"completed": {"say hi", nil, 0, runner.TurnEnd{Outcome: runner.OutcomeCompleted}},
		"failed":    {"exit 3", nil, 1, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_EXITED"}},
		"missing":   {"say hi", []string{"--model", "missing"}, 1, runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_NOT_FOUND"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			r := runCommand(t, "", append([]string{"execute-query", tc.script, "--architecture", "script", "--session-id", "ses_1", "--cwd", dir, "--state", t.TempDir()}, tc.more...)...)
			lines := printed(t, r.out)
			if r.code != tc.code || len(lines) == 0 {
				t.Fatalf("exit code %d, want %d: %s%s", r.code, tc.code, r.out, r.err)
			}
			if e := ended(t, lines); e.Outcome != tc.want.Outcome || e.Code != tc.want.Code {
				t.Errorf("end %+v", e)
			}
			if name != "missing" {
				check(t, lines)
			}
		})
	}
}

// The runner accepts every name of an architecture that the API accepts, aliases included.
func TestRunnerTakesEveryNameOfAnArchitecture(t *testing.T) {
	t.Parallel()
	adapters := cli.Architectures()
	for _, name := range architecture.Names() {
		if adapters[name] == nil {
			t.Errorf("the runner has no adapter for %s", name)
		}
	}
	if len(adapters) != len(architecture.Names()) {
		t.Errorf("the runner has %d architectures, the table %d", len(adapters), len(architecture.Names()))
	}
	for alias, name := range architecture.Aliases() {
		if name != architecture.ClaudeCode {
			t.Fatalf("%s stands for %s: run that one by the scripted agent as well", alias, name)
		}
		base := []string{"--architecture", alias, "--session-id", "ses_1", "--cwd", t.TempDir(), "--state", t.TempDir()}
		r := runCommand(t, "", append([]string{"execute-query", "say hi"}, base...)...)
		if r.code != 0 {
			t.Fatalf("%s: exit code %d: %s%s", alias, r.code, r.out, r.err)
		}
		if e := ended(t, printed(t, r.out)); e.Outcome != runner.OutcomeCompleted {
			t.Errorf("%s: end %+v", alias, e)
		}
		r = runCommand(t, "", "read-session-transcript", "--architecture", alias, "--agent-session", "s-1", "--workspace", t.TempDir(), "--state", t.TempDir())
		if strings.Contains(r.err, "is not known") {
			t.Errorf("%s: %s", alias, r.err)
		}
	}
}

func TestExecuteQueryInterrupted(t *testing.T) {
	t.Parallel()
	cmd := command("execute-query", "say hi\nwait", "--architecture", "script", "--session-id", "ses_1", "--cwd", t.TempDir(), "--state", t.TempDir())
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	in := bufio.NewScanner(pipe)
	for in.Scan() {
		out.WriteString(in.Text() + "\n")
		if strings.Contains(in.Text(), "block_start") {
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 130 {
		t.Errorf("exit code %d (%v)", cmd.ProcessState.ExitCode(), err)
	}
	lines := printed(t, out.String())
	check(t, lines)
	if e := ended(t, lines); e.Outcome != runner.OutcomeInterrupted {
		t.Errorf("end %+v", e)
	}
}

// A second one-shot query of a session continues the conversation of the first.
func TestExecuteQueryGoesOn(t *testing.T) {
	t.Parallel()
	dir, state := t.TempDir(), t.TempDir()
	base := []string{"--architecture", "script", "--session-id", "ses_1", "--cwd", dir, "--state", state}
	runCommand(t, "", append([]string{"execute-query", "session s-9"}, base...)...)
	if r := runCommand(t, "", append([]string{"execute-query", "args"}, base...)...); !strings.Contains(r.out, `",s-9"`) {
		t.Errorf("printed %s%s", r.out, r.err)
	}
}

func TestAttachAndInterruptCommands(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	attach := command("attach", "--socket", s.socket, "--after", "0", "--epoch", "7")
	in, err := attach.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := attach.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := attach.Start(); err != nil {
		t.Fatal(err)
	}
	out := bufio.NewScanner(pipe)
	next := func() (m runner.Message) {
		t.Helper()
		if !out.Scan() {
			t.Fatal("attach ended")
		}
		if err := json.Unmarshal(out.Bytes(), &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	if m := next(); m.Hello == nil {
		t.Fatalf("first message %+v", m)
	}
	raw, err := json.Marshal(runner.Command{Op: runner.OpStart, Epoch: 7, Query: &runner.Query{SessionID: "ses_1", ExecutionID: "exe_1", Architecture: "script", Content: "say x\nwait"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write(append(raw, '\n')); err != nil {
		t.Fatal(err)
	}
	for next().Line.Type != "block_start" {
	}
	if r := runCommand(t, "", "interrupt", "--socket", s.socket); r.code != 0 || !strings.HasPrefix(r.out, `{"reply":{"id":1}}`) {
		t.Errorf("interrupt: %+v", r)
	}
	if m := next(); m.Line.Type != runner.TurnEnded || !strings.Contains(string(m.Line.Data), "interrupted") {
		t.Errorf("after the interrupt: %+v", m.Line)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := attach.Wait(); err != nil {
		t.Errorf("attach does not end well with its stdin: %v", err)
	}
	if r := runCommand(t, "", "interrupt", "--socket", s.socket+"x"); r.code != 1 || !strings.Contains(r.err, "runner serve") {
		t.Errorf("no runner: %+v", r)
	}
}

func TestProfile(t *testing.T) {
	t.Parallel()
	state := t.TempDir()
	if r := runCommand(t, `{"model":"m-from-profile"}`, "load-agent-profile", "--state", state); r.code != 0 || !strings.Contains(r.out, `"type":"agent_profile_loaded"`) {
		t.Fatalf("load: %+v", r)
	}
	base := []string{"execute-query", "args", "--architecture", "script", "--session-id", "ses_1", "--cwd", t.TempDir(), "--state", state}
	if r := runCommand(t, "", base...); !strings.Contains(r.out, `"m-from-profile,"`) {
		t.Errorf("the profile's model is not used: %+v", r)
	}
	if r := runCommand(t, "", append(base, "--model", "mine")...); !strings.Contains(r.out, `"mine,"`) {
		t.Errorf("the query's model does not win: %+v", r)
	}
	if r := runCommand(t, `{"modle":"x"}`, "load-agent-profile", "--state", state); r.code != 1 || !strings.Contains(r.err, "modle") {
		t.Errorf("a misspelt field: %+v", r)
	}
}

func TestTranscripts(t *testing.T) {
	t.Parallel()
	at := []string{"--architecture", "spool", "--agent-session", "agt-1", "--workspace", t.TempDir(), "--state", t.TempDir()}
	content := `{"role":"user","text":"hi"}` + "\n"
	if r := runCommand(t, "", append([]string{"read-session-transcript"}, at...)...); r.code != 1 || !strings.Contains(r.err, "no transcript") {
		t.Errorf("none: %+v", r)
	}
	if r := runCommand(t, content, append([]string{"load-session-transcript"}, at...)...); r.code != 0 || !strings.Contains(r.out, `"bytes":28`) {
		t.Errorf("load: %+v", r)
	}
	if r := runCommand(t, "", append([]string{"read-session-transcript"}, at...)...); r.code != 0 || r.out != content {
		t.Errorf("read: %+v", r)
	}
	at[3] = "../../evil"
	if r := runCommand(t, content, append([]string{"load-session-transcript"}, at...)...); r.code != 1 || !strings.Contains(r.err, "agent session") {
		t.Errorf("evil name: %+v", r)
	}
}

func TestUsage_ErrorsHaveExitCodes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		args []string
		code int
		says string
	}{
		"nothing":       {nil, 2, "expected one of"},
		"unknown":       {[]string{"fly"}, 2, "fly"},
		"missing flag":  {[]string{"serve"}, 2, "--socket"},
		"no workspace":  {[]string{"serve", "--socket", dir + "/s", "--workspace", dir + "/none", "--state", dir + "/st"}, 1, "workspace"},
		"state inside":  {[]string{"serve", "--socket", dir + "/s", "--workspace", dir, "--state", dir + "/st"}, 1, "inside the workspace"},
		"long socket":   {[]string{"serve", "--socket", "/" + strings.Repeat("s", 120), "--workspace", dir, "--state", t.TempDir()}, 1, "shorter"},
		"bad limit":     {[]string{"serve", "--socket", dir + "/s", "--workspace", dir, "--state", t.TempDir(), "--journal-limit=-1"}, 1, "journal limit"},
		"bad duration":  {[]string{"serve", "--socket", dir + "/s", "--workspace", dir, "--state", t.TempDir(), "--silence-kill=-1s"}, 1, "silence-kill"},
		"evil session":  {[]string{"execute-query", "x", "--architecture", "script", "--session-id", "../x", "--cwd", dir}, 1, "session-id"},
		"no such agent": {[]string{"read-session-transcript", "--architecture", "cobol", "--agent-session", "x", "--workspace", dir, "--state", t.TempDir()}, 1, "cobol"},
	} {
		if r := runCommand(t, "", tc.args...); r.code != tc.code || !strings.Contains(r.err, tc.says) || r.out != "" && tc.code == 1 {
			t.Errorf("%s: exit code %d, stderr %q, stdout %q", name, r.code, r.err, r.out)
		}
	}
	if r := runCommand(t, "", "--help"); r.code != 0 || !strings.Contains(r.out, "execute-query") {
		t.Errorf("help: %+v", r)
	}
}
