package watch

import (
	"errors"
	"io/fs"
	"os"
	"strings"
)

// maxIgnored is the largest number of ignored folders that are watched. Further ones are in every answer of the tracker.
const maxIgnored = 4096

// watchIgnored watches an ignored folder, and everything below it. Changes in these folders are not reported as events; only the tracker
// records in which folders they were, for the next snapshot. A folder that cannot be watched, or that exceeds maxIgnored, is in every
// answer of the tracker, so that snapshots always look into it.
func (w *Watcher) watchIgnored(rel string) {
	if w.notifier == nil {
		return // the tracker is blind
	}
	if len(w.ignored) >= maxIgnored {
		w.tracker.setWatched(rel, false)
		return
	}
	wd, err := w.notifier.add(w.absolute(rel))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return // which is reported
	case err != nil || w.watched[wd] != nil: // or it is the same folder as one that is not ignored
		w.tracker.setWatched(rel, false)
		return
	}
	if other, ok := w.ignored[wd]; ok && other != rel { // the same folder, at its former path
		w.tracker.setWatched(other, false)
	}
	w.ignored[wd] = rel
	w.tracker.setWatched(rel, true)
	entries, err := os.ReadDir(w.absolute(rel))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.tracker.setWatched(rel, false)
	}
	for _, e := range entries {
		if e.IsDir() {
			w.watchIgnored(rel + "/" + e.Name())
		}
	}
}

// ignoredChanged records a change in the ignored folder rel in the tracker, and watches ignored folders that have appeared in it.
func (w *Watcher) ignoredChanged(rel string, c change) {
	w.tracker.mark(rel, false)
	child := join(rel, c.name)
	switch {
	case c.kind == ended:
		delete(w.ignored, c.wd)
		w.tracker.setWatched(rel, false)
	case c.name == "" || !c.folder:
	case c.kind == attributes:
		w.tracker.mark(child, false)
	default:
		w.forgetIgnored(child)
		w.tracker.removed(child)
		if c.kind == appeared {
			w.tracker.mark(child, true)
			w.watchIgnored(child)
		}
	}
}

// forgetIgnored ends the watches of ignored folders at a path and below it.
func (w *Watcher) forgetIgnored(rel string) {
	for wd, path := range w.ignored {
		if rel == "" || path == rel || strings.HasPrefix(path, rel+"/") {
			delete(w.ignored, wd)
			w.notifier.remove(wd)
		}
	}
}

// yieldIgnored ends the watches of all ignored folders, so that others can be watched. It reports whether there were any.
func (w *Watcher) yieldIgnored() bool {
	if len(w.ignored) == 0 {
		return false
	}
	for _, path := range w.ignored {
		w.tracker.setWatched(path, false)
	}
	w.forgetIgnored("")
	return true
}
