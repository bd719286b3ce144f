package executor_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor"
)

// executorBinary builds the executor's program once.
var executorBinary = sync.OnceValues(func() (string, error) {
	dir, err := binaries()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "executor")
	if out, err := exec.Command("go", "build", "-o", path, "./cmd/executor").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

// process is an executor in a separate process.
type process struct {
	*exec.Cmd
	t    *testing.T
	gone sync.Once
}

// process starts an executor with local sandboxes. It is killed when the test ends.
func (b *bench) process() *process {
	b.t.Helper()
	path, err := executorBinary()
	if err != nil {
		b.t.Fatalf("build: %v", err)
	}
	var cfg executor.Config
	b.local(&cfg)
	p := &process{Cmd: exec.Command(path, "--beat=50ms", "--sweep-every=1h", "--warm-memory=1099511627776"), t: b.t}
	p.Env = append(os.Environ(), "SPOOL_NATS_URL="+b.url, "SPOOL_DATA_DIR="+cfg.DataDir, "SPOOL_RUNNER="+cfg.Runner, "SPOOL_SLOTS=4",
		"SPOOL_OPENAI_BASE_URL="+cfg.OpenAIBaseURL, "OPENAI_API_KEY="+cfg.OpenAIKey)
	var out bytes.Buffer
	p.Stdout, p.Stderr = &out, &out
	if err := p.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		p.kill()
		if b.t.Failed() {
			b.t.Logf("executor %d said:\n%s", p.Process.Pid, out.String())
		}
	})
	return p
}

// kill kills the process with SIGKILL.
func (p *process) kill() {
	p.t.Helper()
	p.gone.Do(func() {
		if err := p.Process.Kill(); err != nil {
			p.t.Error(err)
		}
		_ = p.Wait() // it reports the kill
	})
}

// extendTimeout extends the test's time limit: after each kill the test waits until the executor's lease and delivery have
// expired.
func (b *bench) extendTimeout(d time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	b.t.Cleanup(cancel)
	b.ctx = ctx
}

// Executors that are killed one after the other during a silent tool call do not exhaust the execution's claims, if
// each attaches before it is killed: the effect of the tool call comes before the end of the execution.
func TestKilledExecutors_DuringASilentToolCallEndNothing(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, silent)
	b.extendTimeout(8 * time.Minute)
	current := b.process()
	dir := ""
	s := b.session(func(c *events.SessionCreated) { c.Architecture = "spool" })
	execution := s.post("wait")
	b.until("the tool runs", func() bool {
		found, err := filepath.Glob(filepath.Join(b.data(), "workspaces", s.id, "pid"))
		if err == nil && len(found) == 1 {
			dir = filepath.Dir(found[0])
		}
		return dir != ""
	})
	// The file is the last event that the runner reports while the tool runs. If an executor read it later, that would
	// count as progress.
	b.until("the log has the tool's call and its file", func() bool { return strings.Contains(types(s.events()), "file_created") })
	for range run.MaxClaimsWithoutProgress + 3 {
		epoch := s.load().Run.Epoch
		current.kill()
		current = b.process()
		l := s.until("the next executor has attached", func(l *eventlog.SessionState) bool {
			// The first claim without progress stores nothing when it attaches; each later one counts as a claim again.
			return l.Run.HasEnded(execution) || l.Run.Epoch > epoch && l.Run.Claims <= 1
		})
		if l.Run.HasEnded(execution) {
			t.Fatalf("the execution ended under epoch %d: %+v", l.Run.Epoch, s.last(execution))
		}
	}
	if exists(filepath.Join(dir, "effect")) {
		t.Fatal("the tool has ended by itself")
	}
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l := s.untilEnded(execution)
	if done, ok := s.last(execution).(events.ExecutionCompleted); !ok || !strings.Contains(done.Result, "waited") || len(starts(s.events())) != 1 {
		t.Errorf("the end is %+v after %s", s.last(execution), types(s.events()))
	}
	if n := len(of[events.ExecutionAttached](s)); !exists(filepath.Join(dir, "effect")) || n < run.MaxClaimsWithoutProgress {
		t.Errorf("the tool's effect is there: %t; %d of %d claims attached", exists(filepath.Join(dir, "effect")), n, l.Run.Epoch)
	}
	s.remove()
	s.job()
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	b.until("no process of the sandbox is left", func() bool { return len(processesOf(s.id)) == 0 })
}

// data returns the folder of local sandboxes.
func (b *bench) data() string {
	var cfg executor.Config
	b.local(&cfg)
	return cfg.DataDir
}
