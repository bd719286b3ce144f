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

// markerVariable is the environment variable that contains the sandbox's id. All processes of a sandbox inherit it, so
// that they are found even after their parents have ended.
const markerVariable = "SPOOL_SANDBOX"

const (
	// shutdownTimeout is the maximum time that a runner may take to end its processes before they are killed.
	shutdownTimeout = 3 * time.Second
	// killTimeout is the maximum time that processes of a sandbox may take to end after SIGKILL.
	killTimeout = 5 * time.Second
	// pollInterval is the interval at which the provider checks whether a process has ended or a socket answers.
	pollInterval = 5 * time.Millisecond
)

// box is a sandbox of local processes, without isolation. It implements sandbox.Sandbox. It is safe for concurrent
// use.
type box struct {
	p   *Provider
	rec savedSandbox
	dir string
}

// ID returns the sandbox's id, sbx_….
func (b *box) ID() string { return b.rec.ID }

// Secret returns the secret with which executors prove themselves to the runner.
func (b *box) Secret() string { return b.rec.Secret }

// workspaceDir returns the path of the folder in which the session's agent works.
func (b *box) workspaceDir() string {
	if b.rec.HostPath != "" {
		return b.rec.HostPath
	}
	return b.p.workspaceDir(b.rec.Labels.Session)
}

// HasWorkspace reports whether the session had a workspace on this machine before the sandbox was created.
func (b *box) HasWorkspace() bool { return !b.rec.Empty }

// Running reports whether the runner runs.
func (b *box) Running(context.Context) (bool, error) {
	_, alive := b.findRunner()
	return alive, nil
}

// findRunner returns the process of the sandbox's runner, and false if the runner does not run.
func (b *box) findRunner() (runnerProcess, bool) {
	var s runnerProcess
	if err := readJSON(filepath.Join(b.dir, "runner.json"), &s); err != nil || s.PID <= 1 {
		return s, false
	}
	p, ok := findProcess(s.PID)
	return s, ok && p.start == s.Start && !p.dead
}

// isPaused reports whether the sandbox is paused, that is, a signal has stopped its runner.
func (b *box) isPaused() bool {
	s, alive := b.findRunner()
	if !alive {
		return false
	}
	p, ok := findProcess(s.PID)
	return ok && p.stopped
}

// environment returns the environment variables that all processes in a sandbox have, in addition to the variables of
// each process.
func (b *box) environment() []string {
	env := []string{
		"PATH=" + b.searchPath(),
		"HOME=" + filepath.Join(b.dir, "home"),
		"TMPDIR=" + filepath.Join(b.dir, "tmp"),
		"LANG=C.UTF-8",
		markerVariable + "=" + b.rec.ID,
		"SPOOL_RUNNER_SOCKET=" + b.rec.Socket,
		"SPOOL_RUNNER_WORKSPACE=" + b.workspaceDir(),
		"SPOOL_RUNNER_STATE=" + filepath.Join(b.p.stateDir(b.rec.Labels.Session), "agent"),
	}
	if b.rec.HostPath != "" {
		env = append(env, "SPOOL_RUNNER_SHARED=true")
	}
	if b.rec.Layer != "" {
		env = append(env, layer.PackageVariables(b.rec.Layer)...)
	}
	return env
}

// searchPath returns the value of the variable PATH in a sandbox.
func (b *box) searchPath() string {
	if b.rec.Layer == "" {
		return b.p.cfg.Path
	}
	return strings.Join(append(layer.ProgramFolders(b.rec.Layer), b.p.cfg.Path), string(os.PathListSeparator))
}

// startRunner starts the runner in a Unix session of its own, without a pipe to this
// process, and blocks until it listens.
func (b *box) startRunner(ctx context.Context) error {
	// An executor that died may have left processes.
	if err := b.endProcesses(ctx); err != nil {
		return err
	}
	b.awaitSocketClosed(ctx)
	log, err := os.OpenFile(filepath.Join(b.dir, "runner.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // the runner has its own descriptor
	workspace := b.workspaceDir()
	cmd := &exec.Cmd{
		Path: b.p.cfg.Runner,
		Args: []string{
			"runner", "serve", "--socket", b.rec.Socket, "--workspace", workspace,
			"--state", filepath.Join(b.p.stateDir(b.rec.Labels.Session), "agent"),
		},
		Env: b.environment(), Dir: workspace, Stdout: log, Stderr: log,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := b.startRestricted(cmd); err != nil {
		return fmt.Errorf("start the runner: %w", err)
	}
	exited := make(chan struct{})
	go func() { // reaps the runner, however long it lives
		defer close(exited)
		if err := cmd.Wait(); err != nil {
			b.p.cfg.Logger.Debug("runner ended", "sandbox", b.rec.ID, "error", err)
		}
	}()
	p, ok := findProcess(cmd.Process.Pid)
	if !ok {
		return b.exitError()
	}
	if err := writeJSON(filepath.Join(b.dir, "runner.json"), runnerProcess{p.pid, p.start}); err != nil {
		return errors.Join(err, b.endProcesses(ctx))
	}
	if err := b.awaitRunner(ctx, exited); err != nil {
		return errors.Join(err, b.endProcesses(context.WithoutCancel(ctx)))
	}
	return nil
}

// awaitSocketClosed blocks until no process answers at the runner's socket. A killed runner answers until its last
// thread has ended, and the next runner would not start while another one answers.
func (b *box) awaitSocketClosed(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, runnerReadyTimeout)
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
	ctx, cancel := context.WithTimeout(ctx, runnerReadyTimeout)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := b.sendSecret(ctx)
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

// sendSecret sends the sandbox's secret to the runner. It may be called more than once.
func (b *box) sendSecret(ctx context.Context) error {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", b.rec.Socket)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // only read from
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	return runner.SendSecret(c, b.rec.Secret)
}

// exitError returns an error that says that the runner has ended, with the end of its output.
func (b *box) exitError() error {
	raw, err := os.ReadFile(filepath.Join(b.dir, "runner.log"))
	if err != nil {
		return fmt.Errorf("the runner ended at once: %w", err)
	}
	text := strings.TrimSpace(string(raw[max(0, len(raw)-1024):]))
	return fmt.Errorf("the runner ended at once; it last said: %s", strings.ToValidUTF8(text, "\uFFFD"))
}

// endProcesses ends all processes of the sandbox: it asks the runner to end its processes, and then kills the runner,
// its descendants, and every process with the sandbox's marker variable.
func (b *box) endProcesses(ctx context.Context) error {
	known := map[int]string{} // pid to start
	if s, alive := b.findRunner(); alive {
		known[s.PID] = s.Start
		b.findProcesses(known)
		if err := sendSignal(s.PID, syscall.SIGCONT); err != nil { // it may be paused
			return err
		}
		if err := syscall.Kill(s.PID, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("end the runner: %w", err)
		}
		b.awaitRunnerExit(ctx, shutdownTimeout)
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

// awaitRunnerExit blocks until the runner has ended, but at most for d.
func (b *box) awaitRunnerExit(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if _, alive := b.findRunner(); !alive {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// findProcesses adds to known all descendants of the processes in known, and all processes with the sandbox's marker
// variable. known maps a pid to the start time of the process. findProcesses returns the pids in known that still run.
func (b *box) findProcesses(known map[int]string) (alive []int) {
	all := listProcesses()
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
	if _, err := b.p.readRecord(b.rec.ID); err != nil {
		return nil, fmt.Errorf("exec: %w", err)
	}
	dir, err := b.workspacePath(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("exec: dir: %w", err)
	}
	cmd := &exec.Cmd{Path: c.Args[0], Args: c.Args, Env: b.environment(), Dir: dir, SysProcAttr: &syscall.SysProcAttr{Setpgid: true}}
	for k, v := range c.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if c.Args[0] == "runner" {
		cmd.Path = b.p.cfg.Runner
	} else if cmd.Path, err = lookPath(c.Args[0], dir, b.searchPath()); err != nil {
		return nil, fmt.Errorf("exec: %w", err)
	}
	return startProcess(cmd, b.startRestricted)
}

// workspacePath returns the absolute path of a folder of the workspace, or an error if the folder is not in the
// workspace.
func (b *box) workspacePath(dir string) (string, error) {
	workspace := b.workspaceDir()
	if dir == "" {
		return workspace, nil
	}
	rel, err := cleanRelativePath(dir)
	if err != nil {
		return "", err
	}
	root, err := os.OpenRoot(workspace)
	if err != nil {
		return "", err
	}
	defer root.Close() //nolint:errcheck // only read
	if _, err := root.Stat(rel); err != nil {
		return "", translateError(dir, err)
	}
	return filepath.Join(workspace, filepath.FromSlash(rel)), nil
}

// lookPath returns the path of a program as a shell in the folder dir finds it with the search path path.
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
