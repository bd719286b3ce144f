package pgserver

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// postmaster is the main process of a running Postgres. Its goroutine keeps the thread that forked the process until
// the process ends: the kernel sends the death signal when that thread ends, not when the parent process does, and Go
// ends idle threads.
type postmaster struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // valid after done is closed
}

func startProcess(cmd *exec.Cmd) (*postmaster, error) {
	p := &postmaster{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

func (p *postmaster) pid() int { return p.cmd.Process.Pid }

// stop requests a fast shutdown of Postgres and, after the time wait, an immediate shutdown.
func (p *postmaster) stop(wait time.Duration) error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	if err := p.signal(syscall.SIGINT); err != nil {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-timer.C:
	}
	if err := p.signal(syscall.SIGQUIT); err != nil {
		return err
	}
	timer.Reset(wait)
	select {
	case <-p.done:
		return fmt.Errorf("postgres: did not stop within %s and was shut down immediately; it recovers at the next start", wait)
	case <-timer.C:
	}
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return fmt.Errorf("postgres: did not stop within %s and was killed; it recovers at the next start", 2*wait)
}

func (p *postmaster) signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("postgres: signal process %d: %w", p.pid(), err)
	}
	return nil
}

// outputWriter writes the output of Postgres to the logger, line by line, and keeps the last lines for error messages.
type outputWriter struct {
	logger *slog.Logger

	mu      sync.Mutex
	partial string
	lines   []string
}

func (w *outputWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	lines := strings.Split(w.partial+string(b), "\n")
	w.partial = lines[len(lines)-1]
	for _, line := range lines[:len(lines)-1] {
		w.handleLine(line)
	}
	return len(b), nil
}

// startingMessage is the message that Postgres sends to clients while it recovers after a crash.
const startingMessage = "the database system is starting up"

func (w *outputWriter) handleLine(line string) {
	if strings.Contains(line, startingMessage) {
		w.logger.Debug(line)
		return
	}
	for _, severe := range []string{"PANIC:", "FATAL:", "ERROR:", "HINT:", "DETAIL:", "postgres: "} {
		if i := strings.Index(line, severe); i >= 0 {
			w.logger.Warn(line)
			if w.lines = append(w.lines, strings.TrimSpace(line[i:])); len(w.lines) > 3 {
				w.lines = w.lines[1:]
			}
			return
		}
	}
	w.logger.Debug(line)
}

func (w *outputWriter) lastOutput() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.lines) == 0 {
		return "no reason given"
	}
	return strings.Join(w.lines, "; ")
}
