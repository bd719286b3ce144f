package local

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
)

// process is a command in a local sandbox. Its Wait does not close stdout and stderr, so that output can be read after
// the command has ended.
type process struct {
	cmd            *exec.Cmd
	stdin          *os.File
	stdout, stderr *os.File

	once sync.Once
	code int
	err  error
}

// startProcess starts a command with the function start.
func startProcess(cmd *exec.Cmd, start func(*exec.Cmd) error) (*process, error) {
	var inside, ours []*os.File
	closeAll := func(list []*os.File) {
		for _, f := range list {
			_ = f.Close() // a pipe's end
		}
	}
	for range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(append(inside, ours...))
			return nil, fmt.Errorf("exec: %w", err)
		}
		if len(inside) == 0 {
			inside, ours = append(inside, r), append(ours, w)
		} else {
			inside, ours = append(inside, w), append(ours, r)
		}
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inside[0], inside[1], inside[2]
	err := start(cmd)
	closeAll(inside)
	if err != nil {
		closeAll(ours)
		return nil, fmt.Errorf("exec: %w", err)
	}
	return &process{cmd: cmd, stdin: ours[0], stdout: ours[1], stderr: ours[2]}, nil
}

// Stdin returns the command's stdin, which the caller closes.
func (p *process) Stdin() io.WriteCloser { return p.stdin }

// Stdout returns the command's stdout.
func (p *process) Stdout() io.Reader { return p.stdout }

// Stderr returns the command's stderr.
func (p *process) Stderr() io.Reader { return p.stderr }

// Wait blocks until the command has ended, and returns its exit code, -1 for a signal. It may be called more than once.
func (p *process) Wait() (int, error) {
	p.once.Do(func() {
		err := p.cmd.Wait()
		_ = p.stdin.Close() // no process reads it any more
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			p.code, p.err = -1, err
			return
		}
		p.code = p.cmd.ProcessState.ExitCode()
	})
	return p.code, p.err
}

// Kill kills the command's process group and closes the command's streams.
func (p *process) Kill() error {
	err := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
		_ = f.Close() // a second close changes nothing
	}
	if err != nil && !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("kill process group %d: %w", p.cmd.Process.Pid, err)
	}
	return nil
}
