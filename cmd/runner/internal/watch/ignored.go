package watch

import (
	"errors"
	"io/fs"
	"os"
	"strings"
)

// maxIgnoredFolders is the maximum number of ignored folders that are watched. Further ones are in every answer of the changeTracker.
const maxIgnoredFolders = 4096

// watchIgnoredFolder watches the ignored folder rel and everything below it. Changes in these folders are not reported as events; only the
// changeTracker records in which folders they were, for the next snapshot. A folder that cannot be watched, or that exceeds maxIgnoredFolders, is
// in every answer of the changeTracker, so that every snapshot walks it.
func (w *Watcher) watchIgnoredFolder(rel string) {
	if w.notifier == nil {
		return // the tracker is blind
	}
	if len(w.ignored) >= maxIgnoredFolders {
		w.tracker.setWatched(rel, false)
		return
	}
	wd, err := w.notifier.addWatch(w.absolutePath(rel))
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
	entries, err := os.ReadDir(w.absolutePath(rel))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.tracker.setWatched(rel, false)
	}
	for _, e := range entries {
		if e.IsDir() {
			w.watchIgnoredFolder(rel + "/" + e.Name())
		}
	}
}

// handleIgnoredChange records a change in the ignored folder rel in the changeTracker, and watches folders that have appeared in it.
func (w *Watcher) handleIgnoredChange(rel string, c kernelChange) {
	w.tracker.markFolder(rel, false)
	child := joinRelative(rel, c.name)
	switch {
	case c.kind == changeWatchEnded:
		delete(w.ignored, c.wd)
		w.tracker.setWatched(rel, false)
	case c.name == "" || !c.folder:
	case c.kind == changeAttributes:
		w.tracker.markFolder(child, false)
	default:
		w.unwatchIgnoredBelow(child)
		w.tracker.markRemoved(child)
		if c.kind == changeAppeared {
			w.tracker.markFolder(child, true)
			w.watchIgnoredFolder(child)
		}
	}
}

// unwatchIgnoredBelow ends the watches of ignored folders at the path rel and below it.
func (w *Watcher) unwatchIgnoredBelow(rel string) {
	for wd, path := range w.ignored {
		if rel == "" || path == rel || strings.HasPrefix(path, rel+"/") {
			delete(w.ignored, wd)
			w.notifier.removeWatch(wd)
		}
	}
}

// unwatchAllIgnored ends the watches of all ignored folders, so that other folders can be watched. It reports whether there were any.
func (w *Watcher) unwatchAllIgnored() bool {
	if len(w.ignored) == 0 {
		return false
	}
	for _, path := range w.ignored {
		w.tracker.setWatched(path, false)
	}
	w.unwatchIgnoredBelow("")
	return true
}
