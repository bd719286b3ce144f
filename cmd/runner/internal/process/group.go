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

// killTimeout is the time within which processes must end after SIGKILL.
const killTimeout = 5 * time.Second

// Group holds the processes that were started with it, and collects the exit status of the orphans that they leave
// behind.
type Group struct {
	log *slog.Logger

	mu      sync.Mutex
	own     map[int]bool // process ids that were started and not waited for yet
	adopted bool
}

// NewGroup returns a group without processes.
func NewGroup(log *slog.Logger) *Group { return &Group{log: log, own: map[int]bool{}} }

// AdoptOrphans makes this process the parent of the orphans among its descendants, as PID 1 is anyway. It may be called
// once per process, and only if all children of the process belong to the group.
func (g *Group) AdoptOrphans() error {
	if err := becomeSubreaper(); err != nil {
		return fmt.Errorf("become the reaper of orphans: %w", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.adopted = true
	return nil
}

// Run collects the exit status of adopted orphans until ctx ends.
func (g *Group) Run(ctx context.Context) error {
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	defer signal.Stop(died)
	for {
		g.reapOrphans()
		select {
		case <-ctx.Done():
			return nil
		case <-died:
		}
	}
}

// startProcess starts a process while it holds the group's lock, so that Run does not take the new process for an
// orphan.
func (g *Group) startProcess(cmd *exec.Cmd) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	g.own[cmd.Process.Pid] = true
	if err := raiseOOMScore(cmd.Process.Pid); err != nil {
		g.log.Debug("raise the OOM score of the agent", "err", err)
	}
	return nil
}

// waitForProcess blocks until a started process has ended. cmd.ProcessState then describes how the process ended.
func (g *Group) waitForProcess(cmd *exec.Cmd) {
	if err := cmd.Wait(); err != nil && cmd.ProcessState == nil {
		g.log.Error("wait for an agent's process", "err", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.own, cmd.Process.Pid)
}

// reapOrphans collects the exit status of ended orphans that this process has adopted.
func (g *Group) reapOrphans() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.adopted {
		return
	}
	self := os.Getpid()
	for _, p := range listProcesses() {
		if p.parent == self && p.dead && !g.own[p.pid] {
			if _, err := syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil); err != nil {
				g.log.Debug("reap", "pid", p.pid, "err", err)
			}
		}
	}
}

// killTree kills a process, its process group, its descendants and the orphans that were adopted from it. It returns
// when none of them runs, or an error that lists those that remain.
func (g *Group) killTree(pid int) error {
	deadline := time.Now().Add(killTimeout)
	pause := time.NewTicker(5 * time.Millisecond)
	defer pause.Stop()
	doomed := map[int]uint64{} // start time by pid: a process that was once a descendant remains one
	for {
		alive := g.runningTreeOf(pid, doomed)   // before the group is killed: its orphans lose their parents
		_ = syscall.Kill(-pid, syscall.SIGKILL) // an error means that it has ended
		if len(alive) == 0 {
			return nil
		}
		for _, p := range alive {
			_ = syscall.Kill(p, syscall.SIGKILL)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("kill processes %v: still running", alive)
		}
		<-pause.C
	}
}

// Descendants returns the ids of all running descendants of this process.
func (g *Group) Descendants() []int {
	all := listProcesses()
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

// HasProcesses reports whether a process runs that this process has started or adopted.
func (g *Group) HasProcesses() bool { return len(g.Descendants()) > 0 }

// KillAll kills every process that this process has started or adopted. It returns when none of them runs.
func (g *Group) KillAll() error {
	deadline := time.Now().Add(killTimeout)
	pause := time.NewTicker(5 * time.Millisecond)
	defer pause.Stop()
	for {
		alive := g.Descendants()
		if len(alive) == 0 {
			return nil
		}
		for _, p := range alive {
			_ = syscall.Kill(p, syscall.SIGKILL) // an error means that it has ended
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("kill processes %v: still running", alive)
		}
		<-pause.C
	}
}

// runningTreeOf returns the processes of the tree of pid that still run. It adds the processes of the tree, with their
// start times, to doomed, so that they are found again when their parents have ended.
func (g *Group) runningTreeOf(pid int, doomed map[int]uint64) []int {
	g.mu.Lock()
	adopted := g.adopted
	own := make(map[int]bool, len(g.own))
	for p := range g.own {
		own[p] = true
	}
	g.mu.Unlock()
	all := listProcesses()
	self := os.Getpid()
	belongs := func(p processInfo) bool {
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

// MemoryUsage returns the sum of the resident sizes of all descendants of this process, in bytes.
func (g *Group) MemoryUsage() uint64 {
	all := listProcesses()
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

// processInfo describes a process of this machine, as /proc shows it.
type processInfo struct {
	pid, parent, group, session int
	start                       uint64 // ticks since boot; distinguishes processes with the same pid
	dead                        bool   // a zombie
	resident                    uint64 // bytes
}
