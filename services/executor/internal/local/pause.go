package local

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Pause stops every process of a sandbox by a signal, and its runner first, so that the runner starts no
// further process. It searches for processes until it finds no more.
func (p *Provider) Pause(ctx context.Context, id string) error {
	return p.signalAll(ctx, id, syscall.SIGSTOP)
}

// Resume lets the processes of a paused sandbox continue, the runner last.
func (p *Provider) Resume(ctx context.Context, id string) error {
	return p.signalAll(ctx, id, syscall.SIGCONT)
}

// signalAll sends a signal to every process of a sandbox.
func (p *Provider) signalAll(ctx context.Context, id string, s syscall.Signal) error {
	if err := events.CheckID("sandbox id", events.KindSandbox, id); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	rec, err := p.readRecord(id)
	if err != nil {
		return err
	}
	box := p.newBox(rec)
	r, alive := box.findRunner()
	if !alive {
		return fmt.Errorf("sandbox %s: its runner is gone: %w", id, sandbox.ErrNotFound)
	}
	family := map[int]string{r.PID: r.Start}
	if s == syscall.SIGSTOP {
		if err := sendSignal(r.PID, s); err != nil {
			return err
		}
	}
	for known := -1; known != len(family); { // until no more are found
		known = len(family)
		for _, pid := range box.findProcesses(family) {
			if pid == r.PID {
				continue
			}
			if err := sendSignal(pid, s); err != nil {
				return err
			}
		}
	}
	if s == syscall.SIGCONT {
		return sendSignal(r.PID, s)
	}
	return box.awaitStopped(ctx)
}

// awaitStopped blocks until the signal has stopped the runner.
func (b *box) awaitStopped(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !b.isPaused() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("sandbox %s does not stop: %w", b.rec.ID, ctx.Err())
		}
	}
	return nil
}

// sendSignal sends a signal to a process, and returns nil if the process does not exist.
func sendSignal(pid int, s syscall.Signal) error {
	if err := syscall.Kill(pid, s); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", pid, err)
	}
	return nil
}
