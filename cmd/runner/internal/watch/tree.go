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

// folder is a watched folder with its last known content.
type folder struct {
	path    string // relative to the workspace, "" for itself
	wd      int    // -1 without a watch
	files   map[string]file
	folders map[string]*folder
}

// file is the last known state of a regular file.
type file struct {
	size    int64
	modTime int64 // ns
	inode   uint64
	blocks  int64 // bytes on disk
}

// suspect is a file that may have changed since it was last reported.
type suspect struct {
	in          *folder
	name        string
	was         file // as last reported
	known       bool // false: it did not exist
	written     bool // a change of its content is certain
	first, last time.Time
	order       uint64
}

// join returns the path of an entry of a folder, both relative to the workspace. dir is "" for the workspace itself.
func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// absolute returns the absolute path for a path relative to the workspace.
func (w *Watcher) absolute(rel string) string {
	return filepath.Join(w.cfg.Dir, filepath.FromSlash(rel))
}

// suspect records that a file may have changed; reportDue compares it later. written is set if the kernel reported a change of the content.
func (w *Watcher) suspect(f *folder, name string, written bool) {
	now := time.Now()
	rel := join(f.path, name)
	s, ok := w.dirty[rel]
	if !ok {
		w.order++
		s = &suspect{in: f, name: name, first: now, order: w.order}
		s.was, s.known = f.files[name]
		w.dirty[rel] = s
		w.cfg.Touched(rel, s.was.blocks)
	}
	s.in, s.last = f, now
	s.written = s.written || written
}

// dropFolder stops watching a folder and everything below it. The files become suspects, so that their removal is reported.
func (w *Watcher) dropFolder(f *folder) {
	if f.wd >= 0 {
		delete(w.watched, f.wd)
		w.notifier.remove(f.wd)
		f.wd = -1
	}
	w.tracker.removed(f.path)
	for name := range f.files {
		w.suspect(f, name, false)
	}
	for _, sub := range f.folders {
		w.dropFolder(sub)
	}
}

// addFolder begins to watch a folder that has appeared in parent, and makes all files in it suspects.
func (w *Watcher) addFolder(parent *folder, name string) {
	f := &folder{path: join(parent.path, name), wd: -1}
	if parent.folders == nil {
		parent.folders = map[string]*folder{}
	}
	parent.folders[name] = f
	w.resync(f)
}

// resync compares a folder, and everything below it, with its last known state, and makes what differs suspects. It adds the watches first,
// so that the kernel reports files that are created during the comparison.
func (w *Watcher) resync(f *folder) {
	w.addWatch(f)
	entries, err := os.ReadDir(w.absolute(f.path))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.cfg.Log.Warn("look at a folder of the workspace", "folder", f.path, "err", err)
		w.tracker.setWatched(f.path, false) // folders in it may have no watch
		if len(entries) == 0 {
			return // it must not count as an empty folder
		}
	}
	files, folders := make(map[string]bool, len(entries)), map[string]bool{}
	for _, e := range entries {
		name, rel := e.Name(), join(f.path, e.Name())
		switch {
		case w.rules.Ignores(rel, e.IsDir()):
			if e.IsDir() {
				w.watchIgnored(rel)
			}
		case e.IsDir():
			folders[name] = true
			if sub := f.folders[name]; sub != nil {
				w.resync(sub)
			} else {
				w.addFolder(f, name)
			}
		case e.Type().IsRegular():
			files[name] = true
			w.compare(f, name, e)
		}
	}
	for name := range f.files {
		if !files[name] {
			w.suspect(f, name, false)
		}
	}
	for name, sub := range f.folders {
		if !folders[name] {
			w.forgetIgnored(sub.path)
			w.dropFolder(sub)
			delete(f.folders, name)
		}
	}
}

// compare makes a file that has changed a suspect. During recordPresent it records the file as known instead.
func (w *Watcher) compare(f *folder, name string, e fs.DirEntry) {
	info, err := e.Info()
	if err != nil {
		return // gone meanwhile, which is reported
	}
	now := fileOf(info)
	if was, known := f.files[name]; known && now.equals(was) {
		return
	}
	if w.learning {
		f.put(name, now)
		return
	}
	w.suspect(f, name, false)
}

// addWatch makes the kernel report the changes of a folder. If the kernel has no more watches, it ends those of ignored folders, and if that
// does not suffice, it falls back to polling.
func (w *Watcher) addWatch(f *folder) {
	if w.notifier == nil {
		return
	}
	wd, err := w.notifier.add(w.absolute(f.path))
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
	case isExhausted(err) && w.yieldIgnored():
		w.addWatch(f)
	case isExhausted(err):
		w.fallBack(err)
	case !errors.Is(err, fs.ErrNotExist):
		w.cfg.Log.Warn("a folder of the workspace cannot be watched", "folder", f.path, "err", err)
		w.tracker.setWatched(f.path, false)
	}
}

// put records the state of a file in the folder.
func (f *folder) put(name string, now file) {
	if f.files == nil {
		f.files = map[string]file{}
	}
	f.files[name] = now
}

// fileOf returns the properties of a file by which two passes over the workspace compare it.
func fileOf(info fs.FileInfo) file {
	inode, blocks := inodeAndBlocks(info)
	return file{size: info.Size(), modTime: info.ModTime().UnixNano(), inode: inode, blocks: blocks}
}

// readRules reads the ignore file again.
func (w *Watcher) readRules() {
	text := []byte(defaultRules)
	f, err := os.Open(filepath.Join(w.cfg.Dir, IgnoreFile))
	if err == nil {
		own, err := readBounded(f)
		if err != nil {
			w.reportRulesError(err)
		}
		text = append(text, own...)
	} else if !errors.Is(err, fs.ErrNotExist) {
		w.reportRulesError(err)
	}
	if w.rules, err = ignore.Parse(text); err != nil {
		w.reportRulesError(err)
	}
}

// reportRulesError queues a warning about the ignore file.
func (w *Watcher) reportRulesError(err error) {
	w.flood.note(warning(IgnoreFile + ": " + strings.ReplaceAll(err.Error(), "\n", "; ")))
}
