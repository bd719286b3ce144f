package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

// markerVariable is the environment variable with the sandbox's id that all processes of a sandbox inherit. By it they
// are found even after their parents have ended.
const markerVariable = "SPOOL_SANDBOX"

const (
	// shutdownTimeout is the maximum time that a runner may take to end its processes.
	shutdownTimeout = 3 * time.Second
	// killTimeout is the maximum time that the remaining processes may take to end after SIGKILL.
	killTimeout = 5 * time.Second
	// pollInterval is the interval at which processes and sockets are checked.
	pollInterval = 5 * time.Millisecond
)

// box implements sandbox.Sandbox. It is safe for concurrent use.
type box struct {
	p   *Provider
	rec savedSandbox
	dir string
}

// ID returns the sandbox's id, sbx_….
func (b *box) ID() string { return b.rec.ID }

// Secret returns the secret with which executors prove themselves to the runner.
func (b *box) Secret() string { return b.rec.Secret }

// workspace returns the folder in which the agent works.
func (b *box) workspace() string {
	if b.rec.HostPath != "" {
		return b.rec.HostPath
	}
	return b.p.workspace(b.rec.Labels.Session)
}

// Kept reports whether the session had a workspace on this machine before this sandbox was created.
func (b *box) Kept() bool { return !b.rec.Empty }

// Running reports whether the runner runs.
func (b *box) Running(context.Context) (bool, error) {
	_, alive := b.runner()
	return alive, nil
}

// runner returns the runner's process, and whether it runs.
func (b *box) runner() (runnerProcess, bool) {
	var s runnerProcess
	if err := readJSON(filepath.Join(b.dir, "runner.json"), &s); err != nil || s.PID <= 1 {
		return s, false
	}
	p, ok := find(s.PID)
	return s, ok && p.start == s.Start && !p.dead
}

// isPaused reports whether the runner is stopped by a signal.
func (b *box) isPaused() bool {
	s, alive := b.runner()
	if !alive {
		return false
	}
	p, ok := find(s.PID)
	return ok && p.stopped
}

// environ returns the environment of all processes of a sandbox, to which each process's own variables are added.
func (b *box) environ() []string {
	env := []string{
		"PATH=" + b.path(),
		"HOME=" + filepath.Join(b.dir, "home"),
		"TMPDIR=" + filepath.Join(b.dir, "tmp"),
		"LANG=C.UTF-8",
		markerVariable + "=" + b.rec.ID,
		"SPOOL_RUNNER_SOCKET=" + b.rec.Socket,
		"SPOOL_RUNNER_WORKSPACE=" + b.workspace(),
		"SPOOL_RUNNER_STATE=" + filepath.Join(b.p.state(b.rec.Labels.Session), "agent"),
	}
	if b.rec.HostPath != "" {
		env = append(env, "SPOOL_RUNNER_SHARED=true")
	}
	if b.rec.Layer != "" {
		env = append(env, layer.Environ(b.rec.Layer)...)
	}
	return env
}

// path returns the search path for programs in a sandbox.
func (b *box) path() string {
	if b.rec.Layer == "" {
		return b.p.cfg.Path
	}
	return strings.Join(append(layer.Path(b.rec.Layer), b.p.cfg.Path), string(os.PathListSeparator))
}

// startRunner starts the runner in a Unix session of its own, without a pipe to this
// process, and blocks until it listens.
func (b *box) startRunner(ctx context.Context) error {
	// An executor that died may have left processes.
	if err := b.end(ctx); err != nil {
		return err
	}
	b.awaitSilence(ctx)
	log, err := os.OpenFile(filepath.Join(b.dir, "runner.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // the runner has its own descriptor
	workspace := b.workspace()
	cmd := &exec.Cmd{
		Path: b.p.cfg.Runner,
		Args: []string{
			"runner", "serve", "--socket", b.rec.Socket, "--workspace", workspace,
			"--state", filepath.Join(b.p.state(b.rec.Labels.Session), "agent"),
		},
		Env: b.environ(), Dir: workspace, Stdout: log, Stderr: log,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the runner: %w", err)
	}
	exited := make(chan struct{})
	go func() { // reaps the runner, however long it lives
		defer close(exited)
		if err := cmd.Wait(); err != nil {
			b.p.cfg.Logger.Debug("runner ended", "sandbox", b.rec.ID, "error", err)
		}
	}()
	p, ok := find(cmd.Process.Pid)
	if !ok {
		return b.exitError()
	}
	if err := writeJSON(filepath.Join(b.dir, "runner.json"), runnerProcess{p.pid, p.start}); err != nil {
		return errors.Join(err, b.end(ctx))
	}
	if err := b.awaitRunner(ctx, exited); err != nil {
		return errors.Join(err, b.end(context.WithoutCancel(ctx)))
	}
	return nil
}

// awaitSilence blocks until no process answers at the socket. A killed runner answers until its last thread has
// ended. Until then, the next runner would refuse to start because another one listens.
func (b *box) awaitSilence(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", b.rec.Socket)
		if err != nil {
			return
		}
		_ = c.Close()
		select {
		case <-ctx.Done():
			return // the new runner then fails, because another one serves there
		case <-tick.C:
		}
	}
}

// awaitRunner blocks until the runner's socket answers, and then sends the runner the sandbox's secret.
func (b *box) awaitRunner(ctx context.Context, exited <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := b.claim(ctx)
		var refused *runner.CommandError
		if err == nil || errors.As(err, &refused) {
			return err
		}
		// No process listens yet, or a runner that was killed has not closed its socket.
		select {
		case <-exited:
			return b.exitError()
		case <-ctx.Done():
			return fmt.Errorf("the runner does not listen: %w", errors.Join(ctx.Err(), err))
		case <-tick.C:
		}
	}
}

// claim sends the runner the sandbox's secret. It may be called more than once.
func (b *box) claim(ctx context.Context) error {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", b.rec.Socket)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // only read from
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	return runner.SendSecret(c, b.rec.Secret)
}

// exitError returns the error of a runner that has ended, with the end of its output.
func (b *box) exitError() error {
	raw, err := os.ReadFile(filepath.Join(b.dir, "runner.log"))
	if err != nil {
		return fmt.Errorf("the runner ended at once: %w", err)
	}
	text := strings.TrimSpace(string(raw[max(0, len(raw)-1024):]))
	return fmt.Errorf("the runner ended at once; it last said: %s", strings.ToValidUTF8(text, "\uFFFD"))
}

// end ends every process of the sandbox: the runner, which is asked to end its
// processes first, all its descendants, and every process with the sandbox's marker.
func (b *box) end(ctx context.Context) error {
	known := map[int]string{} // pid to start
	if s, alive := b.runner(); alive {
		known[s.PID] = s.Start
		b.findProcesses(known)
		if err := kill(s.PID, syscall.SIGCONT); err != nil { // it may be paused
			return err
		}
		if err := syscall.Kill(s.PID, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("end the runner: %w", err)
		}
		b.awaitGone(ctx, shutdownTimeout)
	}
	deadline := time.Now().Add(killTimeout)
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		alive := b.findProcesses(known)
		if len(alive) == 0 {
			break
		}
		for _, pid := range alive {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill process %d: %w", pid, err)
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v cannot be killed", alive)
		}
		<-tick.C
	}
	if err := os.Remove(filepath.Join(b.dir, "runner.json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// awaitGone blocks until the runner has ended, for d at most.
func (b *box) awaitGone(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if _, alive := b.runner(); !alive {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// findProcesses adds the descendants of known processes, and all processes with the sandbox's marker, to known, which
// maps a pid to its start time. It returns the processes of known that still run.
func (b *box) findProcesses(known map[int]string) (alive []int) {
	all := processes()
	self := os.Getpid()
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if start, ok := known[p.pid]; ok && start == p.start || p.pid == self {
				continue
			}
			_, child := known[p.parent]
			if child || p.hasMarker(markerVariable+"="+b.rec.ID) {
				known[p.pid], grown = p.start, true
			}
		}
	}
	for _, p := range all {
		if start, ok := known[p.pid]; ok && start == p.start && !p.dead {
			alive = append(alive, p.pid)
		}
	}
	return alive
}

// Exec starts a command in the workspace, or in its subfolder c.Dir. ctx bounds only the start.
func (b *box) Exec(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(c.Args) == 0 {
		return nil, errors.New("exec: args are empty")
	}
	if _, err := b.p.read(b.rec.ID); err != nil {
		return nil, fmt.Errorf("exec: %w", err)
	}
	dir, err := b.within(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("exec: dir: %w", err)
	}
	cmd := &exec.Cmd{Path: c.Args[0], Args: c.Args, Env: b.environ(), Dir: dir, SysProcAttr: &syscall.SysProcAttr{Setpgid: true}}
	for k, v := range c.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if c.Args[0] == "runner" {
		cmd.Path = b.p.cfg.Runner
	} else if cmd.Path, err = lookPath(c.Args[0], dir, b.path()); err != nil {
		return nil, fmt.Errorf("exec: %w", err)
	}
	return startProcess(cmd)
}

// within returns the absolute path of a folder of the workspace.
func (b *box) within(dir string) (string, error) {
	workspace := b.workspace()
	if dir == "" {
		return workspace, nil
	}
	rel, err := relative(dir)
	if err != nil {
		return "", err
	}
	root, err := os.OpenRoot(workspace)
	if err != nil {
		return "", err
	}
	defer root.Close() //nolint:errcheck // only read
	if _, err := root.Stat(rel); err != nil {
		return "", wrapError(dir, err)
	}
	return filepath.Join(workspace, filepath.FromSlash(rel)), nil
}

// lookPath returns the path of a program as a shell in the sandbox finds it.
func lookPath(name, dir, path string) (string, error) {
	if strings.Contains(name, "/") {
		if filepath.IsAbs(name) {
			return name, nil
		}
		return filepath.Join(dir, name), nil
	}
	for _, d := range filepath.SplitList(path) {
		full := filepath.Join(d, name)
		if info, err := os.Stat(full); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return full, nil
		}
	}
	return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
}
