package modal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	sdk "github.com/modal-labs/modal-client/go"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

const (
	// outputBufferBytes is the maximum number of unread bytes of stdout and of stderr that are buffered. While a buffer is full, its stream
	// is not read.
	outputBufferBytes = 256 << 10
	// brokenStreamTimeout is the maximum time for which Wait waits for the exit code of a command after one of the command's streams has
	// failed.
	brokenStreamTimeout = 3 * time.Second
)

// process is a command that runs in a Modal sandbox.
type process struct {
	p    *Provider
	sb   *sdk.Sandbox
	what string
	cp   *sdk.ContainerProcess
	kill func(context.Context) error // ends the command and its descendants; nil for a command that ends with its stdin

	stdin          *stdinBuffer
	stdout, stderr *guest.Pipe
	ended          chan struct{} // closed when the streams have ended
	given          chan struct{} // closed by Kill of a command that ends with its stdin: Wait returns without its exit code
	giveUp         sync.Once
	broken         atomic.Bool // a stream ended with an error

	once sync.Once
	code int
	err  error
}

// startProgram starts a program in a sandbox and returns without waiting for its end. It returns sandbox.ErrNotFound if the sandbox has
// ended.
func (p *Provider) startProgram(ctx context.Context, h *sandboxHandle, what string, args []string, dir string, env map[string]string) (*process, error) {
	sb := h.sdkSandbox()
	cp, err := callModal(ctx, p, callTimeout, what, func(ctx context.Context) (*sdk.ContainerProcess, error) {
		return sb.Exec(ctx, args, &sdk.SandboxExecParams{Workdir: dir, Env: env})
	})
	if err != nil {
		return nil, p.startError(ctx, h, sb, what, err)
	}
	proc := &process{
		p: p, sb: sb, what: what, cp: cp, stdin: newStdinBuffer(cp.Stdin),
		stdout: guest.NewPipe(outputBufferBytes), stderr: guest.NewPipe(outputBufferBytes), ended: make(chan struct{}), given: make(chan struct{}),
	}
	var both sync.WaitGroup
	both.Go(func() { proc.copyStream(proc.stdout, cp.Stdout) })
	both.Go(func() { proc.copyStream(proc.stderr, cp.Stderr) })
	go func() {
		both.Wait()
		proc.stdin.stopSending(errors.New("the command has ended"))
		close(proc.ended)
	}()
	return proc, nil
}

// startError returns sandbox.ErrNotFound if a program could not be started because the sandbox has ended, and err otherwise.
func (p *Provider) startError(ctx context.Context, h *sandboxHandle, sb *sdk.Sandbox, what string, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if rerr := h.reconnect(ctx, p, sb); rerr != nil {
		return errors.Join(err, rerr)
	}
	ended, perr := p.hasEnded(ctx, sb)
	if perr == nil && ended {
		return fmt.Errorf("%s: %w: %w", what, sandbox.ErrNotFound, err)
	}
	return err
}

// copyStream copies an output stream of the command into a pipe. The SDK resumes a failed stream at the same offset, for about ten
// seconds. If the stream failed because the sandbox has ended, the pipe ends without an error.
func (p *process) copyStream(to *guest.Pipe, from io.ReadCloser) {
	_, err := io.Copy(to, from)
	if errors.Is(err, io.ErrClosedPipe) || errors.Is(err, context.Canceled) {
		err = nil // the reader has abandoned the stream
	}
	if err != nil {
		ctx := context.Background()
		if ended, perr := p.p.hasEnded(ctx, p.sb); perr == nil && ended {
			err = nil
		}
		err = p.p.translateError(ctx, "streams: "+p.what, err)
	}
	if err != nil {
		p.broken.Store(true)
	}
	to.End(err)
}

// Stdin returns the command's stdin. Writes return when they are buffered.
func (p *process) Stdin() io.WriteCloser { return p.stdin }

// Stdout returns the command's stdout.
func (p *process) Stdout() io.Reader { return p.stdout }

// Stderr returns the command's stderr.
func (p *process) Stderr() io.Reader { return p.stderr }

// Wait blocks until the command has ended, and returns its exit code; see guest.ExitCode. It returns -1 if the sandbox has ended, and
// after Kill for the runner program, for whose end Kill does not wait. Wait may be called more than once.
func (p *process) Wait() (int, error) {
	p.once.Do(func() {
		<-p.ended
		p.code, p.err = p.awaitExit()
	})
	return p.code, p.err
}

// awaitExit asks Modal for the command's exit code until the command has ended. Its results are those of Wait.
func (p *process) awaitExit() (int, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-p.given:
			cancel()
		case <-ctx.Done():
		}
	}()
	within := callTimeout
	if p.broken.Load() {
		within = brokenStreamTimeout
	}
	for {
		code, err := callModal(ctx, p.p, within, "wait: "+p.what, func(ctx context.Context) (int, error) { return p.cp.Wait(ctx, nil) })
		switch {
		case ctx.Err() != nil:
			return -1, nil
		case err == nil:
			return guest.ExitCode(code), nil
		}
		ended, perr := p.p.hasEnded(ctx, p.sb)
		switch {
		case perr == nil && ended, ctx.Err() != nil:
			return -1, nil
		case perr != nil || p.broken.Load() || !guest.IsUnavailable(err):
			return -1, err
		}
		// The command has closed its streams and is still running.
	}
}

// Abandon closes the streams at once and blocks until they have ended.
func (p *process) Abandon() {
	p.stdin.abandon()
	p.stdout.Abandon()
	p.stderr.Abandon()
	_ = p.cp.Stdout.Close() // cancels a context and returns nil
	_ = p.cp.Stderr.Close()
	<-p.ended
}

// Kill ends the command and its descendants, and closes the command's streams. It does not kill the runner program, which ends when its
// stdin is closed.
func (p *process) Kill() error {
	p.Abandon()
	if p.kill == nil {
		p.giveUp.Do(func() { close(p.given) })
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	err := p.kill(ctx)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("kill a command: %s: %w", p.what, err)
	}
	return nil
}
