package snapshot

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

const (
	// hashQueryThreshold is the number of new bytes above which the runner requests from the host the hashes of the blocks that the host has, so
	// that the content of moved and copied files is not sent again. For fewer bytes that costs more than it saves, because the host has to read the
	// whole snapshot to answer.
	hashQueryThreshold = 1 << 20
	// assumedRewrite is the number of bytes that estimateChanges counts as new in a changed file, in addition to the growth of the file.
	assumedRewrite = 64 << 10
)

// sendEdits runs the runner's side of a snapshot with edits: it sends the changes since the base, or the whole tree, and saves the index. After the
// host has stored the snapshot, it confirms the snapshot in the index and to the watcher.
func (s *runningSnapshot) sendEdits(hello wire.Hello) error {
	if err := s.makePlan(hello); err != nil {
		return err
	}
	defer s.query.Close()
	found := wire.FoundTree{Base: s.plan.base, Known: s.plan.full}
	if !s.plan.full {
		size, linked, err := s.estimateChanges()
		if err != nil {
			return err
		}
		if linked { // another name of the file may be in a folder that is not walked
			s.plan.full = true
		}
		found.Known = s.plan.full || size > hashQueryThreshold
	}
	if err := errors.Join(s.out.WriteJSON(wire.FrameFoundTree, found), s.out.Flush()); err != nil {
		return err
	}
	if more, err := s.readKnownBlocks(); err != nil || !more {
		return err
	}
	if err := s.walkPlannedFolders(); err != nil {
		return err
	}
	if s.plan.full {
		s.end.Full, s.end.ID, s.end.Missed = true, s.treeID(), s.countMissedFolders()
	}
	s.end.Read = s.read
	if err := errors.Join(s.out.WriteJSON(wire.FrameEnd, s.end), s.out.Flush()); err != nil {
		return err
	}
	saved := s.saveUnconfirmedIndex() // while the host stores the snapshot
	var named wire.StoredSnapshot
	if err := s.in.Expect(wire.FrameStoredSnapshot, &named); err != nil {
		return fmt.Errorf("read the name of the snapshot: %w", err)
	}
	if saved {
		s.confirmStored(named.ID)
	}
	return nil
}

// estimateChanges walks the folders of the plan without reading content. size is an estimate of the number of new bytes. linked reports whether a
// file has got a second name (hard link).
func (s *runningSnapshot) estimateChanges() (size int64, linked bool, err error) {
	visited := map[string]bool{}
	w := &treeWalk{
		ctx: s.ctx, maxFile: s.MaxFile, descend: s.mustEnterFolder,
		file: func(_ *os.Root, _ string, e *wire.Entry, info fs.FileInfo) error {
			k, ok := s.before.entryAt(e.Path)
			linked = linked || hasHardLinks(info) && !k.links
			switch {
			case ok && k.kind == wire.KindFile && k.stat == fileStatOf(info):
			case ok && k.kind == wire.KindFile && info.Size() >= k.size:
				size += info.Size() - k.size + min(assumedRewrite, info.Size())
			default:
				size += info.Size()
			}
			return nil
		},
		add:  func(*wire.Entry, fs.FileInfo) error { return nil },
		skip: func(string, wire.SkipReason) error { return nil },
		done: func(folder string, _ bool) error { visited[folder] = true; return nil },
	}
	if err := w.walkTree(s.roots.state, wire.TreeRecords, 0); err != nil {
		return 0, false, err
	}
	for _, path := range s.plannedFolders() {
		if visited[path] {
			continue
		}
		if _, err := s.walkFolder(w, path); err != nil {
			return 0, false, err
		}
	}
	return size, linked, nil
}

// mustEnterFolder reports whether a walk that finds a folder must enter it. The walk need not if the index has the same folder, unless the plan
// covers the folder with everything below it. A folder that the plan names is walked on its own.
func (s *runningSnapshot) mustEnterFolder(path string, info fs.FileInfo) bool {
	if s.plan.full || wire.IsBelow(path, wire.TreeRecords) || s.before.folders[path] == nil {
		return true
	}
	k, ok := s.before.entryAt(path)
	if !ok || k.kind != wire.KindDir || k.stat.inode != fileStatOf(info).inode || s.plan.folders[path] {
		return true
	}
	for i := range len(path) {
		if path[i] == '/' && s.plan.folders[path[:i]] {
			return true
		}
	}
	return false
}

// walkFolder walks the folder path of the workspace with w. exists is false if there is no such folder.
func (s *runningSnapshot) walkFolder(w *treeWalk, path string) (exists bool, err error) {
	dir, info, depth, err := s.openFolder(path)
	if err != nil || dir == nil {
		return false, err
	}
	if dir != s.roots.workspace {
		defer dir.Close() //nolint:errcheck // only read
		if w.refresh != nil {
			if err := w.refresh(path, info); err != nil {
				return true, err
			}
		}
	}
	return true, w.walkTree(dir, path, depth)
}

// openFolder opens the folder path of the workspace element by element, without following links. It returns nil if there is no such folder. depth
// is the number of folders above it.
func (s *runningSnapshot) openFolder(path string) (dir *os.Root, info fs.FileInfo, depth int, err error) {
	dir = s.roots.workspace
	_, rest, below := strings.Cut(path, "/")
	if !below {
		return dir, nil, 0, nil
	}
	for name := range strings.SplitSeq(rest, "/") {
		sub, now, err := openSubfolder(dir, name)
		if dir != s.roots.workspace {
			_ = dir.Close() // only read
		}
		if err != nil || sub == nil {
			return nil, nil, 0, err
		}
		dir, info = sub, now
		depth++
	}
	return dir, info, depth, nil
}

// openSubfolder opens the folder name in dir, without following a link. It returns nil if there is no such folder, or it cannot be opened.
func openSubfolder(dir *os.Root, name string) (*os.Root, fs.FileInfo, error) {
	info, err := dir.Lstat(name)
	if err != nil || !info.IsDir() {
		return nil, nil, nil //nolint:nilerr // the folder that it is in reports it
	}
	sub, err := dir.OpenRoot(name)
	if err != nil {
		return nil, nil, nil //nolint:nilerr // the folder that it is in reports it
	}
	if now, err := sub.Lstat("."); err != nil || !os.SameFile(now, info) {
		return nil, nil, errors.Join(err, sub.Close())
	}
	return sub, info, nil
}

// walkPlannedFolders walks the folders of the plan, sends what has changed, and sets s.after to the new index.
func (s *runningSnapshot) walkPlannedFolders() error {
	s.after, s.walked = newIndex(), map[string]int{}
	w := s.newRecordingWalk()
	if s.plan.full {
		return s.walkRoots(w)
	}
	s.after.folders = maps.Clone(s.before.folders)
	w.ctx, w.maxFile, w.descend, w.refresh = s.ctx, s.MaxFile, s.mustEnterFolder, s.recordFolder
	if err := w.walkTree(s.roots.state, wire.TreeRecords, 0); err != nil {
		return err
	}
	for _, path := range s.plannedFolders() {
		if _, done := s.walked[path]; done {
			continue
		}
		if s.after.folders[path] == nil && path != wire.TreeWorkspace {
			continue // found to be gone with its parent
		}
		exists, err := s.walkFolder(w, path)
		if err != nil {
			return err
		}
		s.plan.doubt = s.plan.doubt || !exists
	}
	return nil
}

// newRecordingWalk returns a treeWalk that records the entries that it visits in the new index, and sends the changed ones to the host.
func (s *runningSnapshot) newRecordingWalk() *treeWalk {
	return &treeWalk{
		file: s.readFile, add: s.recordEntry, done: s.finishFolder,
		skip: func(path string, why wire.SkipReason) error {
			if folder, _ := wire.SplitPath(path); folder != "" {
				s.sectionOf(folder).always = true
			}
			return s.out.WriteJSON(wire.FrameSkippedFile, newSkip(path, why))
		},
	}
}

// sectionOf returns the section of a folder in the new index. It creates the section when the walk visits the folder for the first time.
func (s *runningSnapshot) sectionOf(folder string) *indexSection {
	if _, ok := s.walked[folder]; !ok {
		s.walked[folder] = 0
		s.after.folders[folder] = &indexSection{entries: map[string]indexEntry{}}
	}
	return s.after.folders[folder]
}

// recordEntry records an entry in the new index, and sends the entry if the host may not have it. info is the metadata of the entry, taken when the
// file was opened.
func (s *runningSnapshot) recordEntry(e *wire.Entry, info fs.FileInfo) error {
	k := indexEntry{kind: e.Kind, mode: e.Mode, target: e.Target}
	switch e.Kind {
	case wire.KindFile:
		k.stat, k.trusted, k.size, k.blocks = s.lastRead.stat, s.lastRead.trusted, e.Size, e.Blocks
		k.links, k.unsettled = hasHardLinks(info), e.Unsettled
		s.end.Files++
		s.end.Bytes += uint64(e.Size) //nolint:gosec // a size
	case wire.KindDir:
		k.stat = fileStatOf(info)
	}
	folder, name := wire.SplitPath(e.Path)
	sec := s.sectionOf(folder)
	sec.entries[name] = k
	sec.always = sec.always || e.Kind == wire.KindFile && (!k.trusted || k.links)
	if s.version1 != nil {
		line, err := s.version1.Add(e)
		if err != nil {
			return err
		}
		return s.out.WriteFrame(wire.FrameEntry, line)
	}
	return s.sendEdit(e, k, folder)
}

// sendEdit sends an entry of a folder if it differs from the entry in the index of the base. k is the entry in the form of the index.
func (s *runningSnapshot) sendEdit(e *wire.Entry, k indexEntry, folder string) error {
	old, had := s.before.entryAt(e.Path)
	same := s.plan.base != "" && had && old.hasEqualEntry(k)
	if same && !s.plan.full {
		return nil
	}
	if err := e.Check(); err != nil {
		return err
	}
	line, err := e.CanonicalLine()
	if err != nil {
		return err
	}
	if s.plan.full {
		s.lines = append(s.lines, entryHash{e.Path, wire.HashOf(line), len(line)})
	}
	if same {
		return nil
	}
	if !had || old.kind != wire.KindDir || k.kind != wire.KindDir {
		s.walked[folder]++
	}
	if had && old.kind == wire.KindDir && k.kind != wire.KindDir && !s.plan.full {
		s.after.removeSectionsBelow(e.Path)
	}
	return s.out.WriteFrame(wire.FrameEntry, line)
}

// recordFolder records the properties of a folder that is walked although its parent is not, and sends the properties if they have changed.
func (s *runningSnapshot) recordFolder(path string, info fs.FileInfo) error {
	parent, name := wire.SplitPath(path)
	if _, done := s.walked[parent]; done {
		return nil
	}
	k := indexEntry{kind: wire.KindDir, mode: uint32(info.Mode().Perm()), stat: fileStatOf(info)}
	old, _ := s.before.entryAt(path)
	if old.equals(k) {
		return nil
	}
	sec := s.after.folders[parent]
	next := &indexSection{always: sec.always, entries: maps.Clone(sec.parsedEntries())}
	next.entries[name] = k
	s.after.folders[parent] = next
	if old.hasEqualEntry(k) {
		return nil
	}
	e := &wire.Entry{Path: path, Kind: wire.KindDir, Mode: k.mode, ModTime: info.ModTime()}
	return s.out.WriteEntry(e)
}

// finishFolder sends which entries of a folder in the base no longer exist. It is called after the entries of the folder were recorded. If listed
// is false, the folder cannot be read, and all of its entries count as gone.
func (s *runningSnapshot) finishFolder(folder string, listed bool) error {
	sec := s.sectionOf(folder)
	old := s.before.folders[folder]
	if old != nil && s.plan.base != "" {
		for name, k := range old.parsedEntries() {
			if _, ok := sec.entries[name]; ok && listed {
				continue
			}
			s.walked[folder]++
			path := folder + "/" + name
			if k.kind == wire.KindDir && !s.plan.full {
				s.after.removeSectionsBelow(path)
			}
			if err := s.out.WriteFrame(wire.FrameRemoved, []byte(path)); err != nil {
				return err
			}
		}
	}
	if !listed {
		s.after.removeSectionsBelow(folder)
	}
	return nil
}

// entryHash is the hash and the length in bytes of the canonical line of an entry; see wire.Entry.CanonicalLine.
type entryHash struct {
	path string
	hash wire.Hash
	size int
}

// treeID returns the id of the tree that a full walk found. The host compares it with the id of the tree that the edits yield.
func (s *runningSnapshot) treeID() string {
	slices.SortFunc(s.lines, func(a, b entryHash) int { return wire.ComparePartOrder(a.path, b.path) })
	id, part, open := wire.NewTreeIDHash(), wire.NewPartHash(), false
	end := func() {
		if open {
			id.Add(part.Sum())
			part, open = wire.NewPartHash(), false
		}
	}
	var cut wire.PartCutter
	for _, l := range s.lines {
		begins, ends := cut.Next(l.path, l.size)
		if begins {
			end()
		}
		part.Add(l.hash)
		if open = true; ends {
			end()
		}
	}
	end()
	return id.ID()
}

// countMissedFolders returns the number of folders of the workspace in which a full walk found changes that the watcher has not reported, neither
// before the walk nor since. It returns 0 if that is not known.
func (s *runningSnapshot) countMissedFolders() (n uint32) {
	if !s.plan.usable {
		return 0
	}
	var missed []string
	for folder, changes := range s.walked {
		if changes > 0 && wire.IsBelow(folder, wire.TreeWorkspace) && !s.plan.coversFolder(folder) {
			missed = append(missed, folder)
		}
	}
	if len(missed) == 0 {
		return 0
	}
	since, err := s.query.QueryAgain()
	if err != nil || since.All {
		return 0 // it does not know any more
	}
	for _, f := range since.Folders {
		s.plan.folders[workspacePath(f.Path)] = f.Deep || s.plan.folders[workspacePath(f.Path)]
	}
	missed = slices.DeleteFunc(missed, s.plan.coversFolder)
	if len(missed) > 0 {
		slices.Sort(missed)
		s.Log.Warn("the watcher had not reported all changes: a full walk found them", "folders", len(missed), "first", missed[0])
	}
	return uint32(len(missed)) //nolint:gosec // bounded by wire.MaxEntries
}

// saveUnconfirmedIndex saves the new index without the id of the snapshot, which the host has not stored yet. It reports whether the index on disk
// is the new one.
func (s *runningSnapshot) saveUnconfirmedIndex() bool {
	s.after.indexHead = indexHead{Since: s.before.Since + 1, FullAt: s.before.FullAt}
	if s.plan.full {
		s.after.Since, s.after.FullAt = 0, time.Now()
	}
	if s.isIndexUnchanged() {
		s.after.file = s.before.file
		return true
	}
	return s.saveIndex()
}

// isIndexUnchanged reports whether the new index has the same sections as the one on disk, so that it need not be written.
func (s *runningSnapshot) isIndexUnchanged() bool {
	if s.plan.base == "" || len(s.after.folders) != len(s.before.folders) {
		return false
	}
	for path, sec := range s.after.folders {
		old := s.before.folders[path]
		if sec == old {
			continue
		}
		if old == nil || old.always != sec.always || !maps.EqualFunc(old.parsedEntries(), sec.parsedEntries(), indexEntry.equals) {
			return false
		}
	}
	return true
}

// confirmStored records in the index on disk that the host has stored the snapshot id, and confirms to the watcher that the snapshot contains the
// changes of its answer. Errors are only logged: the next snapshot then walks more folders.
func (s *runningSnapshot) confirmStored(id string) {
	s.after.ID = id
	if s.query != nil && !s.plan.doubt {
		s.after.Token = s.query.Token
	}
	if err := s.after.writeHead(); err != nil {
		s.Log.Warn("the index of files was not confirmed", "err", err)
		return
	}
	if s.after.Token == "" {
		return
	}
	if err := s.query.Confirm(); err != nil {
		s.Log.Warn("the watcher repeats its changes: its next answer is to look at all files", "err", err)
	}
}
