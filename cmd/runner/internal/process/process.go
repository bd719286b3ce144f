// Package process starts the processes of agents and ends them with all of their descendants, also with those that left
// the process group.
package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// drainTimeAfterExit is the time for which output is still read after the process has ended, if a descendant keeps its
// pipes open.
const drainTimeAfterExit = 300 * time.Millisecond

// Stream names the stream on which a line was printed.
type Stream string

// The streams.
const (
	Stdout Stream = "stdout"
	Stderr Stream = "stderr"
)

// Line is a line that a process printed, without its newline. Data is at most as long as the limit for lines; Size is
// the real length in bytes.
type Line struct {
	Stream Stream
	Data   []byte
	Size   int64
}

// IsCut reports whether the line was longer than Data.
func (l Line) IsCut() bool { return l.Size > int64(len(l.Data)) }

// endTimeWithoutPipe is the time that a process has to end after it has closed its stdin or stdout.
const endTimeWithoutPipe = 5 * time.Second

// Process is a running process of an agent. It leads a session and a process group of its own.
type Process struct {
	group  *Group
	cmd    *exec.Cmd
	stdin  *lineQueue
	lines  chan Line
	tail   outputTail
	exited chan struct{} // closed when the process has ended
	gone   atomic.Bool   // the same, for the readers
	done   chan struct{} // closed after Lines, when the last goroutine has ended
	halt   chan struct{} // closed by End: unread lines are dropped
	ending sync.Once

	unpiped atomic.Pointer[string] // the pipe that the process closed, if it was killed because of that
	endErr  error
}

// Start starts the command in the folder dir. The caller must receive from Lines: while it does not, the process's
// output is not read and the process blocks.
func (g *Group) Start(c agent.Command, dir string, maxLine int) (*Process, error) {
	cmd := exec.Command(c.Path, c.Args...) //nolint:gosec // running the agent is the purpose
	cmd.Dir, cmd.Env = dir, c.Env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, inEnd, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pipe: %w", err)
	}
	out, outEnd, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pipe: %w", err), in.Close(), inEnd.Close())
	}
	errs, errEnd, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pipe: %w", err), in.Close(), inEnd.Close(), out.Close(), outEnd.Close())
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, outEnd, errEnd
	startErr := g.startProcess(cmd)
	closeErr := errors.Join(in.Close(), outEnd.Close(), errEnd.Close())
	if startErr != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", c.Path, startErr), closeErr, inEnd.Close(), out.Close(), errs.Close())
	}
	p := &Process{
		group: g, cmd: cmd, stdin: newLineQueue(inEnd), lines: make(chan Line),
		exited: make(chan struct{}), done: make(chan struct{}), halt: make(chan struct{}),
	}
	go p.runUntilEnd(out, errs, maxLine)
	return p, nil
}

// runUntilEnd runs the goroutines that read and write the pipes of the process, and returns when the last of them has
// ended.
func (p *Process) runUntilEnd(out, errs *os.File, maxLine int) {
	var readers sync.WaitGroup
	for _, r := range []*pipeReader{{file: out, stream: Stdout, p: p}, {file: errs, stream: Stderr, p: p}} {
		readers.Go(func() {
			r.sendLines(maxLine)
			if r.stream == Stdout {
				p.endWithoutPipe("stdout")
			}
		})
	}
	writer := make(chan struct{})
	go func() {
		defer close(writer)
		if !p.stdin.writeLines() {
			p.endWithoutPipe("stdin")
		}
	}()
	p.group.waitForProcess(p.cmd)
	p.gone.Store(true)
	close(p.exited)
	p.stdin.close()
	// A descendant may keep a pipe open; the deadline ends the reader, or the writer, then.
	soon := time.Now().Add(drainTimeAfterExit)
	if err := p.stdin.file.SetWriteDeadline(soon); err != nil && !errors.Is(err, os.ErrClosed) {
		p.group.log.Error("set deadline on an agent's stdin", "err", err)
	}
	for _, f := range []*os.File{out, errs} {
		if err := f.SetReadDeadline(soon); err != nil && !errors.Is(err, os.ErrClosed) {
			p.group.log.Error("set deadline on an agent's pipe", "err", err)
		}
	}
	readers.Wait()
	if err := errors.Join(out.Close(), errs.Close()); err != nil {
		p.group.log.Error("close an agent's pipes", "err", err)
	}
	<-writer
	close(p.lines)
	close(p.done)
}

// endWithoutPipe kills a process that has closed its stdin or stdout and does not end within endTimeWithoutPipe: nothing that it is told, or does,
// arrives any more.
func (p *Process) endWithoutPipe(name string) {
	timer := time.NewTimer(endTimeWithoutPipe)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-p.halt:
	case <-timer.C:
		p.unpiped.Store(&name)
		p.signalGroup(syscall.SIGKILL)
	}
}

// Send queues v as one line of JSON for the process's stdin.
func (p *Process) Send(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode for the agent's stdin: %w", err)
	}
	p.stdin.addLine(append(raw, '\n'))
	return nil
}

// Lines returns the channel of the lines that the process prints. The channel is closed after the last line.
func (p *Process) Lines() <-chan Line { return p.lines }

// PID returns the id of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Exited returns a channel that is closed when the process has ended. The last lines of the process may still be
// unread.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// ExitState returns how the process ended, such as "exit status 3", or "" while it runs.
func (p *Process) ExitState() string {
	if !p.gone.Load() || p.cmd.ProcessState == nil {
		return ""
	}
	if name := p.unpiped.Load(); name != nil {
		return "killed, because it had closed its " + *name
	}
	return p.cmd.ProcessState.String()
}

// KilledBySystem reports whether the process was ended by a SIGKILL that this package did not send.
func (p *Process) KilledBySystem() bool {
	select {
	case <-p.halt:
		return false
	default:
	}
	if !p.gone.Load() || p.unpiped.Load() != nil || p.cmd.ProcessState == nil {
		return false
	}
	ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL
}

// StderrTail returns the last bytes that the process wrote to standard error.
func (p *Process) StderrTail() string { return p.tail.String() }

// End ends the process with all of its descendants. It closes stdin, sends SIGTERM to the process group, and kills the
// processes that still run after grace; with a grace of 0 it kills at once. It returns when no process is left, or an
// error that lists those that remain. Unread lines are dropped.
func (p *Process) End(grace time.Duration) error {
	p.ending.Do(func() {
		close(p.halt)
		defer p.stdin.close() // without grace the process must not see the end of its stdin, which an agent may take for an answer
		if grace > 0 {
			p.stdin.close()
			p.signalGroup(syscall.SIGTERM)
			timer := time.NewTimer(grace)
			select {
			case <-p.exited:
			case <-timer.C:
			}
			timer.Stop()
		}
		p.endErr = p.group.killTree(p.PID())
		<-p.done
	})
	return p.endErr
}

// CloseStdin closes stdin, at which an agent ends by itself, and reports whether the process ended within the time.
func (p *Process) CloseStdin(within time.Duration) bool {
	p.stdin.close()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-p.exited:
		return true
	case <-timer.C:
		return false
	}
}

// signalGroup sends the signal s to the process group. It is not an error if the group has ended.
func (p *Process) signalGroup(s syscall.Signal) {
	if err := syscall.Kill(-p.PID(), s); err != nil && !errors.Is(err, syscall.ESRCH) {
		p.group.log.Warn("signal an agent's process group", "pid", p.PID(), "signal", s, "err", err)
	}
}
