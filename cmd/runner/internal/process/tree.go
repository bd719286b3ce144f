package process

import (
	"log/slog"
	"slices"
)

// Root identifies a process that leads a session, so that another process can kill it later. It includes the start
// time, because process ids are used again.
type Root struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // ticks since boot; 0 if unknown
}

// Tree returns the Root of a process that has just been started.
func Tree(log *slog.Logger, pid int) Root {
	r := Root{PID: pid}
	if p, ok := findProcess(pid); ok {
		r.Start = p.start
	} else {
		log.Debug("read the start time of a process: not found", "pid", pid)
	}
	return r
}

// Kill kills the process with its group, its session and its descendants, and returns when none is left. It returns
// nil if the process has ended, and does not touch another process that got its pid.
func (r Root) Kill(log *slog.Logger) error {
	if p, ok := findProcess(r.PID); r.Start != 0 && (!ok || p.start != r.Start) {
		return nil
	}
	return NewGroup(log).killTree(r.PID)
}

// findProcess returns the entry of a process in the process table, and false if the process has ended.
func findProcess(pid int) (proc, bool) {
	all := listProcesses()
	i := slices.IndexFunc(all, func(p proc) bool { return p.pid == pid })
	if i < 0 {
		return proc{}, false
	}
	return all[i], true
}
