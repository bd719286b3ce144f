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
	// maxUnknown is the number of new bytes above which the runner asks the host for the hashes of the blocks that the
	// host has, so that the content of moved and copied files is not sent again. For fewer bytes that is too expensive,
	// because the host has to read the whole snapshot to answer.
	maxUnknown = 1 << 20
	// rewritten is the number of bytes that survey counts as new in a changed file, in addition to the growth of the
	// file.
	rewritten = 64 << 10
)

// sendEdits runs the runner's side of a snapshot with edits: it sends what has changed since the base, or the whole tree, and saves the index.
// After the host has stored the snapshot, sendEdits confirms it in the index and to the watcher.
func (s *runningSnapshot) sendEdits(hello wire.Hello) error {
	if err := s.makePlan(hello); err != nil {
		return err
	}
	defer s.query.Close()
	found := wire.FoundTree{Base: s.plan.base, Known: s.plan.full}
	if !s.plan.full {
		size, linked, err := s.survey()
		if err != nil {
			return err
		}
		if linked { // another name of the file may be in a folder that is not walked
			s.plan.full = true
		}
		found.Known = s.plan.full || size > maxUnknown
	}
	if err := errors.Join(s.out.WriteJSON(wire.FrameFoundTree, found), s.out.Flush()); err != nil {
		return err
	}
	if more, err := s.readKnownBlocks(); err != nil || !more {
		return err
	}
	if err := s.walkPlan(); err != nil {
		return err
	}
	if s.plan.full {
		s.end.Full, s.end.ID, s.end.Missed = true, s.treeID(), s.countMissed()
	}
	s.end.Read = s.read
	if err := errors.Join(s.out.WriteJSON(wire.FrameEnd, s.end), s.out.Flush()); err != nil {
		return err
	}
	saved := s.saveEdits() // while the host stores the snapshot
	var named wire.StoredSnapshot
	if err := s.in.Expect(wire.FrameStoredSnapshot, &named); err != nil {
		return fmt.Errorf("read the name of the snapshot: %w", err)
	}
	if saved {
		s.confirm(named.ID)
	}
	return nil
}

// survey walks the folders of the plan without reading content. size is an estimate of the bytes that are new. linked reports whether a
// file has got a second name.
func (s *runningSnapshot) survey() (size int64, linked bool, err error) {
	visited := map[string]bool{}
	w := &walk{
		ctx: s.ctx, maxFile: s.MaxFile, descend: s.descend,
		file: func(_ *os.Root, _ string, e *wire.Entry, info fs.FileInfo) error {
			k, ok := s.before.get(e.Path)
			linked = linked || hasLinks(info) && !k.links
			switch {
			case ok && k.kind == wire.KindFile && k.stat == statOf(info):
			case ok && k.kind == wire.KindFile && info.Size() >= k.size:
				size += info.Size() - k.size + min(rewritten, info.Size())
			default:
				size += info.Size()
			}
			return nil
		},
		add:  func(*wire.Entry, fs.FileInfo) error { return nil },
		skip: func(string, wire.SkipReason) error { return nil },
		done: func(folder string, _ bool) error { visited[folder] = true; return nil },
	}
	if err := w.tree(s.roots.state, wire.TreeRecords, 0); err != nil {
		return 0, false, err
	}
	for _, path := range s.targets() {
		if visited[path] {
			continue
		}
		if _, err := s.walkFolder(w, path); err != nil {
			return 0, false, err
		}
	}
	return size, linked, nil
}

// descend reports whether a walk has to enter a folder that it finds. It need not if the index has the same folder, and the plan does not cover
// it with everything below; a folder that the plan names is walked on its own.
func (s *runningSnapshot) descend(path string, info fs.FileInfo) bool {
	if s.plan.full || wire.IsBelow(path, wire.TreeRecords) || s.before.folders[path] == nil {
		return true
	}
	k, ok := s.before.get(path)
	if !ok || k.kind != wire.KindDir || k.stat.inode != statOf(info).inode || s.plan.folders[path] {
		return true
	}
	for i := range len(path) {
		if path[i] == '/' && s.plan.folders[path[:i]] {
			return true
		}
	}
	return false
}

// walkFolder walks one folder of the workspace. exists is false if there is no such folder.
func (s *runningSnapshot) walkFolder(w *walk, path string) (exists bool, err error) {
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
	return true, w.tree(dir, path, depth)
}

// openFolder opens a folder of the workspace step by step, without following links. It returns nil if there is none.
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

// walkPlan walks everything that the plan names, sends what has changed, and sets s.after to the new index.
func (s *runningSnapshot) walkPlan() error {
	s.after, s.walked = newIndex(), map[string]int{}
	w := s.recording()
	if s.plan.full {
		return s.walk(w)
	}
	s.after.folders = maps.Clone(s.before.folders)
	w.ctx, w.maxFile, w.descend, w.refresh = s.ctx, s.MaxFile, s.descend, s.recordFolder
	if err := w.tree(s.roots.state, wire.TreeRecords, 0); err != nil {
		return err
	}
	for _, path := range s.targets() {
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

// recording returns a walk that records what it finds in the new index, and sends it to the host.
func (s *runningSnapshot) recording() *walk {
	return &walk{
		file: s.readFile, add: s.recordEntry, done: s.finishFolder,
		skip: func(path string, why wire.SkipReason) error {
			if folder, _ := wire.SplitPath(path); folder != "" {
				s.section(folder).always = true
			}
			return s.out.WriteJSON(wire.FrameSkippedFile, skipped(path, why))
		},
	}
}

// section returns the section of a folder in the new index. It creates the section when the walk visits the folder for
// the first time.
func (s *runningSnapshot) section(folder string) *section {
	if _, ok := s.walked[folder]; !ok {
		s.walked[folder] = 0
		s.after.folders[folder] = &section{entries: map[string]known{}}
	}
	return s.after.folders[folder]
}

// recordEntry records an entry in the new index, and sends it if the host may not have it. info is the entry's own, with which a file was opened.
func (s *runningSnapshot) recordEntry(e *wire.Entry, info fs.FileInfo) error {
	k := known{kind: e.Kind, mode: e.Mode, target: e.Target}
	switch e.Kind {
	case wire.KindFile:
		k.stat, k.trusted, k.size, k.blocks = s.lastRead.stat, s.lastRead.trusted, e.Size, e.Blocks
		k.links, k.unsettled = hasLinks(info), e.Unsettled
		s.end.Files++
		s.end.Bytes += uint64(e.Size) //nolint:gosec // a size
	case wire.KindDir:
		k.stat = statOf(info)
	}
	folder, name := wire.SplitPath(e.Path)
	sec := s.section(folder)
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

// sendEdit sends an entry of a folder if it differs from the index, which has the base. k is the entry's form in the index.
func (s *runningSnapshot) sendEdit(e *wire.Entry, k known, folder string) error {
	old, had := s.before.get(e.Path)
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
		s.lines = append(s.lines, lineHash{e.Path, wire.HashOf(line), len(line)})
	}
	if same {
		return nil
	}
	if !had || old.kind != wire.KindDir || k.kind != wire.KindDir {
		s.walked[folder]++
	}
	if had && old.kind == wire.KindDir && k.kind != wire.KindDir && !s.plan.full {
		s.after.removeBelow(e.Path)
	}
	return s.out.WriteFrame(wire.FrameEntry, line)
}

// recordFolder records the properties of a folder that is walked although its parent is not, and sends them if they have changed.
func (s *runningSnapshot) recordFolder(path string, info fs.FileInfo) error {
	parent, name := wire.SplitPath(path)
	if _, done := s.walked[parent]; done {
		return nil
	}
	k := known{kind: wire.KindDir, mode: uint32(info.Mode().Perm()), stat: statOf(info)}
	old, _ := s.before.get(path)
	if old.equals(k) {
		return nil
	}
	sec := s.after.folders[parent]
	next := &section{always: sec.always, entries: maps.Clone(sec.list())}
	next.entries[name] = k
	s.after.folders[parent] = next
	if old.hasEqualEntry(k) {
		return nil
	}
	e := &wire.Entry{Path: path, Kind: wire.KindDir, Mode: k.mode, ModTime: info.ModTime()}
	return s.out.WriteEntry(e)
}

// finishFolder is called after the entries of a folder were recorded: it sends which entries of the base are gone. If listed is false, the
// folder cannot be read, and all of its entries are gone.
func (s *runningSnapshot) finishFolder(folder string, listed bool) error {
	sec := s.section(folder)
	old := s.before.folders[folder]
	if old != nil && s.plan.base != "" {
		for name, k := range old.list() {
			if _, ok := sec.entries[name]; ok && listed {
				continue
			}
			s.walked[folder]++
			path := folder + "/" + name
			if k.kind == wire.KindDir && !s.plan.full {
				s.after.removeBelow(path)
			}
			if err := s.out.WriteFrame(wire.FrameRemoved, []byte(path)); err != nil {
				return err
			}
		}
	}
	if !listed {
		s.after.removeBelow(folder)
	}
	return nil
}

// lineHash is the hash and the length in bytes of the canonical line of an entry; see wire.Entry.CanonicalLine.
type lineHash struct {
	path string
	hash wire.Hash
	size int
}

// treeID returns the id of the tree that a full walk found, by which the host checks the result of the edits.
func (s *runningSnapshot) treeID() string {
	slices.SortFunc(s.lines, func(a, b lineHash) int { return wire.ComparePartOrder(a.path, b.path) })
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

// countMissed returns the number of folders of the workspace in which a full walk found changes that the watcher has not reported, neither
// before the walk nor since. It returns 0 if that is not known.
func (s *runningSnapshot) countMissed() (n uint32) {
	if !s.plan.usable {
		return 0
	}
	var missed []string
	for folder, changes := range s.walked {
		if changes > 0 && wire.IsBelow(folder, wire.TreeWorkspace) && !s.plan.covers(folder) {
			missed = append(missed, folder)
		}
	}
	if len(missed) == 0 {
		return 0
	}
	since, err := s.query.Again()
	if err != nil || since.All {
		return 0 // it does not know any more
	}
	for _, f := range since.Folders {
		s.plan.folders[inWorkspace(f.Path)] = f.Deep || s.plan.folders[inWorkspace(f.Path)]
	}
	missed = slices.DeleteFunc(missed, s.plan.covers)
	if len(missed) > 0 {
		slices.Sort(missed)
		s.Log.Warn("the watcher had not reported all changes: a full walk found them", "folders", len(missed), "first", missed[0])
	}
	return uint32(len(missed)) //nolint:gosec // bounded by wire.MaxEntries
}

// saveEdits saves the new index, without the name of the snapshot. It reports whether the index on disk is the new one.
func (s *runningSnapshot) saveEdits() bool {
	s.after.indexHead = indexHead{Since: s.before.Since + 1, FullAt: s.before.FullAt}
	if s.plan.full {
		s.after.Since, s.after.FullAt = 0, time.Now()
	}
	if s.isSaved() {
		s.after.file = s.before.file
		return true
	}
	return s.saveIndex()
}

// isSaved reports whether the new index has the same sections as the one on disk, so that it need not be written.
func (s *runningSnapshot) isSaved() bool {
	if s.plan.base == "" || len(s.after.folders) != len(s.before.folders) {
		return false
	}
	for path, sec := range s.after.folders {
		old := s.before.folders[path]
		if sec == old {
			continue
		}
		if old == nil || old.always != sec.always || !maps.EqualFunc(old.list(), sec.list(), known.equals) {
			return false
		}
	}
	return true
}

// confirm records in the index on disk that the host has stored the snapshot id, and confirms to the watcher that its answer is in the
// snapshot. Errors are only logged: the next snapshot then walks more.
func (s *runningSnapshot) confirm(id string) {
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
