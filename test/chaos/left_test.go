package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startOrphan starts a script in its own session and returns after the shell that started it has ended, so that the
// script's process is an orphan. The script prints nothing and inherits no file.
func startOrphan(t *testing.T, dir, script string) int {
	t.Helper()
	cmd := exec.Command("sh", "-c", `setsid sh -c "$1" "$2" </dev/null >/dev/null 2>&1 & echo $!`, "sh", "exec "+script, "planted")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ignoreEndedProcess(syscall.Kill(-pid, syscall.SIGKILL)); err != nil {
			t.Error(err)
		}
	})
	// The shell of the script must first replace itself by the script's program.
	deadline := time.Now().Add(time.Minute)
	for {
		if raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm")); err == nil && slices.Contains([]string{"sleep\n", "tail\n", "link\n"}, string(raw)) {
			return pid
		}
		if time.Now().After(deadline) {
			t.Fatalf("%q did not start", script)
		}
		time.Sleep(time.Millisecond)
	}
}

func mustLeft(t *testing.T, c *cluster) []int {
	t.Helper()
	pids, err := c.remainingSandboxProcesses()
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

// TestLeft_FindsProcessesOfSandboxes tests that each orphan that uses the executors' folder is found, also after the
// folder was deleted. A process that does not use the folder is not found.
func TestLeft_FindsProcessesOfSandboxes(t *testing.T) { //nolint:paralleltest // the next test changes the parent of these orphans
	c := &cluster{dir: t.TempDir()}
	workspace := filepath.Join(c.executorFolder(), "workspaces", "ses_1")
	if err := os.MkdirAll(workspace, 0o700); err != nil {
		t.Fatal(err)
	}
	inside, outside := filepath.Join(workspace, "sleep"), filepath.Join(c.dir, "link")
	program, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(inside, raw, 0o700); err != nil { //nolint:gosec // the file is executed
		t.Fatal(err)
	}
	if err := os.Symlink(inside, outside); err != nil {
		t.Fatal(err)
	}
	// Each process uses the folder in one way only.
	planted := map[string]int{
		"names it in its arguments":           startOrphan(t, "/", "env -i tail -F /dev/null "+filepath.Join(workspace, "nothing")),
		"names it in its environment":         startOrphan(t, "/", "env -i BOX="+workspace+" sleep 600"),
		"has it as its working directory":     startOrphan(t, workspace, "env -i sleep 600"),
		"has a file open in it":               startOrphan(t, "/", "env -i sleep 600 >"+filepath.Join(workspace, "out")),
		"runs a program that is stored in it": startOrphan(t, "/", "env -i "+outside+" 600"),
	}
	other := startOrphan(t, "/", "env -i sleep 600")
	if err := os.RemoveAll(c.executorFolder()); err != nil {
		t.Fatal(err)
	}
	left := mustLeft(t, c)
	for name, pid := range planted {
		if !slices.Contains(left, pid) {
			t.Errorf("a process that %s was not found", name)
		}
	}
	if slices.Contains(left, other) {
		t.Error("a process that has nothing to do with sandboxes was found")
	}
	if err := c.killRemainingProcesses(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(time.Minute)
	for len(mustLeft(t, c)) > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("after the sweep there are still %v", describeProcesses(mustLeft(t, c)))
		}
		time.Sleep(time.Millisecond)
	}
}

// TestLeft_FindsOrphansWithoutATrace tests that an orphan with an empty environment, without an open file and in
// another folder is found as a descendant of this program. The processes of the run, and the children of its servers,
// are not found.
func TestLeft_FindsOrphansWithoutATrace(t *testing.T) { //nolint:paralleltest // the test adopts the orphans of other tests
	if err := adoptOrphans(true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := adoptOrphans(false); err != nil {
			t.Error(err)
		}
	})
	c := &cluster{dir: t.TempDir()}
	for _, name := range []string{"nats", "executor-0"} {
		if err := c.startFaultTarget(name, func() *exec.Cmd { return exec.Command("sh", "-c", "sleep 600; :") }); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := c.stopAll(); err != nil {
			t.Error(err)
		}
		if err := c.killRemainingProcesses(); err != nil {
			t.Error(err)
		}
	})
	nats, executor := c.parts[0].pid(), c.parts[1].pid()
	var children []int
	for deadline := time.Now().Add(time.Minute); len(children) < 2; time.Sleep(time.Millisecond) {
		list, err := listProcesses()
		if err != nil {
			t.Fatal(err)
		}
		if children = descendants(list, nats, executor); time.Now().After(deadline) {
			t.Fatal("the parts have no children")
		}
	}
	pid := startOrphan(t, "/", "env -i sleep 600")
	left := mustLeft(t, c)
	if !slices.Contains(left, pid) {
		t.Error("the orphan was not found")
	}
	for _, pid := range []int{nats, executor, os.Getpid()} {
		if slices.Contains(left, pid) {
			t.Errorf("a process of the run was found: %v", describeProcesses([]int{pid}))
		}
	}
	list, err := listProcesses()
	if err != nil {
		t.Fatal(err)
	}
	if child := descendants(list, nats)[0]; slices.Contains(left, child) {
		t.Error("a child of NATS was found")
	}
	if child := descendants(list, executor)[0]; !slices.Contains(left, child) {
		t.Error("a child of an executor was not found")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); syscall.Kill(pid, 0) == nil; time.Sleep(time.Millisecond) {
		if err := c.reapOrphans(); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatal("the dead orphan was not reaped")
		}
	}
}

// TestLeftFolders_FindsWhatSessionsLeave tests that folders in each of the executors' folders are found, and nothing
// in empty ones.
func TestLeftFolders_FindsWhatSessionsLeave(t *testing.T) {
	t.Parallel()
	c := &cluster{dir: t.TempDir()}
	var want []string
	for _, path := range []string{"sandboxes/sbx_1", "states/ses_1", "workspaces/ses_1"} {
		want = append(want, filepath.Join(c.executorFolder(), filepath.FromSlash(path)))
		if err := os.MkdirAll(want[len(want)-1], 0o700); err != nil {
			t.Fatal(err)
		}
	}
	got, err := c.remainingSessionFolders()
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("leftFolders returned %q, %v, want %q", got, err, want)
	}
	for _, path := range want {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := c.remainingSessionFolders(); err != nil || len(got) > 0 {
		t.Errorf("in empty folders leftFolders returned %q, %v", got, err)
	}
}
