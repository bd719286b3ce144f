package docker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// box is a sandbox in a Docker container. It implements sandbox.Sandbox. It is safe for concurrent use.
type box struct {
	p         *Provider
	id        string
	container string // the engine's id
	secret    string // "" in a sandbox that a release without secrets created
	kept      bool
}

// ID returns the sandbox's id, sbx_….
func (b *box) ID() string { return b.id }

// Secret returns the secret with which executors prove themselves to the runner.
func (b *box) Secret() string { return b.secret }

// HasWorkspace reports whether the sandbox already has the session's workspace, so that the caller must not restore it. This is so if the
// sandbox took over the volumes of another one, if its container was restarted, or if Attach found it. HasWorkspace returns false for a
// sandbox that Create found running: the executor that created it may have crashed before it restored the workspace.
func (b *box) HasWorkspace() bool { return b.kept }

// Running reports whether the runner runs. The runner is the first process of the container.
func (b *box) Running(ctx context.Context) (bool, error) {
	got, err := callEngine(ctx, b.p, "look at sandbox "+b.id, func(ctx context.Context) (container.InspectResponse, error) {
		return b.p.api.ContainerInspect(ctx, b.container)
	})
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil && got.State.Running, err
}

// Files returns the files of the sandbox's workspace.
func (b *box) Files() sandbox.Files { return guest.Files{Start: b.startRunner} }

// awaitReady blocks until the sandbox's runner listens, and then sends it the sandbox's secret.
func (b *box) awaitReady(ctx context.Context) error {
	args, feed := []string{"wait-ready", "--within", runnerReadyTimeout.String()}, (func(io.Writer) error)(nil)
	if b.secret != "" {
		args, feed = append(args, "--claim"), func(w io.Writer) error {
			_, err := io.WriteString(w, b.secret)
			return err
		}
	}
	out, err := b.runRunner(ctx, feed, args...)
	if err == nil && out.Code == 0 {
		return nil
	}
	if err != nil && guest.IsUnavailable(err) || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	said := b.p.outputTail(ctx, b.container)
	if said == "" {
		said = strings.TrimSpace(out.Stderr)
	}
	return guest.WithCode(sandbox.CodeRunnerSilent, fmt.Sprintf("the runner of sandbox %s does not answer: see whether the image can run it; it last said: %s", b.id, said), err)
}

// Exec starts a command in the workspace, or in its subfolder c.Dir. ctx limits only the start. If the first argument is "runner", the
// command is the runner program, which ends when its stdin is closed. Process.Kill ends any other command with its descendants.
func (b *box) Exec(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if len(c.Args) == 0 {
		return nil, errors.New("exec: args are empty")
	}
	dir, err := guest.StartFunc(b.startRunner).FolderPath(ctx, workspaceDir, c.Dir)
	if err != nil {
		return nil, fmt.Errorf("exec: dir: %w", err)
	}
	opts := container.ExecOptions{WorkingDir: dir}
	for k, v := range c.Env {
		opts.Env = append(opts.Env, k+"="+v)
	}
	slices.Sort(opts.Env)
	id := ""
	if c.Args[0] == "runner" {
		opts.Cmd = append([]string{runnerPath}, c.Args[1:]...)
	} else {
		id = rand.Text()
		opts.Cmd = append([]string{runnerPath, "exec", "--id", id, "--"}, c.Args...)
	}
	return b.startExec(ctx, opts, id)
}

// startRunner starts the runner program with the arguments args in the sandbox's container.
func (b *box) startRunner(ctx context.Context, args ...string) (guest.Process, error) {
	proc, err := b.startExec(ctx, container.ExecOptions{WorkingDir: "/", Cmd: append([]string{runnerPath}, args...)}, "")
	if err != nil {
		return nil, err
	}
	return proc, nil
}

// runRunner runs the runner program with the arguments args in the sandbox's container, and blocks until the program has ended. feed writes
// to the program's stdin; see guest.StartFunc.Run.
func (b *box) runRunner(ctx context.Context, feed func(io.Writer) error, args ...string) (guest.RunResult, error) {
	return guest.StartFunc(b.startRunner).Run(ctx, feed, args...)
}
