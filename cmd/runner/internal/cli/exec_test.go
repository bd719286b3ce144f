package cli_test

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

func TestExecGivesWhatTheCommandGives(t *testing.T) {
	t.Parallel()
	run := t.TempDir()
	r := runCommand(t, "in\n", "exec", "--id", "one", "--run-dir", run, "--", "sh", "-c", `cat; echo --id "$0"; echo oops >&2; exit 7`, "zero")
	if r.code != 7 || r.out != "in\n--id zero\n" || r.err != "oops\n" {
		t.Errorf("%+v", r)
	}
	if left, err := os.ReadDir(run); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	t.Run("refusals", func(t *testing.T) {
		t.Parallel()
		for _, tc := range []struct {
			args []string
			code int
			says string
		}{
			{[]string{"exec", "--id", "x", "--run-dir", run, "--", "/no/such/program"}, 127, "/no/such/program"},
			{[]string{"exec", "--id", "x", "--run-dir", run, "--", "/etc/passwd"}, 126, "permission"},
			{[]string{"exec", "--id", "../x", "--run-dir", run, "--", "true"}, 1, "id"},
			{[]string{"exec", "--id", "x", "--", "true"}, 1, "run-dir"},
			{[]string{"exec", "--run-dir", run, "--", "true"}, 2, "--id"},
			{[]string{"exec", "--id", "x", "--run-dir", run}, 2, "command"},
			{[]string{"kill", "--id", "../x", "--run-dir", run}, 1, "id"},
		} {
			if r := runCommand(t, "", tc.args...); r.code != tc.code || !strings.Contains(r.err, tc.says) {
				t.Errorf("%q: %+v, want exit code %d", tc.args, r, tc.code)
			}
		}
	})
}

func TestExecHidesTheRunnersVariables(t *testing.T) {
	t.Parallel()
	cmd := command("exec", "--id", "x", "--run-dir", t.TempDir(), "--", "env")
	cmd.Env = append(cmd.Env, "SPOOL_RUNNER_EGRESS_TOKEN=secret", "OTHER=1")
	out, err := cmd.Output()
	if err != nil || strings.Contains(string(out), "secret") || !strings.Contains(string(out), "OTHER=1") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestKillEndsAnExec(t *testing.T) {
	t.Parallel()
	run := t.TempDir()
	cmd := command("exec", "--id", "one", "--run-dir", run, "--", "sh", "-c", `trap '' TERM; sleep 600 & echo $!; setsid sleep 601 & echo $!; wait`)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pids []int
	in := bufio.NewScanner(out)
	for len(pids) < 2 && in.Scan() {
		pid, err := strconv.Atoi(in.Text())
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if r := runCommand(t, "", "kill", "--id", "one", "--run-dir", run); r.code != 0 {
		t.Errorf("kill: %+v", r)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 128+9 {
		t.Errorf("exit code %d, %v", cmd.ProcessState.ExitCode(), err)
	}
	for _, pid := range pids {
		eventually(t, fmt.Sprintf("the end of process %d", pid), func() bool { return !runs(pid) })
	}
	if left, err := os.ReadDir(run); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A kill may come before the command has started.
func TestKillBeforeExec(t *testing.T) {
	t.Parallel()
	run := t.TempDir()
	if r := runCommand(t, "", "kill", "--id", "one", "--run-dir", run); r.code != 0 {
		t.Fatalf("kill: %+v", r)
	}
	if r := runCommand(t, "", "exec", "--id", "one", "--run-dir", run, "--", "sleep", "600"); r.code != 128+9 {
		t.Errorf("exec: %+v", r)
	}
}

func TestWaitReady(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	if r := runCommand(t, "", "wait-ready", "--socket", s.socket); r.code != 0 || !strings.Contains(r.out, `"status"`) {
		t.Errorf("%+v", r)
	}
	none := filepath.Join(t.TempDir(), "s")
	if r := runCommand(t, "", "wait-ready", "--socket", none, "--within", "50ms"); r.code != 1 || !strings.Contains(r.err, "not ready within 50ms") {
		t.Errorf("%+v", r)
	}
}

// runs reports whether a process is alive, and not a zombie that its new parent has not reaped yet.
func runs(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	return strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))[0] != "Z"
}
