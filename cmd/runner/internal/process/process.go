// Package process starts agents' processes and ends them with all that they
// started: by process group, and by descent where something left the group.
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

// drainAfterExit is how long output may still come once the process is gone,
// when a descendant keeps its pipes open.
const drainAfterExit = 300 * time.Millisecond

// Stream is where a line was printed.
type Stream string

// The streams.
const (
	Stdout Stream = "stdout"
	Stderr Stream = "stderr"
)

// Line is a line that a process printed, without its newline. One longer than
// the limit is cut to it: Size tells its real length in bytes.
type Line struct {
	Stream Stream
	Data   []byte
	Size   int64
}

// Cut tells whether the line was longer than Data.
func (l Line) Cut() bool { return l.Size > int64(len(l.Data)) }

// Process is a running agent. It leads a session and process group of its own.
type Process struct {
	nursery *Nursery
	cmd     *exec.Cmd
	stdin   *queue
	lines   chan Line
	tail    tail
	exited  chan struct{} // closed when the process itself is gone
	gone    atomic.Bool   // the same, for the readers
	done    chan struct{} // closed when Lines is, and nothing of the process is left to do
	halt    chan struct{} // closed by End: what is still unread is dropped
	ending  sync.Once
	endErr  error
}

// Start starts the command in dir. Its lines have to be read: nothing is read
// from the process while nobody takes them.
func (n *Nursery) Start(c agent.Command, dir string, maxLine int) (*Process, error) {
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
	startErr := n.start(cmd)
	closeErr := errors.Join(in.Close(), outEnd.Close(), errEnd.Close())
	if startErr != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", c.Path, startErr), closeErr, inEnd.Close(), out.Close(), errs.Close())
	}
	p := &Process{
		nursery: n, cmd: cmd, stdin: newQueue(inEnd), lines: make(chan Line),
		exited: make(chan struct{}), done: make(chan struct{}), halt: make(chan struct{}),
	}
	go p.watch(out, errs, maxLine)
	return p, nil
}

// watch owns the process's goroutines: it ends when the last of them has.
func (p *Process) watch(out, errs *os.File, maxLine int) {
	var readers sync.WaitGroup
	for _, r := range []*reader{{file: out, stream: Stdout, p: p}, {file: errs, stream: Stderr, p: p}} {
		readers.Go(func() { r.run(maxLine) })
	}
	writer := make(chan struct{})
	go func() { defer close(writer); p.stdin.run() }()
	p.nursery.wait(p.cmd)
	p.gone.Store(true)
	close(p.exited)
	p.stdin.close()
	// A reader that waits for a pipe which a descendant keeps open is called back.
	soon := time.Now().Add(drainAfterExit)
	for _, f := range []*os.File{out, errs} {
		if err := f.SetReadDeadline(soon); err != nil {
			p.nursery.log.Error("set deadline on an agent's pipe", "err", err)
		}
	}
	readers.Wait()
	if err := errors.Join(out.Close(), errs.Close()); err != nil {
		p.nursery.log.Error("close an agent's pipes", "err", err)
	}
	<-writer
	close(p.lines)
	close(p.done)
}

// Send queues v as one line of JSON for the process's stdin.
func (p *Process) Send(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode for the agent's stdin: %w", err)
	}
	p.stdin.add(append(raw, '\n'))
	return nil
}

// Lines gives what the process prints; it is closed after the last line of a process that is gone.
func (p *Process) Lines() <-chan Line { return p.lines }

// PID of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Exited is closed when the process is gone, though its last lines may be still to be read.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// State says how the process ended, such as "exit status 3"; "" while it runs.
func (p *Process) State() string {
	if !p.gone.Load() || p.cmd.ProcessState == nil {
		return ""
	}
	return p.cmd.ProcessState.String()
}

// KilledBySystem tells whether the process ended by SIGKILL that End did not send.
func (p *Process) KilledBySystem() bool {
	select {
	case <-p.halt:
		return false
	default:
	}
	if !p.gone.Load() || p.cmd.ProcessState == nil {
		return false
	}
	ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL
}

// StderrTail is the end of what the process wrote to standard error.
func (p *Process) StderrTail() string { return p.tail.String() }

// End ends the process with all its descendants: its stdin is closed and its
// group asked to stop (SIGTERM), and what is left after grace is killed. With no
// grace it is killed at once. It returns when nothing runs any more, or with an
// error that names what does. Lines that are not taken yet are dropped.
func (p *Process) End(grace time.Duration) error {
	p.ending.Do(func() {
		close(p.halt)
		p.stdin.close()
		if grace > 0 {
			p.signal(syscall.SIGTERM)
			timer := time.NewTimer(grace)
			select {
			case <-p.exited:
			case <-timer.C:
			}
			timer.Stop()
		}
		p.endErr = p.nursery.killTree(p.PID())
		<-p.done
	})
	return p.endErr
}

// CloseStdin lets the process end by itself; it reports whether it did within the time.
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

// signal tells the whole group; one that is gone is no error.
func (p *Process) signal(s syscall.Signal) {
	if err := syscall.Kill(-p.PID(), s); err != nil && !errors.Is(err, syscall.ESRCH) {
		p.nursery.log.Warn("signal an agent's process group", "pid", p.PID(), "signal", s, "err", err)
	}
}
