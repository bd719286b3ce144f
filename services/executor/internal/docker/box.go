package docker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// box is one sandbox.
type box struct {
	p         *Provider
	id        string
	container string // the engine's id
	secret    string // "" in a sandbox of a release without
	kept      bool
}

// ID is sbx_….
func (b *box) ID() string { return b.id }

// Secret is what executors prove to the runner.
func (b *box) Secret() string { return b.secret }

// Kept is true for a sandbox that took over a workspace, for one whose container
// was started again and has files, and for one that was found by Attach. One
// that Create finds running was made by somebody who may have come no further.
func (b *box) Kept() bool { return b.kept }

// Running tells whether the runner, which is the container's first process, lives.
func (b *box) Running(ctx context.Context) (bool, error) {
	got, err := call(ctx, b.p, "look at sandbox "+b.id, func(ctx context.Context) (container.InspectResponse, error) {
		return b.p.api.ContainerInspect(ctx, b.container)
	})
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil && got.State.Running, err
}

// Files is the workspace.
func (b *box) Files() sandbox.Files { return files{b} }

// ready waits until the runner listens, and gives it the sandbox's secret.
func (b *box) ready(ctx context.Context) error {
	args, feed := []string{"wait-ready", "--within", readyWithin.String()}, (func(io.Writer) error)(nil)
	if b.secret != "" {
		args, feed = append(args, "--claim"), func(w io.Writer) error {
			_, err := io.WriteString(w, b.secret)
			return err
		}
	}
	out, err := b.runner(ctx, feed, args...)
	if err == nil && out.code == 0 {
		return nil
	}
	if err != nil && unavailable(err) || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	said := b.p.lastWords(ctx, b.container)
	if said == "" {
		said = strings.TrimSpace(out.stderr)
	}
	return failed(sandbox.CodeRunnerSilent, fmt.Sprintf("the runner of sandbox %s does not answer: see whether the image can run it; it last said: %s", b.id, said), err)
}

func unavailable(err error) bool {
	var typed *sandbox.Error
	return errors.As(err, &typed) && typed.Code == sandbox.CodeEngineUnavailable
}

// Exec starts a command in the workspace. ctx bounds only the start. A command
// of the runner's own ends with its stdin; every other one can be killed with
// all that it started.
func (b *box) Exec(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if len(c.Args) == 0 {
		return nil, errors.New("exec: args are empty")
	}
	dir, err := b.within(ctx, c.Dir)
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
	return b.start(ctx, opts, id)
}

// within gives the absolute path of a folder of the workspace.
func (b *box) within(ctx context.Context, dir string) (string, error) {
	if dir == "" {
		return workspaceDir, nil
	}
	rel, err := relative(dir)
	if err != nil {
		return "", err
	}
	// Only inside can links be followed.
	out, err := b.runner(ctx, nil, "list", "--", rel)
	if err == nil {
		err = out.outcome(dir)
	}
	return path.Join(workspaceDir, rel), err
}

// answer is what a command of the runner gave.
type answer struct {
	stdout, stderr string
	code           int
}

// The exit codes of the runner's file commands.
const (
	exitNotFound   = 3
	exitOutside    = 4
	exitPermission = 5
	exitIrregular  = 6 // not a regular file, or no path at all
)

// outcome gives a file command's exit code its meaning.
func (a answer) outcome(name string) error {
	switch a.code {
	case 0:
		return nil
	case exitNotFound:
		return fmt.Errorf("path %q: %w", name, sandbox.ErrNotFound)
	case exitOutside:
		return fmt.Errorf("path %q: %w", name, sandbox.ErrOutside)
	}
	said := strings.TrimPrefix(strings.TrimSpace(a.stderr+a.stdout), "runner: ")
	switch a.code {
	case exitPermission:
		return fmt.Errorf("path %q: %w: %s", name, fs.ErrPermission, said)
	case exitIrregular:
		return fmt.Errorf("path %q: %w: %s", name, fs.ErrInvalid, said)
	}
	err := fmt.Errorf("path %q: exit code %d: %s", name, a.code, said)
	if full(err) {
		return &sandbox.Error{Code: sandbox.CodeDiskFull, Message: fmt.Sprintf("path %q: the disk of the engine is full: remove images or volumes that nobody needs", name), Err: err}
	}
	return err
}

// runner runs a command of the runner to its end. feed writes its stdin, which
// is closed after it; an error of feed breaks the command off.
func (b *box) runner(ctx context.Context, feed func(io.Writer) error, args ...string) (answer, error) {
	proc, err := b.start(ctx, container.ExecOptions{WorkingDir: "/", Cmd: append([]string{runnerPath}, args...)}, "")
	if err != nil {
		return answer{}, err
	}
	defer context.AfterFunc(ctx, proc.breakOff)()
	fed := make(chan error, 1)
	go func() {
		var err error
		if feed != nil {
			err = feed(proc.Stdin())
		}
		if err != nil && !errors.Is(err, errWrite) {
			proc.breakOff()
		}
		_ = proc.Stdin().Close() // a command that ended early has closed it
		fed <- err
	}()
	var errs []byte
	said := make(chan struct{})
	go func() {
		defer close(said)
		errs, _ = io.ReadAll(proc.Stderr()) // cut off with stdout, whose error counts
	}()
	out, err := io.ReadAll(proc.Stdout())
	<-said
	feedErr := <-fed
	refused := errors.Is(feedErr, errWrite) // it did not want more: its exit code says why
	switch {
	case ctx.Err() != nil:
		return answer{}, ctx.Err()
	case feedErr != nil && !refused:
		return answer{}, feedErr
	}
	code, werr := proc.Wait()
	if werr != nil || err != nil && !refused {
		return answer{}, errors.Join(werr, err)
	}
	if refused && code == 0 {
		return answer{}, feedErr
	}
	return answer{string(out), string(errs), code}, nil
}
