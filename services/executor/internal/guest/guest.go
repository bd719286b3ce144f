// Package guest holds the code that providers of remote sandboxes share. It reads and writes the files of a sandbox,
// and runs commands to their end, through commands of the runner in the sandbox. It also defines the in-memory
// streams, the exit codes and the errors of such providers.
package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"syscall"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// Process is a running command in a sandbox, whose streams can be abandoned.
type Process interface {
	sandbox.Process
	// Abandon closes the streams at once and blocks until they have ended. The command may continue to run.
	Abandon()
}

// Start is a function that starts the runner program with the arguments args in a sandbox. ctx bounds only the start.
type Start func(ctx context.Context, args ...string) (Process, error)

// ErrStdin is returned by a write to the stdin of a command that no longer reads it.
var ErrStdin = errors.New("the command does not read its stdin")

// Answer holds the output and the exit code of the runner program.
type Answer struct {
	Stdout, Stderr string
	Code           int
}

// The exit codes of the runner's file commands.
const (
	exitNotFound   = 3
	exitOutside    = 4
	exitPermission = 5
	exitIrregular  = 6 // not a regular file, or an invalid path
)

// Outcome returns the error for the exit code of a file command on the path name; nil for 0.
func (a Answer) Outcome(name string) error {
	switch a.Code {
	case 0:
		return nil
	case exitNotFound:
		return fmt.Errorf("path %q: %w", name, sandbox.ErrNotFound)
	case exitOutside:
		return fmt.Errorf("path %q: %w", name, sandbox.ErrOutsideWorkspace)
	}
	said := strings.TrimPrefix(strings.TrimSpace(a.Stderr+a.Stdout), "runner: ")
	switch a.Code {
	case exitPermission:
		return fmt.Errorf("path %q: %w: %s", name, fs.ErrPermission, said)
	case exitIrregular:
		return fmt.Errorf("path %q: %w: %s", name, fs.ErrInvalid, said)
	}
	err := fmt.Errorf("path %q: exit code %d: %s", name, a.Code, said)
	if IsFull(err) {
		return &sandbox.Error{Code: sandbox.CodeDiskFull, Message: fmt.Sprintf("path %q: the disk of the engine is full: remove images or volumes that nobody needs", name), Err: err}
	}
	return err
}

// IsFull reports whether an error means that a disk is full. For an error of a remote program, only the text shows
// that.
func IsFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || strings.Contains(err.Error(), "no space left on device")
}

// Run runs the runner program in a sandbox and blocks until it has ended. feed writes to its stdin, which is closed
// when feed returns; feed may be nil. When feed returns an error other than ErrStdin, or ctx ends, Run closes the
// program's streams and returns that error.
func (s Start) Run(ctx context.Context, feed func(io.Writer) error, args ...string) (Answer, error) {
	proc, err := s(ctx, args...)
	if err != nil {
		return Answer{}, err
	}
	defer context.AfterFunc(ctx, proc.Abandon)()
	fed := make(chan error, 1)
	go func() {
		var err error
		if feed != nil {
			err = feed(proc.Stdin())
		}
		if err != nil && !errors.Is(err, ErrStdin) {
			proc.Abandon()
		}
		_ = proc.Stdin().Close() // fails when the command has ended already
		fed <- err
	}()
	var errs []byte
	said := make(chan struct{})
	go func() {
		defer close(said)
		errs, _ = io.ReadAll(proc.Stderr()) // breaks off together with stdout, whose error is returned
	}()
	out, err := io.ReadAll(proc.Stdout())
	<-said
	feedErr := <-fed
	refused := errors.Is(feedErr, ErrStdin) // the command ended before it read everything; the exit code has the reason
	switch {
	case ctx.Err() != nil:
		return Answer{}, ctx.Err()
	case feedErr != nil && !refused:
		return Answer{}, feedErr
	}
	code, werr := proc.Wait()
	if werr != nil || err != nil && !refused {
		return Answer{}, errors.Join(werr, err)
	}
	if refused && code == 0 {
		return Answer{}, feedErr
	}
	return Answer{string(out), string(errs), code}, nil
}

// Dir returns the absolute path of a folder of the workspace at root; "" is root itself.
func (s Start) Dir(ctx context.Context, root, dir string) (string, error) {
	if dir == "" {
		return root, nil
	}
	rel, err := relative(dir)
	if err != nil {
		return "", err
	}
	// The command follows symbolic links, which is possible only inside the sandbox.
	out, err := s.Run(ctx, nil, "list", "--", rel)
	if err == nil {
		err = out.Outcome(dir)
	}
	return path.Join(root, rel), err
}
