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
	// maxCachedWalks is the maximum number of sessions in a walkCache.
	maxCachedWalks = 64
	// maxMarksPerSession is the maximum number of marks of one session in a walkCache.
	maxMarksPerSession = 64
	// initialMarkSpacing is the number of events between two marks of a session. It doubles when the session has too
	// many marks.
	initialMarkSpacing = 1000
)

// walkCache caches, for sessions that were forked, the state after a part of their log, so that the next fork of a
// session does not read the log from the beginning. Each copy of the service has its own cache, and reads the log for a
// session that is not in it.
type walkCache struct {
	mu       sync.Mutex
	sessions map[topology.SessionRef]*walkEntry
	uses     uint64
}

// walkEntry is the entry of one session in a walkCache. One fork at a time owns it and reads the session's log; other
// forks wait until the owner releases it, and continue from its marks.
type walkEntry struct {
	owner   chan struct{} // holds a value while no fork owns it
	used    uint64
	marks   []walkMark // in the order of the log
	spacing uint32     // events between two marks
	last    walkMark   // the mark with the highest seq
}

// walkMark holds the state of a fork.Walk after the last event of a commit, from which a later walk can continue.
type walkMark struct {
	walk *fork.Finder // never modified
	at   eventlog.NumberedEvent
}

// acquireEntry blocks until no other fork reads the session's log, and returns its cache entry. The caller must release it.
func (w *walkCache) acquireEntry(ctx context.Context, ref topology.SessionRef) (*walkEntry, error) {
	w.mu.Lock()
	one := w.sessions[ref]
	if one == nil {
		one = &walkEntry{owner: make(chan struct{}, 1), spacing: initialMarkSpacing}
		one.owner <- struct{}{}
		if w.sessions == nil {
			w.sessions = map[topology.SessionRef]*walkEntry{}
		}
		w.sessions[ref] = one
	}
	w.uses++
	one.used = w.uses
	if len(w.sessions) > maxCachedWalks {
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

// release gives the entry to the next fork that waits in walkCache.acquireEntry.
func (w *walkEntry) release() { w.owner <- struct{}{} }

// resumeWalk returns a walk for a fork at the seq asked that has read as many of the session's events as are cached,
// and the last of these events.
func (w *walkEntry) resumeWalk(asked uint32) (*fork.Finder, eventlog.NumberedEvent) {
	if w.last.walk != nil && w.last.at.Seq <= asked {
		return w.last.walk.Clone(asked), w.last.at
	}
	i, _ := slices.BinarySearchFunc(w.marks, asked, func(m walkMark, asked uint32) int {
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

// addMark adds the state of a walk after the event at, the last event of a commit, to the cache if the last mark is far
// enough before it. at must not be after the seq of the requested fork. whole reports that the walk has read the log to
// its end.
func (w *walkEntry) addMark(walk *fork.Finder, at eventlog.NumberedEvent, whole bool) {
	after := uint32(0)
	if n := len(w.marks); n > 0 {
		after = w.marks[n-1].at.Seq
	}
	due := at.Seq >= after+w.spacing
	if !due && (!whole || at.Seq <= w.last.at.Seq) {
		return
	}
	m := walkMark{walk.Clone(fork.LastEvent), eventlog.NumberedEvent{Seq: at.Seq, Position: at.Position}}
	if at.Seq > w.last.at.Seq {
		w.last = m
	}
	if !due {
		return
	}
	if w.marks = append(w.marks, m); len(w.marks) > maxMarksPerSession {
		for i := range maxMarksPerSession / 2 {
			w.marks[i] = w.marks[2*i+1]
		}
		clear(w.marks[maxMarksPerSession/2:])
		w.marks, w.spacing = w.marks[:maxMarksPerSession/2], 2*w.spacing
	}
}
