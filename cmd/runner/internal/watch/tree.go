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

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// absolute returns the absolute path.
func (w *Watcher) absolute(rel string) string {
	return filepath.Join(w.cfg.Dir, filepath.FromSlash(rel))
}

// suspect records that a file may have changed.
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

// forget stops watching a folder and everything below it. Its files become suspects, so that removed files are
// reported.
func (w *Watcher) forget(f *folder) {
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
		w.forget(sub)
	}
}

// adopt begins to watch a folder, and makes all files that it finds there suspects.
func (w *Watcher) adopt(parent *folder, name string) {
	f := &folder{path: join(parent.path, name), wd: -1}
	if parent.folders == nil {
		parent.folders = map[string]*folder{}
	}
	parent.folders[name] = f
	w.resync(f)
}

// resync compares a folder, and everything below it, with its last known state. It adds the watch first: the kernel
// reports files that are created during the comparison.
func (w *Watcher) resync(f *folder) {
	w.listen(f)
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
				w.adopt(f, name)
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
			w.forget(sub)
			delete(f.folders, name)
		}
	}
}

// compare makes an entry that has changed a suspect. During the first pass over the workspace it records the entry as
// known.
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

// listen adds the kernel's watch of a folder.
func (w *Watcher) listen(f *folder) {
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
		w.listen(f)
	case isExhausted(err):
		w.fallBack(err)
	case !errors.Is(err, fs.ErrNotExist):
		w.cfg.Log.Warn("a folder of the workspace cannot be watched", "folder", f.path, "err", err)
		w.tracker.setWatched(f.path, false)
	}
}

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
			w.tellRules(err)
		}
		text = append(text, own...)
	} else if !errors.Is(err, fs.ErrNotExist) {
		w.tellRules(err)
	}
	if w.rules, err = ignore.Parse(text); err != nil {
		w.tellRules(err)
	}
}

func (w *Watcher) tellRules(err error) {
	w.flood.note(warning(IgnoreFile + ": " + strings.ReplaceAll(err.Error(), "\n", "; ")))
}
