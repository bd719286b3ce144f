// Package guest uses a remote sandbox through the commands of the runner inside it: its files, and
// commands that run to their end. Providers whose sandboxes have no file system of this machine share it.
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

// Process is a command in a sandbox.
type Process interface {
	sandbox.Process
	// Abandon closes the streams at once and blocks until they have ended. The command may go on.
	Abandon()
}

// Start starts a command of the runner in the root folder. ctx bounds only the start.
type Start func(ctx context.Context, args ...string) (Process, error)

// ErrStdin is a write to a command that does not read its stdin any more.
var ErrStdin = errors.New("the command does not read its stdin")

// Answer is what a command of the runner printed, and its exit code.
type Answer struct {
	Stdout, Stderr string
	Code           int
}

// The exit codes of the runner's file commands.
const (
	exitNotFound   = 3
	exitOutside    = 4
	exitPermission = 5
	exitIrregular  = 6 // not a regular file, or no path at all
)

// Outcome gives a file command's exit code its meaning.
func (a Answer) Outcome(name string) error {
	switch a.Code {
	case 0:
		return nil
	case exitNotFound:
		return fmt.Errorf("path %q: %w", name, sandbox.ErrNotFound)
	case exitOutside:
		return fmt.Errorf("path %q: %w", name, sandbox.ErrOutside)
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

// IsFull reports whether an error is of a full disk, for which remote parties have words alone.
func IsFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || strings.Contains(err.Error(), "no space left on device")
}

// Run runs a command of the runner to its end. feed writes its stdin, which
// is closed after it; an error of feed breaks the command off.
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
	refused := errors.Is(feedErr, ErrStdin) // it did not want more: its exit code says why
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
	// Only inside can links be followed.
	out, err := s.Run(ctx, nil, "list", "--", rel)
	if err == nil {
		err = out.Outcome(dir)
	}
	return path.Join(root, rel), err
}
