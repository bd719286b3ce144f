package process

import (
	"log/slog"
	"slices"
)

// Root is a process that leads a session of its own, as another process finds it.
type Root struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // ticks since boot, 0 where it cannot be told
}

// Tree describes a process that has just been started.
func Tree(log *slog.Logger, pid int) Root {
	r := Root{PID: pid}
	if p, ok := find(pid); ok {
		r.Start = p.start
	} else {
		log.Debug("the start time of a process cannot be told", "pid", pid)
	}
	return r
}

// Kill kills the process with its group, its session and its descendants, and
// returns when none is left. One that is gone is no error, and another process
// that has got its number is left alone.
func (r Root) Kill(log *slog.Logger) error {
	if p, ok := find(r.PID); r.Start != 0 && (!ok || p.start != r.Start) {
		return nil
	}
	return NewNursery(log).killTree(r.PID)
}

func find(pid int) (proc, bool) {
	all := snapshot()
	i := slices.IndexFunc(all, func(p proc) bool { return p.pid == pid })
	if i < 0 {
		return proc{}, false
	}
	return all[i], true
}
