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

// StartFunc is a function that starts the runner program with the arguments args in a sandbox. ctx limits only the start.
type StartFunc func(ctx context.Context, args ...string) (Process, error)

// ErrStdin is returned by a write to the stdin of a command that has stopped reading its stdin.
var ErrStdin = errors.New("the command does not read its stdin")

// RunResult has the output and the exit code of the runner program in a sandbox.
type RunResult struct {
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

// FileError returns the error that the exit code of the runner's file command stands for, or nil for exit code 0. name is
// the path that the command worked on.
func (a RunResult) FileError(name string) error {
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
	if IsDiskFull(err) {
		return &sandbox.Error{Code: sandbox.CodeDiskFull, Message: fmt.Sprintf("path %q: the disk of the engine is full: remove images or volumes that nobody needs", name), Err: err}
	}
	return err
}

// IsDiskFull reports whether an error means that a disk is full. It recognises the error of a program in a sandbox by its
// text.
func IsDiskFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || strings.Contains(err.Error(), "no space left on device")
}

// Run runs the runner program in a sandbox and blocks until the program has ended. feed writes the program's stdin, which
// is closed when feed returns; feed may be nil. If feed returns an error other than ErrStdin, or ctx ends, Run closes the
// program's streams and returns that error.
func (s StartFunc) Run(ctx context.Context, feed func(io.Writer) error, args ...string) (RunResult, error) {
	proc, err := s(ctx, args...)
	if err != nil {
		return RunResult{}, err
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
		return RunResult{}, ctx.Err()
	case feedErr != nil && !refused:
		return RunResult{}, feedErr
	}
	code, werr := proc.Wait()
	if werr != nil || err != nil && !refused {
		return RunResult{}, errors.Join(werr, err)
	}
	if refused && code == 0 {
		return RunResult{}, feedErr
	}
	return RunResult{string(out), string(errs), code}, nil
}

// FolderPath returns the absolute path in a sandbox of the folder dir of the workspace at root; a dir of "" is root
// itself.
func (s StartFunc) FolderPath(ctx context.Context, root, dir string) (string, error) {
	if dir == "" {
		return root, nil
	}
	rel, err := cleanRelativePath(dir)
	if err != nil {
		return "", err
	}
	// The command follows symbolic links, which is possible only inside the sandbox.
	out, err := s.Run(ctx, nil, "list", "--", rel)
	if err == nil {
		err = out.FileError(dir)
	}
	return path.Join(root, rel), err
}
