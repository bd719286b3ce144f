package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/serve"
	"github.com/spoolhq/spool/pkg/runner"
)

// connectRetryPause is the time between two attempts to connect to a runner that does not answer yet.
const connectRetryPause = 10 * time.Millisecond

// exitSignalBase is the exit code, without the number of the signal, of a program that a signal has ended, as in
// shells.
const exitSignalBase = 128

// maxSecretBytes is the maximum length in bytes of a sandbox's secret.
const maxSecretBytes = 1 << 10

// waitReadyCommand is the command wait-ready, which waits until a runner serves at the socket. Optionally it sends the
// runner the sandbox's secret.
type waitReadyCommand struct {
	Socket string        `required:"" help:"Path of the serving runner's socket." env:"SPOOL_RUNNER_SOCKET"`
	Within time.Duration `help:"How long to wait." default:"30s"`
	Claim  bool          `help:"Give the runner the sandbox's secret, which is read from stdin, before its status is printed."`
}

func (c *waitReadyCommand) Run(ctx context.Context, sys *System) error {
	ctx, cancel := context.WithTimeout(ctx, c.Within)
	defer cancel()
	var secret []byte
	if c.Claim {
		var err error
		if secret, err = io.ReadAll(io.LimitReader(sys.Stdin, maxSecretBytes)); err != nil {
			return fmt.Errorf("read the sandbox's secret: %w", err)
		}
	}
	tick := time.NewTicker(connectRetryPause)
	defer tick.Stop()
	for {
		line, err := serve.SendCommand(ctx, c.Socket, runner.OpStatus)
		if err == nil && c.Claim {
			if err := serve.SendSecret(ctx, c.Socket, string(secret)); err != nil {
				return err
			}
		}
		if err == nil {
			_, err = sys.Stdout.Write(line)
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not ready within %s: %w", c.Within, err)
		case <-tick.C:
		}
	}
}

// commandIDPattern matches the id of a command of `runner exec`, which becomes a part of file names.
var commandIDPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$`)

// killableCommands holds the flags that identify a command of `runner exec` by a folder and an id. The file <id>.pid in
// the folder identifies the command's process. The file <id>.kill requests the end of the command, and may exist before
// the command starts.
type killableCommands struct {
	ID  string `required:"" help:"Names the command for runner kill: 1 to 100 letters, digits, - and _."`
	Run string `name:"run-dir" help:"Folder where running commands are written down; by default exec beside the socket." env:"SPOOL_RUNNER_RUN_DIR"`
	// Socket only determines the folder.
	Socket string `help:"Path of the serving runner's socket." env:"SPOOL_RUNNER_SOCKET"`
}

// filePaths creates the folder, and returns the paths of <id>.pid and <id>.kill in it.
func (r killableCommands) filePaths() (pid, kill string, err error) {
	if !commandIDPattern.MatchString(r.ID) {
		return "", "", fmt.Errorf("id: %.100q: want 1 to 100 letters, digits, - and _", r.ID)
	}
	dir := r.Run
	if dir == "" {
		if r.Socket == "" {
			return "", "", errors.New("run-dir: is empty, and so is socket: set one of them")
		}
		dir = filepath.Join(filepath.Dir(r.Socket), "exec")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", "", fmt.Errorf("make run folder: %w", err)
	}
	base := filepath.Join(dir, r.ID)
	return base + ".pid", base + ".kill", nil
}

// execProgramCommand is the command exec, which runs a program that killProgramCommand can end.
type execProgramCommand struct {
	Running killableCommands `embed:""`
	Command []string         `arg:"" passthrough:"" help:"The program and its arguments, after --."`
}

func (c *execProgramCommand) Run(ctx context.Context, sys *System, log *slog.Logger) (err error) {
	args := c.Command
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		return errors.New("command: give a program after --")
	}
	pidFile, killFile, err := c.Running.filePaths()
	if err != nil {
		return err
	}
	cmd := exec.Command(args[0], args[1:]...) //nolint:gosec // running it is the purpose
	cmd.Stdin, cmd.Stdout, cmd.Stderr = sys.Stdin, sys.Stdout, sys.Stderr
	cmd.Env = withoutRunnerVariables(sys.Environ)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return exitCodeError{err, startFailureExitCode(err)}
	}
	tree := process.NewSessionLeader(log, cmd.Process.Pid)
	defer func() {
		for _, f := range []string{pidFile, killFile} {
			if rmErr := os.Remove(f); rmErr != nil && !errors.Is(rmErr, fs.ErrNotExist) {
				err = errors.Join(err, rmErr)
			}
		}
	}()
	raw, err := json.Marshal(tree)
	if err == nil {
		err = os.WriteFile(pidFile, raw, 0o600)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write down the command: %w", err), tree.KillTree(log), cmd.Wait())
	}
	// A kill that came before the process was recorded left this file.
	if _, err := os.Stat(killFile); err == nil {
		if err := tree.KillTree(log); err != nil {
			return err
		}
	}
	defer context.AfterFunc(ctx, func() {
		if err := tree.KillTree(log); err != nil {
			log.Error("end the command", "err", err)
		}
	})()
	var ended *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &ended) {
		return fmt.Errorf("run %s: %w", args[0], err)
	}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return silentExit(exitSignalBase + int(ws.Signal()))
	}
	if code := cmd.ProcessState.ExitCode(); code != 0 {
		return silentExit(code)
	}
	return nil
}

// startFailureExitCode returns the exit code, as in shells, for the error with which a program could not be started.
func startFailureExitCode(err error) int {
	if errors.Is(err, fs.ErrPermission) {
		return 126
	}
	return 127
}

// withoutRunnerVariables returns environ without the runner's own variables (SPOOL_RUNNER_…).
func withoutRunnerVariables(environ []string) []string {
	var out []string
	for _, kv := range environ {
		if !strings.HasPrefix(kv, "SPOOL_RUNNER_") {
			out = append(out, kv)
		}
	}
	return out
}

// killProgramCommand is the command kill, which ends a program of `runner exec` with all processes that the program has
// started.
type killProgramCommand struct {
	Running killableCommands `embed:""`
}

func (c *killProgramCommand) Run(log *slog.Logger) error {
	pidFile, killFile, err := c.Running.filePaths()
	if err != nil {
		return err
	}
	if err := os.WriteFile(killFile, nil, 0o600); err != nil {
		return fmt.Errorf("ask for the command's end: %w", err)
	}
	raw, err := os.ReadFile(pidFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it has ended, or ends as soon as it begins
	}
	if err != nil {
		return fmt.Errorf("find the command: %w", err)
	}
	var tree process.SessionLeader
	if err := json.Unmarshal(raw, &tree); err != nil {
		return fmt.Errorf("find the command: %s: %w", pidFile, err)
	}
	return tree.KillTree(log)
}
