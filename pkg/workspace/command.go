package workspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

const (
	// stderrTimeout is the maximum time for which finish waits for the end of stderr, which states the reason, after the
	// stream of a runner command was cut off.
	stderrTimeout = 2 * time.Second
	// maxKeptStderr is the maximum number of bytes that are kept of a runner command's error output.
	maxKeptStderr = 4 << 10
)

// runnerCommand is a command of the runner's program that runs in a sandbox, for example "runner snapshot". It is
// killed when ctx ends.
type runnerCommand struct {
	ctx        context.Context
	name       string
	p          sandbox.Process
	stderr     tailWriter
	stderrDone chan struct{} // closed at the end of stderr
	stop       func() bool
}

// startCommand starts a command of the runner's program in a sandbox. The first two of args name the command in errors.
// The caller must call finish.
func startCommand(ctx context.Context, box sandbox.Sandbox, args ...string) (*runnerCommand, error) {
	c := &runnerCommand{ctx: ctx, name: strings.Join(args[:2], " "), stderrDone: make(chan struct{})}
	var err error
	if c.p, err = box.Exec(ctx, sandbox.Command{Args: args}); err != nil {
		return nil, fmt.Errorf("%s: %w", c.name, err)
	}
	go func() {
		defer close(c.stderrDone)
		_, _ = io.Copy(&c.stderr, c.p.Stderr()) // an error means the same as the end of stderr
	}()
	c.stop = context.AfterFunc(ctx, func() { _ = c.p.Kill() }) // Wait returns the error
	return c, nil
}

// finish blocks until the command has ended. err is the error of the caller's communication with the command; if it is
// not nil, finish kills the command. finish returns nil if err is nil and the exit code is 0, and otherwise one error
// that states why the command failed: the end of the context, the last line of stderr, or err.
func (c *runnerCommand) finish(err error) error {
	_ = c.p.Stdin().Close() // it may be closed already
	switch {
	case errors.Is(err, ErrStreamCut): // the command has ended, or hangs
		patience := time.NewTimer(stderrTimeout)
		select {
		case <-c.stderrDone:
		case <-patience.C:
		}
		patience.Stop()
		_ = c.p.Kill() // Wait returns the error
	case err != nil:
		_ = c.p.Kill() // Wait returns the error
	default:
		_, _ = io.Copy(io.Discard, c.p.Stdout()) // no output is expected, but a full pipe would block the command
	}
	code, waited := c.p.Wait()
	<-c.stderrDone
	c.stop()
	reason := c.stderr.lastLine()
	switch {
	case c.ctx.Err() != nil:
		return fmt.Errorf("%s: %w", c.name, context.Cause(c.ctx))
	case code == wire.ExitDiskFull:
		return &sandbox.Error{Code: sandbox.CodeDiskFull, Message: c.name + ": " + reason, Err: err}
	case code == wire.ExitTarRefused:
		return &RefusedError{Message: reason}
	case err != nil && reason != "" && code > 0:
		return fmt.Errorf("%s: %s (%w)", c.name, reason, err)
	case err != nil:
		return fmt.Errorf("%s: %w", c.name, err)
	case waited != nil:
		return fmt.Errorf("%s: %w", c.name, waited)
	case code != 0:
		return fmt.Errorf("%s: exit code %d: %s", c.name, code, reason)
	}
	return nil
}

// tailWriter is a writer that keeps the last maxKeptStderr bytes.
type tailWriter struct {
	mu  sync.Mutex
	buf []byte
}

func (t *tailWriter) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p[max(0, len(p)-maxKeptStderr):]...)
	t.buf = t.buf[max(0, len(t.buf)-maxKeptStderr):]
	return len(p), nil
}

// lastLine returns the last line that was written, without the prefix of the runner's messages.
func (t *tailWriter) lastLine() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	line := bytes.TrimSpace(t.buf)
	line = line[bytes.LastIndexByte(line, '\n')+1:]
	return strings.ToValidUTF8(strings.TrimPrefix(string(line), "runner: "), "\uFFFD")
}

// UnpackTar extracts the files, folders and links of a tar into a folder of a sandbox's workspace, "" for the workspace
// itself. It replaces existing files. A *RefusedError means that the tar is invalid; entries before the refused one
// stay.
func UnpackTar(ctx context.Context, box sandbox.Sandbox, dir string, tar io.Reader) error {
	if dir == "" {
		dir = "."
	}
	return runWithInput(ctx, box, "the archive", tar, "runner", "unpack", "--", dir)
}

// ProvideTranscript copies a transcript into a sandbox, where a query with fork.provided continues it. sha256 is the
// transcript's SHA-256 in hex, which the runner verifies.
func ProvideTranscript(ctx context.Context, box sandbox.Sandbox, sha256 string, content io.Reader) error {
	return runWithInput(ctx, box, "the transcript", content, "runner", "provide-transcript", "--sha256", sha256)
}

// runWithInput runs a command of the runner's program in a sandbox with content as its standard input, and blocks until
// it has ended. what names the content in errors.
func runWithInput(ctx context.Context, box sandbox.Sandbox, what string, content io.Reader, args ...string) error {
	c, err := startCommand(ctx, box, args...)
	if err != nil {
		return err
	}
	from := &errorRecorder{r: content}
	_, err = io.Copy(c.p.Stdin(), from)
	if from.err != nil { // the runner must not mistake the error for the end of the content
		_ = c.p.Kill() // Wait returns the error
		return c.finish(fmt.Errorf("read %s: %w", what, from.err))
	}
	if err == nil {
		err = c.p.Stdin().Close()
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrStreamCut, err)
	}
	return c.finish(err)
}

// errorRecorder is a reader that reads from r and records the error of r, except io.EOF.
type errorRecorder struct {
	r   io.Reader
	err error
}

func (s *errorRecorder) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}
