package cli_test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// mountProc mounts a new /proc for a process with its own pid and mount namespaces.
func mountProc() {
	err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil {
		err = unix.Mount("proc", "/proc", "proc", 0, "")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mount /proc:", err)
		os.Exit(1)
	}
}

// serveFirst serves as PID 1, as in a container.
func serveFirst(t *testing.T, flags ...string) *served {
	t.Helper()
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	if os.Geteuid() != 0 {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	return serveAs(t, attr, []string{"RUNNER_TEST_PID1=1"}, flags...)
}

func TestServe_AsPID1EndsWithItsDescendants(t *testing.T) {
	t.Parallel()
	s := serveFirst(t)
	c := s.attach(1, 0)
	c.run("exe_1", "orphan\norphan\nspawn\norphan")
	list := func() []string {
		out := find[events.BlockStart](t, c.run(fmt.Sprintf("exe_ps_%d", time.Now().UnixNano()), "shell cat /proc/[0-9]*/stat")).Block.Content
		return strings.Split(strings.TrimSpace(out), "\n")
	}
	if first := list()[0]; !strings.HasPrefix(first, "1 (") {
		t.Fatalf("the first process is %s", first)
	}
	eventually(t, "no dead orphan", func() bool {
		for _, stat := range list() {
			if strings.Contains(stat, ") Z 1 ") {
				return false
			}
		}
		return true
	})
	// Signals that a container may get and that the runner ignores.
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGPIPE, syscall.SIGURG, syscall.SIGWINCH} {
		if err := s.cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
	c.run("exe_2", "say still here")
	pid := s.cmd.Process.Pid
	before := children(pid)
	if len(before) < 2 {
		t.Errorf("its children are %v, want the agent and what it left", before)
	}
	if r := c.start("exe_3", "say x\nwait"); r.Error != nil {
		t.Fatal(r.Error)
	}
	c.until(runner.AgentStarted)
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if e := decode[runner.TurnEnd](t, c.until(runner.TurnEnded)); e.Outcome != runner.OutcomeKilled {
		t.Errorf("end %+v", e)
	}
	s.gone()
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, child := range before {
		if runs(child) {
			t.Errorf("process %d outlives the runner", child)
		}
	}
}

// A terminal that closes, or a reader of the log that is gone, does not end a sandbox.
func TestServe_OutlivesHangupsAndBrokenPipes(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	for range 3 {
		for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGPIPE} {
			if err := s.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := find[events.BlockStart](t, s.attach(1, 0).run("exe_1", "shell trap")).Block.Content; got != "<nil>" {
		t.Errorf("the agent ignores signals: %s", got)
	}
}
