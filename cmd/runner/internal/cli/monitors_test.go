package cli_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// files returns the lines about files, with their execution.
func files(t *testing.T, lines []runner.JournalLine) (out []string) {
	t.Helper()
	for _, l := range lines {
		var d struct{ Path string }
		if strings.HasPrefix(string(l.Type), "file_") {
			if err := json.Unmarshal(l.Data, &d); err != nil {
				t.Fatal(err)
			}
			out = append(out, fmt.Sprintf("%s %s %s", l.ExecutionID, l.Type, d.Path))
		}
	}
	return out
}

func TestFiles_OfATurnAreReported(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	c := s.attach(1, 0)
	c.run("exe_0", "say the watch has begun")
	if err := os.WriteFile(filepath.Join(s.workspace, "before"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// The end of a turn waits for the reports of the agent's changes so far.
	one := c.run("exe_1", "shell mkdir -p a/b; echo 1 >a/b/f; ln -s f a/l; mkdir .git; echo 1 >.git/x")
	if err := os.WriteFile(filepath.Join(s.workspace, "between"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	two := c.run("exe_2", "shell echo 2 >>a/b/f; mv before after")
	want := []string{" file_created before", "exe_1 file_created a/b/f", " file_created between", "exe_2 file_modified a/b/f", "exe_2 file_created after", "exe_2 file_deleted before"}
	got := append(files(t, one), files(t, two)...)
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
	// Between turns they are reported without a flush.
	if r := runCommand(t, "x", "put", "put.txt", "--workspace", s.workspace); r.code != 0 {
		t.Fatalf("put: %+v", r)
	}
	if l := c.until("file_created"); l.ExecutionID != "" || !strings.Contains(string(l.Data), "put.txt") {
		t.Errorf("told %+v", l)
	}
}

const megabyte = 1 << 20

// errorsOf returns the lines of type error.
func errorsOf(t *testing.T, lines []runner.JournalLine) (out []events.Error) {
	t.Helper()
	for _, l := range lines {
		if l.Type == (events.Error{}).EventType() {
			out = append(out, decode[events.Error](t, l))
		}
	}
	return out
}

func TestDiskLimitEndsTheTurn(t *testing.T) {
	t.Parallel()
	for name, fill := range map[string]string{
		"a file":     "exec dd if=/dev/zero of=big bs=1M count=20000",
		"ignored":    "mkdir node_modules; exec dd if=/dev/zero of=node_modules/big bs=1M count=20000",
		"state":      "exec dd if=/dev/zero of=../st/big bs=1M count=20000",
		"no name":    "exec 3>f; rm f; exec dd if=/dev/zero bs=1M count=20000 >&3",
		"many files": "i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero >f$i; done",
		"left alone": "setsid dd if=/dev/zero of=big bs=1M count=20000 & wait",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const limit = 32 * megabyte
			s := serveRunner(t, "--disk-limit", fmt.Sprint(limit))
			c := s.attach(1, 0)
			began := time.Now()
			lines := c.run("exe_1", "shell "+fill)
			took := time.Since(began)
			e := ended(t, lines)
			if e.Outcome != runner.OutcomeFailed || e.Code != "DISK_LIMIT" || !strings.Contains(e.Message, "33554432") {
				t.Fatalf("end %+v", e)
			}
			if errs := errorsOf(t, lines); len(errs) != 1 || errs[0].Code != "DISK_LIMIT" || errs[0].Message != e.Message {
				t.Errorf("errors %+v", errs)
			}
			t.Logf("ended after %s: %s", took, e.Message)
			if left := writers(s.workspace); len(left) != 0 {
				t.Errorf("processes %v live", left)
			}
			st := c.ask(runner.Command{Op: runner.OpStatus}).Status
			// The end of the process has freed the space of a file without a name, and the disk may have been measured
			// again since.
			if st.DiskBytes < limit && name != "no name" || st.AgentPID != 0 {
				t.Errorf("status %+v", st)
			}
			if name == "no name" {
				c.run("exe_2", "say again")
				return
			}
			if r := c.start("exe_2", "say no"); r.Error == nil || r.Error.Code != "DISK_LIMIT" || !strings.Contains(r.Error.Message, "remove files") {
				t.Errorf("the next turn: %+v", r.Error)
			}
			for _, f := range []string{"big", "node_modules", "../st/big"} {
				if err := os.RemoveAll(filepath.Join(s.workspace, f)); err != nil {
					t.Fatal(err)
				}
			}
			if name == "many files" {
				return
			}
			if e := ended(t, c.run("exe_3", "say yes")); e.Outcome != runner.OutcomeCompleted {
				t.Errorf("below the limit again: %+v", e)
			}
			if st := c.ask(runner.Command{Op: runner.OpStatus}).Status; st.DiskBytes >= limit || st.DiskBytes == 0 {
				t.Errorf("status %+v", st)
			}
		})
	}
}

// writers returns the processes that work in a folder.
func writers(dir string) (pids []string) {
	paths, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range paths {
		cwd, err := os.Readlink(p + "/cwd")
		if err == nil && cwd == dir {
			pids = append(pids, filepath.Base(p))
		}
	}
	return pids
}

// Processes that a turn left behind are stopped too.
func TestDiskLimitBetweenTurns(t *testing.T) {
	t.Parallel()
	s := serveRunner(t, "--disk-limit", fmt.Sprint(32*megabyte))
	c := s.attach(1, 0)
	c.run("exe_1", "shell (sleep 0.3; exec dd if=/dev/zero of=big bs=1M count=20000) >/dev/null 2>&1 &")
	l := c.until("error")
	if e := decode[events.Error](t, l); e.Code != "DISK_LIMIT" || l.ExecutionID != "" {
		t.Errorf("told %+v of %q", e, l.ExecutionID)
	}
	eventually(t, "the end of what writes", func() bool { return len(writers(s.workspace)) == 0 })
}

// Sparse files and further names of a file count only with their allocated space.
func TestDiskCountsWhatIsAllocated(t *testing.T) {
	t.Parallel()
	s := serveRunner(t, "--disk-limit", fmt.Sprint(64*megabyte))
	c := s.attach(1, 0)
	c.run("exe_1", "shell truncate -s 10G sparse; head -c 20000000 /dev/zero >f; for i in 1 2 3 4 5 6 7 8 9; do ln f f$i; done; sync")
	if e := ended(t, c.run("exe_2", "shell sleep 0.6")); e.Outcome != runner.OutcomeCompleted {
		t.Errorf("end %+v", e)
	}
}
