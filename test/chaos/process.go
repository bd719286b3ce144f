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

// restartPause is the time that an ended process stays down, unless a fault sets another time.
const restartPause = 300 * time.Millisecond

// process runs a program of the cluster, and starts it again whenever it ends, like `restart: unless-stopped` in
// compose.
type process struct {
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

// run starts a process of the cluster and keeps it running until its end method is called.
func run(dir, name string, start func() *exec.Cmd) (*process, error) {
	p := &process{name: name, start: start, down: -1, done: make(chan struct{})}
	log, err := os.OpenFile(filepath.Join(dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	if err := p.begin(log); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	go p.supervise(log)
	return p, nil
}

// begin starts the program, unless the run is over.
func (p *process) begin(log *os.File) error {
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

// supervise starts the program again whenever it has ended, until end is called. It records ends that no fault caused.
func (p *process) supervise(log *os.File) {
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
		if err := p.begin(log); err != nil {
			fmt.Fprintf(log, "chaos: %v\n", err)
			return
		}
		if p.ended() {
			return
		}
	}
}

// ended reports whether the process has ended for good.
func (p *process) ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.over && p.cmd.ProcessState != nil
}

// kill ends the process at once. It is started again after the given time.
func (p *process) kill(down time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killed, p.down = true, down
	return ignoreGone(p.cmd.Process.Kill())
}

// freeze stops the process and its children, as Postgres has.
func (p *process) freeze() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	list, err := listTasks()
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
		errs = append(errs, ignoreGone(syscall.Kill(pid, syscall.SIGSTOP)))
	}
	return errors.Join(errs...)
}

// thaw resumes the processes that freeze stopped.
func (p *process) thaw() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, pid := range p.stopped {
		errs = append(errs, ignoreGone(syscall.Kill(pid, syscall.SIGCONT)))
	}
	p.stopped = nil
	return errors.Join(errs...)
}

// end stops the process for good and returns when it has ended.
func (p *process) end(ctx context.Context, sig syscall.Signal) error {
	p.mu.Lock()
	p.over = true
	err := ignoreGone(p.cmd.Process.Signal(sig))
	p.mu.Unlock()
	select {
	case <-p.done:
		return err
	case <-ctx.Done():
	}
	p.mu.Lock()
	err = errors.Join(err, fmt.Errorf("%s did not end within its time after %s", p.name, sig), ignoreGone(p.cmd.Process.Kill()))
	p.mu.Unlock()
	<-p.done
	return err
}

// pid returns the process id of the present process.
func (p *process) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

// ignoreGone returns nil for the error of a signal to a process that has ended.
func ignoreGone(err error) error {
	if errors.Is(err, os.ErrProcessDone) || errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}
