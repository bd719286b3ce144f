package local

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Pause stops every process of a sandbox, its runner first, so that nothing is
// started behind the signal's back; what is found again and again is stopped too.
func (p *Provider) Pause(_ context.Context, id string) error {
	return p.signal(id, syscall.SIGSTOP)
}

// Resume lets them go on, the runner last.
func (p *Provider) Resume(_ context.Context, id string) error {
	return p.signal(id, syscall.SIGCONT)
}

func (p *Provider) signal(id string, s syscall.Signal) error {
	if err := events.CheckID("sandbox id", events.KindSandbox, id); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	rec, err := p.read(id)
	if err != nil {
		return err
	}
	box := p.box(rec)
	r, alive := box.runner()
	if !alive {
		return fmt.Errorf("sandbox %s: its runner is gone: %w", id, sandbox.ErrNotFound)
	}
	family := map[int]string{r.PID: r.Start}
	if s == syscall.SIGSTOP {
		if err := kill(r.PID, s); err != nil {
			return err
		}
	}
	for known := -1; known != len(family); { // until no more are found
		known = len(family)
		for _, pid := range box.spread(family) {
			if pid == r.PID {
				continue
			}
			if err := kill(pid, s); err != nil {
				return err
			}
		}
	}
	if s == syscall.SIGCONT {
		return kill(r.PID, s)
	}
	return nil
}

func kill(pid int, s syscall.Signal) error {
	if err := syscall.Kill(pid, s); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", pid, err)
	}
	return nil
}
