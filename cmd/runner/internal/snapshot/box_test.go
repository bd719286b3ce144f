package snapshot_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/runner/internal/cli"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

// TestMain makes the test binary act as the runner.
func TestMain(m *testing.M) {
	if os.Getenv("RUNNER_TEST_AS") == "runner" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		code := cli.Run(ctx, os.Args[1:], cli.ProcessSystem())
		stop()
		if path := os.Getenv("RUNNER_TEST_PEAK"); path != "" {
			// This high-water mark is that of this program alone; that of rusage begins with the parent's.
			if raw, err := os.ReadFile("/proc/self/status"); err == nil {
				_ = os.WriteFile(path, raw, 0o600) // who reads it misses it
			}
		}
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

// box is a sandbox whose runner is this test binary, in a separate process.
type box struct {
	sandbox.Sandbox // only Exec is implemented
	workspace       string
	state           string
	flags           []string                    // added to each command
	binary          string                      // "" for the test binary
	user            *syscall.Credential         // nil for the user of the test
	stdout          func(r io.Reader) io.Reader // wraps the stream that the host reads
	env             []string
	last            *process
}

func newBox(t testing.TB) *box {
	t.Helper()
	dir := t.TempDir()
	b := &box{workspace: filepath.Join(dir, "w"), state: filepath.Join(dir, "s")}
	for _, d := range []string{b.workspace, b.state} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { unlock(t, dir) })
	return b
}

// unlock makes a tree removable.
func unlock(t testing.TB, dir string) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() {
			if err := os.Chmod(path, 0o700); err != nil { //nolint:gosec // for its owner
				t.Error(err)
			}
		}
		return nil
	})
}

func (b *box) ID() string { return "sbx_test" }

// Exec starts the runner.
func (b *box) Exec(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if c.Args[0] != "runner" {
		return nil, fmt.Errorf("%s: %w", c.Args[0], exec.ErrNotFound)
	}
	binary := b.binary
	if binary == "" {
		binary = os.Args[0]
	}
	cmd := exec.Command(binary, append(append([]string{c.Args[1]}, b.flags...), c.Args[2:]...)...) //nolint:gosec // this test's own binary
	cmd.Env = append(append(os.Environ(), "RUNNER_TEST_AS=runner", "SPOOL_RUNNER_WORKSPACE="+b.workspace, "SPOOL_RUNNER_STATE="+b.state), b.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: b.user}
	p := &process{cmd: cmd}
	var theirs [3]*os.File
	var ours [3]*os.File
	for i := range ours {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		if theirs[i], ours[i] = w, r; i == 0 {
			theirs[i], ours[i] = r, w
		}
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs[0], theirs[1], theirs[2]
	err := cmd.Start()
	for _, f := range theirs {
		_ = f.Close()
	}
	p.stdin, p.stdout, p.stderr, p.see = ours[0], ours[1], ours[2], ours[1]
	if err != nil {
		return nil, errors.Join(err, p.stdin.Close(), p.stdout.Close(), p.stderr.Close())
	}
	if b.stdout != nil {
		p.see = b.stdout(p.stdout)
	}
	b.last = p
	return p, nil
}

type process struct {
	cmd                   *exec.Cmd
	stdin, stdout, stderr *os.File
	see                   io.Reader
	once                  sync.Once
	code                  int
	err                   error
}

func (p *process) Stdin() io.WriteCloser { return p.stdin }
func (p *process) Stdout() io.Reader     { return p.see }
func (p *process) Stderr() io.Reader     { return p.stderr }

func (p *process) Wait() (int, error) {
	p.once.Do(func() {
		err := p.cmd.Wait()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			p.code, p.err = -1, err
			return
		}
		p.code = p.cmd.ProcessState.ExitCode()
		for _, f := range []*os.File{p.stdin, p.stdout} {
			_ = f.Close()
		}
	})
	return p.code, p.err
}

func (p *process) Kill() error {
	err := p.cmd.Process.Kill()
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
		_ = f.Close()
	}
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// measured makes runners report their memory use.
func (b *box) measured(t testing.TB) *box {
	b.env = append(b.env, "RUNNER_TEST_PEAK="+filepath.Join(t.TempDir(), "peak"))
	return b
}

// peak returns the largest memory use of the last runner, in bytes.
func (b *box) peak(t testing.TB) int64 {
	t.Helper()
	raw, err := os.ReadFile(strings.TrimPrefix(b.env[0], "RUNNER_TEST_PEAK="))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(raw), "VmHWM:")
	var kB int64
	if _, err := fmt.Sscan(rest, &kB); err != nil {
		t.Fatal(err)
	}
	return kB << 10
}

var options = workspace.Options{Tenant: "acme", Session: "ses_1"}

func take(t testing.TB, b *box, store workspace.Store, previous string) workspace.Result {
	t.Helper()
	o := options
	o.Previous = previous
	r, err := workspace.Snapshot(t.Context(), b, store, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func restore(t testing.TB, b *box, store workspace.Store, id string) workspace.Result {
	t.Helper()
	r, err := workspace.Restore(t.Context(), b, store, options.Tenant, options.Session, id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// node is the entry of a tree at a path.
type node struct {
	mode    fs.FileMode
	content string // of a file; the target of a link
	time    time.Time
}

// tree reads a whole folder. Links have no time, because snapshots do not keep it.
func tree(t testing.TB, dir string) map[string]node {
	t.Helper()
	out := map[string]node{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir || d.Name() == ".spool-index" {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		n := node{mode: info.Mode(), time: info.ModTime()}
		switch info.Mode().Type() {
		case 0:
			raw, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			n.content = string(raw)
		case fs.ModeSymlink:
			if n.content, err = os.Readlink(path); err != nil {
				return err
			}
			n.time, n.mode = time.Time{}, fs.ModeSymlink
		}
		out[path[len(dir)+1:]] = n
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// same compares two trees.
func same(t testing.TB, want, got map[string]node) {
	t.Helper()
	var paths []string
	for path := range want {
		paths = append(paths, path)
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			t.Errorf("%q: is there and should not be", path)
		}
	}
	sort.Strings(paths)
	for _, path := range paths {
		w := want[path]
		g, ok := got[path]
		switch {
		case !ok:
			t.Errorf("%q: is not there", path)
		case w.mode != g.mode || !w.time.Equal(g.time) || w.content != g.content:
			t.Errorf("%q: want %v %v %.40q (%d bytes), got %v %v %.40q (%d bytes)", path, w.mode, w.time, w.content, len(w.content), g.mode, g.time, g.content, len(g.content))
		}
	}
}

// put writes a file, and creates its folders.
func put(t testing.TB, dir, path, content string) {
	t.Helper()
	full := filepath.Join(dir, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// old makes all times of a tree old enough to be trusted.
func old(t testing.TB, dir string) {
	t.Helper()
	when := time.Now().Add(-time.Hour)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type()&fs.ModeSymlink == 0 {
			err = os.Chtimes(path, when, when)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

var _ workspace.Store = (*workspacetest.MemoryStore)(nil)
