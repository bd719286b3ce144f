package process

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// killWithin bounds how long End looks for survivors.
const killWithin = 5 * time.Second

// Nursery knows the processes that were started, and adopts and reaps what they leave behind.
type Nursery struct {
	log *slog.Logger

	mu      sync.Mutex
	own     map[int]bool // started by Start and not yet waited for
	adopted bool
}

// NewNursery makes an empty one.
func NewNursery(log *slog.Logger) *Nursery { return &Nursery{log: log, own: map[int]bool{}} }

// Adopt makes this process the parent of its descendants' orphans, as PID 1 is
// anyway. Once per process, and only where all of its children are the nursery's.
func (n *Nursery) Adopt() error {
	if err := becomeSubreaper(); err != nil {
		return fmt.Errorf("become the reaper of orphans: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.adopted = true
	return nil
}

// Run reaps adopted orphans until ctx ends.
func (n *Nursery) Run(ctx context.Context) error {
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	defer signal.Stop(died)
	for {
		n.reap()
		select {
		case <-ctx.Done():
			return nil
		case <-died:
		}
	}
}

// start holds the lock over the fork, so that a new process is never taken for an orphan.
func (n *Nursery) start(cmd *exec.Cmd) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	n.own[cmd.Process.Pid] = true
	if err := sacrifice(cmd.Process.Pid); err != nil {
		n.log.Debug("tell the kernel to end the agent before the runner", "err", err)
	}
	return nil
}

// wait waits for a started process. How it ended is in its state.
func (n *Nursery) wait(cmd *exec.Cmd) {
	if err := cmd.Wait(); err != nil && cmd.ProcessState == nil {
		n.log.Error("wait for an agent's process", "err", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.own, cmd.Process.Pid)
}

// reap waits for dead orphans.
func (n *Nursery) reap() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.adopted {
		return
	}
	self := os.Getpid()
	for _, p := range snapshot() {
		if p.parent == self && p.dead && !n.own[p.pid] {
			if _, err := syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil); err != nil {
				n.log.Debug("reap", "pid", p.pid, "err", err)
			}
		}
	}
}

// killTree kills a process, its group, its descendants, and the orphans that
// were adopted from it, until none is left.
func (n *Nursery) killTree(pid int) error {
	deadline := time.Now().Add(killWithin)
	pause := time.NewTicker(5 * time.Millisecond)
	defer pause.Stop()
	doomed := map[int]uint64{} // pid → start time: what was once its descendant stays it
	for {
		alive := n.survivors(pid, doomed)       // before the group is killed: its orphans lose their parents
		_ = syscall.Kill(-pid, syscall.SIGKILL) // gone is what is wanted
		if len(alive) == 0 {
			return nil
		}
		for _, p := range alive {
			_ = syscall.Kill(p, syscall.SIGKILL)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes that cannot be killed: %v", alive)
		}
		<-pause.C
	}
}

// Descendants are the processes that this one has started, with all below them.
func (n *Nursery) Descendants() []int {
	all := snapshot()
	tree := map[int]bool{os.Getpid(): true}
	var out []int
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if tree[p.parent] && !tree[p.pid] {
				tree[p.pid], grown = true, true
				if !p.dead {
					out = append(out, p.pid)
				}
			}
		}
	}
	return out
}

// Busy tells whether something runs that this process has started or adopted.
func (n *Nursery) Busy() bool { return len(n.Descendants()) > 0 }

// KillAll kills everything that this process has started or adopted, until none is left.
func (n *Nursery) KillAll() error {
	deadline := time.Now().Add(killWithin)
	pause := time.NewTicker(5 * time.Millisecond)
	defer pause.Stop()
	for {
		alive := n.Descendants()
		if len(alive) == 0 {
			return nil
		}
		for _, p := range alive {
			_ = syscall.Kill(p, syscall.SIGKILL) // gone is what is wanted
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes that cannot be killed: %v", alive)
		}
		<-pause.C
	}
}

// survivors lists what still runs of a process's tree, and remembers it.
func (n *Nursery) survivors(pid int, doomed map[int]uint64) []int {
	n.mu.Lock()
	adopted := n.adopted
	own := make(map[int]bool, len(n.own))
	for p := range n.own {
		own[p] = true
	}
	n.mu.Unlock()
	all := snapshot()
	self := os.Getpid()
	belongs := func(p proc) bool {
		start, known := doomed[p.pid]
		parentStart, byParent := doomed[p.parent]
		return p.pid == pid || known && start == p.start || byParent && parentStart <= p.start ||
			p.parent == pid || p.group == pid || p.session == pid || adopted && p.parent == self && !own[p.pid]
	}
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if start, known := doomed[p.pid]; (!known || start != p.start) && p.pid != self && belongs(p) {
				doomed[p.pid], grown = p.start, true
			}
		}
	}
	var alive []int
	for _, p := range all {
		if start, known := doomed[p.pid]; known && start == p.start && !p.dead {
			alive = append(alive, p.pid)
		}
	}
	return alive
}

// Memory is the resident size in bytes of everything that descends from this process.
func (n *Nursery) Memory() uint64 {
	all := snapshot()
	tree := map[int]bool{os.Getpid(): true}
	var sum uint64
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if tree[p.parent] && !tree[p.pid] {
				tree[p.pid], grown = true, true
				sum += p.resident
			}
		}
	}
	return sum
}

// proc is what is known of a process.
type proc struct {
	pid, parent, group, session int
	start                       uint64 // ticks since boot: tells a pid's users apart
	dead                        bool   // a zombie
	resident                    uint64 // bytes
}
