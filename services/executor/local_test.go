package executor_test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/services/executor"
)

// binariesDir is removed when the tests end.
var binariesDir string

// binaries builds the programs of the module cmd once.
var binaries = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "spool-executor-")
	if err != nil {
		return "", err
	}
	binariesDir = dir
	cmd := exec.Command("go", "build", "-o", dir, "./runner", "./mockllm")
	cmd.Dir = filepath.Join("..", "..", "cmd")
	if out, err := cmd.CombinedOutput(); err != nil {
		return dir, fmt.Errorf("%w: %s", err, out)
	}
	return dir, nil
})

// newLocalBench returns a bench with real sandboxes, the real runner, the built-in agent, and a scripted model. DATA in
// the script stands for the data folder.
func newLocalBench(t *testing.T, script string) *bench {
	t.Helper()
	dir, err := binaries()
	if err != nil {
		t.Fatalf("build: %v", err)
	}
	b := newBench(t, nil)
	data := t.TempDir()
	scriptFile := filepath.Join(t.TempDir(), "script.yaml")
	if err := os.WriteFile(scriptFile, []byte(strings.ReplaceAll(script, "DATA", data)), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	model := exec.Command(filepath.Join(dir, "mockllm"), "--listen", addr, "--script", scriptFile)
	model.Stdout, model.Stderr = &out, &out
	if err := model.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = model.Process.Kill()
		_ = model.Wait()
		if t.Failed() {
			t.Logf("the model said:\n%s", out.String())
		}
	})
	b.until("the model listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			if p, ok := processState(model.Process.Pid); ok && p == 'Z' {
				t.Fatalf("the model ended at once")
			}
			return false
		}
		return c.Close() == nil
	})
	b.local = func(c *executor.Config) {
		c.DataDir, c.Engine, c.Runner = data, "", filepath.Join(dir, "runner")
		c.OpenAIBaseURL, c.OpenAIKey = "http://"+addr+"/v1", "test-key-of-the-model"
	}
	return b
}

// processState returns the state letter of proc_pid_stat(5).
func processState(pid int) (byte, bool) {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	i := bytes.LastIndexByte(raw, ')')
	if err != nil || i < 0 || len(raw) < i+3 {
		return 0, false
	}
	return raw[i+2], true
}

// removeAll deletes the session and waits until nothing of it is left.
func (s *talk) removeAll(e *runningExecutor) {
	s.b.t.Helper()
	s.remove()
	s.job()
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	s.b.noJobs()
	if _, err := os.Stat(filepath.Join(e.WorkspacesDir(), s.id)); !os.IsNotExist(err) {
		s.b.t.Errorf("the workspace is left: %v", err)
	}
	if left := processesOf(s.id); len(left) > 0 {
		s.b.t.Errorf("processes are left: %v", left)
	}
}

// processesOf returns the processes with a session's folder on their command line.
func processesOf(session string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err == nil && strings.Contains(string(line), session) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func starts(list []events.Event) (out []events.ExecutionStarted) {
	for _, e := range list {
		if d, ok := e.Data.(events.ExecutionStarted); ok {
			out = append(out, d)
		}
	}
	return out
}

const program = `
rules:
  - name: program
    match: {user: {regex: 'write'}, tools: [write_file, run_code]}
    steps:
      - tool: {name: write_file, input: {path: hello.sh, content: "echo hello from $0"}}
      - tool: {name: run_code, input: {language: bash, code: bash hello.sh}}
      - text: "It said: {{result | trim}}"
  - name: rest
    steps:
      - text: "You said {{user}}"
`

const slow = `
stream: {piece: 2, delay: 50ms}
rules:
  - name: count
    steps:
      - text: "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
`

func TestLocal_TurnsRunTheRealAgent(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, program)
	e := b.run()
	s := b.session(func(c *events.SessionCreated) { c.Architecture = "spool" })
	first := s.post("write a program")
	l := s.untilEnded(first)
	if l.Run.Phase != run.Completed {
		t.Fatalf("end: %+v\n%s", s.last(first), types(s.events()))
	}
	raw, err := os.ReadFile(filepath.Join(e.WorkspacesDir(), s.id, "hello.sh"))
	if err != nil || !strings.Contains(string(raw), "hello from") {
		t.Errorf("the agent's file: %q, %v", raw, err)
	}
	if done, _ := s.last(first).(events.ExecutionCompleted); !strings.Contains(done.Result, "hello from hello.sh") {
		t.Errorf("result %q", done.Result)
	}
	second := s.post("again")
	s.untilEnded(second)
	list := starts(s.events())
	if len(list) != 2 || list[0].Warm || !list[1].Warm || list[0].PID != list[1].PID || list[0].PID == 0 {
		t.Errorf("starts: %+v", list)
	}
	for _, ev := range s.events() {
		if strings.Contains(fmt.Sprintf("%+v", ev), "test-key-of-the-model") {
			t.Errorf("the model's key is in the log: %s", ev.Type())
		}
	}
	s.removeAll(e)
}

// Fault 1 with a real agent: its executor dies in the middle of a sentence, and another one follows.
func TestLocal_AnotherExecutorFollowsTheAgent(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, slow)
	a := b.run()
	s := b.session(func(c *events.SessionCreated) { c.Architecture = "spool" })
	execution := s.post("count slowly")
	b.until("text flows", func() bool { return len(b.texts()) > 3 })
	a.wire.kill()
	e := b.run()
	l := s.untilEnded(execution)
	if l.Run.Phase != run.Completed || l.Run.Epoch < 2 || len(starts(s.events())) != 1 {
		t.Errorf("end: %+v after %s", s.last(execution), types(s.events()))
	}
	if got := wrote(s.events()); !strings.HasPrefix(got, "[one two") || !strings.HasSuffix(got, "sixteen]") {
		t.Errorf("wrote %s", got)
	}
	s.removeAll(e)
}

// Fault 2 with a real agent: every process in the sandbox is killed.
func TestLocal_LostSandboxIsReplaced(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, slow)
	e := b.run()
	s := b.session(func(c *events.SessionCreated) { c.Architecture = "spool" })
	s.untilEnded(s.post("remember this"))
	execution := s.post("count slowly")
	b.until("text flows", func() bool {
		return slices.ContainsFunc(b.texts(), func(d events.Delta) bool { return d.ExecutionID == execution && d.Offset > 0 })
	})
	for _, pid := range processesOf(s.id) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	l := s.untilEnded(execution)
	if l.Run.Phase != run.Completed || l.Run.Attempt != 2 {
		t.Errorf("end: %+v after %s", s.last(execution), types(s.events()))
	}
	torn := ""
	for _, ev := range s.events() {
		if c, ok := ev.Data.(events.BlockComplete); ok && c.Block.Status == events.StatusError {
			torn = c.Block.Content
		}
	}
	if !strings.HasPrefix(torn, "on") {
		t.Errorf("the torn block has %q", torn)
	}
	s.removeAll(e)
}

// A stopped runner is ended with its sandbox and all its processes, during an execution and at rest.
func TestLocalTerminate_OfAStoppedRunner(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running %v", running), func(t *testing.T) {
			t.Parallel()
			b := newLocalBench(t, slow)
			b.run()
			s := b.session(func(c *events.SessionCreated) { c.Architecture = "spool" })
			execution := s.post("count slowly")
			b.until("text flows", func() bool { return len(b.texts()) > 0 })
			if !running {
				s.untilEnded(execution)
			}
			for _, pid := range processesOf(s.id) {
				if line, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline")); err == nil && strings.HasPrefix(string(line), "runner\x00serve\x00") {
					if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
						t.Fatal(err)
					}
				}
			}
			s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
				return session.RequestTerminate{CommandBase: base, ActiveEnded: l.RunView().ActiveEnded, HasSandbox: true}
			})
			if running {
				s.untilEnded(execution)
				if c, ok := s.last(execution).(events.ExecutionCancelled); !ok || c.Reason != "terminated" {
					t.Errorf("end %+v", s.last(execution))
				}
			} else {
				s.job()
			}
			s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
			b.until("nothing runs", func() bool { return len(processesOf(s.id)) == 0 })
		})
	}
}

// A warm turn takes less than the limit from the message's job to the first text.
func TestLocal_WarmTurnStartsSoon(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, program)
	e := b.run(func(c *executor.Config) { c.Beat = time.Second })
	s := b.session(func(c *events.SessionCreated) { c.Architecture = "spool" })
	s.untilEnded(s.post("hello"))
	var took []time.Duration
	for range 20 {
		began := time.Now()
		execution := s.post("hello")
		b.until("the first text", func() bool {
			return slices.ContainsFunc(b.texts(), func(d events.Delta) bool { return d.ExecutionID == execution })
		})
		took = append(took, time.Since(began))
		s.untilEnded(execution)
	}
	slices.Sort(took)
	t.Logf("posted to first text: p50 %s, all %s", took[len(took)/2], took)
	if took[len(took)/2] > 500*time.Millisecond {
		t.Errorf("a warm turn takes %s", took[len(took)/2])
	}
	s.removeAll(e)
}
