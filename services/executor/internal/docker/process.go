package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

const (
	// outputBufferBytes is the size in bytes of the buffers for unread stdout and stderr. While a buffer is full, the
	// command blocks in its writes.
	outputBufferBytes = 256 << 10
	// firstExitPoll and maxExitPoll are the first and the longest interval at which the executor asks the engine whether a command has
	// exited, after the command's output has ended. The interval doubles each time.
	firstExitPoll = 2 * time.Millisecond
	maxExitPoll   = time.Second
)

// process is a command that runs in the container of a sandbox.
type process struct {
	b    *box
	exec string // the engine's id
	kill string // the id by which "runner kill" ends the command; "" for the runner program itself and for the egress program
	conn types.HijackedResponse

	stdin          *stdinWriter
	stdout, stderr *guest.Pipe
	ended          chan struct{} // closed when the streams have ended
	killed         chan struct{} // closed by Kill. Wait then does not wait for the exit code of a command that has not started, or that ends with its stdin
	killOnce       sync.Once     // closes killed
	lost           atomic.Pointer[error]

	once sync.Once
	code int
	err  error
}

// startExec starts a command in the container and returns without waiting for its end. kill is the name by which "runner kill" finds the
// command, "" if the command is the runner program itself.
func (b *box) startExec(ctx context.Context, opts container.ExecOptions, kill string) (*process, error) {
	opts.AttachStdin, opts.AttachStdout, opts.AttachStderr = true, true, true
	made, err := callEngine(ctx, b.p, "exec in sandbox "+b.id, func(ctx context.Context) (container.ExecCreateResponse, error) {
		return b.p.api.ContainerExecCreate(ctx, b.container, opts)
	})
	if errdefs.IsNotFound(err) {
		return nil, fmt.Errorf("exec in sandbox %s: %w", b.id, sandbox.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	conn, err := b.attachExec(ctx, made.ID)
	if err != nil {
		return nil, err
	}
	proc := &process{
		b: b, exec: made.ID, kill: kill, conn: conn, stdin: &stdinWriter{conn: conn},
		stdout: guest.NewPipe(outputBufferBytes), stderr: guest.NewPipe(outputBufferBytes), ended: make(chan struct{}), killed: make(chan struct{}),
	}
	b.p.watch.addProcess(proc)
	go proc.copyOutput()
	return proc, nil
}

// attachExec starts an exec of Docker and returns the connection to the streams of its command. It returns when ctx ends, also if the
// engine does not answer: the Docker client observes ctx only while it connects.
func (b *box) attachExec(ctx context.Context, exec string) (types.HijackedResponse, error) {
	type result struct {
		conn types.HijackedResponse
		err  error
	}
	bounded, cancel := context.WithTimeout(ctx, b.p.within)
	defer cancel()
	done := make(chan result, 1)
	go func() {
		conn, err := b.p.api.ContainerExecAttach(bounded, exec, container.ExecAttachOptions{})
		done <- result{conn, err}
	}()
	var err error
	select {
	case r := <-done:
		if r.err == nil {
			return r.conn, nil
		}
		err = r.err
	case <-bounded.Done():
		err = bounded.Err()
		go func() {
			if r := <-done; r.err == nil {
				r.conn.Close()
			}
		}()
	}
	return types.HijackedResponse{}, b.p.translateError(ctx, "exec in sandbox "+b.id, err)
}

// copyOutput copies the output of the command to p.stdout and p.stderr until the connection ends, and then closes p.ended.
func (p *process) copyOutput() {
	defer close(p.ended)
	defer p.b.p.watch.removeProcess(p)
	_, err := stdcopy.StdCopy(p.stdout, p.stderr, p.conn.Reader)
	if errors.Is(err, io.ErrClosedPipe) {
		err = nil // the reader has abandoned the stream
	}
	if lost := p.lost.Load(); lost != nil {
		err = *lost
	}
	err = p.b.p.translateError(context.Background(), "streams of a command in sandbox "+p.b.id, err)
	p.stdout.End(err)
	p.stderr.End(err)
	p.conn.Close()
}

// closeStreams closes the connection to the command's streams because the engine does not answer. Reads and writes of the streams then
// return err.
func (p *process) closeStreams(err error) {
	p.lost.CompareAndSwap(nil, &err)
	p.conn.Close()
}

// Stdin returns the command's stdin.
func (p *process) Stdin() io.WriteCloser { return p.stdin }

// Stdout returns the command's stdout.
func (p *process) Stdout() io.Reader { return p.stdout }

// Stderr returns the command's stderr.
func (p *process) Stderr() io.Reader { return p.stderr }

// Wait blocks until the command has ended, and returns its exit code; see guest.ExitCode. An exit code of -1 without an error means that
// the exit code is not known, because the container no longer exists, or because Kill was called for the runner program or for a command
// that had not started. An error means that the engine did not answer, or did not start the command. Wait may be called more than once,
// also concurrently.
func (p *process) Wait() (int, error) {
	p.once.Do(func() {
		<-p.ended
		p.code, p.err = p.awaitExit()
	})
	return p.code, p.err
}

// awaitExit asks the engine for the command's exit code at growing intervals until the command has ended. Its results are those of Wait.
func (p *process) awaitExit() (int, error) {
	since := time.Now()
	for pause := firstExitPoll; ; pause = min(2*pause, maxExitPoll) {
		got, err := p.inspectExec()
		if errdefs.IsNotFound(err) {
			return -1, nil
		}
		if err != nil {
			return -1, err
		}
		if hasEnded(got) {
			return guest.ExitCode(got.ExitCode), nil
		}
		if !got.Running && time.Since(since) > p.b.p.within {
			return -1, fmt.Errorf("command in sandbox %s: the engine accepted it and did not start it within %s", p.b.id, p.b.p.within)
		}
		killed := p.killed
		if p.kill != "" && got.Running {
			killed = nil // the engine reports the end of a command that runs
		}
		look := time.NewTimer(pause)
		select {
		case <-look.C:
		case <-killed:
			look.Stop()
			return -1, nil
		}
	}
}

// hasEnded reports whether the command of an exec has ended, rather than not yet started. The engine reports exit code 0 before the start
// too, but then no pid.
func hasEnded(got container.ExecInspect) bool {
	return !got.Running && (got.Pid != 0 || got.ExitCode != 0)
}

// inspectExec returns the engine's description of the command.
func (p *process) inspectExec() (container.ExecInspect, error) {
	return callEngine(context.Background(), p.b.p, "look at a command in sandbox "+p.b.id, func(ctx context.Context) (container.ExecInspect, error) {
		return p.b.p.api.ContainerExecInspect(ctx, p.exec)
	})
}

// Abandon closes the command's streams at once, and blocks until they are closed.
func (p *process) Abandon() {
	p.stdout.Abandon()
	p.stderr.Abandon()
	p.conn.Close()
	<-p.ended
}

// Kill ends the command and its descendants, and closes the command's streams. If the command is the runner program itself, Kill
// only closes the streams, and the program ends at the end of its stdin.
func (p *process) Kill() error {
	p.Abandon()
	if p.kill == "" {
		p.killOnce.Do(func() { close(p.killed) })
		return nil
	}
	got, err := p.inspectExec()
	if errdefs.IsNotFound(err) || err == nil && hasEnded(got) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), p.b.p.within)
	defer cancel()
	out, err := p.b.runRunner(ctx, nil, "kill", "--id", p.kill) // a command that has not begun will not begin after this
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("kill a command: %w", err)
	}
	if out.Code != 0 {
		return fmt.Errorf("kill a command in sandbox %s: exit code %d: %s", p.b.id, out.Code, out.Stderr)
	}
	p.killOnce.Do(func() { close(p.killed) })
	return nil
}

// stdinWriter writes to the standard input of a command in a container.
type stdinWriter struct {
	conn types.HijackedResponse
	once sync.Once
	err  error
}

func (i *stdinWriter) Write(b []byte) (int, error) {
	n, err := i.conn.Conn.Write(b)
	if err != nil {
		err = fmt.Errorf("%w: %w", guest.ErrStdin, err)
	}
	return n, err
}

// Close closes the command's stdin. It may be called more than once.
func (i *stdinWriter) Close() error {
	i.once.Do(func() { i.err = i.conn.CloseWrite() })
	return i.err
}
