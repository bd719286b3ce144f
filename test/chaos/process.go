package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// restartPause is the time from the end of a process to its restart, unless a fault sets another time.
const restartPause = 300 * time.Millisecond

// restartedProcess runs a program of the installation, and starts it again whenever it ends, like `restart:
// unless-stopped` in compose.
type restartedProcess struct {
	name  string
	start func() *exec.Cmd

	mu      sync.Mutex
	cmd     *exec.Cmd
	down    time.Duration // time that the process stays down after its next end; negative for restartPause
	killed  bool          // a fault ended the process, or the run is over
	over    bool
	began   time.Time
	from    int64           // offset in the log file at which the present process began
	ends    []unexpectedEnd // ends that no fault caused
	stopped []int
	done    chan struct{}
}

// startRestarted starts a program and keeps it running until the method stop of the result is called. start returns the
// command; the program's output is appended to the log file NAME.log in dir.
func startRestarted(dir, name string, start func() *exec.Cmd) (*restartedProcess, error) {
	p := &restartedProcess{name: name, start: start, down: -1, done: make(chan struct{})}
	log, err := os.OpenFile(filepath.Join(dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	if err := p.startProgram(log); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	go p.restartUntilStopped(log)
	return p, nil
}

// startProgram starts the program, unless stop was called. log receives its output.
func (p *restartedProcess) startProgram(log *os.File) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return nil
	}
	info, err := log.Stat()
	if err != nil {
		return err
	}
	cmd := p.start()
	cmd.Stdout, cmd.Stderr = log, log
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true // an interrupt from the terminal reaches only this program
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	p.cmd, p.killed, p.down, p.began, p.from = cmd, false, -1, time.Now(), info.Size()
	return nil
}

// restartUntilStopped starts the program again whenever it has ended, until stop is called. It stores the ends that no fault
// caused.
func (p *restartedProcess) restartUntilStopped(log *os.File) {
	defer close(p.done)
	defer log.Close() //nolint:errcheck // this program did not write to the file
	for {
		err := p.cmd.Wait()
		p.mu.Lock()
		wait, over := p.down, p.over
		if !p.killed && !over {
			now := time.Now()
			p.ends = append(p.ends, unexpectedEnd{p.name, now, now.Sub(p.began), p.cmd.ProcessState.String(), lastLines(log.Name(), p.from)})
			fmt.Fprintf(log, "chaos: %s ended by itself: %v\n", p.name, err)
		}
		p.mu.Unlock()
		if over {
			return
		}
		if wait < 0 {
			wait = restartPause
		}
		time.Sleep(wait)
		if err := p.startProgram(log); err != nil {
			fmt.Fprintf(log, "chaos: %v\n", err)
			return
		}
		if p.hasEnded() {
			return
		}
	}
}

// hasEnded reports whether stop was called and the program has ended.
func (p *restartedProcess) hasEnded() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.over && p.cmd.ProcessState != nil
}

// kill sends SIGKILL to the program. It is started again after the time down.
func (p *restartedProcess) kill(down time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killed, p.down = true, down
	return ignoreEndedProcess(p.cmd.Process.Kill())
}

// freeze pauses the program and its child processes with SIGSTOP, until thaw is called. Of all programs, Postgres has
// child processes.
func (p *restartedProcess) freeze() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	list, err := listProcesses()
	if err != nil {
		return err
	}
	now := []int{p.cmd.Process.Pid}
	for _, t := range list {
		if t.parent == now[0] {
			now = append(now, t.pid)
		}
	}
	p.stopped = append(p.stopped, now...) // processes of an earlier freeze that is not over may have lost their parent since
	var errs []error
	for _, pid := range now {
		errs = append(errs, ignoreEndedProcess(syscall.Kill(pid, syscall.SIGSTOP)))
	}
	return errors.Join(errs...)
}

// thaw continues the processes that freeze paused, with SIGCONT.
func (p *restartedProcess) thaw() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, pid := range p.stopped {
		errs = append(errs, ignoreEndedProcess(syscall.Kill(pid, syscall.SIGCONT)))
	}
	p.stopped = nil
	return errors.Join(errs...)
}

// stop sends the signal sig to the program, does not start it again, and returns when it has ended. If ctx ends first,
// stop kills the program and returns an error.
func (p *restartedProcess) stop(ctx context.Context, sig syscall.Signal) error {
	p.mu.Lock()
	p.over = true
	err := ignoreEndedProcess(p.cmd.Process.Signal(sig))
	p.mu.Unlock()
	select {
	case <-p.done:
		return err
	case <-ctx.Done():
	}
	p.mu.Lock()
	err = errors.Join(err, fmt.Errorf("%s did not end within its time after %s", p.name, sig), ignoreEndedProcess(p.cmd.Process.Kill()))
	p.mu.Unlock()
	<-p.done
	return err
}

// pid returns the id of the process that was started last.
func (p *restartedProcess) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

// ignoreEndedProcess returns nil if err is the error of a signal to a process that has ended, and err otherwise.
func ignoreEndedProcess(err error) error {
	if errors.Is(err, os.ErrProcessDone) || errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}
