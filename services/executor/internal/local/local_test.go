package local

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/landlock"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/sandbox/sandboxtest"
)

var scratch string // of the test binary

func TestMain(m *testing.M) {
	var err error
	if scratch, err = os.MkdirTemp("", "spool-local-"); err != nil {
		panic(err)
	}
	// npm caches downloads, and would not request them again.
	if err := os.Setenv("npm_config_cache", filepath.Join(scratch, "npm")); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(scratch); err != nil {
			panic(err)
		}
		os.Exit(code)
	}))
}

// runnerBinary builds the runner once.
var runnerBinary = sync.OnceValues(func() (string, error) {
	path := filepath.Join(scratch, "runner")
	cmd := exec.Command("go", "build", "-o", path, "./runner")
	cmd.Dir = filepath.Join("..", "..", "..", "..", "cmd") // a module of its own, which no service imports
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
})

func newConfig(t testing.TB) Config {
	t.Helper()
	path, err := runnerBinary()
	if err != nil {
		t.Fatalf("build the runner: %v", err)
	}
	cfg := Config{Dir: t.TempDir(), Runner: path, Engine: "suite"}
	if landlock.Supported() {
		cfg.Hidden = []string{cfg.Dir}
	}
	return cfg
}

// withRequired returns cfg with the limits of layers that a test does not name.
func withRequired(cfg Config) Config {
	l := &cfg.Layers
	l.Within, l.MaxBytes, l.Keep = cmp.Or(l.Within, 10*time.Minute), cmp.Or(l.MaxBytes, 2<<30), cmp.Or(l.Keep, 7*24*time.Hour)
	return cfg
}

func newProvider(t testing.TB, cfg Config) *Provider {
	t.Helper()
	p, err := New(withRequired(cfg))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProvider(t *testing.T) {
	var mu sync.Mutex
	configs := map[string]Config{} // one engine for each test of the suite
	sandboxtest.Exercise(t, sandboxtest.TestedProvider{
		New: func(t testing.TB) sandbox.Provider {
			mu.Lock()
			defer mu.Unlock()
			if _, ok := configs[t.Name()]; !ok {
				configs[t.Name()] = newConfig(t)
			}
			return newProvider(t, configs[t.Name()])
		},
		Alive: alive,
		KillRunner: func(t testing.TB, id string) {
			mu.Lock()
			cfg := configs[t.Name()]
			mu.Unlock()
			b, err := newProvider(t, cfg).Attach(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			killRunner(t, b.(*box))
		},
	})
}

// killRunner kills a sandbox's runner.
func killRunner(t testing.TB, b *box) {
	t.Helper()
	s, _ := b.findRunner()
	if err := syscall.Kill(s.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); alive(s.PID); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the runner does not die")
		}
	}
}

func alive(pid int) bool {
	p, ok := findProcess(pid)
	return ok && !p.dead
}

func newSpec(t *testing.T) sandbox.Spec {
	t.Helper()
	id := func(k events.IDKind) string {
		id, err := events.NewID(k, time.Now(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	return sandbox.Spec{ID: id(events.KindSandbox), Labels: sandbox.Labels{Tenant: "default", Session: id(events.KindSession), Engine: "suite", Epoch: 1}}
}

func create(t *testing.T, p *Provider, spec sandbox.Spec) *box {
	t.Helper()
	b, err := p.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Terminate(context.Background(), spec.ID, true); err != nil {
			t.Error(err)
		}
	})
	return b.(*box)
}

// The workspace and the agent's records stay for the session's next sandbox.
func TestWorkspace_StaysForTheNextSandbox(t *testing.T) {
	t.Parallel()
	p := newProvider(t, newConfig(t))
	spec := newSpec(t)
	if err := create(t, p, spec).Files().Put(t.Context(), "kept", strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if err := p.Terminate(t.Context(), spec.ID, false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(p.sandboxDir(spec.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the sandbox's own folder stays: %v", err)
	}
	kept, err := p.ListWorkspaces(t.Context())
	if err != nil || len(kept) != 1 || kept[0] != spec.Labels {
		t.Errorf("kept: %+v, %v", kept, err)
	}
	next := newSpec(t)
	next.Labels.Session = spec.Labels.Session
	list, err := create(t, p, next).Files().List(t.Context(), "")
	if err != nil || len(list) != 1 || list[0].Path != "kept" {
		t.Errorf("in the next sandbox: %+v, %v", list, err)
	}
	if err := p.Terminate(t.Context(), next.ID, false); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := p.RemoveWorkspace(t.Context(), spec.Labels); err != nil {
			t.Fatal(err)
		}
	}
	if kept, err = p.ListWorkspaces(t.Context()); err != nil || len(kept) != 0 {
		t.Errorf("kept after the wipe: %+v, %v", kept, err)
	}
}

// A pid that another process has now is neither found nor killed.
func TestRecycledPid_IsNotKilled(t *testing.T) {
	t.Parallel()
	p := newProvider(t, newConfig(t))
	spec := newSpec(t)
	b := create(t, p, spec)
	real, ok := b.findRunner()
	if !ok {
		t.Fatal("no runner")
	}
	stranger := exec.Command("sleep", "1000")
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = stranger.Process.Kill()
		_ = stranger.Wait()
	}()
	if err := writeJSON(filepath.Join(b.dir, "runner.json"), runnerProcess{stranger.Process.Pid, real.Start}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Attach(t.Context(), spec.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("attach: %v", err)
	}
	if err := p.Terminate(t.Context(), spec.ID, false); err != nil {
		t.Fatal(err)
	}
	if !alive(stranger.Process.Pid) {
		t.Error("a stranger with the runner's pid was killed")
	}
	if alive(real.PID) {
		t.Error("the runner, whose pid was forgotten, lives on")
	}
}

// Processes that a killed runner leaves behind end with the sandbox.
func TestRunnerKilled(t *testing.T) {
	t.Parallel()
	p := newProvider(t, newConfig(t))
	spec := newSpec(t)
	b := create(t, p, spec)
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{"setsid", "sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	orphan := proc.(*process).cmd.Process.Pid
	killRunner(t, b)
	if _, err := p.Attach(t.Context(), spec.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("attach: %v", err)
	}
	infos, err := p.List(t.Context())
	if err != nil || len(infos) != 1 || infos[0].Running {
		t.Errorf("listed: %+v, %v", infos, err)
	}
	// A new sandbox of the session starts with the workspace only.
	if _, err := p.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if alive(orphan) {
		t.Error("a process of the sandbox before lives on")
	}
	if _, err := proc.Wait(); err != nil {
		t.Error(err)
	}
}

// The runner does not depend on an executor.
func TestRunnerHasNoTies(t *testing.T) {
	t.Parallel()
	p := newProvider(t, newConfig(t))
	b := create(t, p, newSpec(t))
	s, _ := b.findRunner()
	sid, err := unix.Getsid(s.PID)
	if err != nil || sid != s.PID {
		t.Errorf("session %d, %v, want one of its own", sid, err)
	}
	for _, fd := range []string{"0", "1", "2"} {
		target, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(s.PID), "fd", fd))
		if err != nil || strings.HasPrefix(target, "pipe:") || strings.HasPrefix(target, "socket:") {
			t.Errorf("descriptor %s is %s, %v", fd, target, err)
		}
	}
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(s.PID), "environ"))
	if err != nil {
		t.Fatal(err)
	}
	for v := range strings.SplitSeq(strings.TrimRight(string(raw), "\x00"), "\x00") {
		switch name, _, _ := strings.Cut(v, "="); name {
		case "PATH", "HOME", "TMPDIR", "LANG", markerVariable, "SPOOL_RUNNER_SOCKET", "SPOOL_RUNNER_WORKSPACE", "SPOOL_RUNNER_STATE":
		default:
			t.Errorf("the runner was started with %s", v)
		}
	}
}

func TestDeepFolder(t *testing.T) {
	t.Parallel()
	cfg := newConfig(t)
	cfg.Dir = filepath.Join(cfg.Dir, strings.Repeat("deep/", 30))
	p := newProvider(t, cfg)
	spec := newSpec(t)
	b := create(t, p, spec)
	if len(b.rec.Socket) > maxSocketPathBytes || strings.HasPrefix(b.rec.Socket, cfg.Dir) {
		t.Errorf("socket %s", b.rec.Socket)
	}
	t.Cleanup(func() { _ = os.Remove(filepath.Dir(b.rec.Socket)) })
	if err := p.Terminate(t.Context(), spec.ID, true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(b.rec.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket stays: %v", err)
	}
}

func TestSocketFolderOfAnother(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "sockets")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil { //nolint:gosec // that is the point
		t.Fatal(err)
	}
	if err := makePrivateFolder(dir); err == nil {
		t.Error("a folder that others may write was accepted")
	}
}

func TestBadRunner(t *testing.T) {
	t.Parallel()
	cfg := newConfig(t)
	cfg.Runner = filepath.Join(t.TempDir(), "runner")
	if err := os.WriteFile(cfg.Runner, []byte("#!/bin/sh\necho the disk is full >&2\nexit 4\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	p := newProvider(t, cfg)
	spec := newSpec(t)
	_, err := p.Create(t.Context(), spec)
	if err == nil || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("create: %v", err)
	}
	cfg.Runner += "-missing"
	if _, err = newProvider(t, cfg).Create(t.Context(), spec); err == nil {
		t.Error("created without a runner")
	}
	if err := p.Terminate(t.Context(), spec.ID, true); err != nil {
		t.Error(err)
	}
	spec.Labels.Session = "../../evil"
	if _, err = p.Create(t.Context(), spec); err == nil {
		t.Error("a session that is a path was accepted")
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	if _, err := New(Config{}); err == nil {
		t.Error("an empty config was accepted")
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(withRequired(Config{Dir: filepath.Join(file, "x"), Runner: "r", Engine: "e"})); err == nil || !strings.Contains(err.Error(), "data folder") {
		t.Errorf("a folder in a file: %v", err)
	}
}

// The record on disk is read by later versions: its names are fixed.
func TestRecordShape(t *testing.T) {
	t.Parallel()
	raw, err := json.Marshal(savedSandbox{ID: "sbx", Labels: sandbox.Labels{Tenant: "t", Session: "s", Engine: "e", Epoch: 2}, Socket: "k"})
	want := `{"id":"sbx","labels":{"tenant":"t","session":"s","engine":"e","epoch":2},"created":"0001-01-01T00:00:00Z","socket":"k"}`
	if err != nil || string(raw) != want {
		t.Errorf("%s, %v", raw, err)
	}
}
