package process

import (
	"log/slog"
	"slices"
)

// SessionLeader identifies a process that leads a session, so that another process can kill the session later. It
// includes the start time, because process ids are used again.
type SessionLeader struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // ticks since boot; 0 if unknown
}

// NewSessionLeader returns the SessionLeader for a process that was just started.
func NewSessionLeader(log *slog.Logger, pid int) SessionLeader {
	r := SessionLeader{PID: pid}
	if p, ok := findProcess(pid); ok {
		r.Start = p.start
	} else {
		log.Debug("read the start time of a process: not found", "pid", pid)
	}
	return r
}

// KillTree kills the process with its group, its session and its descendants, and returns when none of them runs. It
// returns nil if the process has ended, and does not touch another process that got the same id.
func (r SessionLeader) KillTree(log *slog.Logger) error {
	if p, ok := findProcess(r.PID); r.Start != 0 && (!ok || p.start != r.Start) {
		return nil
	}
	return NewGroup(log).killTree(r.PID)
}

// findProcess returns the entry of the process pid in the process table, and false if the process has ended.
func findProcess(pid int) (processInfo, bool) {
	all := listProcesses()
	i := slices.IndexFunc(all, func(p processInfo) bool { return p.pid == pid })
	if i < 0 {
		return processInfo{}, false
	}
	return all[i], true
}
