package command

import (
	"context"
	"slices"
	"sync"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/fork"
	"github.com/spoolhq/spool/pkg/topology"
)

// Limits of a walkCache.
const (
	maxWalked  = 64   // sessions in the cache
	maxMarks   = 64   // marks of a session
	firstMarks = 1000 // events between two marks of a session, as long as they are not too many
)

// walkCache caches the positions to which the logs of sessions were read for forks, so that the next fork of a
// session does not read its log from the beginning. Each copy of the service has its own cache. Entries that are
// missing are read again.
type walkCache struct {
	mu       sync.Mutex
	sessions map[topology.SessionRef]*walkEntry
	uses     uint64
}

// walkEntry is the cache entry of one session. Its owner is the one fork that reads the log. Other forks wait for it and
// continue from its marks.
type walkEntry struct {
	owner   chan struct{} // holds a value while no fork owns it
	used    uint64
	marks   []mark // in the order of the log
	spacing uint32 // events between two of them
	last    mark   // the mark with the highest seq
}

// mark is the state of a walk after the last event of a commit, from which a later walk can continue.
type mark struct {
	walk *fork.Finder // never modified
	at   eventlog.NumberedEvent
}

// acquire blocks until no other fork reads the session's log, and returns its cache entry. The caller must release it.
func (w *walkCache) acquire(ctx context.Context, ref topology.SessionRef) (*walkEntry, error) {
	w.mu.Lock()
	one := w.sessions[ref]
	if one == nil {
		one = &walkEntry{owner: make(chan struct{}, 1), spacing: firstMarks}
		one.owner <- struct{}{}
		if w.sessions == nil {
			w.sessions = map[topology.SessionRef]*walkEntry{}
		}
		w.sessions[ref] = one
	}
	w.uses++
	one.used = w.uses
	if len(w.sessions) > maxWalked {
		oldest := ref
		for r, s := range w.sessions {
			if s.used < w.sessions[oldest].used {
				oldest = r
			}
		}
		delete(w.sessions, oldest) // a fork that owns it keeps its reference
	}
	w.mu.Unlock()
	select {
	case <-one.owner:
		return one, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// release gives the entry to the next fork that waits in own.
func (w *walkEntry) release() { w.owner <- struct{}{} }

// walk returns the walk from which a fork at a seq continues, and the last event that the walk has read.
func (w *walkEntry) walk(asked uint32) (*fork.Finder, eventlog.NumberedEvent) {
	if w.last.walk != nil && w.last.at.Seq <= asked {
		return w.last.walk.Clone(asked), w.last.at
	}
	i, _ := slices.BinarySearchFunc(w.marks, asked, func(m mark, asked uint32) int {
		if m.at.Seq <= asked {
			return -1
		}
		return 1
	})
	if i == 0 {
		return fork.NewFinder(asked), eventlog.NumberedEvent{}
	}
	return w.marks[i-1].walk.Clone(asked), w.marks[i-1].at
}

// keep stores a walk after the last event of a commit, which must not be after the requested event. whole reports that
// the log was read to its end.
func (w *walkEntry) keep(walk *fork.Finder, at eventlog.NumberedEvent, whole bool) {
	after := uint32(0)
	if n := len(w.marks); n > 0 {
		after = w.marks[n-1].at.Seq
	}
	due := at.Seq >= after+w.spacing
	if !due && (!whole || at.Seq <= w.last.at.Seq) {
		return
	}
	m := mark{walk.Clone(fork.LastEvent), eventlog.NumberedEvent{Seq: at.Seq, Position: at.Position}}
	if at.Seq > w.last.at.Seq {
		w.last = m
	}
	if !due {
		return
	}
	if w.marks = append(w.marks, m); len(w.marks) > maxMarks {
		for i := range maxMarks / 2 {
			w.marks[i] = w.marks[2*i+1]
		}
		clear(w.marks[maxMarks/2:])
		w.marks, w.spacing = w.marks[:maxMarks/2], 2*w.spacing
	}
}
