package watch

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/ignore"
)

// watchedFolder is a watched folder with its last known content.
type watchedFolder struct {
	path    string // relative to the workspace, "" for itself
	wd      int    // -1 without a watch
	files   map[string]fileState
	folders map[string]*watchedFolder
}

// fileState is the last known state of a regular file.
type fileState struct {
	size    int64
	modTime int64 // ns
	inode   uint64
	blocks  int64 // bytes on disk
}

// suspectFile is a file that may have changed since the last report about it.
type suspectFile struct {
	in          *watchedFolder
	name        string
	was         fileState // as last reported
	known       bool      // false: it did not exist
	written     bool      // a change of its content is certain
	first, last time.Time
	order       uint64
}

// joinRelative returns the path of the entry name of the folder dir, both relative to the workspace. dir is "" for the workspace itself.
func joinRelative(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// absolutePath returns the absolute path for rel, a path relative to the workspace.
func (w *Watcher) absolutePath(rel string) string {
	return filepath.Join(w.cfg.Dir, filepath.FromSlash(rel))
}

// addSuspect records that a file may have changed; reportDueChanges compares the file later. written is set if the kernel reported a change of the
// content.
func (w *Watcher) addSuspect(f *watchedFolder, name string, written bool) {
	now := time.Now()
	rel := joinRelative(f.path, name)
	s, ok := w.dirty[rel]
	if !ok {
		w.order++
		s = &suspectFile{in: f, name: name, first: now, order: w.order}
		s.was, s.known = f.files[name]
		w.dirty[rel] = s
		w.cfg.Touched(rel, s.was.blocks)
	}
	s.in, s.last = f, now
	s.written = s.written || written
}

// unwatchFolder stops watching a folder and everything below it. It makes the files suspects, so that their removal is reported.
func (w *Watcher) unwatchFolder(f *watchedFolder) {
	if f.wd >= 0 {
		delete(w.watched, f.wd)
		w.notifier.removeWatch(f.wd)
		f.wd = -1
	}
	w.tracker.markRemoved(f.path)
	for name := range f.files {
		w.addSuspect(f, name, false)
	}
	for _, sub := range f.folders {
		w.unwatchFolder(sub)
	}
}

// addFolder begins to watch the folder name that has appeared in parent, and makes all files in it suspects.
func (w *Watcher) addFolder(parent *watchedFolder, name string) {
	f := &watchedFolder{path: joinRelative(parent.path, name), wd: -1}
	if parent.folders == nil {
		parent.folders = map[string]*watchedFolder{}
	}
	parent.folders[name] = f
	w.compareFolder(f)
}

// compareFolder compares a folder, and everything below it, with its last known state, and makes the files that differ suspects. It adds the
// watches first, so that the kernel reports files that are created during the comparison.
func (w *Watcher) compareFolder(f *watchedFolder) {
	w.addWatch(f)
	entries, err := os.ReadDir(w.absolutePath(f.path))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.cfg.Log.Warn("look at a folder of the workspace", "folder", f.path, "err", err)
		w.tracker.setWatched(f.path, false) // folders in it may have no watch
		if len(entries) == 0 {
			return // it must not count as an empty folder
		}
	}
	files, folders := make(map[string]bool, len(entries)), map[string]bool{}
	for _, e := range entries {
		name, rel := e.Name(), joinRelative(f.path, e.Name())
		switch {
		case w.rules.Ignores(rel, e.IsDir()):
			if e.IsDir() {
				w.watchIgnoredFolder(rel)
			}
		case e.IsDir():
			folders[name] = true
			if sub := f.folders[name]; sub != nil {
				w.compareFolder(sub)
			} else {
				w.addFolder(f, name)
			}
		case e.Type().IsRegular():
			files[name] = true
			w.compareFile(f, name, e)
		}
	}
	for name := range f.files {
		if !files[name] {
			w.addSuspect(f, name, false)
		}
	}
	for name, sub := range f.folders {
		if !folders[name] {
			w.unwatchIgnoredBelow(sub.path)
			w.unwatchFolder(sub)
			delete(f.folders, name)
		}
	}
}

// compareFile makes the file name of a folder a suspect if it has changed. During recordExistingFiles it records the file as known instead.
func (w *Watcher) compareFile(f *watchedFolder, name string, e fs.DirEntry) {
	info, err := e.Info()
	if err != nil {
		return // gone meanwhile, which is reported
	}
	now := fileStateOf(info)
	if was, known := f.files[name]; known && now.equalsExceptBlocks(was) {
		return
	}
	if w.learning {
		f.putFile(name, now)
		return
	}
	w.addSuspect(f, name, false)
}

// addWatch makes the kernel report the changes of a folder. If the kernel allows no further watches, it ends those of ignored folders, and if that
// does not suffice, it falls back to polling.
func (w *Watcher) addWatch(f *watchedFolder) {
	if w.notifier == nil {
		return
	}
	wd, err := w.notifier.addWatch(w.absolutePath(f.path))
	switch {
	case err == nil:
		if f.wd != wd {
			delete(w.watched, f.wd)
		}
		if path, ok := w.ignored[wd]; ok { // it was ignored at its former path, or is a second place of the folder
			delete(w.ignored, wd)
			w.tracker.setWatched(path, false)
		}
		if other := w.watched[wd]; other != nil && other != f {
			other.wd = -1 // the same folder, at its former path
			w.tracker.setWatched(other.path, false)
		}
		f.wd = wd
		w.watched[wd] = f
		w.tracker.setWatched(f.path, true)
	case isWatchLimitError(err) && w.unwatchAllIgnored():
		w.addWatch(f)
	case isWatchLimitError(err):
		w.fallBackToPolling(err)
	case !errors.Is(err, fs.ErrNotExist):
		w.cfg.Log.Warn("a folder of the workspace cannot be watched", "folder", f.path, "err", err)
		w.tracker.setWatched(f.path, false)
	}
}

// putFile records the state of a file in the folder.
func (f *watchedFolder) putFile(name string, now fileState) {
	if f.files == nil {
		f.files = map[string]fileState{}
	}
	f.files[name] = now
}

// fileStateOf returns those properties of a file by which the watcher recognises a change.
func fileStateOf(info fs.FileInfo) fileState {
	inode, blocks := inodeAndBlocks(info)
	return fileState{size: info.Size(), modTime: info.ModTime().UnixNano(), inode: inode, blocks: blocks}
}

// readIgnoreRules reads the ignore file again and replaces the ignore rules.
func (w *Watcher) readIgnoreRules() {
	text := []byte(defaultIgnoreRules)
	f, err := os.Open(filepath.Join(w.cfg.Dir, IgnoreFile))
	if err == nil {
		own, err := readIgnoreFile(f)
		if err != nil {
			w.warnAboutIgnoreRules(err)
		}
		text = append(text, own...)
	} else if !errors.Is(err, fs.ErrNotExist) {
		w.warnAboutIgnoreRules(err)
	}
	if w.rules, err = ignore.Parse(text); err != nil {
		w.warnAboutIgnoreRules(err)
	}
}

// warnAboutIgnoreRules queues a warning about the ignore file.
func (w *Watcher) warnAboutIgnoreRules(err error) {
	w.flood.queueNote(warningEvent(IgnoreFile + ": " + strings.ReplaceAll(err.Error(), "\n", "; ")))
}
