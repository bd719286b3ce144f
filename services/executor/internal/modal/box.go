package modal

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// box is a sandbox at Modal. It implements sandbox.Sandbox. It is safe for concurrent use.
type box struct {
	p      *Provider
	id     string
	secret string
	kept   bool
}

// ID returns the sandbox's id, sbx_….
func (b *box) ID() string { return b.id }

// Secret returns the secret with which executors prove themselves to the runner.
func (b *box) Secret() string { return b.secret }

// HasWorkspace reports whether the sandbox started from the snapshot of an earlier sandbox of the session, or
// was found by Attach.
func (b *box) HasWorkspace() bool { return b.kept }

// Files returns the workspace.
func (b *box) Files() sandbox.Files { return guest.Files{Start: b.startRunner} }

// Running reports whether the sandbox runs. Modal ends a sandbox when its runner ends.
func (b *box) Running(ctx context.Context) (bool, error) {
	_, err := b.p.currentHandle(ctx, b.id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// awaitReady blocks until the sandbox's runner listens, and then sends it the sandbox's secret.
func (b *box) awaitReady(ctx context.Context) error {
	out, err := guest.StartFunc(b.startRunner).Run(ctx, func(w io.Writer) error {
		_, err := io.WriteString(w, b.secret)
		return err
	}, "wait-ready", "--within", runnerReadyTimeout.String(), "--claim")
	switch {
	case errors.Is(err, sandbox.ErrNotFound), err == nil && out.Code < 0:
		return &sandbox.Error{Code: sandbox.CodeRunnerSilent, Err: err, Message: fmt.Sprintf(
			"sandbox %s ended as it was made: see whether the image can run the runner; Modal has the sandbox's log", b.id)}
	case err != nil:
		return err
	case out.Code != 0:
		return &sandbox.Error{Code: sandbox.CodeRunnerSilent, Message: fmt.Sprintf(
			"the runner of sandbox %s does not answer: see whether the image can run it: %s", b.id, strings.TrimSpace(out.Stderr))}
	}
	return nil
}

// Exec starts a command in the workspace, or in its subfolder c.Dir. ctx limits only the start. If the first
// argument is "runner", the command is the runner program, which ends when its stdin is closed; any other
// command can be killed with its descendants.
func (b *box) Exec(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if len(c.Args) == 0 {
		return nil, errors.New("exec: args are empty")
	}
	dir, err := guest.StartFunc(b.startRunner).FolderPath(ctx, workspaceDir, c.Dir)
	if err != nil {
		return nil, fmt.Errorf("exec: dir: %w", err)
	}
	if c.Args[0] == "runner" {
		return b.startProgram(ctx, append([]string{runnerPath}, c.Args[1:]...), dir, c.Env, "")
	}
	id := rand.Text()
	return b.startProgram(ctx, append([]string{runnerPath, "exec", "--id", id, "--"}, c.Args...), dir, c.Env, id)
}

// startRunner starts the runner program with the arguments args in the sandbox.
func (b *box) startRunner(ctx context.Context, args ...string) (guest.Process, error) {
	return b.startProgram(ctx, append([]string{runnerPath}, args...), "/", nil, "")
}

// startProgram starts a program in the sandbox. kill is the name by which "runner kill" finds the program, ""
// for the runner program itself.
func (b *box) startProgram(ctx context.Context, args []string, dir string, env map[string]string, kill string) (guest.Process, error) {
	h := b.p.knownHandle(b.id)
	if h == nil { // the sandbox was not used yet, or has ended
		var err error
		if h, err = b.p.currentHandle(ctx, b.id); err != nil {
			return nil, fmt.Errorf("exec in sandbox %s: %w", b.id, err)
		}
	}
	proc, err := b.p.startProgram(ctx, h, "exec in sandbox "+b.id, args, dir, env)
	if err != nil {
		if errors.Is(err, sandbox.ErrNotFound) {
			b.p.removeHandle(b.id)
		}
		return nil, err
	}
	if kill != "" {
		proc.kill = func(ctx context.Context) error {
			out, err := guest.StartFunc(b.startRunner).Run(ctx, nil, "kill", "--id", kill)
			if err == nil && out.Code != 0 {
				err = fmt.Errorf("exit code %d: %s", out.Code, strings.TrimSpace(out.Stderr))
			}
			return err
		}
	}
	return proc, nil
}
